// The engine: sequences over one KV arena, and batched steps that mix prefill and decode rows of
// several sequences. Built on ggml's backend interface only, so it runs on any of its devices.
//
// A step is prepared, run layer range by layer range, and committed:
//
//   Step step = engine.prepare(items).value();        // arena room, inputs; nothing visible yet
//   engine.run_layers(step, 0, engine.n_layer());     // may be cut anywhere between layers
//   Logits logits = engine.finish(step).value();      // sequences grow, logits are read
//
// Threading: one thread owns an Engine. The capture sink's publish() is called from that thread.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/attention.h"
#include "engine/compute_queue.h"
#include "engine/weight_stream.h"
#include "model/compute_threads.h"
#include "model/model.h"

namespace hcache::engine {

using SeqId = int32_t;

// Which attention kernel a step uses; a function of device and KV type alone, never of load.
enum class AttentionKind {
  kAuto,  // ours where it applies (CPU, F16 KV), else ggml's
  kOurs,  // kUnimplemented where it does not apply
  kGgml,  // ggml's flash attention: with it our logits equal libllama's bit for bit
  // ggml's products and softmax, which devices get whose flash attention lacks the size of heads.
  kScores,
};

struct EngineOptions {
  int64_t arena_tokens = 8192;        // KV cells shared by all sequences
  ggml_type kv_type = GGML_TYPE_F16;  // F32, F16, BF16 or Q8_0
  int max_batch_rows = 512;           // most rows (tokens) of one step
  AttentionKind attention = AttentionKind::kAuto;
  // Layers per stage: a run of layers with queues, an arena and buffers of its own. Steps go from
  // stage to stage; what is computed does not depend on it. A stage that spans several devices of
  // the model is cut where the device changes. Empty: one stage per run of layers on one device.
  // Where devices share every layer (Model::parts()) there is nothing to cut: kUnimplemented.
  std::vector<int> stage_layers{};
  // False, for comparison alone: rows that erase_range() moves keep K as it is, rotated to where
  // they were, as in a cache that can't take positions apart (NKVT, AttentionStore §4.3.4).
  bool rotate_moved = true;
  // Layers that see a window of the last rows keep those alone, with room for as many sequences as
  // this (or as many tokens as the others have, if that is less); 0: for as many tokens.
  int window_sequences = 0;
  // Whether each layer keeps rows of its own, so that keep_rows() may leave it with fewer than the
  // sequence has tokens.
  bool separate_layers = false;
};

// Rows before its window that a layer keeps: a sequence can be trimmed by as many.
inline constexpr int64_t kWindowSlack = 256;

// About what an engine with these options takes of its device's memory: the arena, and the largest
// step's activations, captured rows and inputs. Without the weights.
[[nodiscard]] uint64_t estimate_device_bytes(const model::HParams& hparams,
                                             const EngineOptions& options);

// One sequence's rows in a step.
struct BatchItem {
  SeqId seq = -1;
  std::span<const int32_t> tokens;
  // Position of tokens[0]; -1: append. A smaller position than the sequence's length rewrites rows
  // that the restorer has reserved (recomputation); the rest of the sequence is left as it is.
  int64_t first_pos = -1;
  enum class Output { kNone, kLast, kAll } output = Output::kLast;  // rows whose logits are wanted
  // Instead of the logits what the output matrix would make them of: the rows behind the final
  // norm.
  bool hidden = false;
  bool captured = true;  // by the tap, where there is one
};

// What the capture tap copies of a layer (a mask).
inline constexpr uint8_t kTapHidden = 1;
inline constexpr uint8_t kTapKv = 2;

// Where one layer's rows lie in a captured block: row r of the step at offset + r * row_bytes.
struct CapturedLayer {
  int64_t hidden_offset = -1;  // -1: not captured
  ggml_type hidden_type = GGML_TYPE_COUNT;
  size_t hidden_row_bytes = 0;
  int64_t k_offset = -1;
  int64_t v_offset = -1;
};

// One sequence's part of a captured step.
struct CapturedRows {
  SeqId seq = -1;
  int64_t first_pos = 0;
  int first_row = 0;  // within the step
  int n_rows = 0;
};

// What a step captured, and how its block is laid out. Valid during publish() only.
struct StepCapture {
  std::span<const CapturedLayer> layers;
  std::span<const CapturedRows> rows;
  int n_rows = 0;  // of the whole step
  ggml_type kv_type = GGML_TYPE_F16;
  size_t kv_row_bytes = 0;  // of K, and of V
  size_t n_bytes = 0;       // of the block
};

// Receives captured rows: stage one of the two-stage saving (HCache §4.2.2).
class CaptureSink {
 public:
  virtual ~CaptureSink() = default;
  // Host memory for a block of n_bytes that stays valid until publish() or drop() names it;
  // nullptr when the ring has no room: the step's rows are then not captured (the sink counts it).
  virtual std::byte* reserve(size_t n_bytes) = 0;
  // The block is complete: the sink owns it from here and must not block.
  virtual void publish(std::byte* block, const StepCapture& capture) = 0;
  // The step failed; the block is returned unused.
  virtual void drop(std::byte* block) = 0;
};

struct CaptureOptions {
  std::vector<uint8_t> layers;  // per layer: kTapHidden | kTapKv; empty or all zero: off
  // Per layer, the type in which `hidden` is captured; empty, or COUNT: native_hidden_type().
  std::vector<ggml_type> hidden_types{};
};

// Rows whose attention is looked at: every stride-th of a sequence's from first_pos on, before
// end_pos.
struct ObservedRows {
  SeqId seq = -1;
  int64_t first_pos = 0;
  int64_t end_pos = std::numeric_limits<int64_t>::max();
  int64_t stride = 1;
  int64_t n_keys = 0;  // tell of the sequence's first rows, so many
};

// What the attention of observed rows falls on, by layer and KV head.
struct AttentionScores {
  int n_head_kv = 0;
  std::vector<AttentionTally> tallies{};  // [layer][n_head_kv]

