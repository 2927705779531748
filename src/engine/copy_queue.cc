#include "engine/copy_queue.h"

#include <deque>
#include <vector>

namespace hcache::engine {
namespace {

// Devices without events (CPU, RPC) copy synchronously: a ticket is done when it is given out.
class SynchronousCopyQueue : public CopyQueue {
 public:
  explicit SynchronousCopyQueue(model::Device& device) : device_(device) {}

  Ticket upload(ggml_tensor* dst, size_t offset, const void* src, size_t n_bytes) override {
    ggml_backend_tensor_set(dst, src, offset, n_bytes);
    return ++last_;
  }
  Ticket download(const ggml_tensor* src, size_t offset, void* dst, size_t n_bytes) override {
    ggml_backend_tensor_get(src, dst, offset, n_bytes);
    return ++last_;
  }
  void after_compute() override { ggml_backend_synchronize(device_.compute()); }
  void before_compute(Ticket /*ticket*/) override {}
  void wait(Ticket /*ticket*/) override {}
  bool done(Ticket /*ticket*/) override { return true; }

 private:
  model::Device& device_;
  Ticket last_ = 0;
};

// Two streams of one device, ordered by events.
class EventCopyQueue : public CopyQueue {
 public:
  EventCopyQueue(model::Device& device, ggml_backend_event_t compute_event)
      : device_(device), compute_event_(compute_event) {}
  EventCopyQueue(const EventCopyQueue&) = delete;
  EventCopyQueue& operator=(const EventCopyQueue&) = delete;
  ~EventCopyQueue() override {
    ggml_backend_synchronize(device_.copy());
    for (const Pending& p : pending_) ggml_backend_event_free(p.event);
    for (ggml_backend_event_t event : spare_) ggml_backend_event_free(event);
    ggml_backend_event_free(compute_event_);
  }

  Ticket upload(ggml_tensor* dst, size_t offset, const void* src, size_t n_bytes) override {
    ggml_backend_tensor_set_async(device_.copy(), dst, src, offset, n_bytes);
    return record();
  }
  Ticket download(const ggml_tensor* src, size_t offset, void* dst, size_t n_bytes) override {
    ggml_backend_tensor_get_async(device_.copy(), src, dst, offset, n_bytes);
    return record();
  }
  void after_compute() override {
    ggml_backend_event_record(compute_event_, device_.compute());
    ggml_backend_event_wait(device_.copy(), compute_event_);
  }
  void before_compute(Ticket ticket) override {
    for (const Pending& p : pending_) {
      if (p.ticket >= ticket) {
        ggml_backend_event_wait(device_.compute(), p.event);
        return;
      }
    }
  }
  void wait(Ticket ticket) override {
    while (!pending_.empty() && pending_.front().ticket <= ticket) {
      ggml_backend_event_synchronize(pending_.front().event);
      spare_.push_back(pending_.front().event);
      pending_.pop_front();
    }
  }
  // ggml's events cannot be polled: a copy counts as done once somebody has waited for it.
  bool done(Ticket ticket) override { return pending_.empty() || pending_.front().ticket > ticket; }

 private:
  struct Pending {
    Ticket ticket;
    ggml_backend_event_t event;
  };
  static constexpr size_t kMaxPending = 256;

  Ticket record() {
    if (pending_.size() >= kMaxPending) wait(pending_.front().ticket);
    ggml_backend_event_t event = nullptr;
    if (spare_.empty()) {
      event = ggml_backend_event_new(device_.dev());
    } else {
      event = spare_.back();
      spare_.pop_back();
    }
    ggml_backend_event_record(event, device_.copy());
    pending_.push_back({++last_, event});
    return last_;
  }

  model::Device& device_;
  ggml_backend_event_t compute_event_;
  std::deque<Pending> pending_;  // oldest first; the copy stream completes in order
  std::vector<ggml_backend_event_t> spare_;
  Ticket last_ = 0;
};

}  // namespace

std::unique_ptr<CopyQueue> make_device_copy_queue(model::Device& device) {
  ggml_backend_event_t event =
      device.copy() == device.compute() ? nullptr : ggml_backend_event_new(device.dev());
  if (event == nullptr) return std::make_unique<SynchronousCopyQueue>(device);
  return std::make_unique<EventCopyQueue>(device, event);
}

}  // namespace hcache::engine
