#include "engine/engine.h"

#include <fmt/format.h>
#include <ggml-alloc.h>
#include <ggml-backend.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <set>
#include <unordered_map>
#include <utility>

#include "arena.h"
#include "attention_op.h"
#include "base/env.h"
#include "engine/copy_queue.h"
#include "model/graph.h"
#include "projection.h"

namespace hcache::engine {
namespace {

using model::LayerWeights;
using model::Model;

constexpr size_t kBlockAlignment = 64;  // of captured rows within a block
constexpr int64_t kTokenTableBytes = 16 << 20;
constexpr int kStagingSlots = 3;      // slices of hidden rows in flight
constexpr int kNodesPerLayer = 96;    // upper bound, without ggml's attention
constexpr int kNodesPerSegment = 16;  // of ggml's attention, per layer

size_t align_up(size_t n, size_t alignment) { return (n + alignment - 1) / alignment * alignment; }

// From how many rows on ggml's CPU product takes the kernel that it takes for many; the result of a
// row then does not depend on the others. 1: it has no other one, or the bits are the same.
int64_t least_rows(ggml_type weight) {
  switch (weight) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16: return 2;
    case GGML_TYPE_Q2_K:
    case GGML_TYPE_Q3_K:
    case GGML_TYPE_Q4_K:
    case GGML_TYPE_Q5_K:
    case GGML_TYPE_Q6_K:
    case GGML_TYPE_IQ4_XS: return 8;
    default: return 1;
  }
}

// A set of tensors that live as long as the engine, in one buffer of their own.
class TensorPool {
 public:
  TensorPool() = default;
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;
  ~TensorPool() {
    ggml_free(ctx_);
    ggml_backend_buffer_free(buffer_);
  }

  void open(size_t n_tensors) {
    ctx_ = ggml_init(
        {.mem_size = ggml_tensor_overhead() * n_tensors, .mem_buffer = nullptr, .no_alloc = true});
  }
  [[nodiscard]] ggml_context* ctx() const { return ctx_; }
  Status allocate(ggml_backend_buffer_type_t type, const char* what) {
    size_t n_bytes = 0;
    for (ggml_tensor* t = ggml_get_first_tensor(ctx_); t != nullptr;
         t = ggml_get_next_tensor(ctx_, t)) {
      n_bytes += ggml_nbytes(t);
    }
    buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(ctx_, type);
    if (buffer_ == nullptr) {
      return resource_exhausted(fmt::format(
          "the device has no {} MiB for {}; make the arena (--ctx) or the batch smaller",
          n_bytes >> 20, what));
    }
    if (ggml_backend_buffer_is_host(buffer_)) {
      prefer_huge_pages({static_cast<std::byte*>(ggml_backend_buffer_get_base(buffer_)),
                         ggml_backend_buffer_get_size(buffer_)});
    }
    // A NaN in a masked cell would poison ggml's tiled flash attention.
    ggml_backend_buffer_clear(buffer_, 0);
    return {};
  }
  [[nodiscard]] size_t n_bytes() const {
    return buffer_ == nullptr ? 0 : ggml_backend_buffer_get_size(buffer_);
  }

 private:
  ggml_context* ctx_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
};

struct Sequence {
  int64_t length = 0;
};

}  // namespace

struct Step::Impl {
  struct Segment {
    SeqId seq = -1;
    int64_t first_pos = 0;
    int first_row = 0;
    int n_rows = 0;
  };
  Engine::Impl* engine = nullptr;
  std::vector<Segment> segments;
  std::vector<AttentionSegment> attention;
  std::vector<int32_t> output_rows;
  std::vector<int32_t> tokens;
  // Which row of the engine's token table is a row's, where layer 0's K and V come from there; x
  // then holds the rows that the table lacks. Empty: each row has its own.
  std::vector<int32_t> token_rows;
  std::vector<int64_t> table_rows;  // of the table, for the rows of x
  std::vector<int32_t> new_tokens;  // theirs
  std::vector<float> x;  // the rows before next_layer, as of when they last left the device
  std::vector<int32_t> positions;
  std::vector<int64_t> cells;
  uint64_t arena_epoch = 0;  // of `attention` and `cells`
  int n_rows = 0;
  int next_layer = 0;
  bool finished = false;
  std::vector<float> logits;
  // Capture layout of this step; empty when the tap is off or the block was given up.
  std::vector<CapturedLayer> capture;
  std::vector<size_t> capture_ends;  // where each layer's part of the block ends
  std::byte* capture_host = nullptr;
  int captured_layers = 0;               // that are on their way to capture_host
  CopyQueue::Ticket capture_ticket = 0;  // of the last such copy
  ~Impl();
};

struct Engine::Impl {
  const Model& model;
  EngineOptions options;
  model::Device& device;
  ggml_backend_t backend;
  std::unique_ptr<CopyQueue> queue;
  std::unique_ptr<AttentionOp> attention;

  ExtentAllocator extents;
  std::map<SeqId, Sequence> sequences;
  SeqId next_seq = 0;
  uint64_t arena_epoch = 0;  // counts extent moves

  TensorPool arena_pool;
  std::vector<ggml_tensor*> k_arena;  // per layer [n_embd_kv, cells]
  std::vector<ggml_tensor*> v_arena;

  TensorPool input_pool;
  ggml_tensor* x = nullptr;            // F32 [n_embd, max_rows]: rows between two layer ranges
  ggml_tensor* positions = nullptr;    // I32 [max_rows]
  ggml_tensor* cells = nullptr;        // I64 [max_rows]
  ggml_tensor* iota = nullptr;         // I64 [max_rows]: 0, 1, 2, ...
  ggml_tensor* output_rows = nullptr;  // I32 [max_rows]
  ggml_tensor* token_rows = nullptr;   // I32 [max_rows]
  ggml_tensor* table_rows = nullptr;   // I64 [max_rows]
  const Step::Impl* loaded = nullptr;  // whose positions, cells and other rows the device holds
  Step::Impl* x_owner = nullptr;       // the step between two layer ranges whose rows x holds

  // Layer 0's K before rotation and V, which depend on the token alone, of tokens met in
  // restorations. F32 [n_embd_kv, entries].
  ggml_tensor* table_k = nullptr;
  ggml_tensor* table_v = nullptr;
  std::unordered_map<int32_t, int64_t> table;  // token -> row

  ggml_gallocr_t allocator = nullptr;
  std::vector<std::byte> graph_memory;

  // Capture.
  CaptureSink* sink = nullptr;
  std::vector<uint8_t> tap;
  ggml_type tap_hidden_type = GGML_TYPE_F32;
  TensorPool capture_pool;
  ggml_tensor* capture_block = nullptr;  // I8 [bytes]
  struct PendingCapture {
    CopyQueue::Ticket ticket = 0;
    std::byte* block = nullptr;
    std::vector<CapturedLayer> layers;
    std::vector<CapturedRows> rows;
    StepCapture capture;
  };
  std::deque<PendingCapture> pending;
  CopyQueue::Ticket capture_ticket = 0;     // the last copy out of capture_block
  std::vector<Step::Impl*> captured_steps;  // prepared with a capture layout, not yet ended
  Step::Impl* block_owner = nullptr;        // whose layers capture_block holds

  // Restoration.
  TensorPool staging_pool;
  std::array<ggml_tensor*, kStagingSlots> staging = {};          // I8 [max_rows * widest row]
  std::array<CopyQueue::Mark, kStagingSlots> staging_mark = {};  // behind its last product
  int staging_slot = 0;
  bool staging_open = false;
  CopyQueue::Ticket staged_ticket = 0;
  std::vector<CopyQueue::Ticket> layer_ticket;  // last upload into each layer's arena
  std::map<ggml_type, bool> projectable;
  std::set<ggml_type> fast_product_equals;  // weight types whose fast product was seen to be ggml's

  std::vector<float> logits;

