#include "engine/hybrid_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "attention_choice.h"
#include "batch_buffers.h"
#include "batch_checks.h"
#include "block_capture.h"
#include "block_io.h"
#include "block_store.h"
#include "engine/weight_stream.h"
#include "hidden_types.h"
#include "layer_graphs.h"
#include "stage.h"
#include "step_loop.h"
#include "step_plan.h"
#include "store_ring.h"

namespace hcache::engine {
namespace {

struct Request {
  std::vector<int32_t> tokens;
  int64_t n_done = 0;  // tokens whose state is kept
  int64_t max_tokens = 0;
  std::vector<BlockStore::Id> blocks;
  std::array<int64_t, kBlockKinds> n_of_kind{};  // of the blocks
  int64_t prompt_tokens = 0;
  int64_t n_complete = 0;  // blocks that have been given to their places
  int64_t n_known = 0;     // blocks at the end that are being written from outside
  bool reserved = true;    // room for max_tokens is
  bool captured = false;
};

}  // namespace

struct HybridEngine::Impl {
  Impl(const model::Model& m, HybridOptions o) : model(m), options(std::move(o)) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  Status create(const MakeQueues& make_queues);
  Status create_stage(const MakeQueues& make_queues);
  void choose_activations();
  Status create_blocks();
  Status create_buffers();

  Status check_length(int64_t max_tokens) const;
  Result<RequestId> add(std::span<const int32_t> prompt, int64_t max_tokens);
  Result<RequestId> open(int64_t max_tokens, bool captured);
  Status append(RequestId id, std::span<const int32_t> tokens);
  Status begin_known(RequestId id, std::span<const BlockKind> kinds);
  Status end_known(RequestId id, std::span<const int32_t> tokens);
  void drop_known(Request& request, int64_t n_blocks);
  Result<Request*> find(RequestId id);
  Status remove(RequestId id);
  Result<HybridStep> step();

  // The members of the next step; `later`: of the one after it, if every sequence goes on.
  [[nodiscard]] std::vector<StepMember> members(bool later) const;
  [[nodiscard]] BlockKind next_kind(const Request& request) const;
  Status add_blocks(Request& request, int64_t n_tokens);
  [[nodiscard]] StepLimits limits() const;
  Result<StepInput> input(std::span<const StepMember> members) const;
  Status embed(StepInput& step) const;
  Status commit(std::span<const StepMember> members);
  // Reads arrive in the buffers themselves.
  [[nodiscard]] bool in_place() const { return model.device().is_cpu() && !async_compute; }
  [[nodiscard]] bool waits() const { return async_compute && options.waits_for_graphs; }
  // Blocks whose rows are all there go to their places.
  Status complete_blocks(RequestId id, Request& request);

  const model::Model& model;
  HybridOptions options;
  EngineOptions engine_options;  // what the parts of an ordinary engine go by
  int least = 1;
  bool own_attention = false;
  bool async_compute = false;
  bool can_act = false;
  BlockLayout layout;

  // In the order of their making: what comes later uses what is before.
  CopyQueue* queue = nullptr;  // the stage's
  std::unique_ptr<Stages> stages;
  std::unique_ptr<WeightStream> weights;
  std::unique_ptr<HiddenTypes> types;
  std::unique_ptr<BlockIo> io;
  std::unique_ptr<BlockStore> store;
  std::unique_ptr<BatchBuffers> buffers;
  std::unique_ptr<LayerGraphs> graphs;
  std::unique_ptr<StoreRing> ring;
  std::unique_ptr<StepLoop> loop;
  std::unique_ptr<BlockCapture> tap;

