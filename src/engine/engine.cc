#include "engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "engine_parts.h"
#include "step_state.h"
#include "windows.h"

namespace hcache::engine {

using model::Model;

Step::Step(std::unique_ptr<StepState> state) : state_(std::move(state)) {}
Step::Step(Step&&) noexcept = default;
Step& Step::operator=(Step&&) noexcept = default;
Step::~Step() = default;
int Step::n_rows() const { return state_->n_rows; }

Engine::Engine(std::unique_ptr<EngineParts> parts) : parts_(std::move(parts)) {}
Engine::~Engine() = default;
const Model& Engine::model() const { return parts_->model; }
const EngineOptions& Engine::options() const { return parts_->options; }
int Engine::n_layer() const { return parts_->model.hparams().n_layer; }
bool Engine::uses_own_attention(int layer) const {
  return parts_->stages.of(layer).attention(0).ours();
}

std::vector<std::pair<int, int>> Engine::stage_ranges() const {
  if (parts_->stages.shares_layers()) return {{0, n_layer()}};
  std::vector<std::pair<int, int>> ranges;
  for (const auto& stage : parts_->stages) ranges.emplace_back(stage->begin(), stage->end());
  return ranges;
}

bool Engine::stages_overlap() const {
  std::set<const model::Device*> devices;
  bool overlap = parts_->stages.size() > 1 && !parts_->stages.shares_layers();
  for (const auto& stage : parts_->stages) {
    overlap = overlap && devices.insert(&stage->device()).second &&
              (stage->begin() == 0 || stage->graphs().is_async());
  }
  return overlap;
}

Result<std::unique_ptr<Engine>> Engine::create(const Model& model, const EngineOptions& options,
                                               const MakeQueues& make_queues) {
  std::vector<int> row_groups(static_cast<size_t>(model.hparams().n_layer), 0);
  for (size_t i = 0; i < row_groups.size(); ++i) {
    row_groups[i] = model.hparams().window_of(static_cast<int>(i)) > 0 ? 1 : 0;
  }
  // Groups are numbered from 0 on.
  if (std::find(row_groups.begin(), row_groups.end(), 0) == row_groups.end()) {
    std::fill(row_groups.begin(), row_groups.end(), 0);
  }
  if (options.separate_layers) std::iota(row_groups.begin(), row_groups.end(), 0);
  HCACHE_ASSIGN_OR_RETURN(auto parts,
                          EngineParts::create(model, options, make_queues, std::move(row_groups)));
  return std::unique_ptr<Engine>(new Engine(std::move(parts)));
}

// --- Sequences
// -------------------------------------------------------------------------------

Result<SeqId> Engine::create_sequence() { return parts_->sequences.add(); }

Status Engine::set_adapters(SeqId seq, std::span<const float> scales) {
  HCACHE_RETURN_IF_ERROR(parts_->sequences.check(seq));
  const size_t n = parts_->model.adapters().size();
  if (scales.size() != n) {
    return invalid_argument(fmt::format("{} scales for the model's {} adapters", scales.size(), n));
  }
  parts_->sequences.set_adapters(seq, {scales.begin(), scales.end()});
  return {};
}

Result<SeqId> Engine::fork_sequence(SeqId src, int64_t n_tokens) {
  HCACHE_ASSIGN_OR_RETURN(const SeqId seq, parts_->rows.fork(src, n_tokens));
  const auto scales = parts_->sequences.adapters(src);
  if (!scales.empty()) parts_->sequences.set_adapters(seq, {scales.begin(), scales.end()});
  return seq;
}

Status Engine::trim_sequence(SeqId seq, int64_t n_tokens) {
  parts_->restore.drop_staged(seq);
  return parts_->rows.trim(seq, n_tokens);
}

Status Engine::erase_range(SeqId seq, int64_t from, int64_t to) {
  return parts_->rows.erase_range(seq, from, to);
}

Status Engine::erase_ranges(SeqId seq, std::span<const ErasedRows> ranges) {
  return parts_->rows.erase_ranges(seq, ranges);
}

Status Engine::move_positions(SeqId seq, int layer, int64_t first_pos, int64_t n_rows,
                              int64_t moved) {
  return parts_->rows.move_positions(seq, layer, first_pos, n_rows, moved);
}

Status Engine::release_sequence(SeqId seq) {
  parts_->restore.drop_staged(seq);
  return parts_->rows.release(seq);
}

Status Engine::swap_sequences(SeqId a, SeqId b) {
  for (const SeqId seq : {a, b}) {
    HCACHE_RETURN_IF_ERROR(parts_->sequences.check(seq));
    parts_->restore.drop_staged(seq);
  }
  if (a != b) parts_->sequences.swap(a, b);
  return {};
}

Status Engine::reserve_rows(SeqId seq, int64_t n_tokens) {
  return parts_->rows.reserve(seq, n_tokens);
}

int64_t Engine::shortest(SeqId seq) const { return parts_->sequences.shortest(seq); }

int64_t Engine::first_row_needed(int layer, int64_t n_tokens) const {
  const int64_t window = parts_->sequences.window(parts_->sequences.group_of(layer));
  return window > 0 ? needed_from(window, n_tokens) : 0;
}

int64_t Engine::length(SeqId seq) const { return parts_->sequences.length(seq); }

int64_t Engine::held_rows(SeqId seq, int layer) const {
  return parts_->sequences.held(seq, parts_->sequences.group_of(layer)).n_rows;
}

int64_t Engine::arena_free_cells() const { return parts_->sequences.free_cells(); }

Status Engine::can_observe() const { return parts_->steps.can_observe(); }

Status Engine::observe(const ObservedRows& rows, AttentionScores* scores) {
  return parts_->steps.observe(rows, scores);
}

Status Engine::keep_rows(SeqId seq, int layer, std::span<const int32_t> kept) {
  HCACHE_RETURN_IF_ERROR(synchronize());
  return parts_->kept.keep(seq, layer, kept);
}

Status Engine::read_kept(SeqId seq, int layer, std::span<const int32_t> kept, std::byte* k,
                         std::byte* v) {
  HCACHE_RETURN_IF_ERROR(synchronize());
  return parts_->kept.read(seq, layer, kept, k, v);
}

Status Engine::load_kept(SeqId seq, int layer, int64_t n, const std::byte* k, const std::byte* v) {
  HCACHE_RETURN_IF_ERROR(synchronize());
  return parts_->kept.load(seq, layer, n, k, v);
}

// --- Steps
// -----------------------------------------------------------------------------------

Result<Step> Engine::prepare(std::span<const BatchItem> items) {
  auto state = std::make_unique<StepState>();
  HCACHE_RETURN_IF_ERROR(parts_->steps.prepare(items, *state));
  return Step(std::move(state));
}

Status Engine::run_layers(Step& step, int begin, int end) {
  HCACHE_RETURN_IF_ERROR(parts_->steps.check_range(*step.state_, begin, end));
  return parts_->steps.run_layers(*step.state_, end);
}

Status Engine::finish_with_kv(Step& step, int layer) {
  return parts_->steps.finish_with_kv(*step.state_, layer);
}

Result<Logits> Engine::finish(Step& step) { return parts_->steps.finish(*step.state_); }

Result<Logits> Engine::decode(std::span<const BatchItem> items) {
  HCACHE_ASSIGN_OR_RETURN(Step step, prepare(items));
  HCACHE_RETURN_IF_ERROR(run_layers(step, 0, n_layer()));
  return finish(step);
}

Status Engine::prefill(SeqId seq, std::span<const int32_t> tokens) {
  const auto most = static_cast<size_t>(options().max_batch_rows);
  while (!tokens.empty()) {
    const auto piece = tokens.first(std::min(most, tokens.size()));
    const BatchItem item{.seq = seq, .tokens = piece};
    HCACHE_RETURN_IF_ERROR(decode({&item, 1}).status());
    tokens = tokens.subspan(piece.size());
  }
  return {};
}

// --- Capture
// ---------------------------------------------------------------------------------

ggml_type Engine::native_hidden_type(int layer) const { return parts_->types.native(layer); }

size_t Engine::kv_row_bytes() const {
  return ggml_row_size(parts_->options.kv_type, parts_->model.hparams().n_embd_kv());
}

size_t Engine::hidden_row_bytes(ggml_type type) const { return parts_->types.row_bytes(type); }

Status Engine::set_capture(CaptureSink* sink, const CaptureOptions& options) {
  parts_->steps.capture_changed();
  return parts_->tap.set(sink, options);
}

bool Engine::can_project(ggml_type type, int layer) {
  return parts_->types.can_project(type, layer);
}

// --- Restoration
// -----------------------------------------------------------------------------

Result<Engine::Ticket> Engine::load_kv(SeqId seq, int layer, int64_t first_pos, int n_rows,
                                       const std::byte* k, const std::byte* v) {
  return parts_->restore.load_kv(seq, layer, first_pos, n_rows, k, v);
}

Result<Engine::Ticket> Engine::stage_hidden(SeqId seq, int layer, int row_in_slice, int n_rows,
                                            ggml_type type, const std::byte* rows) {
  return parts_->restore.stage_hidden(seq, layer, row_in_slice, n_rows, type, rows);
}

Status Engine::project_staged(SeqId seq, int layer, int64_t first_pos, int n_rows, ggml_type type) {
  return parts_->restore.project_staged(seq, layer, first_pos, n_rows, type);
}

Status Engine::wait(Ticket ticket) {
  parts_->restore.wait(ticket);
  return {};
}

bool Engine::done(Ticket ticket) const { return parts_->restore.done(ticket); }

Status Engine::synchronize() {
  parts_->stages.synchronize();
  parts_->restore.wait_for_all();
  parts_->tap.wait();
  parts_->tap.poll(true);
  return {};
}

model::ComputeThreads* Engine::threads_of_every_core() const {
  return parts_->stages.front().device().takes_every_core() ? parts_->threads.get() : nullptr;
}

Status Engine::read_kv(SeqId seq, int layer, int64_t first_pos, int n_rows, std::byte* k,
                       std::byte* v) {
  HCACHE_RETURN_IF_ERROR(synchronize());
  return parts_->restore.read_kv(seq, layer, first_pos, n_rows, k, v);
}

Result<std::vector<std::byte>> Engine::read_kv(SeqId seq, int64_t n_tokens) {
  std::vector<std::byte> kv;
  for (int layer = 0; layer < n_layer(); ++layer) {
    const int64_t first = first_row_needed(layer, n_tokens);
    const auto rows = static_cast<int>(n_tokens - first);
    const size_t half = kv_row_bytes() * static_cast<size_t>(rows);
    const size_t at = kv.size();
    kv.resize(at + 2 * half);
    std::byte* k = kv.data() + at;
    HCACHE_RETURN_IF_ERROR(read_kv(seq, layer, first, rows, k, k + half));
  }
  return kv;
}

WeightStream& Engine::weights() const { return *parts_->weights; }

void Engine::forget_tokens() { parts_->table.clear(); }

size_t Engine::device_bytes() const {
  const EngineParts& parts = *parts_;
  size_t n = parts.tap.n_bytes() + parts.table.n_bytes() + parts.restore.n_bytes();
  for (const auto& stage : parts.stages) n += stage->n_bytes();
  return n;
}

}  // namespace hcache::engine