  Impl(const Model& m, const EngineOptions& o)
      : model(m),
        options(o),
        device(m.device()),
        backend(m.device().compute()),
        extents(o.arena_tokens) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    ggml_backend_synchronize(backend);
    queue.reset();
    ggml_gallocr_free(allocator);
  }

  [[nodiscard]] int n_layer() const { return model.hparams().n_layer; }

  // --- Graphs ------------------------------------------------------------------------------
  // A graph being built; its memory is reused by the next one.
  struct Graph {
    ggml_context* ctx = nullptr;
    ggml_cgraph* graph = nullptr;
    explicit Graph(Impl& impl, size_t n_nodes) {
      impl.step_graph.reset();
      const size_t size =
          ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false);
      if (impl.graph_memory.size() < size) impl.graph_memory.resize(size);
      ctx = ggml_init({.mem_size = impl.graph_memory.size(),
                       .mem_buffer = impl.graph_memory.data(),
                       .no_alloc = true});
      graph = ggml_new_graph_custom(ctx, n_nodes, false);
    }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() { ggml_free(ctx); }
    void add(ggml_tensor* tensor) const { ggml_build_forward_expand(graph, tensor); }
  };

  // What the graph of a step's layer range depends on besides tensors that live with the engine.
  struct StepGraphKey {
    int begin = 0;
    int end = 0;
    int n_rows = 0;
    size_t n_outputs = 0;
    bool kv_only_last = false;
    bool capture = false;
    size_t x_size = 0;  // smaller where x holds what the token table lacks
    friend bool operator==(const StepGraphKey&, const StepGraphKey&) = default;
  };
  // The last graph, when it was a step's and another step may run it again: decoding builds one
  // graph, not one per token. Any other graph takes its memory.
  std::unique_ptr<Graph> step_graph;
  StepGraphKey step_graph_key;
  ggml_tensor* step_graph_logits = nullptr;

  Status compute(const Graph& g) {
    HCACHE_RETURN_IF_ERROR(allocate(g));
    return run(g);
  }

  Status allocate(const Graph& g) {
    if (!ggml_gallocr_alloc_graph(allocator, g.graph)) {
      return resource_exhausted("the device has no memory for a step's activations");
    }
    if (!device.is_cpu()) {
      for (int i = 0; i < ggml_graph_n_nodes(g.graph); ++i) {
        const ggml_tensor* node = ggml_graph_node(g.graph, i);
        if (!ggml_backend_supports_op(backend, node)) {
          return unimplemented(fmt::format("device {} can't compute {} ({})", device.name(),
                                           ggml_op_desc(node), ggml_type_name(node->type)));
        }
      }
    }
    return {};
  }

  Status run(const Graph& g) {
    const ggml_status status = ggml_backend_graph_compute_async(backend, g.graph);
    if (status != GGML_STATUS_SUCCESS) {
      return internal_error(
          fmt::format("device {} failed: {}", device.name(), ggml_status_to_string(status)));
    }
    return {};
  }

  // --- Arena -------------------------------------------------------------------------------
  Status copy_rows(const ExtentAllocator::Move& move);
  Status apply(const std::vector<ExtentAllocator::Move>& moves);
  Status resize(SeqId seq, int64_t n_tokens);
  [[nodiscard]] ggml_tensor* arena_rows(ggml_context* ctx, ggml_tensor* arena, int64_t cell,
                                        int64_t n) const {
    return ggml_view_2d(ctx, arena, arena->ne[0], n, arena->nb[1],
                        static_cast<size_t>(cell) * arena->nb[1]);
  }

  // Blocks until no upload into the arena is under way.
  void wait_for_uploads() {
    queue->wait(*std::max_element(layer_ticket.begin(), layer_ticket.end()));
  }

  // --- Steps -------------------------------------------------------------------------------
  [[nodiscard]] Status check_room(const Step::Impl& step) const;
  void load_inputs(Step::Impl& step);
  void keep_unknown_tokens(Step::Impl& step);
  void spill_x();
  void end_step(Step::Impl& step);
  Status run_range(Step::Impl& step, int begin, int end, bool kv_only_last);
  ggml_tensor* build_range(const Graph& g, const Step::Impl& step, int begin, int end,
                           bool kv_only_last);
  ggml_tensor* product_input(ggml_context* ctx, const ggml_tensor* weight, ggml_tensor* hidden);
  ggml_tensor* capture_tensor(ggml_context* ctx, ggml_type type, int64_t width, int64_t n,
                              int64_t offset);
  void store_kv(const Graph& g, int layer, ggml_tensor* k, ggml_tensor* v, ggml_tensor* rows);
  void layout_capture(Step::Impl& step);
  void own_capture_block(Step::Impl& step);
  void download_capture(Step::Impl& step);
  void publish_capture(Step::Impl& step);
  void abandon_capture(Step::Impl& step);
  void poll_captures(bool all);

  [[nodiscard]] ggml_type native_hidden_type() const;
  [[nodiscard]] size_t kv_row_bytes() const {
    return ggml_row_size(options.kv_type, model.hparams().n_embd_kv());
  }
  [[nodiscard]] Result<Sequence*> find(SeqId seq) {
    auto it = sequences.find(seq);
    if (it == sequences.end()) return invalid_argument(fmt::format("no sequence {}", seq));
    return &it->second;
  }
  [[nodiscard]] Status check_rows(SeqId seq, int layer, int64_t first_pos, int64_t n_rows);
  [[nodiscard]] Status check_slice(int first_row, int n_rows) const {
    if (first_row >= 0 && n_rows >= 1 && n_rows <= options.max_batch_rows - first_row) return {};
    return out_of_range(fmt::format("{} rows from {} on in a slice of at most {} rows", n_rows,
                                    first_row, options.max_batch_rows));
  }
  [[nodiscard]] Status cannot_project(ggml_type type) const {
    return unimplemented(fmt::format("device {} can't project hidden states saved as {}",
                                     device.name(), ggml_type_name(type)));
  }
  [[nodiscard]] bool takes_fast_product(const ggml_tensor* weight, ggml_type rows) const {
    return device.is_cpu() && ggml_backend_buffer_is_host(weight->buffer) &&
           can_project_fast(weight->type, rows);
  }
  // From how many rows on K and V of a layer come from the kernels that restoration uses.
  [[nodiscard]] int64_t least_projection_rows(const LayerWeights& w) const {
    return device.is_cpu() ? std::max(least_rows(w.k.w->type), least_rows(w.v.w->type)) : 1;
  }
  // The fast product that was seen to be ggml's.
  [[nodiscard]] bool has_fast_product(const ggml_tensor* weight, ggml_type rows) const {
    return fast_product_equals.contains(weight->type) && takes_fast_product(weight, rows);
  }
  // For K and V of a layer, from rows in the native type.
  [[nodiscard]] bool has_fast_products(const LayerWeights& w) const {
    const ggml_type native = native_hidden_type();
    return has_fast_product(w.k.w, native) && has_fast_product(w.v.w, native);
  }
  // Which of K's and V's weights may take it with rows of `type`. x holds n_rows rows to try with.
  void check_fast_products(ggml_type type, int n_rows);
  Status project(ggml_tensor* rows, SeqId seq, int layer, int64_t first_pos, int n_rows);
};

Step::Impl::~Impl() {
  if (engine == nullptr || finished) return;
  // Abandoned: give back the room that was reserved for appended rows.
  ggml_backend_synchronize(engine->backend);  // logits may be on their way to this object
  engine->abandon_capture(*this);
  if (engine->loaded == this) engine->loaded = nullptr;
  if (engine->x_owner == this) engine->x_owner = nullptr;
  for (const Segment& s : segments) {
    auto it = engine->sequences.find(s.seq);
    if (it != engine->sequences.end()) {
      (void)engine->extents.resize(s.seq, it->second.length);
    }
  }
}

