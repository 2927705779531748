// The batch engine (HybridServe §4): many sequences whose state does not fit the device, decoded
// together at the speed of the link that their state comes over.
//
// The state of a sequence lies in blocks of 64 tokens, on the device, in host memory or on disk.
// A KV block holds K and V; an ACT block holds the activation rows that W_k and W_v multiply, which
// are smaller in a multi-head model, and from which K and V are generated again in every step. A
// step runs layer by layer, and within a layer mini-batch by mini-batch: while one mini-batch is
// computed, the blocks of the next are loaded into the other buffer, and new blocks are stored
// behind it. So a layer's weights are read once for all sequences of a step, where the model
// streams them (weight_stream.h).
//
//   HybridEngine& engine = ...;
//   const RequestId id = engine.add(prompt, prompt.size() + 32).value();
//   HybridStep step = engine.step().value();      // prefill, or a token of every sequence
//   for (...) engine.append(step.rows[i].id, argmax(step.rows[i].logits));
//
// What a sequence answers does not depend on the kinds and places of its blocks, nor on what else
// runs: on the CPU its logits are the same to the bit.
//
// Threading: one thread owns a HybridEngine.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "engine/compute_queue.h"
#include "engine/engine.h"
#include "engine/weight_stream.h"
#include "model/model.h"

namespace hcache::engine {

inline constexpr int kBlockTokens = 64;

enum class BlockKind : uint8_t {
  kKv,
  kAct,
  kTokens,  // nothing is kept: computed from the tokens again in every step, through all layers
};
inline constexpr int kBlockKinds = 3;
enum class BlockPlace : uint8_t { kDevice, kHost, kDisk };

// An entry of a request's block table.
struct BlockEntry {
  BlockKind kind = BlockKind::kKv;
  BlockPlace place = BlockPlace::kHost;
  int64_t number = 0;  // of the place's blocks of this kind
  int n_rows = 0;      // tokens it holds, at most kBlockTokens

  friend bool operator==(const BlockEntry&, const BlockEntry&) = default;
};

// What a sequence asks of a step: what mini-batches are formed by.
struct BatchMember {
  int64_t act_tokens = 0;         // of its context in ACT blocks
  int64_t kv_tokens = 0;          // in KV blocks
  int64_t recomputed_tokens = 0;  // and in those that hold nothing
  int64_t new_rows = 0;           // to compute
  int64_t cells = 0;              // that it takes of a buffer's
};

// What the kind of a sequence's next block depends on.
struct BlockQuestion {
  int64_t n_act = 0;  // blocks that it has of each kind
  int64_t n_kv = 0;
  int64_t n_recomputed = 0;
  int64_t prompt_tokens = 0;
};

// Decisions that belong to policies. They are called by the engine's thread, between steps.
struct HybridDecisions {
  // The kind of a sequence's next block. Null: KV. kTokens only before all others, and not beside
  // recomputed layers: elsewhere it is taken for KV, and so is kAct where no rows can be kept.
  std::function<BlockKind(const BlockQuestion&)> next_kind;
  // Forms the mini-batches of a step: indices of members, each in exactly one, the cells of a
  // mini-batch at most `max_cells`. Null: in order, as many as fit.
  std::function<std::vector<std::vector<int>>(std::span<const BatchMember> members,
                                              int64_t max_cells)>
      form_batches;
};

struct HybridOptions {
  // Tokens of one mini-batch: cells of each of the KV buffers, and rows of each of the ACT buffers.
  // No sequence may be longer.
  int64_t buffer_tokens = 8192;
  int n_buffers = 2;             // mini-batches that may be loaded or computed at once, 2 or more
  int max_batch_rows = 512;      // most rows of one graph
  int64_t max_step_rows = 4096;  // most new rows of one step
  ggml_type kv_type = GGML_TYPE_F16;
  AttentionKind attention = AttentionKind::kAuto;
  // The first layers whose state is not kept: it is recomputed from the tokens in every step.
  int recomputed_layers = 0;

  // Room for complete blocks, in bytes. Beside it the host holds a block per sequence, and those of
  // a step that are on their way to the disk.
  size_t device_bytes = 0;
  size_t host_bytes = size_t{1} << 30;
  size_t disk_bytes = 0;
  std::string disk_dir;  // of the files, which have no name once they are open

  // Waits for each graph and each upload, weights' too, so that samples tell what they take on
  // devices that compute asynchronously too: to measure costs, since nothing overlaps then.
  bool waits_for_graphs = false;

  HybridDecisions decisions{};
  Env* env = &Env::real();  // files, clock; outlives the engine
};

using RequestId = int64_t;

// What was measured of one (layer, mini-batch) of a step.
struct BatchSample {
  int layer = 0;
  int batch = 0;
  int64_t act_tokens = 0;       // generated from activation rows
  int64_t kv_tokens = 0;        // loaded
  int64_t read_act_tokens = 0;  // of them, over the link
  int64_t read_kv_tokens = 0;
  int64_t rows = 0;       // computed
  int64_t cells = 0;      // attended by decoding rows, all sequences together
  double load_act_s = 0;  // of the link
  double load_kv_s = 0;
  double generate_s =
      0;  // K and V from activation rows; 0 where an asynchronous device was not waited for
  double forward_s = 0;  // the rest
  double wait_s = 0;     // computing waited for loads
};

struct StepTimes {
  double total_s = 0;
  double wait_s = 0;        // computing waited for loads
  double link_busy_s = 0;   // reads were under way
  double weights_s = 0;     // computing waited for weights
  uint64_t read_bytes = 0;  // that the step needed from disk
  uint64_t link_bytes = 0;  // read since the last one: of its own, and ahead for the next step
  int64_t rows = 0;
  int64_t context_tokens = 0;
  int n_batches = 0;
  bool decode_only = true;  // every sequence had one row
  std::vector<BatchSample> samples;
};

struct RequestLogits {
  RequestId id = -1;
  std::span<const float> logits;  // n_vocab, behind the request's last token
};

// Valid until the engine's next step.
struct HybridStep {
  std::vector<RequestLogits> rows;  // of requests all of whose tokens are computed
  StepTimes times;
};

// Bytes of blocks in use.
struct HybridCacheUse {
  size_t device_bytes = 0;
  size_t host_bytes = 0;  // newest blocks included
  size_t disk_bytes = 0;
};

class HybridEngine {
 public:
  // kUnimplemented: an architecture, device or type that has no way to do it; kResourceExhausted
  // names the bytes that were wanted. The model, its device and the Env must outlive the engine.
  // `make_queues` is for tests.
  static Result<std::unique_ptr<HybridEngine>> create(const model::Model& model,
                                                      const HybridOptions& options,
                                                      const MakeQueues& make_queues = nullptr);
  ~HybridEngine();
  HybridEngine(const HybridEngine&) = delete;
  HybridEngine& operator=(const HybridEngine&) = delete;