  [[nodiscard]] const AttentionTally& at(int layer, int kv_head) const {
    return tallies[static_cast<size_t>(layer) * static_cast<size_t>(n_head_kv) +
                   static_cast<size_t>(kv_head)];
  }
};

// Rows [from, to) of a sequence that are to go.
struct ErasedRows {
  int64_t from = 0;
  int64_t to = 0;
};

// Rows of logits, valid until the engine finishes its next step.
struct Logits {
  // In the order of the wanted outputs: n_vocab numbers each, n_embd of an item's `hidden`.
  std::vector<std::span<const float>> rows;
};

struct StepState;
struct EngineParts;

// A prepared step; obtained from prepare(), used once.
class Step {
 public:
  Step(Step&&) noexcept;
  Step& operator=(Step&&) noexcept;
  ~Step();
  [[nodiscard]] int n_rows() const;

 private:
  friend class Engine;
  explicit Step(std::unique_ptr<StepState> state);
  std::unique_ptr<StepState> state_;
};

class Engine {
 public:
  // Allocates the arena and the compute buffers. kResourceExhausted names the bytes that were
  // wanted. The model and its device must outlive the engine. `make_queues` is for tests: what each
  // stage uses instead of the device's own queues.
  static Result<std::unique_ptr<Engine>> create(const model::Model& model,
                                                const EngineOptions& options,
                                                const MakeQueues& make_queues = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] const model::Model& model() const;
  [[nodiscard]] const EngineOptions& options() const;
  [[nodiscard]] int n_layer() const;
  // Whether our attention kernel computes a layer.
  [[nodiscard]] bool uses_own_attention(int layer) const;
  // Layers [begin, end) of each stage, in their order; one range where devices share every layer.
  [[nodiscard]] std::vector<std::pair<int, int>> stage_ranges() const;
  // Whether stages can compute at once if they are given different steps (see Pipeline): each is on
  // a device of its own, and giving work to any but the first returns before it is done.
  [[nodiscard]] bool stages_overlap() const;

