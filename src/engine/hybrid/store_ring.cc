#include "store_ring.h"

#include <cstring>
#include <utility>

namespace hcache::engine {

Status StoreRing::allocate(const model::Device& device, size_t n_bytes) {
  for (Entry& entry : entries_) {
    entry.pool.open(1);
    ggml_tensor* captured =
        ggml_new_tensor_1d(entry.pool.ctx(), GGML_TYPE_I8, static_cast<int64_t>(n_bytes));
    HCACHE_RETURN_IF_ERROR(entry.pool.allocate(device.buffer_type(), "new rows of a batch"));
    entry.captured = captured;
    HCACHE_ASSIGN_OR_RETURN(entry.host, HostBuffer::make(device, n_bytes, "new rows of a batch"));
  }
  return {};
}

ggml_tensor* StoreRing::next() {
  Entry& entry = entries_[next_];
  finish(entry);
  queue_.before_compute(entry.ticket);
  return entry.captured;
}

void StoreRing::captured(size_t n_bytes, std::vector<Target> targets) {
  Entry& entry = entries_[next_];
  next_ = (next_ + 1) % entries_.size();
  entry.targets = std::move(targets);
  entry.n_bytes = n_bytes;
  entry.mark = queue_.mark_compute();
}

void StoreRing::send(Entry& entry) {
  if (entry.n_bytes == 0) return;
  queue_.after_compute(entry.mark);
  entry.ticket = queue_.download(entry.captured, 0, entry.host.data(), entry.n_bytes);
  entry.n_bytes = 0;
}

void StoreRing::send() {
  for (size_t i = 0; i < entries_.size(); ++i) send(entries_[(next_ + i) % entries_.size()]);
}

void StoreRing::finish(Entry& entry) {
  send(entry);
  if (entry.targets.empty()) return;
  queue_.wait(entry.ticket);
  for (const Target& target : entry.targets) {
    std::memcpy(target.page, entry.host.data() + target.offset, target.n_bytes);
  }
  entry.targets.clear();
}

void StoreRing::flush() {
  for (size_t i = 0; i < entries_.size(); ++i) finish(entries_[(next_ + i) % entries_.size()]);
}

void StoreRing::drop() {
  for (Entry& entry : entries_) {
    entry.n_bytes = 0;
    queue_.wait(entry.ticket);
    entry.targets.clear();
  }
}

}  // namespace hcache::engine