Step::Step(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Step::Step(Step&&) noexcept = default;
Step& Step::operator=(Step&&) noexcept = default;
Step::~Step() = default;
int Step::n_rows() const { return impl_->n_rows; }

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;
const Model& Engine::model() const { return impl_->model; }
const EngineOptions& Engine::options() const { return impl_->options; }
int Engine::n_layer() const { return impl_->n_layer(); }
bool Engine::uses_own_attention() const { return impl_->attention->ours(); }

namespace {

// Whether our kernel applies, as `wanted` says.
Result<bool> choose_attention(const Model& model, const EngineOptions& options) {
  const model::HParams& hp = model.hparams();
  const AttentionShape shape = {.n_head = hp.n_head,
                                .n_head_kv = hp.n_head_kv,
                                .head_dim_k = hp.head_dim,
                                .head_dim_v = hp.head_dim,
                                .scale = hp.attention_scale};
  const bool applies =
      model.device().is_cpu() && options.kv_type == GGML_TYPE_F16 && attention_supports(shape);
  if (options.attention == AttentionKind::kOurs && !applies) {
    return unimplemented(
        fmt::format("our attention kernel needs the CPU and an F16 KV cache (device {}, KV type "
                    "{}); use --attention auto",
                    model.device().name(), ggml_type_name(options.kv_type)));
  }
  return applies && options.attention != AttentionKind::kGgml;
}

Status check_options(const Model& model, const EngineOptions& options) {
  const model::HParams& hp = model.hparams();
  if (options.arena_tokens < 1 || options.max_batch_rows < 1) {
    return invalid_argument("the arena and the batch need at least one token");
  }
  switch (options.kv_type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16: break;
    case GGML_TYPE_Q8_0:
      if (hp.head_dim % ggml_blck_size(GGML_TYPE_Q8_0) != 0) {
        return unimplemented(fmt::format(
            "a Q8_0 KV cache needs heads divisible by 32, this model's have {}; use f16",
            hp.head_dim));
      }
      break;
    default:
      return unimplemented(fmt::format("KV type {} is not supported; use f16, f32, bf16 or q8_0",
                                       ggml_type_name(options.kv_type)));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create(const Model& model, const EngineOptions& options,
                                               std::unique_ptr<CopyQueue> queue) {
  HCACHE_RETURN_IF_ERROR(check_options(model, options));
  HCACHE_ASSIGN_OR_RETURN(const bool ours, choose_attention(model, options));

  auto impl = std::make_unique<Impl>(model, options);
  const model::HParams& hp = model.hparams();
  const int64_t rows = options.max_batch_rows;
  impl->attention = std::make_unique<AttentionOp>(model, ours);
  impl->queue = queue != nullptr ? std::move(queue) : make_device_copy_queue(impl->device);
  impl->layer_ticket.assign(hp.n_layer, 0);

  const int64_t n_cells = align_up(options.arena_tokens, AttentionOp::kKvPadding) +
                          (ours ? 0 : AttentionOp::kKvPadding);
  impl->arena_pool.open(2 * static_cast<size_t>(hp.n_layer));
  for (int layer = 0; layer < hp.n_layer; ++layer) {
    for (auto* arena : {&impl->k_arena, &impl->v_arena}) {
      arena->push_back(
          ggml_new_tensor_2d(impl->arena_pool.ctx(), options.kv_type, hp.n_embd_kv(), n_cells));
    }
  }
  HCACHE_RETURN_IF_ERROR(impl->arena_pool.allocate(
      impl->device.buffer_type(),
      fmt::format("a KV arena of {} tokens", options.arena_tokens).c_str()));

  impl->input_pool.open(9);
  ggml_context* ctx = impl->input_pool.ctx();
  impl->x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, hp.n_embd, rows);
  impl->positions = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, rows);
  impl->cells = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, rows);
  impl->iota = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, rows);
  impl->output_rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, rows);
  impl->token_rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, rows);
  impl->table_rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, rows);
  const int64_t entry_bytes = 2 * hp.n_embd_kv() * static_cast<int64_t>(sizeof(float));
  const int64_t entries =
      std::max<int64_t>(rows, std::min<int64_t>(hp.n_vocab, kTokenTableBytes / entry_bytes));
  impl->table_k = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, hp.n_embd_kv(), entries);
  impl->table_v = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, hp.n_embd_kv(), entries);
  HCACHE_RETURN_IF_ERROR(impl->input_pool.allocate(impl->device.buffer_type(), "a step's inputs"));
  std::vector<int64_t> iota(rows);
  std::iota(iota.begin(), iota.end(), 0);
  ggml_backend_tensor_set(impl->iota, iota.data(), 0, iota.size() * sizeof(int64_t));

  impl->allocator = ggml_gallocr_new(impl->device.buffer_type());
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

// --- Sequences -------------------------------------------------------------------------------

// Moves rows of every layer. Rows are copied in blocks that do not overlap their target, in the
// direction that never overwrites rows that have yet to be read.
Status Engine::Impl::copy_rows(const ExtentAllocator::Move& move) {
  if (move.n == 0 || move.from == move.to) return {};
  if (device.host_visible()) {
    ggml_backend_synchronize(backend);
    for (int layer = 0; layer < n_layer(); ++layer) {
      for (ggml_tensor* arena : {k_arena[layer], v_arena[layer]}) {
        auto* base = static_cast<std::byte*>(arena->data);
        std::memmove(base + static_cast<size_t>(move.to) * arena->nb[1],
                     base + static_cast<size_t>(move.from) * arena->nb[1],
                     static_cast<size_t>(move.n) * arena->nb[1]);
      }
    }
    return {};
  }
  // Through a bounce tensor per block: source and target of one copy must not overlap on devices.
  const int64_t block = options.max_batch_rows;
  const int64_t n_blocks = (move.n + block - 1) / block;
  for (int layer = 0; layer < n_layer(); ++layer) {
    const Graph g(*this, static_cast<size_t>(n_blocks) * 12 + 16);
    for (int64_t i = 0; i < n_blocks; ++i) {
      const int64_t index = move.to < move.from ? i : n_blocks - 1 - i;
      const int64_t first = index * block;
      const int64_t n = std::min(block, move.n - first);
      for (ggml_tensor* arena : {k_arena[layer], v_arena[layer]}) {
        ggml_tensor* bounce = ggml_cont(g.ctx, arena_rows(g.ctx, arena, move.from + first, n));
        g.add(ggml_cpy(g.ctx, bounce, arena_rows(g.ctx, arena, move.to + first, n)));
      }
    }
    HCACHE_RETURN_IF_ERROR(compute(g));
  }
  return {};
}

Status Engine::Impl::apply(const std::vector<ExtentAllocator::Move>& moves) {
  if (moves.empty()) return {};
  // Restored rows may still be on their way to where they were.
  wait_for_uploads();
  ++arena_epoch;
  for (const ExtentAllocator::Move& move : moves) HCACHE_RETURN_IF_ERROR(copy_rows(move));
  queue->after_compute();
  return {};
}

Status Engine::Impl::resize(SeqId seq, int64_t n_tokens) {
  HCACHE_ASSIGN_OR_RETURN(const auto moves, extents.resize(seq, n_tokens));
  return apply(moves);
}

Result<SeqId> Engine::create_sequence() {
  const SeqId seq = impl_->next_seq++;
  impl_->sequences[seq] = Sequence{};
  impl_->extents.add(seq);
  return seq;
}

Result<SeqId> Engine::fork_sequence(SeqId src, int64_t n_tokens) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * source, impl_->find(src));
  if (n_tokens < 0 || n_tokens > source->length) {
    return out_of_range(fmt::format("can't fork {} tokens of sequence {}, which has {}", n_tokens,
                                    src, source->length));
  }
  HCACHE_ASSIGN_OR_RETURN(const SeqId seq, create_sequence());
  if (Status status = reserve_rows(seq, n_tokens); !status.ok()) {
    release_sequence(seq).ignore("it exists: it was created above");
    return status;
  }
  impl_->wait_for_uploads();
  if (Status status = impl_->copy_rows(
          {impl_->extents.extent(src).first, impl_->extents.extent(seq).first, n_tokens});
      !status.ok()) {
    release_sequence(seq).ignore("it exists: it was created above");
    return status;
  }
  impl_->queue->after_compute();
  return seq;
}

Status Engine::trim_sequence(SeqId seq, int64_t n_tokens) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, impl_->find(seq));
  if (n_tokens < 0 || n_tokens > sequence->length) {
    return out_of_range(fmt::format("can't keep {} tokens of sequence {}, which has {}", n_tokens,
                                    seq, sequence->length));
  }
  // Copies still under way into rows that go must not land in their next owner's.
  impl_->wait_for_uploads();
  sequence->length = n_tokens;
  return impl_->resize(seq, n_tokens);
}