  std::map<RequestId, Request> requests;  // in the order in which they were added
  std::vector<RequestId> order;           // of `requests`, as of the last members()
  RequestId last_id = 0;
  int64_t reserved_blocks = 0;
  Status deferred;  // of what follows a step; the next one returns it
  std::vector<float> logits;
  std::vector<int> logits_of;
};

HybridEngine::Impl::~Impl() {
  loop.reset();
  if (stages != nullptr) stages->synchronize();
  store.reset();  // waits for its moves
  io.reset();
  if (stages != nullptr) {
    for (const auto& stage : *stages) stage->graphs().synchronize();
  }
  graphs.reset();
  buffers.reset();
  ring.reset();
  types.reset();
  weights.reset();
  if (stages != nullptr) {
    for (const auto& stage : *stages) stage->close();
  }
}

Status HybridEngine::Impl::create(const MakeQueues& make_queues) {
  HCACHE_RETURN_IF_ERROR(check_options(model, options));
  least = least_rows(model);
  options.max_batch_rows = std::max(options.max_batch_rows, least);
  HCACHE_RETURN_IF_ERROR(create_stage(make_queues));
  choose_activations();
  HCACHE_RETURN_IF_ERROR(create_blocks());
  HCACHE_RETURN_IF_ERROR(create_buffers());
  loop = std::make_unique<StepLoop>(
      StepLoopParts{.model = model,
                    .options = options,
                    .layout = layout,
                    .stage = stages->front(),
                    .queue = *queue,
                    .weights = *weights,
                    .store = *store,
                    .io = io.get(),
                    .buffers = *buffers,
                    .graphs = *graphs,
                    .ring = *ring,
                    .least_rows = least,
                    .times_graphs = !async_compute || options.waits_for_graphs,
                    .waits = waits(),
                    .far = !in_place()});
  std::vector<ggml_type> act_types;
  for (int layer = 0; layer < layout.n_layer; ++layer) {
    act_types.push_back(layout.act_row_bytes[layer] > 0 ? types->native(layer) : GGML_TYPE_COUNT);
  }
  tap = std::make_unique<BlockCapture>(layout, *store, options.kv_type, std::move(act_types));
  return {};
}

// A stage for its queues, graphs and inputs; its own arena is not used, and holds one cell.
Status HybridEngine::Impl::create_stage(const MakeQueues& make_queues) {
  engine_options = {.arena_tokens = 1,
                    .kv_type = options.kv_type,
                    .max_batch_rows = options.max_batch_rows,
                    .attention = options.attention};
  HCACHE_RETURN_IF_ERROR(check_kv_type(model, options.kv_type));
  HCACHE_ASSIGN_OR_RETURN(own_attention, choose_attention(model, model.device(), engine_options));
  DeviceQueues queues =
      make_queues ? make_queues(model.device()) : make_device_queues(model.device());
  async_compute = queues.compute->is_async();
  queue = queues.copy.get();
  std::vector<std::unique_ptr<Stage>> made;
  made.push_back(std::make_unique<Stage>(
      model, engine_options,
      StageOptions{
          .index = 0,
          .begin = 0,
          .end = model.hparams().n_layer,
          .device = &model.device(),
          .queues = std::move(queues),
          .own_attention = own_attention,
          .n_groups = 1,
          .cells = std::vector<int64_t>(static_cast<size_t>(model.hparams().n_layer), 1)}));
  HCACHE_RETURN_IF_ERROR(made.back()->allocate());
  stages = std::make_unique<Stages>(std::move(made));
  HCACHE_ASSIGN_OR_RETURN(weights, WeightStream::open(model, *queue, async_compute));
  if (waits()) weights->set_read_ahead(false);  // which uploads and graphs would be timed with
  types = std::make_unique<HiddenTypes>(model, engine_options, *stages, *weights);
  return {};
}

// Activation rows can stand for K and V where every layer that is kept can be generated from them.
void HybridEngine::Impl::choose_activations() {
  const int n_layer = model.hparams().n_layer;
  layout = {.first_layer = options.recomputed_layers,
            .n_layer = n_layer,
            .kv_row_bytes = stages->front().arena().row_bytes(),
            .act_row_bytes = std::vector<size_t>(n_layer, 0)};
  can_act = options.recomputed_layers < n_layer;
  for (int layer = options.recomputed_layers; can_act && layer < n_layer; ++layer) {
    const ggml_type type = types->native(layer);
    if (type == GGML_TYPE_COUNT) {
      can_act = false;
      break;
    }
    can_act = types->can_project(type, layer);
    layout.act_row_bytes[layer] = types->row_bytes(type);
  }
  if (!can_act) std::fill(layout.act_row_bytes.begin(), layout.act_row_bytes.end(), 0);
}

Status HybridEngine::Impl::create_blocks() {
  if (options.disk_bytes > 0) {
    HCACHE_ASSIGN_OR_RETURN(io, BlockIo::create(*options.env));
  }
  HCACHE_ASSIGN_OR_RETURN(store, BlockStore::create(*options.env, model.device(), *queue, io.get(),
                                                    {.layout = layout,
                                                     .device_bytes = options.device_bytes,
                                                     .host_bytes = options.host_bytes,
                                                     .disk_bytes = options.disk_bytes,
                                                     .disk_dir = options.disk_dir}));
  return {};
}

Status HybridEngine::Impl::create_buffers() {
  const model::HParams& hp = model.hparams();
  options.buffer_tokens = options.buffer_tokens / kBlockTokens * kBlockTokens;
  // Behind the sequences' cells those that ggml's kernel may read masked.
  const int64_t n_cells = options.buffer_tokens + AttentionOp::kKvPadding;
  buffers = std::make_unique<BatchBuffers>(model.device(), *queue, *store, layout);
  HCACHE_RETURN_IF_ERROR(buffers->allocate({.n_buffers = options.n_buffers,
                                            .buffer_tokens = options.buffer_tokens,
                                            .n_cells = n_cells,
                                            .spare_act_rows = least,
                                            .n_embd_kv = hp.n_embd_kv(),
                                            .kv_type = options.kv_type,
                                            .in_place = in_place(),
                                            .from_disk = io != nullptr}));
  graphs = std::make_unique<LayerGraphs>(model, stages->front(), *types, own_attention);
  HCACHE_RETURN_IF_ERROR(graphs->allocate({.buffer_tokens = options.buffer_tokens,
                                           .max_batch_rows = options.max_batch_rows,
                                           .least_rows = least}));
  size_t widest = 0;
  for (int layer = layout.first_layer; layer < layout.n_layer; ++layer) {
    widest = std::max(widest,
                      graphs->capture_layout(layer, options.max_batch_rows, can_act, true).n_bytes);
  }
  ring = std::make_unique<StoreRing>(*queue);
  return ring->allocate(model.device(), std::max<size_t>(widest, 1));
}

Status HybridEngine::Impl::check_length(int64_t max_tokens) const {
  const int64_t most = std::min<int64_t>(model.hparams().n_ctx_train, options.buffer_tokens);
  if (max_tokens > most) {
    return out_of_range(
        fmt::format("a sequence of {} tokens: the model's context is {}, a mini-batch's buffer {}; "
                    "generate fewer tokens, or make the buffer larger",
                    max_tokens, model.hparams().n_ctx_train, options.buffer_tokens));
  }
  return {};
}

Result<RequestId> HybridEngine::Impl::add(std::span<const int32_t> prompt, int64_t max_tokens) {
  if (prompt.empty() || static_cast<int64_t>(prompt.size()) > max_tokens) {
    return invalid_argument(fmt::format("a prompt of {} tokens for a sequence of at most {}",
                                        prompt.size(), max_tokens));
  }
  HCACHE_RETURN_IF_ERROR(check_length(max_tokens));
  HCACHE_RETURN_IF_ERROR(check_tokens(model, prompt));
  const int64_t n_blocks = max_tokens / kBlockTokens;  // that will be complete
  if (n_blocks > store->capacity() - reserved_blocks) {
    return resource_exhausted(
        fmt::format("the cache has room for {} blocks of 64 tokens, {} are reserved, the sequence "
                    "wants {}",
                    store->capacity(), reserved_blocks, n_blocks));
  }
  reserved_blocks += n_blocks;
  Request& request = requests[++last_id];
  request.tokens.assign(prompt.begin(), prompt.end());
  request.max_tokens = max_tokens;
  request.prompt_tokens = static_cast<int64_t>(prompt.size());
  return last_id;
}

Result<RequestId> HybridEngine::Impl::open(int64_t max_tokens, bool captured) {
  HCACHE_RETURN_IF_ERROR(check_length(max_tokens));
  Request& request = requests[++last_id];
  request.max_tokens = max_tokens;
  request.reserved = false;
  request.captured = captured;
  return last_id;
}

Status HybridEngine::Impl::append(RequestId id, std::span<const int32_t> tokens) {
  HCACHE_ASSIGN_OR_RETURN(Request * request, find(id));
  HCACHE_RETURN_IF_ERROR(check_tokens(model, tokens));
  if (static_cast<int64_t>(request->tokens.size() + tokens.size()) > request->max_tokens) {
    return out_of_range(
        fmt::format("request {} was added with at most {} tokens", id, request->max_tokens));
  }
  if (request->n_known > 0) {
    return failed_precondition(fmt::format("rows of request {} are being written", id));
  }
  request->tokens.insert(request->tokens.end(), tokens.begin(), tokens.end());
  if (!request->reserved && tokens.size() > 1) {
    request->prompt_tokens = static_cast<int64_t>(request->tokens.size());
  }
  return {};
}

Status HybridEngine::Impl::begin_known(RequestId id, std::span<const BlockKind> kinds) {
  HCACHE_ASSIGN_OR_RETURN(Request * request, find(id));
  const auto n_blocks = static_cast<int64_t>(request->blocks.size());
  const auto n_tokens = static_cast<int64_t>(request->tokens.size());
  if (layout.first_layer > 0 || request->n_known > 0 || request->n_done != n_tokens ||
      n_blocks * kBlockTokens != n_tokens) {
    return failed_precondition(
        fmt::format("request {} does not end with a complete block; no known rows may follow", id));
  }
  for (const BlockKind kind : kinds) {
    const bool possible = kind == BlockKind::kKv || (kind == BlockKind::kAct && can_act);
    Result<BlockStore::Id> block =
        possible ? store->add(kind) : invalid_argument("known rows are K and V, or activations");
    if (!block.ok()) {
      drop_known(*request, request->n_known);
      return block.status();
    }
    request->blocks.push_back(*block);
    ++request->n_of_kind[static_cast<size_t>(kind)];
    ++request->n_known;
  }
  return {};
}

void HybridEngine::Impl::drop_known(Request& request, int64_t n_blocks) {
  for (; n_blocks > 0; --n_blocks, --request.n_known) {
    const BlockStore::Id block = request.blocks.back();
    --request.n_of_kind[static_cast<size_t>(store->kind(block))];
    store->remove(block);
    request.blocks.pop_back();
  }
}

Status HybridEngine::Impl::end_known(RequestId id, std::span<const int32_t> tokens) {
  HCACHE_ASSIGN_OR_RETURN(Request * request, find(id));
  const auto n = static_cast<int64_t>(tokens.size());
  const bool fits = n % kBlockTokens == 0 && n / kBlockTokens <= request->n_known &&
                    request->n_done + n <= request->max_tokens;
  const Status status =
      fits ? check_tokens(model, tokens)
           : out_of_range(fmt::format("{} known rows for {} blocks", n, request->n_known));
  drop_known(*request, request->n_known - (status.ok() ? n / kBlockTokens : 0));
  request->n_known = 0;
  HCACHE_RETURN_IF_ERROR(status);
  request->tokens.insert(request->tokens.end(), tokens.begin(), tokens.end());
  request->n_done += n;
  const bool captured = std::exchange(request->captured, false);  // they are known elsewhere
  const Status completed = complete_blocks(id, *request);
  request->captured = captured;
  return completed;
}

Result<Request*> HybridEngine::Impl::find(RequestId id) {
  const auto found = requests.find(id);
  if (found == requests.end()) return not_found(fmt::format("there is no request {}", id));
  return &found->second;
}

Status HybridEngine::Impl::remove(RequestId id) {
  HCACHE_ASSIGN_OR_RETURN(const Request* request, find(id));
  // What is being read ahead may be of its blocks, which others may have from here on.
  loop->drop_loads();
  for (const BlockStore::Id block : request->blocks) store->remove(block);
  if (request->reserved) reserved_blocks -= request->max_tokens / kBlockTokens;
  requests.erase(id);
  return {};
}

StepLimits HybridEngine::Impl::limits() const {
  return {.buffer_tokens = options.buffer_tokens,
          .max_batch_rows = options.max_batch_rows,
          .least_rows = least,
          .recompute = options.recomputed_layers > 0};
}

// Sequences that decode come first, so that prompts never hold them up.
std::vector<StepMember> HybridEngine::Impl::members(bool later) const {
  std::vector<StepMember> chosen;
  int64_t room = options.max_step_rows;
  std::vector<int64_t> taken(requests.size(), 0);  // by the next step
  const auto choose = [&](bool after) {
    chosen.clear();
    room = options.max_step_rows;
    std::vector<int64_t> now(requests.size(), 0);
    for (const bool decoding : {true, false}) {
      int index = -1;
      for (const auto& [id, request] : requests) {
        ++index;
        const int64_t n_past = request.n_done + taken[index];
        auto pending = static_cast<int64_t>(request.tokens.size()) - n_past;
        if (after && pending == 0 && n_past < request.max_tokens) pending = 1;
        const int64_t n = std::min(pending, room);
        if (n <= 0 || (pending == 1) != decoding) continue;
        room -= n;
        now[index] = n;
        StepMember member{.request = index, .n_past = n_past, .n_new = n};
        member.wants_logits = n == pending;
        for (int64_t first = 0; first < n_past; first += kBlockTokens) {
          const int64_t n_rows = std::min<int64_t>(kBlockTokens, n_past - first);
          const BlockKind kind = store->kind(request.blocks[first / kBlockTokens]);
          if (kind == BlockKind::kAct) member.n_act += n_rows;
          if (kind == BlockKind::kTokens) member.n_tokens += n_rows;
        }
        chosen.push_back(member);
      }
    }
    taken = now;
  };
  choose(false);
  if (later) choose(true);
  // Requests keep their order, so that mini-batches are alike from step to step.
  std::sort(chosen.begin(), chosen.end(),
            [](const StepMember& a, const StepMember& b) { return a.request < b.request; });
  return chosen;
}

BlockKind HybridEngine::Impl::next_kind(const Request& request) const {
  const auto n = [&](BlockKind kind) { return request.n_of_kind[static_cast<size_t>(kind)]; };
  if (!options.decisions.next_kind) return BlockKind::kKv;
  const BlockKind kind = options.decisions.next_kind({.n_act = n(BlockKind::kAct),
                                                      .n_kv = n(BlockKind::kKv),
                                                      .n_recomputed = n(BlockKind::kTokens),
                                                      .prompt_tokens = request.prompt_tokens});
  const bool only_tokens = n(BlockKind::kAct) + n(BlockKind::kKv) == 0;
  const bool possible = kind == BlockKind::kAct      ? can_act
                        : kind == BlockKind::kTokens ? only_tokens && layout.first_layer == 0
                                                     : true;
  return possible ? kind : BlockKind::kKv;
}

Status HybridEngine::Impl::add_blocks(Request& request, int64_t n_tokens) {
  while (static_cast<int64_t>(request.blocks.size()) * kBlockTokens < n_tokens) {
    const BlockKind kind = next_kind(request);
    HCACHE_ASSIGN_OR_RETURN(const BlockStore::Id id, store->add(kind));
    request.blocks.push_back(id);
    ++request.n_of_kind[static_cast<size_t>(kind)];
  }
  return {};
}

Result<StepInput> HybridEngine::Impl::input(std::span<const StepMember> members) const {
  StepInput step;
  HCACHE_ASSIGN_OR_RETURN(step.plan, plan_step(members, limits(), options.decisions));
  for (const auto& [id, request] : requests) step.tables.push_back(&request.blocks);
  for (const StepMember& member : members) step.n_wanted += member.wants_logits ? 1 : 0;
  return step;
}

// The rows before the first layer; padding rows are zero.
Status HybridEngine::Impl::embed(StepInput& step) const {
  const auto n_embd = static_cast<size_t>(model.hparams().n_embd);
  step.x.assign(static_cast<size_t>(step.plan.n_rows) * n_embd, 0.0F);
  std::vector<const Request*> by_index;
  for (const auto& [id, request] : requests) by_index.push_back(&request);
  for (const Piece& piece : step.plan.pieces) {
    const MiniBatch& batch = step.plan.batches[piece.batch];
    for (const RowRange& range : piece.ranges) {
      const Request& request = *by_index[batch.members[range.member].request];
      const auto first = static_cast<size_t>(range.first_pos);
      const auto n = static_cast<size_t>(range.n_rows);
      float* x = step.x.data() +
                 static_cast<size_t>(step.plan.first_row(piece) + range.first_row) * n_embd;
      HCACHE_RETURN_IF_ERROR(model.embed_tokens(std::span(request.tokens).subspan(first, n), x));
      std::vector<int32_t> positions(n);
      for (size_t i = 0; i < n; ++i) positions[i] = static_cast<int32_t>(first + i);
      HCACHE_RETURN_IF_ERROR(model.add_learned_positions(positions, x));
    }
  }
  return {};
}

// The step's rows are the sequences' from here on; blocks that they complete go to their places.
Status HybridEngine::Impl::commit(std::span<const StepMember> members) {
  Status first;
  for (const StepMember& member : members) {
    Request& request = requests[order[member.request]];
    request.n_done += member.n_new;
    const Status status = complete_blocks(order[member.request], request);
    if (first.ok()) first = status;
  }
  return first;
}

Status HybridEngine::Impl::complete_blocks(RequestId id, Request& request) {
  Status first;
  for (; (request.n_complete + 1) * kBlockTokens <= request.n_done; ++request.n_complete) {
    const BlockStore::Id block = request.blocks[request.n_complete];
    if (request.captured) tap->give(id, block, request.n_complete * kBlockTokens, kBlockTokens);
    BlockStore::Id neighbour = -1;
    for (int64_t b = request.n_complete - 1; b >= 0 && neighbour < 0; --b) {
      if (store->kind(request.blocks[b]) == store->kind(block)) neighbour = request.blocks[b];
    }
    const Status status = store->complete(block, neighbour);
    if (first.ok()) first = status;
  }
  return first;
}

Result<HybridStep> HybridEngine::Impl::step() {
  HCACHE_RETURN_IF_ERROR(std::exchange(deferred, {}));
  const auto most_moving =
      requests.size() + static_cast<size_t>(options.max_step_rows / kBlockTokens);
  HCACHE_RETURN_IF_ERROR(store->settle(store->n_moving() > most_moving));
  const std::vector<StepMember> now = members(false);
  if (now.empty()) return failed_precondition("no sequence has a token to compute");
  order.clear();
  for (auto& [id, request] : requests) order.push_back(id);
  HybridStep result;
  StepTimes& times = result.times;
  for (const StepMember& member : now) {
    HCACHE_RETURN_IF_ERROR(
        add_blocks(requests[order[member.request]], member.n_past + member.n_new));
    times.rows += member.n_new;
    times.context_tokens += member.n_past;
    times.decode_only = times.decode_only && member.n_new == 1;
  }
  HCACHE_ASSIGN_OR_RETURN(StepInput input_now, input(now));
  HCACHE_RETURN_IF_ERROR(embed(input_now));
  HCACHE_ASSIGN_OR_RETURN(const StepInput input_later, input(members(true)));
  times.n_batches = static_cast<int>(input_now.plan.batches.size());
  HCACHE_RETURN_IF_ERROR(loop->run(input_now, input_later, &logits, &logits_of, &times));
  deferred = commit(now);
  const auto n_vocab = static_cast<size_t>(model.hparams().n_vocab);
  for (size_t i = 0; i < logits_of.size(); ++i) {
    result.rows.push_back(
        {.id = order[logits_of[i]], .logits = std::span(logits).subspan(i * n_vocab, n_vocab)});
  }
  return result;
}

HybridEngine::HybridEngine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HybridEngine::~HybridEngine() = default;

Result<std::unique_ptr<HybridEngine>> HybridEngine::create(const model::Model& model,
                                                           const HybridOptions& options,
                                                           const MakeQueues& make_queues) {
  auto impl = std::make_unique<Impl>(model, options);
  HCACHE_RETURN_IF_ERROR(impl->create(make_queues));
  return std::unique_ptr<HybridEngine>(new HybridEngine(std::move(impl)));
}

Result<RequestId> HybridEngine::add(std::span<const int32_t> prompt, int64_t max_tokens) {
  return impl_->add(prompt, max_tokens);
}

Result<RequestId> HybridEngine::open(int64_t max_tokens, bool captured) {
  return impl_->open(max_tokens, captured);
}

Status HybridEngine::append(RequestId id, int32_t token) {
  return impl_->append(id, std::span(&token, 1));
}

Status HybridEngine::append(RequestId id, std::span<const int32_t> tokens) {
  return impl_->append(id, tokens);
}

Status HybridEngine::drop_pending(RequestId id) {
  HCACHE_ASSIGN_OR_RETURN(Request * request, impl_->find(id));
  request->tokens.resize(static_cast<size_t>(request->n_done));
  return {};
}

Status HybridEngine::begin_known(RequestId id, std::span<const BlockKind> kinds) {
  return impl_->begin_known(id, kinds);
}

std::span<std::byte> HybridEngine::known_page(RequestId id, int block, int layer, int part) {
  const auto request = impl_->find(id);
  if (!request.ok() || block < 0 || block >= (*request)->n_known) return {};
  const auto& blocks = (*request)->blocks;
  const BlockStore::Id known =
      blocks[blocks.size() - static_cast<size_t>((*request)->n_known) + static_cast<size_t>(block)];
  const BlockKind kind = impl_->store->kind(known);
  if (layer < 0 || layer >= impl_->layout.n_layer || part >= BlockLayout::parts(kind)) return {};
  return {impl_->store->host_page(known, layer, part), impl_->layout.page_bytes(kind, layer)};
}

Status HybridEngine::end_known(RequestId id, std::span<const int32_t> tokens) {
  return impl_->end_known(id, tokens);
}

void HybridEngine::set_capture(CaptureSink* sink) { impl_->tap->set(sink); }

Status HybridEngine::capture_tail(RequestId id) {
  HCACHE_ASSIGN_OR_RETURN(const Request* request, impl_->find(id));
  const int64_t first_pos = request->n_complete * kBlockTokens;
  if (!request->captured || first_pos >= request->n_done) return {};
  impl_->tap->give(id, request->blocks[request->n_complete], first_pos,
                   static_cast<int>(request->n_done - first_pos));
  return {};
}

ggml_type HybridEngine::activation_type(int layer) const {
  return impl_->can_act ? impl_->tap->act_type(layer) : GGML_TYPE_COUNT;
}

const WeightStream& HybridEngine::weights() const { return *impl_->weights; }

int64_t HybridEngine::capacity_tokens() const {
  const int64_t blocks = impl_->store->capacity();
  return blocks > INT64_MAX / kBlockTokens ? INT64_MAX : blocks * kBlockTokens;
}

Status HybridEngine::remove(RequestId id) { return impl_->remove(id); }
Result<HybridStep> HybridEngine::step() { return impl_->step(); }
bool HybridEngine::can_keep_activations() const { return impl_->can_act; }

int HybridEngine::n_layer() const { return impl_->layout.n_layer; }

size_t HybridEngine::row_bytes(BlockKind kind, int layer) const {
  return impl_->layout.row_bytes(kind, layer) * static_cast<size_t>(BlockLayout::parts(kind));
}

size_t HybridEngine::block_bytes(BlockKind kind) const { return impl_->layout.block_bytes(kind); }

double HybridEngine::kv_token_bytes() const {
  return 2 * static_cast<double>(impl_->layout.kv_row_bytes);
}

double HybridEngine::act_token_bytes() const {
  const BlockLayout& layout = impl_->layout;
  const int n = layout.n_layer - layout.first_layer;
  return n == 0 ? 0 : static_cast<double>(layout.block_bytes(BlockKind::kAct)) / (n * kBlockTokens);
}

void HybridEngine::set_decisions(HybridDecisions decisions) {
  impl_->options.decisions = std::move(decisions);
}

const HybridOptions& HybridEngine::options() const { return impl_->options; }

int64_t HybridEngine::length(RequestId id) const {
  const auto request = impl_->find(id);
  return request.ok() ? static_cast<int64_t>((*request)->tokens.size()) : 0;
}

int64_t HybridEngine::computed(RequestId id) const {
  const auto request = impl_->find(id);
  return request.ok() ? (*request)->n_done : 0;
}

std::vector<BlockEntry> HybridEngine::blocks(RequestId id) const {
  std::vector<BlockEntry> entries;
  const auto request = impl_->find(id);
  if (!request.ok()) return entries;
  int64_t left = (*request)->n_done;
  for (const BlockStore::Id block : (*request)->blocks) {
    if (left <= 0) break;
    const auto n = static_cast<int>(std::min<int64_t>(left, kBlockTokens));
    entries.push_back({.kind = impl_->store->kind(block),
                       .place = impl_->store->place(block),
                       .number = impl_->store->number(block),
                       .n_rows = n});
    left -= n;
  }
  return entries;
}

HybridCacheUse HybridEngine::cache_use() const { return impl_->store->use(); }

Status HybridEngine::flush() {
  HCACHE_RETURN_IF_ERROR(std::exchange(impl_->deferred, {}));
  return impl_->store->settle(true);
}

}  // namespace hcache::engine
