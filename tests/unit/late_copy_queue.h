// A copy queue as unhelpful as its contract allows: no copy happens before somebody waits for it,
// fences on it or is lucky, those that happen together do so in shuffled order, and what may be
// read early is read early. Code that is right with it leans on waits and fences alone.
#pragma once

#include <ggml-backend.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "engine/copy_queue.h"
#include "late_compute_queue.h"

namespace hcache::engine::testing {

// What it does to catch a missing ordering:
//  - wait, before_compute: uploads and downloads run only when one of these names them (or, now and
//    then, done() is asked), so a graph that was not fenced meets old memory, a capture buffer
//    that was not fenced is overwritten before it is copied, and a block that was not waited for
//    still holds the poison that download() put there;
//  - after_compute before a download: half of the downloads give what the device held at the last
//    after_compute (of tensors downloaded before);
//  - after_compute before an upload: writing again what a fenced graph may still be reading is a
//    test failure, as is host memory that changes before its upload ran.
//
// One queue may serve one engine that sets its capture up once: source tensors must live as long.
// Beside a late compute queue its fences are all that makes that one do anything.
// Threading: one thread.
class LateCopyQueue : public CopyQueue {
 public:
  static constexpr std::byte kPoison{0xA5};

  struct Stats {
    int uploads = 0;
    int downloads = 0;
    int out_of_order = 0;  // copies that ran before an older one
    int early_reads = 0;
  };
  // `stats` may be null; it outlives the queue otherwise. So does `compute`; null: the device's
  // own, which has always done what it was given.
  explicit LateCopyQueue(unsigned seed, Stats* stats = nullptr, LateComputeQueue* compute = nullptr)
      : random_(seed), stats_(stats), compute_(compute) {}

  Ticket upload(ggml_tensor* dst, size_t offset, const void* src, size_t n_bytes) override {
    for (const Region& r : being_read_) {
      if (r.tensor == dst && r.offset < offset + n_bytes && offset < r.offset + r.n_bytes) {
        ADD_FAILURE() << "upload into memory that a graph may still be reading: no after_compute";
        break;
      }
    }
    pending_.push_back({.ticket = ++last_,
                        .tensor = dst,
                        .offset = offset,
                        .n_bytes = n_bytes,
                        .src = src,
                        .hash = hash(src, n_bytes)});
    count(&Stats::uploads);
    return last_;
  }
  Ticket download(const ggml_tensor* src, size_t offset, void* dst, size_t n_bytes) override {
    std::memset(dst, static_cast<int>(kPoison), n_bytes);
    Copy copy{.ticket = ++last_,
              .tensor = const_cast<ggml_tensor*>(src),
              .offset = offset,
              .n_bytes = n_bytes,
              .dst = dst};
    std::vector<std::byte>& at_fence = sources_[src];
    if (at_fence.empty()) {
      at_fence.resize(ggml_nbytes(src));
    } else if (random_() % 2 == 0) {
      copy.early.assign(at_fence.begin() + static_cast<std::ptrdiff_t>(offset),
                        at_fence.begin() + static_cast<std::ptrdiff_t>(offset + n_bytes));
      count(&Stats::early_reads);
    }
    pending_.push_back(std::move(copy));
    count(&Stats::downloads);
    return last_;
  }
  using CopyQueue::after_compute;
  Mark mark_compute() override {
    Sources& now = marks_[++last_mark_];
    for (const auto& [tensor, bytes] : sources_) now[tensor].resize(bytes.size());
    const auto look = [&now] {
      for (auto& [tensor, bytes] : now) {
        ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
      }
    };
    if (compute_ == nullptr) {
      look();
    } else {
      compute_->give(look);
      given_[last_mark_] = compute_->n_given();
    }
    return last_mark_;
  }
  void after_compute(Mark mark) override {
    if (const auto given = given_.find(mark); given != given_.end()) {
      compute_->run_to(given->second);
      given_.erase(given_.begin(), std::next(given));
    }
    std::erase_if(being_read_, [&](const Region& r) { return r.given_at < mark; });
    const auto taken = marks_.find(mark);
    if (taken == marks_.end()) return;  // an earlier fence covers it
    for (auto& [tensor, bytes] : taken->second) sources_[tensor] = std::move(bytes);
    marks_.erase(marks_.begin(), std::next(taken));
  }
  void wait_compute(Mark mark) override {
    if (const auto given = given_.find(mark); given != given_.end()) {
      compute_->run_to(given->second);
    }
  }
  void before_compute(Ticket ticket) override {
    run_up_to(ticket);
    for (auto it = finished_uploads_.begin(); it != finished_uploads_.end();) {
      if (it->ticket <= ticket) {
        being_read_.push_back(*it);
        being_read_.back().given_at = last_mark_;
        it = finished_uploads_.erase(it);
      } else {
        ++it;
      }
    }
  }
  void wait(Ticket ticket) override { run_up_to(ticket); }
  bool done(Ticket ticket) override {
    if (!pending_.empty() && random_() % 4 == 0) run(random_() % pending_.size());
    return std::none_of(pending_.begin(), pending_.end(),
                        [&](const Copy& c) { return c.ticket <= ticket; });
  }