Status Engine::erase_range(SeqId seq, int64_t from, int64_t to) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, impl_->find(seq));
  if (from < 0 || from > to || to > sequence->length) {
    return out_of_range(fmt::format("can't erase [{}, {}) of sequence {}, which has {} tokens",
                                    from, to, seq, sequence->length));
  }
  const int64_t tail = sequence->length - to;
  if (tail == 0 || from == to) return trim_sequence(seq, sequence->length - (to - from));
  Impl& impl = *impl_;
  if (impl.model.spec().learned_positions) {
    return unimplemented("positions can't be shifted in a model with learned positions");
  }
  const int64_t first = impl.extents.extent(seq).first;
  impl.wait_for_uploads();
  HCACHE_RETURN_IF_ERROR(impl.copy_rows({first + to, first + from, tail}));

  const int64_t block = impl.options.max_batch_rows;
  const std::vector<int32_t> deltas(block, static_cast<int32_t>(from - to));
  impl.loaded = nullptr;
  ggml_backend_tensor_set_async(impl.backend, impl.positions, deltas.data(), 0,
                                deltas.size() * sizeof(int32_t));
  const model::HParams& hp = impl.model.hparams();
  for (int layer = 0; layer < impl.n_layer(); ++layer) {
    for (int64_t done = 0; done < tail; done += block) {
      const int64_t n = std::min(block, tail - done);
      const Impl::Graph g(impl, 32);
      ggml_tensor* rows = impl.arena_rows(g.ctx, impl.k_arena[layer], first + from + done, n);
      ggml_tensor* k = rows->type == GGML_TYPE_F32 ? ggml_cont(g.ctx, rows)
                                                   : ggml_cast(g.ctx, rows, GGML_TYPE_F32);
      k = ggml_reshape_3d(g.ctx, k, hp.head_dim, hp.n_head_kv, n);
      k = model::build_k_shift(g.ctx, impl.model, layer, k,
                               ggml_view_1d(g.ctx, impl.positions, n, 0));
      k = ggml_reshape_2d(g.ctx, k, hp.n_embd_kv(), n);
      g.add(ggml_cpy(g.ctx, k, rows));
      HCACHE_RETURN_IF_ERROR(impl.compute(g));
    }
  }
  impl.queue->after_compute();
  sequence->length -= to - from;
  return impl.resize(seq, sequence->length);
}

Status Engine::release_sequence(SeqId seq) {
  HCACHE_RETURN_IF_ERROR(impl_->find(seq).status());
  // Copies still under way into the extent must not land in its next owner's rows.
  impl_->wait_for_uploads();
  impl_->sequences.erase(seq);
  impl_->extents.remove(seq);
  return {};
}

Status Engine::reserve_rows(SeqId seq, int64_t n_tokens) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, impl_->find(seq));
  if (n_tokens <= sequence->length) return {};
  if (n_tokens > impl_->model.hparams().n_ctx_train) {
    return out_of_range(fmt::format("{} tokens are more than the model's context of {}", n_tokens,
                                    impl_->model.hparams().n_ctx_train));
  }
  HCACHE_RETURN_IF_ERROR(impl_->resize(seq, n_tokens));
  impl_->queue->after_compute();
  sequence->length = n_tokens;
  return {};
}

int64_t Engine::length(SeqId seq) const {
  const auto it = impl_->sequences.find(seq);
  return it == impl_->sequences.end() ? -1 : it->second.length;
}

int64_t Engine::arena_free_cells() const { return impl_->extents.free_cells(); }

// --- Steps -----------------------------------------------------------------------------------

Result<Step> Engine::prepare(std::span<const BatchItem> items) {
  Impl& impl = *impl_;
  const model::HParams& hp = impl.model.hparams();
  impl.poll_captures(false);

  auto step = std::make_unique<Step::Impl>();
  int64_t n_rows = 0;
  int64_t n_new_cells = 0;
  for (const BatchItem& item : items) {
    HCACHE_ASSIGN_OR_RETURN(const Sequence* sequence, impl.find(item.seq));
    const int64_t first = item.first_pos < 0 ? sequence->length : item.first_pos;
    const int64_t end = first + static_cast<int64_t>(item.tokens.size());
    if (item.tokens.empty() || first > sequence->length) {
      return invalid_argument(fmt::format(
          "sequence {}: a batch item needs tokens that begin at or before its length {}", item.seq,
          sequence->length));
    }
    for (const Step::Impl::Segment& other : step->segments) {
      if (other.seq == item.seq) {
        return invalid_argument(fmt::format("sequence {} stands twice in a batch", item.seq));
      }
    }
    if (end > hp.n_ctx_train) {
      return out_of_range(fmt::format("sequence {} would have {} tokens, the model's context is {}",
                                      item.seq, end, hp.n_ctx_train));
    }
    n_new_cells += std::max<int64_t>(0, end - sequence->length);
    step->segments.push_back({.seq = item.seq,
                              .first_pos = first,
                              .first_row = static_cast<int>(n_rows),
                              .n_rows = static_cast<int>(item.tokens.size())});
    n_rows += static_cast<int64_t>(item.tokens.size());
  }
  if (n_rows == 0 || n_rows > impl.options.max_batch_rows) {
    return invalid_argument(
        fmt::format("a step takes 1 to {} rows, not {}", impl.options.max_batch_rows, n_rows));
  }
  if (n_new_cells > impl.extents.free_cells()) {
    return resource_exhausted(fmt::format("the KV arena has {} free cells of {}, the step needs {}",
                                          impl.extents.free_cells(), impl.extents.n_cells(),
                                          n_new_cells));
  }

  step->n_rows = static_cast<int>(n_rows);
  step->x.resize(static_cast<size_t>(n_rows) * hp.n_embd);
  step->positions.reserve(n_rows);
  for (size_t i = 0; i < items.size(); ++i) {
    const Step::Impl::Segment& s = step->segments[i];
    float* rows = step->x.data() + static_cast<size_t>(s.first_row) * hp.n_embd;
    HCACHE_RETURN_IF_ERROR(impl.model.embed_tokens(items[i].tokens, rows));
    step->tokens.insert(step->tokens.end(), items[i].tokens.begin(), items[i].tokens.end());
    for (int r = 0; r < s.n_rows; ++r) {
      step->positions.push_back(static_cast<int32_t>(s.first_pos + r));
    }
    if (items[i].output == BatchItem::Output::kAll) {
      for (int r = 0; r < s.n_rows; ++r) step->output_rows.push_back(s.first_row + r);
    } else if (items[i].output == BatchItem::Output::kLast) {
      step->output_rows.push_back(s.first_row + s.n_rows - 1);
    }
  }
  HCACHE_RETURN_IF_ERROR(impl.model.add_learned_positions(step->positions, step->x.data()));

  // From here on nothing can fail for lack of room.
  step->engine = &impl;
  // Rows that are only computed again (a restored prefix) are saved already.
  if (n_new_cells > 0) impl.layout_capture(*step);
  for (const Step::Impl::Segment& s : step->segments) {
    const int64_t end = s.first_pos + s.n_rows;
    if (end > impl.extents.extent(s.seq).length) HCACHE_RETURN_IF_ERROR(impl.resize(s.seq, end));
  }
  return Step(std::move(step));
}

// Sequences may have been released or cut since the step was prepared.
Status Engine::Impl::check_room(const Step::Impl& step) const {
  for (const Step::Impl::Segment& s : step.segments) {
    if (!extents.contains(s.seq) || extents.extent(s.seq).length < s.first_pos + s.n_rows) {
      return failed_precondition(
          fmt::format("sequence {} was released or cut while a step ran on it", s.seq));
    }
  }
  return {};
}

// Another step needs x: the rows of the one that is between two layer ranges wait on the host.
void Engine::Impl::spill_x() {
  if (x_owner == nullptr) return;
  ggml_backend_tensor_get_async(backend, x, x_owner->x.data(), 0,
                                x_owner->x.size() * sizeof(float));
  ggml_backend_synchronize(backend);
  x_owner = nullptr;
}

// The step's rows count as their sequences' from here on.
void Engine::Impl::end_step(Step::Impl& step) {
  step.finished = true;
  if (loaded == &step) loaded = nullptr;
  if (x_owner == &step) x_owner = nullptr;
  for (const Step::Impl::Segment& s : step.segments) {
    int64_t& length = sequences.at(s.seq).length;
    length = std::max(length, s.first_pos + s.n_rows);
  }
}

// Uploads a step's inputs unless the device holds them already. Extents may have moved since the
// step last ran, so cells are derived here.
void Engine::Impl::load_inputs(Step::Impl& step) {
  if (loaded == &step && step.arena_epoch == arena_epoch) return;
  step.cells.clear();
  step.attention.clear();
  for (const Step::Impl::Segment& s : step.segments) {
    const int64_t first = extents.extent(s.seq).first;
    for (int r = 0; r < s.n_rows; ++r) step.cells.push_back(first + s.first_pos + r);
    step.attention.push_back(
        {.first_row = s.first_row, .n_rows = s.n_rows, .first_cell = first, .n_past = s.first_pos});
  }
  step.arena_epoch = arena_epoch;
  const auto set = [&](ggml_tensor* tensor, const auto& values) {
    if (values.empty()) return;
    ggml_backend_tensor_set_async(backend, tensor, values.data(), 0,
                                  values.size() * sizeof(values[0]));
  };
  set(positions, step.positions);
  set(cells, step.cells);
  set(output_rows, step.output_rows);
  set(token_rows, step.token_rows);
  set(table_rows, step.table_rows);
  loaded = &step;
}

