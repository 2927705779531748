#include "engine/copy_queue.h"

#include <ggml.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "model/compute_threads.h"

namespace hcache::engine {
namespace {

// On the CPU a copy is work of the same cores that compute. Uploads are gathered until something
// needs them or a batch is full, and then made by all compute threads together: one thread alone
// reaches half of the memory's bandwidth, while the others would spin until it is through. Those
// that nobody waited for are dropped with the queue: their memory may be gone by then.
class HostCopyQueue : public CopyQueue {
 public:
  explicit HostCopyQueue(model::Device& device) : device_(device), threads_(device) {}

  Ticket upload(ggml_tensor* dst, size_t offset, const void* src, size_t n_bytes) override {
    return add(static_cast<std::byte*>(dst->data) + offset, src, n_bytes);
  }
  // At once: the compute queue may overwrite the source as soon as this returns.
  Ticket download(const ggml_tensor* src, size_t offset, void* dst, size_t n_bytes) override {
    add(dst, static_cast<const std::byte*>(src->data) + offset, n_bytes);
    run();
    return last_;
  }
  // Computing is through when it returns.
  Mark mark_compute() override { return 0; }
  void after_compute(Mark /*mark*/) override {}
  void wait_compute(Mark /*mark*/) override {}
  void before_compute(Ticket ticket) override { wait(ticket); }
  void wait(Ticket ticket) override {
    if (ticket > done_) run();
  }
  bool done(Ticket ticket) override { return ticket <= done_; }

 private:
  struct Job {
    std::byte* dst;
    const std::byte* src;
    size_t n_bytes;
  };
  static constexpr size_t kBatchBytes = 1 << 20;
  static constexpr size_t kAloneBytes = 64 << 10;  // less is not worth waking the others

  Ticket add(void* dst, const void* src, size_t n_bytes) {
    jobs_.push_back({static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), n_bytes});
    n_bytes_ += n_bytes;
    ++last_;
    if (n_bytes_ >= kBatchBytes) run();
    return last_;
  }

  void run() {
    const size_t n = n_bytes_ < kAloneBytes ? 1 : static_cast<size_t>(device_.n_threads());
    threads_.run(n, [&](size_t i) { copy_range(n_bytes_ * i / n, n_bytes_ * (i + 1) / n); });
    jobs_.clear();
    n_bytes_ = 0;
    done_ = last_;
  }
  // Bytes [begin, end) of all jobs laid end to end.
  void copy_range(size_t begin, size_t end) const {
    size_t first = 0;  // of the job
    for (const Job& job : jobs_) {
      const size_t from = std::max(begin, first);
      const size_t to = std::min(end, first + job.n_bytes);
      if (from < to) std::memcpy(job.dst + (from - first), job.src + (from - first), to - from);
      first += job.n_bytes;
    }
  }

  model::Device& device_;
  model::ComputeThreads threads_;
  std::vector<Job> jobs_;  // not copied yet
  size_t n_bytes_ = 0;     // of jobs_
  Ticket last_ = 0;
  Ticket done_ = 0;
};

// n_bytes of a tensor, for ggml's copies: its buffer and memory, as bytes.
ggml_tensor bytes_of(const ggml_tensor* tensor, size_t offset, size_t n_bytes) {
  ggml_tensor view{};
  view.type = GGML_TYPE_I8;
  view.ne[0] = static_cast<int64_t>(n_bytes);
  view.nb[0] = 1;
  for (int i = 1; i < GGML_MAX_DIMS; ++i) {
    view.ne[i] = 1;
    view.nb[i] = n_bytes;
  }
  view.data = static_cast<std::byte*>(tensor->data) + offset;
  view.buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
  return view;
}

// Copies what the device has a copy of from there, behind what `backend` was given. False: it has
// none.
bool copy_from_mirror(const model::Device& device, ggml_backend_t backend, const ggml_tensor* dst,
                      size_t offset, const void* src, size_t n_bytes) {
  const auto place = device.mirrors().find(src, n_bytes);
  if (!place) return false;
  const ggml_tensor from = bytes_of(place->tensor, place->offset, n_bytes);
  ggml_tensor to = bytes_of(dst, offset, n_bytes);
  ggml_backend_tensor_copy_async(backend, backend, &from, &to);
  return true;
}

// Devices without events copy synchronously: a ticket is done when it is given out.
class SynchronousCopyQueue : public CopyQueue {
 public:
  explicit SynchronousCopyQueue(model::Device& device) : device_(device) {}

