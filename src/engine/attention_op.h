// Attention inside a step's graph: ours through ggml's custom op, or ggml's flash attention.
#pragma once

#include <ggml-backend.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/attention.h"
#include "engine/engine.h"
#include "graph_runner.h"
#include "model/model.h"

namespace hcache::engine {

// Queries [head_dim, n_head, n] against one layer of the arena; the result is [n_head*head_dim, n].
// `k_arena`, `v_arena` are [n_embd_kv, n_cells] and depend on this step's writes.
//
// Threading: the engine's thread; the kernel itself uses the device's threads.
class AttentionOp {
 public:
  // kv_row_bytes: of a row of K or V in the arena. window: a row attends so many keys; 0: all.
  AttentionOp(const model::Model& model, GraphRunner& graphs, bool ours,
              const EngineOptions& options, size_t kv_row_bytes, int64_t window);
  ~AttentionOp();
  AttentionOp(const AttentionOp&) = delete;
  AttentionOp& operator=(const AttentionOp&) = delete;

  // Fixes the segments for the graphs built from here on. For ggml's kernel it uploads masks,
  // which may need device memory.
  Status set_batch(std::span<const AttentionSegment> segments);
  // sinks: the layer's, F32 [n_head]; null: it has none.
  ggml_tensor* build(ggml_context* ctx, int layer, ggml_tensor* q, ggml_tensor* k_arena,
                     ggml_tensor* v_arena, ggml_tensor* sinks);
  // What the graphs of a layer observe, from the next that is computed on; ours() alone can. None
  // may be running.
  void observe(int layer, const AttentionObservation& observed);
  [[nodiscard]] bool ours() const { return plan_ != nullptr; }
  // Of what build() makes of the segments: as long as it stays, graphs fit the batches that follow.
  [[nodiscard]] uint64_t layout() const { return layout_; }

  // Cells behind a sequence's last that ggml's kernel may read (masked): the arena ends with so
  // many spare cells.
  static constexpr int64_t kKvPadding = 256;

 private:
  // Of a segment, what its part of a graph is made of: as long as it is equal the part fits.
  struct Layout {
    int64_t first_row = 0;  // of the step's queries
    int64_t n_queries = 0;
    int64_t first_cell =
        0;               // of the view of the arena; those before the sequence's first are masked
    int64_t n_kv = 0;    // cells of it
    int group = 1;       // query heads packed as rows
    int64_t n_rows = 0;  // of the mask: packed and padded
    friend bool operator==(const Layout&, const Layout&) = default;
  };
  [[nodiscard]] Layout layout_of(const AttentionSegment& segment) const;
  // Tensors for masks of these layouts.
  Status make_masks(std::vector<Layout> layouts);
  void upload_masks();
  // Of our kernel, what the op of a layer's graphs points to.
  struct Call {
    AttentionPlan* plan = nullptr;
    AttentionObservation observed;
  };
  static void run_custom(ggml_tensor* dst, int ith, int nth, void* userdata);
  // What the queries of a segment attend.
  struct Attended {
    ggml_tensor* k = nullptr;
    ggml_tensor* v = nullptr;
    ggml_tensor* mask = nullptr;
    ggml_tensor* sinks = nullptr;
  };
  ggml_tensor* build_ggml(ggml_context* ctx, ggml_tensor* q, ggml_tensor* k_arena,
                          ggml_tensor* v_arena, ggml_tensor* sinks);
  // [n_embd, queries] of one segment's queries [head_dim, n_head, queries].
  ggml_tensor* attend_packed(ggml_context* ctx, const Layout& layout, ggml_tensor* q,
                             const Attended& to) const;
  // [head_dim, heads, rows] of queries [head_dim, rows, heads].
  ggml_tensor* attend(ggml_context* ctx, ggml_tensor* q, const Attended& to) const;
  [[nodiscard]] bool has_flash_attention(ggml_type kv_type) const;

  GraphRunner& graphs_;
  AttentionShape shape_;
  bool has_sinks_ = false;
  int64_t view_cells_ = 1;  // on a multiple of so many cells a view of the arena may begin
  std::unique_ptr<AttentionPlan> plan_;  // null: ggml's
  std::vector<Call> calls_;              // per layer, of plan_
  bool flash_ = true;                    // the device has it for this size of heads
  bool tiled_ = false;  // the kernel may be the CPU's, which is another one for few rows
  std::vector<AttentionSegment> segments_;
  uint64_t layout_ = 0;
  std::vector<Layout> layouts_;          // of segments_
  std::vector<ggml_tensor*> masks_;      // F16 [n_kv, n_rows] each
  std::unique_ptr<Graph> mask_tensors_;  // holds them, as long as a graph may read them
  ggml_backend_buffer_t mask_buffer_ = nullptr;
  size_t mask_capacity_ = 0;
};

}  // namespace hcache::engine