ggml_tensor* Engine::Impl::capture_tensor(ggml_context* ctx, ggml_type type, int64_t width,
                                          int64_t n, int64_t offset) {
  ggml_tensor* t = ggml_new_tensor_2d(ctx, type, width, n);
  auto* base = static_cast<std::byte*>(capture_block->data);
  if (ggml_backend_tensor_alloc(capture_block->buffer, t, base + offset) != GGML_STATUS_SUCCESS) {
    die("a captured tensor does not fit the capture buffer");
  }
  return t;
}

// What ggml's product wants on its right-hand side for `weight`: exactly the native type, or F32.
ggml_tensor* Engine::Impl::product_input(ggml_context* ctx, const ggml_tensor* weight,
                                         ggml_tensor* hidden) {
  if (hidden->type == GGML_TYPE_F32) return hidden;
  if (device.is_cpu()) {
    if (hidden->type == model::native_activation_type(device, weight->type)) return hidden;
  } else if (hidden->type == weight->type &&
             (hidden->type == GGML_TYPE_F16 || hidden->type == GGML_TYPE_BF16)) {
    ggml_tensor* product = ggml_mul_mat(ctx, const_cast<ggml_tensor*>(weight), hidden);
    if (ggml_backend_supports_op(backend, product)) return hidden;
  }
  return ggml_cast(ctx, hidden, GGML_TYPE_F32);
}

void Engine::Impl::store_kv(const Graph& g, int layer, ggml_tensor* k, ggml_tensor* v,
                            ggml_tensor* rows) {
  const int64_t width = model.hparams().n_embd_kv();
  g.add(ggml_set_rows(g.ctx, k_arena[layer], ggml_reshape_2d(g.ctx, k, width, k->ne[2]), rows));
  g.add(ggml_set_rows(g.ctx, v_arena[layer], ggml_reshape_2d(g.ctx, v, width, v->ne[2]), rows));
}

// F32 rows converted to the type that they are saved in, as capture does it. `order`: 0, 1, …
ggml_tensor* saved_as(ggml_context* ctx, ggml_type type, ggml_tensor* rows, ggml_tensor* order) {
  ggml_tensor* target = ggml_new_tensor_2d(ctx, type, rows->ne[0], rows->ne[1]);
  ggml_set_input(target);  // set_rows writes into it: it must have memory of its own
  return ggml_set_rows(ctx, target, rows, order);
}

// The product of few rows by the kernel for many: rows of zeros are added and their results left.
ggml_tensor* padded_product(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* x) {
  const int64_t n = x->ne[1];
  const int64_t missing = std::max<int64_t>(least_rows(weight->type) - n, 0);
  ggml_tensor* rows = missing == 0 ? x : ggml_pad(ctx, x, 0, static_cast<int>(missing), 0, 0);
  ggml_tensor* y = ggml_mul_mat(ctx, weight, rows);
  return ggml_view_2d(ctx, y, y->ne[0], n, y->nb[1], 0);
}

// Adds layers [begin, end) of a step to the graph; returns the logits, or nullptr where the range
// has none.
ggml_tensor* Engine::Impl::build_range(const Graph& g, const Step::Impl& step, int begin, int end,
                                       bool kv_only_last) {
  const model::HParams& hp = model.hparams();
  const int64_t n = step.n_rows;
  ggml_context* ctx = g.ctx;
  ggml_tensor* pos = ggml_view_1d(ctx, positions, n, 0);
  ggml_tensor* kv_rows = ggml_view_1d(ctx, cells, n, 0);
  ggml_tensor* step_rows = ggml_view_1d(ctx, iota, n, 0);
  const bool distinct = !step.token_rows.empty();
  const auto n_x = static_cast<int64_t>(step.x.size()) / hp.n_embd;
  ggml_tensor* cur = ggml_view_2d(ctx, x, hp.n_embd, n_x, x->nb[1], 0);

  // Project exactly what is saved: it is what the product would have converted to anyway.
  const bool project_saved =
      !step.capture.empty() && device.is_cpu() && tap_hidden_type == native_hidden_type();
  ggml_tensor* logits = nullptr;
  for (int layer = begin; layer < end; ++layer) {
    const bool last = layer == n_layer() - 1;
    // Rows nobody wants logits of need no more than their K and V in the last layer.
    const bool kv_only = (kv_only_last && layer == end - 1) || (last && step.output_rows.empty());
    const LayerWeights& w = model.weights().layers[layer];
    ggml_tensor* hidden = model::build_hidden(ctx, model, layer, cur);
    ggml_tensor* kv_input = hidden;
    const CapturedLayer* captured = step.capture.empty() ? nullptr : &step.capture[layer];
    if (captured != nullptr && captured->hidden_offset >= 0) {
      ggml_tensor* saved = ggml_set_rows(
          ctx, capture_tensor(ctx, tap_hidden_type, hp.n_embd, n, captured->hidden_offset), hidden,
          step_rows);
      g.add(saved);
      if (project_saved) kv_input = saved;
    }
    // Restoration projects rows by the hundred; the same kernel must have computed them here. What
    // is not saved of layer 0 is projected from the tokens' embeddings.
    const bool projected_later = captured != nullptr && (captured->hidden_offset >= 0 ||
                                                         (layer == 0 && captured->k_offset < 0));
    const bool tail = kv_only_last && layer == end - 1;
    const bool padded = (projected_later || tail) && n_x < least_projection_rows(w);
    if (padded) kv_input = hidden;
    model::Product product = padded ? padded_product : ggml_mul_mat;
    if (tail && has_fast_products(w)) {
      kv_input = saved_as(ctx, native_hidden_type(), hidden, ggml_view_1d(ctx, iota, n_x, 0));
      product = build_fast_product;
    }
    const auto through = [&](ggml_tensor* token_table) -> model::Product {
      if (!distinct) return product;
      return [this, n, n_x, token_table, by_row = product](ggml_context* c, ggml_tensor* weight,
                                                           ggml_tensor* rows) {
        ggml_tensor* known = ggml_set_rows(c, token_table, by_row(c, weight, rows),
                                           ggml_view_1d(c, table_rows, n_x, 0));
        return ggml_get_rows(c, known, ggml_view_1d(c, token_rows, n, 0));
      };
    };
    ggml_tensor* k = model::build_k(ctx, model, layer, product_input(ctx, w.k.w, kv_input), pos,
                                    through(table_k));
    ggml_tensor* v =
        model::build_v(ctx, model, layer, product_input(ctx, w.v.w, kv_input), through(table_v));
    store_kv(g, layer, k, v, kv_rows);
    if (captured != nullptr && captured->k_offset >= 0) {
      const int64_t width = hp.n_embd_kv();
      g.add(ggml_set_rows(ctx, capture_tensor(ctx, options.kv_type, width, n, captured->k_offset),
                          ggml_reshape_2d(ctx, k, width, n), step_rows));
      g.add(ggml_set_rows(ctx, capture_tensor(ctx, options.kv_type, width, n, captured->v_offset),
                          ggml_reshape_2d(ctx, v, width, n), step_rows));
    }
    if (kv_only) continue;

    ggml_tensor* q = model::build_q(ctx, model, layer, hidden, pos);
    g.add(q);
    ggml_tensor* attn = attention->build(ctx, q, k_arena[layer], v_arena[layer]);
    if (last) {
      ggml_tensor* wanted =
          ggml_view_1d(ctx, output_rows, static_cast<int64_t>(step.output_rows.size()), 0);
      attn = ggml_get_rows(ctx, attn, wanted);
      cur = ggml_get_rows(ctx, cur, wanted);
      hidden = ggml_get_rows(ctx, hidden, wanted);
    }
    cur = model::build_layer_output(ctx, model, layer, cur, hidden, attn);
    if (last) {
      logits = model::build_logits(ctx, model, cur);
      ggml_set_output(logits);
      g.add(logits);
    } else if (layer == end - 1) {
      g.add(ggml_cpy(ctx, cur, ggml_view_2d(ctx, x, hp.n_embd, n, x->nb[1], 0)));
    }
  }
  return logits;
}