 private:
  struct Copy {
    Ticket ticket = 0;
    ggml_tensor* tensor = nullptr;
    size_t offset = 0;
    size_t n_bytes = 0;
    const void* src = nullptr;          // of an upload
    uint64_t hash = 0;                  // of its memory when it was asked for
    void* dst = nullptr;                // of a download
    std::vector<std::byte> early = {};  // what a download gives that ran before later graphs
  };
  struct Region {
    Ticket ticket = 0;
    const ggml_tensor* tensor = nullptr;
    size_t offset = 0;
    size_t n_bytes = 0;
    Mark given_at = 0;  // to a graph, behind this mark
  };
  using Sources = std::map<const ggml_tensor*, std::vector<std::byte>>;

  static uint64_t hash(const void* data, size_t n_bytes) {
    uint64_t h = 14695981039346656037U;
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < n_bytes; ++i) h = (h ^ bytes[i]) * 1099511628211U;
    return h;
  }
  void count(int Stats::*field) const {
    if (stats_ != nullptr) ++(stats_->*field);
  }

  // All copies up to `ticket`, shuffled, and some that nobody asked for yet.
  void run_up_to(Ticket ticket) {
    while (true) {
      std::vector<size_t> wanted;
      for (size_t i = 0; i < pending_.size(); ++i) {
        if (pending_[i].ticket <= ticket) wanted.push_back(i);
      }
      if (wanted.empty()) return;
      const bool stray = random_() % 8 == 0;
      run(stray ? random_() % pending_.size() : wanted[random_() % wanted.size()]);
    }
  }

  void run(size_t index) {
    const Copy copy = std::move(pending_[index]);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(index));
    if (index > 0) count(&Stats::out_of_order);
    if (copy.src != nullptr) {
      EXPECT_EQ(hash(copy.src, copy.n_bytes), copy.hash)
          << "host memory changed before its upload ran";
      ggml_backend_tensor_set(copy.tensor, copy.src, copy.offset, copy.n_bytes);
      finished_uploads_.push_back({copy.ticket, copy.tensor, copy.offset, copy.n_bytes});
    } else if (!copy.early.empty()) {
      std::memcpy(copy.dst, copy.early.data(), copy.n_bytes);
    } else {
      ggml_backend_tensor_get(copy.tensor, copy.dst, copy.offset, copy.n_bytes);
    }
  }

  std::mt19937 random_;
  Stats* stats_;
  LateComputeQueue* compute_;
  std::map<Mark, uint64_t> given_;  // of the compute queue, when marks not fenced yet were taken
  Ticket last_ = 0;
  std::deque<Copy> pending_;              // oldest first
  std::vector<Region> finished_uploads_;  // not yet given to a graph
  std::vector<Region> being_read_;        // by graphs that no fence covers
  Sources sources_;                       // as of the last after_compute
  std::map<Mark, Sources> marks_;         // as of marks not fenced yet
  Mark last_mark_ = 0;
};

}  // namespace hcache::engine::testing