  // A sequence that begins with `prompt` and will have at most `max_tokens`, for which room is
  // reserved. kInvalidArgument: no tokens, or more than max_tokens. kOutOfRange: longer than the
  // model's context or a buffer. kResourceExhausted: no room now; try again after a remove().
  Result<RequestId> add(std::span<const int32_t> prompt, int64_t max_tokens);
  // An empty sequence that will have at most `max_tokens`, for which no room is reserved: each row
  // takes one of capacity_tokens() as it comes. `captured`: its rows go to set_capture()'s sink.
  // kOutOfRange as add().
  Result<RequestId> open(int64_t max_tokens, bool captured);
  // The sequence goes on with `token`, which the next step computes. kOutOfRange: max_tokens.
  Status append(RequestId id, int32_t token);
  // The same for several tokens. After an error none of them is there.
  Status append(RequestId id, std::span<const int32_t> tokens);
  // Takes back what was appended and is not computed yet.
  Status drop_pending(RequestId id);
  // Its room is free at once.
  Status remove(RequestId id);

  // Computes tokens that are not computed yet: one of every sequence that has one, and pieces of
  // longer ones as far as max_step_rows goes, in the order in which they were added. With nothing
  // to compute: kFailedPrecondition. When it fails, sequences are as they were before, and the step
  // may be tried again: kDataLoss and kResourceExhausted name the file.
  Result<HybridStep> step();

  // --- Rows whose state is known -------------------------------------------------------------
  // Begins blocks of these kinds, KV or ACT, behind a sequence all of whose tokens are computed
  // and whose blocks are all complete. Their pages are then written, and end_known() makes their
  // rows the sequence's. kFailedPrecondition: the sequence is not like that, or layers are
  // recomputed. After an error there are none of them.
  Status begin_known(RequestId id, std::span<const BlockKind> kinds);
  // Where a page of one of these blocks (from 0) is written: kBlockTokens rows, part 0 of K or of
  // activation rows, part 1 of V. Empty for an unknown one. Until the next call but this one.
  [[nodiscard]] std::span<std::byte> known_page(RequestId id, int block, int layer, int part);
  // The sequence goes on with these tokens, whose rows lie in the first of the blocks: whole
  // blocks of them, or none. The other blocks are dropped.
  Status end_known(RequestId id, std::span<const int32_t> tokens);

  // --- Capture -------------------------------------------------------------------------------
  // From the next step on, the rows of every block that becomes complete, of sequences that were
  // opened to be captured, go to the sink, a block each. The sink may take its time: the engine
  // waits. nullptr: to none. It outlives its use.
  void set_capture(CaptureSink* sink);
  // The computed rows of the sequence's newest block go there now, if it is not complete. Later
  // they go again, with those behind them.
  Status capture_tail(RequestId id);
  // The type of a layer's activation rows; COUNT where there are none.
  [[nodiscard]] ggml_type activation_type(int layer) const;

  // Whether every layer's activation rows can stand for K and V here: else no block can be ACT.
  [[nodiscard]] bool can_keep_activations() const;
  [[nodiscard]] int n_layer() const;
  // Bytes of a token's row in a block's pages of one layer, K and V together.
  [[nodiscard]] size_t row_bytes(BlockKind kind, int layer) const;
  // Bytes of a block of 64 tokens, all layers together.
  [[nodiscard]] size_t block_bytes(BlockKind kind) const;
  // Bytes of one token and layer: of K and V together, and of activation rows (the layers' mean).
  [[nodiscard]] double kv_token_bytes() const;
  [[nodiscard]] double act_token_bytes() const;
  // Replaces the decisions from the next step on; blocks that exist keep their kinds.
  void set_decisions(HybridDecisions decisions);

  [[nodiscard]] const HybridOptions& options() const;
  // What brings the weights of layers that are not on the device.
  [[nodiscard]] const WeightStream& weights() const;
  // Rows that blocks have room for in all places; INT64_MAX where nothing is kept.
  [[nodiscard]] int64_t capacity_tokens() const;
  [[nodiscard]] int64_t length(RequestId id) const;    // tokens; 0 for an unknown request
  [[nodiscard]] int64_t computed(RequestId id) const;  // of them
  [[nodiscard]] std::vector<BlockEntry> blocks(RequestId id) const;
  [[nodiscard]] HybridCacheUse cache_use() const;
  // Waits for stores that are under way. The first error of one.
  Status flush();

 private:
  struct Impl;
  explicit HybridEngine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hcache::engine