// Layer 0's K and V before rotation depend on the token alone: they are computed once per token and
// kept. Leaves in x the rows of tokens that the table lacks (at least one: no graph is without
// rows).
void Engine::Impl::keep_unknown_tokens(Step::Impl& step) {
  if (!step.token_rows.empty() || model.spec().learned_positions) return;
  const auto n_embd = static_cast<size_t>(model.hparams().n_embd);
  std::unordered_map<int32_t, int64_t> fresh;
  for (const int32_t token : step.tokens) {
    if (!table.contains(token)) fresh.try_emplace(token, 0);
  }
  if (static_cast<int64_t>(table.size() + fresh.size()) > table_k->ne[1]) table.clear();
  auto next = static_cast<int64_t>(table.size());
  fresh.clear();
  for (size_t row = 0; row < step.tokens.size(); ++row) {
    const int32_t token = step.tokens[row];
    int64_t entry = 0;
    bool compute = false;
    if (const auto known = table.find(token); known != table.end()) {
      entry = known->second;
      compute = row + 1 == step.tokens.size() && step.new_tokens.empty();
    } else {
      const auto [at, is_new] = fresh.try_emplace(token, next);
      entry = at->second;
      compute = is_new;
      if (is_new) ++next;
    }
    step.token_rows.push_back(static_cast<int32_t>(entry));
    if (!compute) continue;
    const size_t kept = step.new_tokens.size();
    const auto from = step.x.begin() + static_cast<std::ptrdiff_t>(row * n_embd);
    if (kept != row) {
      std::copy_n(from, n_embd, step.x.begin() + static_cast<std::ptrdiff_t>(kept * n_embd));
    }
    step.new_tokens.push_back(token);
    step.table_rows.push_back(entry);
  }
  step.x.resize(step.new_tokens.size() * n_embd);
}

Status Engine::Impl::run_range(Step::Impl& step, int begin, int end, bool kv_only_last) {
  if (step.finished || begin != step.next_layer || end < begin || end > n_layer()) {
    return failed_precondition(fmt::format("layers [{}, {}) can't follow layer {} of a step", begin,
                                           end, step.next_layer - 1));
  }
  const bool layer_0_tail = kv_only_last && begin == 0 && end == 1;
  if (!step.token_rows.empty() && !layer_0_tail) {
    return failed_precondition("the step keeps no more than layer 0's K and V need");
  }
  HCACHE_RETURN_IF_ERROR(check_room(step));
  if (begin == end) return {};
  if (layer_0_tail && step.capture.empty()) keep_unknown_tokens(step);
  own_capture_block(step);
  if (x_owner != &step) {
    spill_x();
    ggml_backend_tensor_set_async(backend, x, step.x.data(), 0, step.x.size() * sizeof(float));
  }
  load_inputs(step);
  HCACHE_RETURN_IF_ERROR(attention->set_batch(step.attention));
  CopyQueue::Ticket restored = 0;
  for (int layer = begin; layer < end; ++layer) {
    restored = std::max(restored, layer_ticket[layer]);
  }
  queue->before_compute(restored);
  x_owner = nullptr;
  step.next_layer = -1;  // no way on from a failure below: some of the rows may be written

  const StepGraphKey key = {.begin = begin,
                            .end = end,
                            .n_rows = step.n_rows,
                            .n_outputs = step.output_rows.size(),
                            .kv_only_last = kv_only_last,
                            .capture = !step.capture.empty(),
                            .x_size = step.x.size()};
  if (step_graph == nullptr || !(step_graph_key == key)) {
    const size_t n_nodes =
        static_cast<size_t>(end - begin) *
            (kNodesPerLayer + (attention->ours() ? 0 : kNodesPerSegment) * step.segments.size()) +
        64;
    auto g = std::make_unique<Graph>(*this, n_nodes);
    ggml_tensor* logits = build_range(*g, step, begin, end, kv_only_last);
    HCACHE_RETURN_IF_ERROR(allocate(*g));
    step_graph = std::move(g);
    step_graph_key = key;
    step_graph_logits = logits;
  }
  const Status status = run(*step_graph);
  for (size_t i = 0; status.ok() && i < step.new_tokens.size(); ++i) {
    table[step.new_tokens[i]] = step.table_rows[i];
  }
  const ggml_tensor* logits = step_graph_logits;
  if (status.ok() && logits != nullptr) {
    step.logits.swap(this->logits);  // for its memory
    step.logits.resize(static_cast<size_t>(ggml_nelements(logits)));
    ggml_backend_tensor_get_async(backend, logits, step.logits.data(), 0, ggml_nbytes(logits));
  }
  // ggml's attention is built for this step's segments and masks.
  if (!attention->ours()) step_graph.reset();
  HCACHE_RETURN_IF_ERROR(status);
  step.next_layer = end;
  if (end < n_layer()) x_owner = &step;
  return {};
}

Status Engine::run_layers(Step& step, int begin, int end) {
  return impl_->run_range(*step.impl_, begin, end, false);
}

Status Engine::finish_with_kv(Step& step, int layer) {
  if (impl_->device.is_cpu())
    can_project(impl_->native_hidden_type());  // tries fast products, once
  HCACHE_RETURN_IF_ERROR(impl_->run_range(*step.impl_, step.impl_->next_layer, layer + 1, true));
  impl_->abandon_capture(*step.impl_);
  impl_->end_step(*step.impl_);
  return {};
}

Result<Logits> Engine::finish(Step& step) {
  Impl& impl = *impl_;
  Step::Impl& s = *step.impl_;
  if (s.finished || s.next_layer != impl.n_layer()) {
    return failed_precondition(
        fmt::format("a step can't finish after {} of {} layers", s.next_layer, impl.n_layer()));
  }
  HCACHE_RETURN_IF_ERROR(impl.check_room(s));
  impl.publish_capture(s);
  ggml_backend_synchronize(impl.backend);
  impl.poll_captures(false);
  impl.end_step(s);
  impl.logits.swap(s.logits);
  Logits logits;
  const size_t n_vocab = static_cast<size_t>(impl.model.hparams().n_vocab);
  for (size_t i = 0; i < s.output_rows.size(); ++i) {
    logits.rows.emplace_back(impl.logits.data() + i * n_vocab, n_vocab);
  }
  return logits;
}

Result<Logits> Engine::decode(std::span<const BatchItem> items) {
  HCACHE_ASSIGN_OR_RETURN(Step step, prepare(items));
  HCACHE_RETURN_IF_ERROR(run_layers(step, 0, n_layer()));
  return finish(step);
}

// --- Capture ---------------------------------------------------------------------------------

ggml_type Engine::Impl::native_hidden_type() const {
  ggml_type type = GGML_TYPE_COUNT;
  for (const LayerWeights& w : model.weights().layers) {
    for (const ggml_tensor* weight : {w.k.w, w.v.w}) {
      const ggml_type native = model::native_activation_type(device, weight->type);
      if (type != GGML_TYPE_COUNT && type != native) return GGML_TYPE_F16;
      type = native;
    }
  }
  const bool fits = model.hparams().n_embd % ggml_blck_size(type) == 0;
  return fits ? type : GGML_TYPE_F16;
}

ggml_type Engine::native_hidden_type() const { return impl_->native_hidden_type(); }

size_t Engine::kv_row_bytes() const { return impl_->kv_row_bytes(); }

size_t Engine::hidden_row_bytes(ggml_type type) const {
  return ggml_row_size(type, impl_->model.hparams().n_embd);
}

Status Engine::set_capture(CaptureSink* sink, const CaptureOptions& options) {
  Impl& impl = *impl_;
  while (!impl.captured_steps.empty()) impl.abandon_capture(*impl.captured_steps.back());
  impl.poll_captures(true);
  impl.sink = nullptr;
  impl.tap.clear();
  impl.step_graph.reset();  // it writes what the old options capture
  const bool wanted = std::any_of(options.layers.begin(), options.layers.end(),
                                  [](uint8_t mask) { return mask != 0; });
  if (sink == nullptr || !wanted) return {};
  if (options.layers.size() != static_cast<size_t>(impl.n_layer())) {
    return invalid_argument(fmt::format("a save plan of {} layers for a model of {}",
                                        options.layers.size(), impl.n_layer()));
  }
  const ggml_type type =
      options.hidden_type == GGML_TYPE_COUNT ? native_hidden_type() : options.hidden_type;
  const bool any_hidden = std::any_of(options.layers.begin(), options.layers.end(),
                                      [](uint8_t mask) { return (mask & kTapHidden) != 0; });
  if (any_hidden && !can_project(type)) {
    return unimplemented(
        fmt::format("device {} can't save and project hidden states as {} for {} "
                    "weights; choose another --state-type or --save kv",
                    impl.device.name(), ggml_type_name(type), impl.model.type_name()));
  }

  size_t row_bytes = 0;
  size_t n_parts = 0;
  for (const uint8_t mask : options.layers) {
    if ((mask & kTapHidden) != 0) row_bytes += hidden_row_bytes(type), ++n_parts;
    if ((mask & kTapKv) != 0) row_bytes += 2 * kv_row_bytes(), n_parts += 2;
  }
  const size_t capacity = row_bytes * impl.options.max_batch_rows + n_parts * kBlockAlignment;
  if (impl.capture_block == nullptr || ggml_nbytes(impl.capture_block) < capacity) {
    ggml_backend_synchronize(impl.backend);
    std::destroy_at(&impl.capture_pool);
    std::construct_at(&impl.capture_pool);
    impl.capture_block = nullptr;
    impl.capture_pool.open(1);
    ggml_tensor* block =
        ggml_new_tensor_1d(impl.capture_pool.ctx(), GGML_TYPE_I8, static_cast<int64_t>(capacity));
    HCACHE_RETURN_IF_ERROR(
        impl.capture_pool.allocate(impl.device.buffer_type(), "the capture buffer"));
    impl.capture_block = block;
  }
  impl.sink = sink;
  impl.tap = options.layers;
  impl.tap_hidden_type = type;
  return {};
}

