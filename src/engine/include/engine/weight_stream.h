// Brings the weights of streamed layers to the device while others are computed.
//
//   HCACHE_RETURN_IF_ERROR(weights.acquire(layer));  // blocks until they are there
//   ...                                              // graphs that use the layer
//   weights.release(layer);                          // they have all been given to the queue
//
// Where layers are streamed by halves (in_halves()), each half is acquired in turn instead.
//
// Layers of a step follow each other, and so do steps: with acquire() the next one begins to come
// into the other slot, with release() the one after that into this one, and behind the last layer
// comes the first. Layers may be acquired in any order all the same; what was read ahead for
// nothing is dropped. A loop that runs many batches through a layer before the next one acquires it
// once for all of them.
//
// On a device whose memory the host can write, and whose queue is synchronous, layers are read from
// disk straight into their slots. Elsewhere they are read into two pieces of host memory, or lie
// there all of them, and are uploaded on the copy queue: behind the graphs that used the slot last,
// and before those that use it next.
//
// Threading: the engine's thread; stats() from any.
#pragma once

#include <ggml-backend.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "engine/copy_queue.h"
#include "model/model.h"
#include "model/streamed_weights.h"

namespace hcache::engine {

class WeightReader;

struct WeightStats {
  uint64_t bytes = 0;        // of weights brought to the slots, or read for them
  uint64_t layers = 0;       // or halves of them, acquired that were not in their slot already
  uint64_t read_errors = 0;  // reads that failed, or found the file changed
  double wait_s = 0;         // the engine's thread waited for reads
  double read_s = 0;         // reads were under way; 0 where nothing is read
  double upload_s = 0;       // uploads that were waited for, for want of reading ahead
};

class WeightStream {
 public:
  // Takes the model's slots: kFailedPrecondition when another stream has them. A model without
  // streamed layers is fine; every call then does nothing. `queue` is the copy queue of the device
  // that computes the streamed layers, `is_async` whether its compute queue is asynchronous. Both
  // outlive the stream's use (not its destruction), the model outlives the stream.
  // kResourceExhausted: no host memory to read into.
  static Result<std::unique_ptr<WeightStream>> open(const model::Model& model, CopyQueue& queue,
                                                    bool is_async);
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  [[nodiscard]] bool streams(int layer) const { return layer >= first_; }
  // Whether the layer comes half by half: a graph may use LayerPart::kAttention or kFeedForward
  // then, and there is no kAll.
  [[nodiscard]] bool in_halves(int layer) const { return streams(layer) && weights_->halves; }
  // Up to which layer, at most `end`, layers from `begin` on may be in one graph.
  [[nodiscard]] int graph_end(int begin, int end) const;

  // Blocks until this part of the layer's weights is in its slot, or will be before any graph that
  // is given to the compute queue from now on. Nothing for a resident layer. One at a time. Of a
  // layer that does not come by halves, each half is the whole.
  // kDataLoss as the disk or the file have it: nothing is held then, and it may be tried again.
  Status acquire(int layer, model::LayerPart part = model::LayerPart::kAll);
  // Every graph that uses the layer has been given to the compute queue. After a whole layer its
  // slot is refilled; after LayerPart::kKv not before the next one is acquired, since more of the
  // same layer often follows.
  void release(int layer);

  // Whether layers are brought before they are acquired (default). Off for measurements of what
  // computing takes: a layer then stays in its slot until another one needs that, and has been
  // uploaded, not only before later graphs, when acquire() returns.
  void set_read_ahead(bool on) { read_ahead_ = on; }

  [[nodiscard]] WeightStats stats() const;
  // Bytes that one layer's part takes to bring; 0: it is resident.
  [[nodiscard]] uint64_t layer_bytes(int layer, model::LayerPart part) const;
  // Host memory for what is read, if it does not go straight into the slots.
  [[nodiscard]] size_t host_bytes() const;

 private:
  struct Slot {
    int64_t unit = -1;    // that was uploaded last
    bool has_kv = false;  // which parts were
    bool has_rest = false;
    CopyQueue::Ticket ticket = 0;  // the last upload
    CopyQueue::Mark mark = 0;      // behind the last graph that used the slot
  };
  struct FreeBuffer {
    void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
  };

  WeightStream(const model::Model& model, CopyQueue& queue);
  Status open_reader(bool direct);
  [[nodiscard]] Slot& slot_of(size_t index) { return slots_.at(index % 2); }
  // The streamed unit that holds the part of a layer.
  [[nodiscard]] size_t unit_of(int layer, model::LayerPart part) const;
  // Below, a part is kKv or kAll, of a unit.
  // Begins to bring the part of a unit whose slot is free.
  void begin(size_t index, model::LayerPart part);
  void upload(size_t index, model::LayerPart part);
  void upload_and_wait(size_t index, model::LayerPart part);
  [[nodiscard]] bool is_there(size_t index, model::LayerPart part);
  // The unit that uses this one's slot next.
  [[nodiscard]] size_t next_in_slot(size_t index) const;

  const model::Model& model_;
  CopyQueue& queue_;
  const model::StreamedWeights* weights_;  // null: nothing is streamed
  const int first_;       // streamed layer; the number of layers where there is none
  bool uploads_ = false;  // the slots are filled by the copy queue
  bool read_ahead_ = true;
  std::unique_ptr<ggml_backend_buffer, FreeBuffer> host_;  // images to be uploaded from
  std::array<std::byte*, 2> images_{};
  std::array<Slot, 2> slots_;
  int held_ = -1;  // the layer that is acquired
  size_t held_unit_ = 0;
  model::LayerPart held_part_ = model::LayerPart::kAll;
  std::unique_ptr<WeightReader> reader_;  // null: all is in host memory
  std::atomic<uint64_t> uploaded_ = 0;    // bytes, where nothing is read
  std::atomic<uint64_t> layers_ = 0;
  std::atomic<int64_t> wait_ns_ = 0;
  std::atomic<int64_t> upload_ns_ = 0;  // of uploads that were waited for
};

// Holds a layer's weights for a scope.
class HeldWeights {
 public:
  HeldWeights(WeightStream& stream, int layer, model::LayerPart part)
      : stream_(stream), layer_(layer), status_(stream.acquire(layer, part)) {}
  ~HeldWeights() {
    if (status_.ok()) stream_.release(layer_);
  }
  HeldWeights(const HeldWeights&) = delete;
  HeldWeights& operator=(const HeldWeights&) = delete;
  // Of acquire().
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  WeightStream& stream_;
  int layer_;
  Status status_;
};

}  // namespace hcache::engine