  // --- Sequences ---------------------------------------------------------------------------
  Result<SeqId> create_sequence();
  // By how much each of the model's adapters counts in what the sequence computes from now on; none
  // where nothing was set. A fork has its source's. kInvalidArgument: not as many as the model has.
  Status set_adapters(SeqId seq, std::span<const float> scales);
  // A new sequence with a copy of the first n_tokens rows of `src`; none, or its shortest() at
  // least.
  Result<SeqId> fork_sequence(SeqId src, int64_t n_tokens);
  // Keeps the first n_tokens rows: none, or shortest() at least.
  Status trim_sequence(SeqId seq, int64_t n_tokens);
  // To how few rows, but for none, the sequence can be trimmed or forked; more than 0 where layers
  // see a window, and what lies before it is gone, or do without rows.
  [[nodiscard]] int64_t shortest(SeqId seq) const;
  // Of a sequence of n_tokens, the first row that a layer has to hold: 0 unless it sees a window.
  [[nodiscard]] int64_t first_row_needed(int layer, int64_t n_tokens) const;
  // Removes rows [from, to); the rows behind them move down and their K is re-rotated.
  // kUnimplemented with learned positions; kFailedPrecondition, with nothing changed, where a layer
  // would be left with less than the window that it sees.
  Status erase_range(SeqId seq, int64_t from, int64_t to);
  // The same of several ranges, in ascending order and apart: K of each row is rotated once.
  // kUnimplemented where layers see a window.
  Status erase_ranges(SeqId seq, std::span<const ErasedRows> ranges);
  // Rotates K of rows that are there, which were computed for positions `moved` less than theirs.
  // kUnimplemented with learned positions.
  Status move_positions(SeqId seq, int layer, int64_t first_pos, int64_t n_rows, int64_t moved);
  Status release_sequence(SeqId seq);
  // Each gets the other's rows; no step of either may be in flight.
  Status swap_sequences(SeqId a, SeqId b);
  // Reserves rows up to length n_tokens without content, for the restorer to fill. The rows count
  // as the sequence's from here on. Of an empty sequence layers take those from first_row_needed()
  // on. kResourceExhausted when the arena has no room.
  Status reserve_rows(SeqId seq, int64_t n_tokens);
  [[nodiscard]] int64_t length(SeqId seq) const;
  // Of them, the last ones that a layer has; fewer where it does without some.
  [[nodiscard]] int64_t held_rows(SeqId seq, int layer) const;
  [[nodiscard]] int64_t arena_free_cells() const;

  // --- Rows that a layer does without ----------------------------------------------------------
  // kUnimplemented, with the reason, where nothing is told of what attention falls on: unless our
  // kernel computes every layer, each sees all rows, and no other part of them is elsewhere.
  [[nodiscard]] Status can_observe() const;
  // From the next step on the attention of these rows is added to *scores, which is emptied first
  // and must outlive its use; nullptr ends that. The last layer's is of steps that want logits.
  // What can_observe() refuses is refused.
  Status observe(const ObservedRows& rows, AttentionScores* scores);
  // Leaves a layer with the rows of `kept` alone, for each KV head as many positions below the
  // sequence's length, in ascending order: [n_head_kv][n]. Their K stays rotated as it is. What was
  // kept counts as the last rows before the length: the sequence can't be trimmed or forked below
  // that, nor can positions move. kFailedPrecondition where layers are not separate, or the layer
  // does without rows already.
  Status keep_rows(SeqId seq, int layer, std::span<const int32_t> kept);
  // What keep_rows() would leave of K and of V, n rows of kv_row_bytes() each; nothing changes.
  Status read_kept(SeqId seq, int layer, std::span<const int32_t> kept, std::byte* k, std::byte* v);
  // Fills a layer of a sequence whose rows are reserved with n kept rows, as read_kept() gave them
  // of a sequence of this length: it is as if keep_rows() had left them.
  Status load_kept(SeqId seq, int layer, int64_t n, const std::byte* k, const std::byte* v);

  // --- Steps -------------------------------------------------------------------------------
  // Validates the batch and makes room. kInvalidArgument names the bad item; kOutOfRange when a
  // sequence would pass the model's context; kResourceExhausted when the arena is full (nothing
  // has changed then).
  Result<Step> prepare(std::span<const BatchItem> items);
  // Runs layers [begin, end) of the step; ranges must follow each other from 0.
  Status run_layers(Step& step, int begin, int end);
  // For recomputation of a layer prefix: after run_layers(step, 0, layer), computes and stores only
  // K and V of `layer`, and ends the step (no logits).
  Status finish_with_kv(Step& step, int layer);
  // Ends the step after its last layer: sequences grow, captured rows go to the sink, logits are
  // copied to the host. A step of which no logits are wanted may still be computing when this
  // returns, on a device that computes asynchronously; the one before it is not.
  Result<Logits> finish(Step& step);
  // prepare + all layers + finish.
  Result<Logits> decode(std::span<const BatchItem> items);
  // Appends tokens whose logits nobody reads, in as many steps as they take; each goes through all
  // of the last layer, for observe().
  Status prefill(SeqId seq, std::span<const int32_t> tokens);