// Lays the step's block out by the rows it really has, so that one copy takes all of it.
void Engine::Impl::layout_capture(Step::Impl& step) {
  if (sink == nullptr) return;
  size_t offset = 0;
  const auto take = [&](size_t row_bytes) {
    const size_t at = offset;
    offset = align_up(offset + row_bytes * step.n_rows, kBlockAlignment);
    return static_cast<int64_t>(at);
  };
  for (const uint8_t mask : tap) {
    CapturedLayer layer;
    if ((mask & kTapHidden) != 0) {
      layer.hidden_offset = take(ggml_row_size(tap_hidden_type, model.hparams().n_embd));
    }
    if ((mask & kTapKv) != 0) {
      layer.k_offset = take(kv_row_bytes());
      layer.v_offset = take(kv_row_bytes());
    }
    step.capture.push_back(layer);
    step.capture_ends.push_back(offset);
  }
  captured_steps.push_back(&step);
}

// Makes capture_block the step's, once the rows of its last owner have left it.
void Engine::Impl::own_capture_block(Step::Impl& step) {
  if (step.capture.empty() || block_owner == &step) return;
  if (block_owner != nullptr) download_capture(*block_owner);
  block_owner = &step;
  queue->before_compute(capture_ticket);
}

// Copies what the device holds of the step's block to the sink's memory: all of it in one copy,
// unless another step ran between the layers of this one.
void Engine::Impl::download_capture(Step::Impl& step) {
  const size_t begin = step.captured_layers == 0 ? 0 : step.capture_ends[step.captured_layers - 1];
  const size_t end = step.next_layer <= 0 ? 0 : step.capture_ends[step.next_layer - 1];
  if (begin >= end) return;
  if (step.capture_host == nullptr) step.capture_host = sink->reserve(step.capture_ends.back());
  if (step.capture_host == nullptr) return abandon_capture(step);
  queue->after_compute();
  step.capture_ticket =
      queue->download(capture_block, begin, step.capture_host + begin, end - begin);
  step.captured_layers = step.next_layer;
  capture_ticket = step.capture_ticket;
}

// The step goes on without being captured.
void Engine::Impl::abandon_capture(Step::Impl& step) {
  if (step.capture.empty()) return;
  if (step.capture_host != nullptr) {
    queue->wait(step.capture_ticket);
    sink->drop(std::exchange(step.capture_host, nullptr));
  }
  step.capture.clear();
  std::erase(captured_steps, &step);
  if (block_owner == &step) block_owner = nullptr;
}

void Engine::Impl::publish_capture(Step::Impl& step) {
  if (block_owner == &step) download_capture(step);
  if (step.capture.empty()) return;
  PendingCapture p;
  p.ticket = step.capture_ticket;
  p.block = std::exchange(step.capture_host, nullptr);
  p.layers = step.capture;
  for (const Step::Impl::Segment& s : step.segments) {
    p.rows.push_back(
        {.seq = s.seq, .first_pos = s.first_pos, .first_row = s.first_row, .n_rows = s.n_rows});
  }
  p.capture = {.layers = {},
               .rows = {},
               .n_rows = step.n_rows,
               .hidden_type = tap_hidden_type,
               .kv_type = options.kv_type,
               .hidden_row_bytes = ggml_row_size(tap_hidden_type, model.hparams().n_embd),
               .kv_row_bytes = kv_row_bytes(),
               .n_bytes = step.capture_ends.back()};
  pending.push_back(std::move(p));
  abandon_capture(step);  // nothing of it is left here
}

// Hands complete blocks to the sink, oldest first; `all` waits for the rest.
void Engine::Impl::poll_captures(bool all) {
  while (!pending.empty()) {
    PendingCapture& p = pending.front();
    if (!queue->done(p.ticket)) {
      // One block may stay in flight beside the step that follows it.
      if (!all && pending.size() < 2) return;
      queue->wait(p.ticket);
    }
    p.capture.layers = p.layers;
    p.capture.rows = p.rows;
    sink->publish(p.block, p.capture);
    pending.pop_front();
  }
}

// --- Restoration -----------------------------------------------------------------------------

Status Engine::Impl::check_rows(SeqId seq, int layer, int64_t first_pos, int64_t n_rows) {
  HCACHE_ASSIGN_OR_RETURN(const Sequence* sequence, find(seq));
  if (layer < 0 || layer >= n_layer() || first_pos < 0 || n_rows < 1 ||
      first_pos + n_rows > sequence->length) {
    return out_of_range(fmt::format("rows [{}, {}) of layer {} lie outside sequence {} of {} rows",
                                    first_pos, first_pos + n_rows, layer, seq, sequence->length));
  }
  return {};
}

Result<Engine::Ticket> Engine::load_kv(SeqId seq, int layer, int64_t first_pos, int n_rows,
                                       const std::byte* k, const std::byte* v) {
  Impl& impl = *impl_;
  HCACHE_RETURN_IF_ERROR(impl.check_rows(seq, layer, first_pos, n_rows));
  const size_t row = impl.kv_row_bytes();
  const size_t offset = static_cast<size_t>(impl.extents.extent(seq).first + first_pos) * row;
  impl.queue->upload(impl.k_arena[layer], offset, k, row * n_rows);
  const Ticket ticket = impl.queue->upload(impl.v_arena[layer], offset, v, row * n_rows);
  impl.layer_ticket[layer] = ticket;
  return ticket;
}

Result<Engine::Ticket> Engine::stage_hidden(int row_in_slice, int n_rows, ggml_type type,
                                            const std::byte* rows) {
  Impl& impl = *impl_;
  HCACHE_RETURN_IF_ERROR(impl.check_slice(row_in_slice, n_rows));
  if (!can_project(type)) return impl.cannot_project(type);
  if (impl.staging[0] == nullptr) {
    impl.staging_pool.open(kStagingSlots);
    const size_t capacity = hidden_row_bytes(GGML_TYPE_F32) * impl.options.max_batch_rows;
    for (ggml_tensor*& slot : impl.staging) {
      slot =
          ggml_new_tensor_1d(impl.staging_pool.ctx(), GGML_TYPE_I8, static_cast<int64_t>(capacity));
    }
    HCACHE_RETURN_IF_ERROR(
        impl.staging_pool.allocate(impl.device.buffer_type(), "staged hidden states"));
  }
  if (!impl.staging_open) {
    // The slot's previous slice must have been projected; the other slot's may still be.
    impl.queue->after_compute(impl.staging_mark[impl.staging_slot]);
    impl.staging_open = true;
  }
  const size_t row = hidden_row_bytes(type);
  impl.staged_ticket =
      impl.queue->upload(impl.staging[impl.staging_slot], row * row_in_slice, rows, row * n_rows);
  return impl.staged_ticket;
}