  Ticket upload(ggml_tensor* dst, size_t offset, const void* src, size_t n_bytes) override {
    if (copy_from_mirror(device_, device_.copy(), dst, offset, src, n_bytes)) {
      ggml_backend_synchronize(device_.copy());
    } else {
      ggml_backend_tensor_set(dst, src, offset, n_bytes);
    }
    return ++last_;
  }
  Ticket download(const ggml_tensor* src, size_t offset, void* dst, size_t n_bytes) override {
    ggml_backend_tensor_get(src, dst, offset, n_bytes);
    return ++last_;
  }
  Mark mark_compute() override { return ++last_mark_; }
  void after_compute(Mark mark) override {
    if (mark <= reached_) return;
    ggml_backend_synchronize(device_.compute());
    reached_ = last_mark_;
  }
  void wait_compute(Mark mark) override { after_compute(mark); }
  void before_compute(Ticket /*ticket*/) override {}
  void wait(Ticket /*ticket*/) override {}
  bool done(Ticket /*ticket*/) override { return true; }

 private:
  model::Device& device_;
  Ticket last_ = 0;
  Mark last_mark_ = 0;
  Mark reached_ = 0;  // marks that have been waited for
};

// Two streams of one device, ordered by events.
class EventCopyQueue : public CopyQueue {
 public:
  EventCopyQueue(model::Device& device, ggml_backend_event_t first_mark) : device_(device) {
    marks_.push_back(first_mark);
    while (marks_.size() < kMarks) marks_.push_back(ggml_backend_event_new(device.dev()));
  }
  EventCopyQueue(const EventCopyQueue&) = delete;
  EventCopyQueue& operator=(const EventCopyQueue&) = delete;
  ~EventCopyQueue() override {
    ggml_backend_synchronize(device_.copy());
    for (const Pending& p : pending_) ggml_backend_event_free(p.event);
    for (ggml_backend_event_t event : spare_) ggml_backend_event_free(event);
    for (ggml_backend_event_t event : marks_) ggml_backend_event_free(event);
  }

  Ticket upload(ggml_tensor* dst, size_t offset, const void* src, size_t n_bytes) override {
    wait_for_mark();
    if (!copy_from_mirror(device_, device_.copy(), dst, offset, src, n_bytes)) {
      ggml_backend_tensor_set_async(device_.copy(), dst, src, offset, n_bytes);
    }
    return record();
  }
  Ticket download(const ggml_tensor* src, size_t offset, void* dst, size_t n_bytes) override {
    wait_for_mark();
    ggml_backend_tensor_get_async(device_.copy(), src, dst, offset, n_bytes);
    return record();
  }
  Mark mark_compute() override {
    recycle();
    ggml_backend_event_record(marks_[++last_mark_ % kMarks], device_.compute());
    return last_mark_;
  }
  void after_compute(Mark mark) override { awaited_ = std::max(awaited_, mark); }
  void wait_compute(Mark mark) override {
    if (mark > 0) ggml_backend_event_synchronize(marks_[mark % kMarks]);
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
  // ggml's events cannot be polled: a copy counts as done once it was waited for.
  bool done(Ticket ticket) override { return pending_.empty() || pending_.front().ticket > ticket; }

 private:
  struct Pending {
    Ticket ticket;
    ggml_backend_event_t event;
  };
  static constexpr size_t kMaxPending = 256;
  static constexpr int kMaxRecorded = 1024;
  static constexpr size_t kMarks = 8;

  // Only when a copy follows: Vulkan sends a stream's wait to the device with what comes behind it,
  // and by then the event may have been recorded again, waited for and reset, so that the stream
  // would wait for ever. The event of an old mark stands for a later one by now: that is safe as
  // well.
  void wait_for_mark() {
    if (awaited_ > 0) ggml_backend_event_wait(device_.copy(), marks_[awaited_ % kMarks]);
    awaited_ = 0;
  }

  // Some backends (Vulkan) keep what a recorded event, and the copies before it, were made of until
  // somebody waits for the event and for the stream; now and then somebody must.
  void recycle() {
    if (++n_recorded_ < kMaxRecorded) return;
    n_recorded_ = 0;
    ggml_backend_synchronize(device_.compute());
    wait(last_);
    ggml_backend_synchronize(device_.copy());
    for (ggml_backend_event_t mark : marks_) ggml_backend_event_synchronize(mark);
  }

  Ticket record() {
    recycle();
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
  std::vector<ggml_backend_event_t> marks_;  // of the last kMarks marks
  Mark last_mark_ = 0;
  Mark awaited_ = 0;             // that the next copy waits for
  std::deque<Pending> pending_;  // oldest first; the copy stream completes in order
  std::vector<ggml_backend_event_t> spare_;
  Ticket last_ = 0;
  int n_recorded_ = 0;  // events since the last recycle()
};

}  // namespace

std::unique_ptr<CopyQueue> make_device_copy_queue(model::Device& device) {
  if (device.is_cpu()) return std::make_unique<HostCopyQueue>(device);
  ggml_backend_event_t event =
      device.copy() == device.compute() ? nullptr : ggml_backend_event_new(device.dev());
  if (event == nullptr) return std::make_unique<SynchronousCopyQueue>(device);
  return std::make_unique<EventCopyQueue>(device, event);
}

}  // namespace hcache::engine