  // --- Capture -----------------------------------------------------------------------------
  // From the next step on. The sink must outlive its use; nullptr switches the tap off.
  Status set_capture(CaptureSink* sink, const CaptureOptions& options);
  // The type a layer's `hidden` is saved in unless overridden, which loses nothing that the
  // products of K and V would have kept. COUNT where no type whose rows are smaller than K's and
  // V's together does that for the types of both weights: such a layer is saved as K and V.
  [[nodiscard]] ggml_type native_hidden_type(int layer) const;
  // True when a layer's hidden rows of `type` can be projected on this device (checked by a round
  // trip when first asked).
  bool can_project(ggml_type type, int layer);
  [[nodiscard]] size_t kv_row_bytes() const;  // one token's K of one layer, and V's
  [[nodiscard]] size_t hidden_row_bytes(ggml_type type) const;

  // --- Restoration (used through state's Projector) -----------------------------------------
  // A ticket stands for host memory the engine may still be reading. Tickets are totally ordered.
  using Ticket = uint64_t;
  // Copies saved K and V rows (n_rows x kv_row_bytes() each, exactly as the arena holds them) to
  // rows [first_pos, first_pos + n_rows) of a layer.
  Result<Ticket> load_kv(SeqId seq, int layer, int64_t first_pos, int n_rows, const std::byte* k,
                         const std::byte* v);
  // Stages hidden rows of a layer for a projection; row_in_slice counts from the slice's first row.
  // A slice has at most max_batch_rows rows; rows may be staged in any order and number of calls.
  // Each sequence has a slice of its own, so several can be restored at once, call by call. Device
  // memory is taken for as many as are open, and two more.
  Result<Ticket> stage_hidden(SeqId seq, int layer, int row_in_slice, int n_rows, ggml_type type,
                              const std::byte* rows);
  // Projects the sequence's staged rows to K and V of the layer that they were staged for, at
  // [first_pos, first_pos + n_rows), and ends the slice. Ordered behind the staging copies and
  // before every later step. A slice that is not projected goes with release_sequence() or
  // trim_sequence().
  Status project_staged(SeqId seq, int layer, int64_t first_pos, int n_rows, ggml_type type);
  // Blocks until the host memory of `ticket` (and of all before it) is no longer read.
  Status wait(Ticket ticket);
  // True when wait(ticket) would not block.
  [[nodiscard]] bool done(Ticket ticket) const;
  // Blocks until everything enqueued is complete.
  Status synchronize();
  // The threads that compute, where these have every core of the machine: what another thread does
  // takes one from them, and as they wait for each other, from all. Null elsewhere.
  [[nodiscard]] model::ComputeThreads* threads_of_every_core() const;

  // Layer 0's K and V before rotation depend on the token alone. Those that finish_with_kv() meets
  // are kept (16 MiB) for later calls; this drops them, for measurements of what a new process
  // does.
  void forget_tokens();

  // --- Weights -------------------------------------------------------------------------------
  // What brings the weights of layers that are not on the device; nothing to do for its callers
  // unless they build graphs of their own.
  [[nodiscard]] WeightStream& weights() const;

  // --- Inspection ----------------------------------------------------------------------------
  // Reads rows of the arena: K and V of a layer, n_rows x kv_row_bytes() each.
  Status read_kv(SeqId seq, int layer, int64_t first_pos, int n_rows, std::byte* k, std::byte* v);
  // The first n_tokens rows of all layers, as far as each needs them: K, then V of a layer, from
  // its first_row_needed() on.
  Result<std::vector<std::byte>> read_kv(SeqId seq, int64_t n_tokens);
  // Bytes of the arena and of the compute buffers on the device.
  [[nodiscard]] size_t device_bytes() const;

 private:
  explicit Engine(std::unique_ptr<EngineParts> parts);
  std::unique_ptr<EngineParts> parts_;
};

}  // namespace hcache::engine