// K and V of `layer` from hidden rows [n_embd, n_rows or more] of any type, into the sequence's
// rows; rows behind n_rows are there for the kernel's choice alone.
Status Engine::Impl::project(ggml_tensor* rows, SeqId seq, int layer, int64_t first_pos,
                             int n_rows) {
  loaded = nullptr;
  std::vector<int32_t> pos(rows->ne[1]);
  std::iota(pos.begin(), pos.end(), static_cast<int32_t>(first_pos));
  ggml_backend_tensor_set_async(backend, positions, pos.data(), 0, pos.size() * sizeof(int32_t));

  const Graph g(*this, 64);
  const LayerWeights& w = model.weights().layers[layer];
  const int64_t width = model.hparams().n_embd_kv();
  const int64_t cell = extents.extent(seq).first + first_pos;
  ggml_tensor* rotation = ggml_view_1d(g.ctx, positions, rows->ne[1], 0);
  const model::Product product = [this](ggml_context* ctx, ggml_tensor* weight,
                                        ggml_tensor* input) {
    return has_fast_product(weight, input->type) ? build_fast_product(ctx, weight, input)
                                                 : ggml_mul_mat(ctx, weight, input);
  };
  ggml_tensor* k =
      model::build_k(g.ctx, model, layer, product_input(g.ctx, w.k.w, rows), rotation, product);
  ggml_tensor* v = model::build_v(g.ctx, model, layer, product_input(g.ctx, w.v.w, rows), product);
  ggml_tensor* step_rows = ggml_view_1d(g.ctx, iota, n_rows, 0);
  // The same row conversion as in a step, into a view of the extent.
  for (const auto& [arena, made] : {std::pair(k_arena[layer], k), std::pair(v_arena[layer], v)}) {
    ggml_tensor* all = ggml_reshape_2d(g.ctx, made, width, rows->ne[1]);
    g.add(ggml_set_rows(g.ctx, arena_rows(g.ctx, arena, cell, n_rows),
                        ggml_view_2d(g.ctx, all, width, n_rows, all->nb[1], 0), step_rows));
  }
  return compute(g);
}

Status Engine::project_staged(SeqId seq, int layer, int64_t first_pos, int n_rows, ggml_type type) {
  Impl& impl = *impl_;
  HCACHE_RETURN_IF_ERROR(impl.check_rows(seq, layer, first_pos, n_rows));
  HCACHE_RETURN_IF_ERROR(impl.check_slice(0, n_rows));
  if (!impl.staging_open) return failed_precondition("no hidden rows are staged");
  if (!can_project(type)) return impl.cannot_project(type);
  ggml_tensor* slot = impl.staging[impl.staging_slot];
  ggml_context* ctx =
      ggml_init({.mem_size = ggml_tensor_overhead() * 2, .mem_buffer = nullptr, .no_alloc = true});
  // A slice of few rows takes the slot's older ones along, for the kernel that takes many.
  const int64_t computed =
      std::clamp<int64_t>(impl.least_projection_rows(impl.model.weights().layers[layer]), n_rows,
                          impl.options.max_batch_rows);
  ggml_tensor* rows = ggml_new_tensor_2d(ctx, type, impl.model.hparams().n_embd, computed);
  Status status;
  if (ggml_backend_tensor_alloc(slot->buffer, rows, slot->data) != GGML_STATUS_SUCCESS) {
    status = internal_error("staged rows do not fit their slot");
  } else {
    impl.queue->before_compute(impl.staged_ticket);
    status = impl.project(rows, seq, layer, first_pos, n_rows);
    impl.staging_mark[impl.staging_slot] = impl.queue->mark_compute();
  }
  ggml_free(ctx);
  impl.staging_slot = (impl.staging_slot + 1) % kStagingSlots;
  impl.staging_open = false;
  return status;
}

// Checks the ops that saving and projecting `type` needs, then a round trip of a few rows.
bool Engine::can_project(ggml_type type) {
  Impl& impl = *impl_;
  const auto known = impl.projectable.find(type);
  if (known != impl.projectable.end()) return known->second;
  const int64_t n_embd = impl.model.hparams().n_embd;
  bool& answer = impl.projectable[type];
  answer = false;
  switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_Q8_1:
    case GGML_TYPE_Q8_K: break;
    default: return false;
  }
  if (n_embd % ggml_blck_size(type) != 0) return false;

  const int n_rows = std::min(4, impl.options.max_batch_rows);
  for (const LayerWeights& w : impl.model.weights().layers) {
    for (const ggml_tensor* weight : {w.k.w, w.v.w}) {
      // Q8_1 and Q8_K can't be cast back (ggml crashes): only the product itself reads them.
      const bool castable = type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K;
      const bool native =
          impl.device.is_cpu() && type == model::native_activation_type(impl.device, weight->type);
      if (!castable && !native) return false;
    }
  }

  // Round trip: F32 rows -> saved type -> product of layer 0, against the product of the F32 rows.
  const Impl::Graph g(impl, 64);
  std::vector<float> values(static_cast<size_t>(n_embd) * n_rows);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        std::sin(0.37F * static_cast<float>(i)) + 0.25F * std::cos(1.7F * static_cast<float>(i));
  }
  impl.spill_x();
  ggml_backend_tensor_set_async(impl.backend, impl.x, values.data(), 0,
                                values.size() * sizeof(float));
  const LayerWeights& w = impl.model.weights().layers[0];
  ggml_tensor* exact = ggml_view_2d(g.ctx, impl.x, n_embd, n_rows, impl.x->nb[1], 0);
  ggml_tensor* saved = saved_as(g.ctx, type, exact, ggml_view_1d(g.ctx, impl.iota, n_rows, 0));
  ggml_tensor* from_saved = ggml_mul_mat(g.ctx, w.k.w, impl.product_input(g.ctx, w.k.w, saved));
  ggml_tensor* from_exact = ggml_mul_mat(g.ctx, w.k.w, exact);
  ggml_set_output(from_saved);
  ggml_set_output(from_exact);
  g.add(from_saved);
  g.add(from_exact);
  if (!impl.compute(g).ok()) return false;
  std::vector<float> a(static_cast<size_t>(ggml_nelements(from_saved)));
  std::vector<float> b(a.size());
  ggml_backend_synchronize(impl.backend);
  ggml_backend_tensor_get(from_saved, a.data(), 0, a.size() * sizeof(float));
  ggml_backend_tensor_get(from_exact, b.data(), 0, b.size() * sizeof(float));
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  answer = error <= 1e-3 * norm;
  if (answer) impl.check_fast_products(type, n_rows);
  return answer;
}

void Engine::Impl::check_fast_products(ggml_type type, int n_rows) {
  const int64_t n_embd = model.hparams().n_embd;
  const LayerWeights& w = model.weights().layers[0];
  for (ggml_tensor* weight : {w.k.w, w.v.w}) {
    if (!takes_fast_product(weight, type)) continue;
    const Graph g(*this, 64);
    ggml_tensor* saved = saved_as(g.ctx, type, ggml_view_2d(g.ctx, x, n_embd, n_rows, x->nb[1], 0),
                                  ggml_view_1d(g.ctx, iota, n_rows, 0));
    std::array<ggml_tensor*, 2> products = {ggml_mul_mat(g.ctx, weight, saved),
                                            build_fast_product(g.ctx, weight, saved)};
    for (ggml_tensor* product : products) {
      ggml_set_output(product);
      g.add(product);
    }
    if (!compute(g).ok()) return;
    ggml_backend_synchronize(backend);
    if (std::memcmp(products[0]->data, products[1]->data, ggml_nbytes(products[0])) == 0) {
      fast_product_equals.insert(weight->type);
    } else {
      fast_product_equals.erase(weight->type);
    }
  }
}

Status Engine::wait(Ticket ticket) {
  impl_->queue->wait(ticket);
  return {};
}

bool Engine::done(Ticket ticket) const { return impl_->queue->done(ticket); }

Status Engine::synchronize() {
  ggml_backend_synchronize(impl_->backend);
  CopyQueue::Ticket last = std::max(impl_->staged_ticket, impl_->capture_ticket);
  for (const CopyQueue::Ticket ticket : impl_->layer_ticket) last = std::max(last, ticket);
  impl_->queue->wait(last);
  impl_->poll_captures(true);
  return {};
}

Status Engine::read_kv(SeqId seq, int layer, int64_t first_pos, int n_rows, std::byte* k,
                       std::byte* v) {
  Impl& impl = *impl_;
  HCACHE_RETURN_IF_ERROR(impl.check_rows(seq, layer, first_pos, n_rows));
  HCACHE_RETURN_IF_ERROR(synchronize());
  const size_t row = impl.kv_row_bytes();
  const size_t offset = static_cast<size_t>(impl.extents.extent(seq).first + first_pos) * row;
  ggml_backend_tensor_get(impl.k_arena[layer], k, offset, row * n_rows);
  ggml_backend_tensor_get(impl.v_arena[layer], v, offset, row * n_rows);
  return {};
}

void Engine::forget_tokens() { impl_->table.clear(); }

size_t Engine::device_bytes() const {
  return impl_->arena_pool.n_bytes() + impl_->input_pool.n_bytes() + impl_->capture_pool.n_bytes() +
         impl_->staging_pool.n_bytes() + ggml_gallocr_get_buffer_size(impl_->allocator, 0);
}

}  // namespace hcache::engine
