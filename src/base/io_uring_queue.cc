// IoQueue over io_uring.
#include <fmt/format.h>
#include <liburing.h>

#include <cerrno>
#include <vector>

#include "posix_io.h"

namespace hcache {
namespace {

class UringQueue final : public IoQueue {
 public:
  explicit UringQueue(std::size_t depth) : slots_(depth) {
    for (std::size_t i = depth; i > 0; --i) free_.push_back(i - 1);
  }
  ~UringQueue() override {
    if (!open_) return;
    std::vector<IoCompletion> rest;
    while (in_flight() > 0 && reap(true, &rest).ok()) rest.clear();
    io_uring_queue_exit(&ring_);
  }

  bool init() {
    open_ = io_uring_queue_init(static_cast<unsigned>(slots_.size()), &ring_, 0) == 0;
    return open_;
  }

  Status submit(const IoRequest& request) override {
    if (free_.empty()) return resource_exhausted("the I/O queue is full");
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) return internal_error("io_uring has no free entry");
    const std::size_t slot = free_.back();
    const int fd = static_cast<PosixFile*>(request.file)->fd();
    const auto size = static_cast<unsigned>(request.buffer.size());
    if (request.op == IoOp::kRead) {
      io_uring_prep_read(sqe, fd, request.buffer.data(), size, request.offset);
    } else {
      io_uring_prep_write(sqe, fd, request.buffer.data(), size, request.offset);
    }
    io_uring_sqe_set_data64(sqe, slot);
    int rc = io_uring_submit(&ring_);
    while (rc == -EINTR || rc == -EAGAIN) rc = io_uring_submit(&ring_);
    if (rc < 0) return errno_status("submit I/O on", request.file->path(), -rc);
    free_.pop_back();
    slots_[slot] = request;
    return {};
  }

  Status reap(bool block, std::vector<IoCompletion>* out) override {
    bool wait = block && in_flight() > 0;
    while (in_flight() > 0) {
      io_uring_cqe* cqe = nullptr;
      int rc = wait ? io_uring_wait_cqe(&ring_, &cqe) : io_uring_peek_cqe(&ring_, &cqe);
      if (rc == -EINTR) continue;
      if (rc == -EAGAIN) return {};
      if (rc < 0) return errno_status("wait for", "io_uring", -rc);
      const auto slot = static_cast<std::size_t>(io_uring_cqe_get_data64(cqe));
      const int res = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      const IoRequest& request = slots_[slot];
      IoCompletion done;
      done.tag = request.tag;
      if (res >= 0) {
        done.bytes = static_cast<std::size_t>(res);
      } else if (res != -EINTR && res != -EAGAIN) {  // those two: nothing transferred, ask again
        done.status =
            errno_status(request.op == IoOp::kRead ? "read" : "write", request.file->path(), -res);
      } else {
        done = retry(request);
      }
      free_.push_back(slot);
      out->push_back(std::move(done));
      wait = false;
    }
    return {};
  }

  [[nodiscard]] std::size_t in_flight() const override { return slots_.size() - free_.size(); }
  [[nodiscard]] std::size_t depth() const override { return slots_.size(); }
  [[nodiscard]] const char* name() const override { return "io_uring"; }

 private:
  // The rare request that the kernel wants again goes the synchronous way.
  static IoCompletion retry(const IoRequest& request) {
    IoCompletion done;
    done.tag = request.tag;
    if (request.op == IoOp::kRead) {
      auto got = request.file->read_at(request.offset, request.buffer);
      if (got.ok()) {
        done.bytes = *got;
      } else {
        done.status = got.status();
      }
    } else {
      done.status = request.file->write_at(request.offset, request.buffer);
      if (done.status.ok()) done.bytes = request.buffer.size();
    }
    return done;
  }

  io_uring ring_{};
  bool open_ = false;
  std::vector<IoRequest> slots_;
  std::vector<std::size_t> free_;
};

}  // namespace

std::unique_ptr<IoQueue> new_uring_queue(std::size_t depth) {
  auto queue = std::make_unique<UringQueue>(depth == 0 ? 1 : depth);
  if (!queue->init()) return nullptr;
  return queue;
}

}  // namespace hcache
