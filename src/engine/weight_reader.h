// Reads layers of a model's files, or halves of layers, into two pieces of host memory, in the
// background.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "base/sync.h"
#include "model/streamed_weights.h"

namespace hcache::engine {

// Streamed unit i goes to image i mod 2. An image that is
// not wanted any more is dropped at once; what of it is under way is waited for before the memory
// is used again. What is waited for is read first, then what was asked for first.
//
// Threading: one thread beside its own, but for the counters.
class WeightReader {
 public:
  struct Counters {
    uint64_t bytes_read = 0;
    uint64_t errors = 0;
    int64_t busy_ns = 0;  // with reads under way
  };

  // Opens the model's files, with direct I/O where there is any. `images` are aligned to
  // kDirectAlignment, of weights.image_bytes, and outlive the reader, as `weights` does.
  // kFailedPrecondition: the file is not the one whose header was read.
  static Result<std::unique_ptr<WeightReader>> open(const model::StreamedWeights& weights,
                                                    std::array<std::byte*, 2> images);
  ~WeightReader();
  WeightReader(const WeightReader&) = delete;
  WeightReader& operator=(const WeightReader&) = delete;

  // From now on the unit's image is to hold this part of it (kKv or kAll), at least; nobody may be
  // using that memory for another unit.
  void fetch(size_t index, model::LayerPart part) HCACHE_EXCLUDES(mutex_);
  // Blocks until the part that was asked for is there. kDataLoss: the file is shorter than it was,
  // or was changed, or the disk failed; the unit may be fetched again.
  Status wait(size_t index, model::LayerPart part) HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] bool ready(size_t index, model::LayerPart part) const HCACHE_EXCLUDES(mutex_);
  // Which unit the unit's image is for now; -1: none.
  [[nodiscard]] int64_t target(size_t index) const HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] Counters counters() const HCACHE_EXCLUDES(mutex_);

 private:
  struct Image {
    std::byte* memory = nullptr;
    int64_t unit = -1;
    uint64_t order = 0;          // when it was asked for
    size_t wanted = 0;           // of the unit's pieces, in their order
    size_t begun = 0;            // that were given to the queue
    size_t in_flight = 0;        // of them, not complete
    size_t stale = 0;            // pieces of an earlier unit that are still under way
    size_t done_kv = 0;          // complete pieces, of those that come first
    size_t done = 0;             // and of all
    std::vector<size_t> have{};  // per piece: bytes that are there
    Status error{};
  };

  WeightReader(const model::StreamedWeights& weights, std::vector<std::unique_ptr<File>> files,
               std::unique_ptr<IoQueue> queue, std::array<std::byte*, 2> images);
  void run() HCACHE_EXCLUDES(mutex_);
  // The image whose next piece is to be read; null: none has any to read.
  Image* next_image() HCACHE_REQUIRES(mutex_);
  void submit_more() HCACHE_REQUIRES(mutex_);
  void submit(Image& image, size_t piece) HCACHE_REQUIRES(mutex_);
  void complete(const IoCompletion& completion) HCACHE_REQUIRES(mutex_);
  void finish_piece(Image& image, size_t piece) HCACHE_REQUIRES(mutex_);
  void fail(Image& image, Status status) HCACHE_REQUIRES(mutex_);
  void drop(Image& image) HCACHE_REQUIRES(mutex_);
  [[nodiscard]] Status check_unchanged() const;
  [[nodiscard]] static size_t pieces_of(const model::StreamedUnit& unit, model::LayerPart part) {
    return part == model::LayerPart::kKv ? unit.n_kv_pieces : unit.pieces.size();
  }
  [[nodiscard]] bool is_ready(const Image& image, size_t index, model::LayerPart part) const
      HCACHE_REQUIRES(mutex_);

  const model::StreamedWeights& weights_;
  const std::vector<std::unique_ptr<File>> files_;  // of weights_.files
  const std::unique_ptr<IoQueue> queue_;            // the thread's alone

  mutable Mutex mutex_;
  CondVar work_;   // for the thread
  CondVar ready_;  // for wait()
  std::array<Image, 2> images_ HCACHE_GUARDED_BY(mutex_);
  const Image* urgent_ HCACHE_GUARDED_BY(mutex_) = nullptr;  // that wait() waits for
  uint64_t n_asked_ HCACHE_GUARDED_BY(mutex_) = 0;
  size_t in_flight_ HCACHE_GUARDED_BY(mutex_) = 0;
  int64_t busy_since_ns_ HCACHE_GUARDED_BY(mutex_) = 0;
  Status queue_error_ HCACHE_GUARDED_BY(mutex_);  // the queue must not be used again
  Counters counters_ HCACHE_GUARDED_BY(mutex_);
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace hcache::engine
