#include "step_runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "windows.h"

namespace hcache::engine {

StepState::~StepState() {
  if (runner != nullptr && !finished) runner->abandon(*this);
}

StepRunner::StepRunner(const model::Model& model, const EngineOptions& options,
                       Sequences& sequences, ArenaRows& rows, const Stages& stages,
                       HiddenTypes& types, CaptureTap& tap, TokenTable& table,
                       WeightStream& weights)
    : model_(model),
      options_(options),
      sequences_(sequences),
      rows_(rows),
      stages_(stages),
      tap_(tap),
      table_(table),
      weights_(weights),
      graphs_(model, options, sequences, stages, types, tap, table),
      shared_(model, stages, graphs_) {}

void StepRunner::abandon(StepState& step) {
  stages_.synchronize();  // logits may be on their way to the step
  tap_.abandon(step);
  for (const auto& stage : stages_) stage->forget(step);
  for (const StepState::Segment& s : step.segments) {
    if (sequences_.contains(s.seq)) {
      rows_.resize(s.seq, sequences_.length(s.seq)).ignore("giving rows back takes no room");
    }
  }
}

// Checks the items and lays their rows out one behind the other.
Status StepRunner::add_segments(std::span<const BatchItem> items, StepState& step,
                                int64_t& n_new_cells) {
  int64_t n_rows = 0;
  n_new_cells = 0;
  for (const BatchItem& item : items) {
    HCACHE_RETURN_IF_ERROR(sequences_.check(item.seq));
    const int64_t length = sequences_.length(item.seq);
    const int64_t first = item.first_pos < 0 ? length : item.first_pos;
    const int64_t end = first + static_cast<int64_t>(item.tokens.size());
    HCACHE_RETURN_IF_ERROR(sequences_.check_compacted(item.seq, first));
    if (item.hidden && stages_.shares_layers()) {
      return unimplemented("devices that share every layer give no rows of the final norm");
    }
    if (item.tokens.empty() || first > length) {
      return invalid_argument(
          fmt::format("sequence {}: a batch item needs tokens that begin at or "
                      "before its length {}",
                      item.seq, length));
    }
    for (const StepState::Segment& other : step.segments) {
      if (other.seq == item.seq) {
        return invalid_argument(fmt::format("sequence {} stands twice in a batch", item.seq));
      }
    }
    if (end > model_.hparams().n_ctx_train) {
      return out_of_range(fmt::format("sequence {} would have {} tokens, the model's context is {}",
                                      item.seq, end, model_.hparams().n_ctx_train));
    }
    n_new_cells += std::max<int64_t>(0, end - length);
    step.segments.push_back({.seq = item.seq,
                             .first_pos = first,
                             .first_row = static_cast<int>(n_rows),
                             .n_rows = static_cast<int>(item.tokens.size()),
                             .captured = item.captured});
    n_rows += static_cast<int64_t>(item.tokens.size());
  }
  if (n_rows == 0 || n_rows > options_.max_batch_rows) {
    return invalid_argument(
        fmt::format("a step takes 1 to {} rows, not {}", options_.max_batch_rows, n_rows));
  }
  if (n_new_cells > sequences_.free_cells()) {
    return resource_exhausted(fmt::format("the KV arena has {} free cells of {}, the step needs {}",
                                          sequences_.free_cells(), sequences_.n_cells(),
                                          n_new_cells));
  }
  step.n_rows = static_cast<int>(n_rows);
  return {};
}

// Embeddings, positions and wanted outputs of the segments' rows.
Status StepRunner::add_rows(std::span<const BatchItem> items, StepState& step) {
  const int64_t n_embd = model_.hparams().n_embd;
  step.x.swap(spare_x_);  // for its memory
  step.x.resize(static_cast<size_t>(step.n_rows * n_embd));
  step.positions.reserve(step.n_rows);
  for (size_t i = 0; i < items.size(); ++i) {
    const StepState::Segment& s = step.segments[i];
    HCACHE_RETURN_IF_ERROR(
        model_.embed_tokens(items[i].tokens, step.x.data() + s.first_row * n_embd));
    step.tokens.insert(step.tokens.end(), items[i].tokens.begin(), items[i].tokens.end());
    for (int r = 0; r < s.n_rows; ++r) {
      step.positions.push_back(static_cast<int32_t>(s.first_pos + r));
    }
  }
  add_outputs(items, step);
  return model_.add_learned_positions(step.positions, step.x.data());
}

void StepRunner::add_outputs(std::span<const BatchItem> items, StepState& step) {
  std::vector<int32_t> hidden_rows;
  for (size_t i = 0; i < items.size(); ++i) {
    const StepState::Segment& s = step.segments[i];
    const int end = s.first_row + s.n_rows;
    int first = s.first_row;
    if (items[i].output == BatchItem::Output::kNone) first = end;
    if (items[i].output == BatchItem::Output::kLast) first = end - 1;
    for (int row = first; row < end; ++row) {
      step.hidden_outputs.push_back(items[i].hidden);
      (items[i].hidden ? hidden_rows : step.output_rows).push_back(row);
    }
  }
  step.n_logits = step.output_rows.size();
  step.output_rows.insert(step.output_rows.end(), hidden_rows.begin(), hidden_rows.end());
}

void StepRunner::add_adapters(StepState& step) const {
  const size_t n = model_.adapters().size();
  const auto n_rows = static_cast<size_t>(step.n_rows);
  for (const StepState::Segment& s : step.segments) {
    const std::span<const float> scales = sequences_.adapters(s.seq);
    for (size_t i = 0; i < scales.size(); ++i) {
      if (scales[i] == 0) continue;
      step.adapters.resize(n);
      step.adapters[i] = true;
      step.adapter_scales.resize(n * n_rows);
      const auto first = step.adapter_scales.begin() +
                         static_cast<std::ptrdiff_t>(i * n_rows + static_cast<size_t>(s.first_row));
      std::fill_n(first, s.n_rows, scales[i]);
    }
  }
}

Status StepRunner::prepare(std::span<const BatchItem> items, StepState& step) {
  tap_.poll(false);
  int64_t n_new_cells = 0;
  HCACHE_RETURN_IF_ERROR(add_segments(items, step, n_new_cells));
  HCACHE_RETURN_IF_ERROR(add_rows(items, step));
  add_adapters(step);
  // From here on nothing can fail for lack of room.
  step.runner = this;
  // Rows that are only computed again (a restored prefix) are saved already.
  const bool captured = std::ranges::any_of(step.segments, &StepState::Segment::captured);
  if (n_new_cells > 0 && captured) tap_.lay_out(step);
  for (const StepState::Segment& s : step.segments) {
    const int64_t end = s.first_pos + s.n_rows;
    if (end > sequences_.held(s.seq, 0).end_pos()) {
      HCACHE_RETURN_IF_ERROR(rows_.resize(s.seq, end));
    }
  }
  return {};
}

// Sequences may have been released or cut since the step was prepared.
Status StepRunner::check_room(const StepState& step) const {
  for (const StepState::Segment& s : step.segments) {
    bool has_room = sequences_.contains(s.seq);
    for (int group = 0; has_room && group < sequences_.n_groups(); ++group) {
      const HeldRows held = sequences_.held(s.seq, group);
      // Layers with a window may do without rows that only others compute again.
      has_room = (sequences_.window(group) > 0 || held.first_pos <= s.first_pos) &&
                 held.end_pos() >= s.first_pos + s.n_rows;
    }
    if (!has_room) {
      return failed_precondition(
          fmt::format("sequence {} was released or cut while a step ran on it", s.seq));
    }
  }
  return {};
}

Status StepRunner::check_windows(const StepState& step) const {
  for (const StepState::Segment& s : step.segments) {
    HCACHE_RETURN_IF_ERROR(sequences_.check_window(s.seq, s.first_pos));
  }
  return {};
}

// Derives the cells of the step's rows; extents may have moved since the step last ran.
void StepRunner::place(StepState& step) {
  if (!step.placed.empty() && step.placed_epoch == sequences_.epoch()) return;
  step.placed.assign(sequences_.n_groups(), {});
  step.placed_epoch = sequences_.epoch();
  for (int group = 0; group < sequences_.n_groups(); ++group) {
    StepState::Placed& placed = step.placed[group];
    for (const StepState::Segment& s : step.segments) {
      const HeldRows held = sequences_.held(s.seq, group);
      const int64_t window = sequences_.window(group);
      const int64_t seen = window > 0 ? attended_from(window, s.first_pos) : 0;
      const int64_t begin = std::max(held.first_pos, seen);
      // Rows that are not held are written by nobody: see run_range().
      for (int r = 0; r < s.n_rows; ++r) {
        placed.cells.push_back(held.cell(std::max(held.first_pos, s.first_pos + r)));
      }
      placed.attention.push_back({.first_row = s.first_row,
                                  .n_rows = s.n_rows,
                                  .first_cell = held.cell(begin),
                                  .n_past = std::max<int64_t>(0, s.first_pos - begin)});
    }
  }
}

Status StepRunner::can_observe() const {
  const model::HParams& hp = model_.hparams();
  if (hp.attention_soft_cap > 0 || model_.spec().sinks) {
    return unimplemented(
        fmt::format("what attention falls on is not told where scores are capped or part of it "
                    "falls on sinks, as {} models want",
                    hp.arch));
  }
  for (int layer = 0; layer < hp.n_layer; ++layer) {
    if (hp.window_of(layer) > 0) {
      return unimplemented(fmt::format(
          "layer {} sees a window of {} rows; what attention falls on is told of all rows alone",
          layer, hp.window_of(layer)));
    }
    if (!stages_.shares_layers() && stages_.of(layer).attention(0).ours()) continue;
    return unimplemented(fmt::format(
        "what attention falls on is told by hcache's own kernel alone, and layer {} is computed "
        "by another; take a CPU with --kv-type f16",
        layer));
  }
  return {};
}

Status StepRunner::observe(const ObservedRows& rows, AttentionScores* scores) {
  const model::HParams& hp = model_.hparams();
  if (scores != nullptr) {
    HCACHE_RETURN_IF_ERROR(sequences_.check(rows.seq));
    if (rows.first_pos < 0 || rows.stride < 1 || rows.n_keys < 1) {
      return invalid_argument(
          fmt::format("can't observe every {}th row from {} on of {} keys; positions begin at 0, "
                      "the others at 1",
                      rows.stride, rows.first_pos, rows.n_keys));
    }
    if (sequences_.compacted(rows.seq) > 0) {
      return failed_precondition(fmt::format(
          "layers of sequence {} do without rows: attention can't be told by position", rows.seq));
    }
    HCACHE_RETURN_IF_ERROR(can_observe());
    scores->n_head_kv = hp.n_head_kv;
    scores->tallies.resize(static_cast<size_t>(hp.n_layer) * static_cast<size_t>(hp.n_head_kv));
    for (AttentionTally& tally : scores->tallies) tally.reset(rows.n_keys);
  }
  stages_.synchronize();  // a graph under way may still tell the one before
  if (scores == nullptr && scores_ != nullptr) {
    for (int layer = 0; layer < hp.n_layer; ++layer) {
      stages_.of(layer).attention(sequences_.group_of(layer)).observe(layer, {});
    }
  }
  observed_ = rows;
  scores_ = scores;
  return {};
}

void StepRunner::observe(const StepState& step, int begin, int end) {
  AttentionObservation observation;
  for (size_t i = 0; i < step.segments.size(); ++i) {
    const StepState::Segment& s = step.segments[i];
    if (s.seq != observed_.seq) continue;
    const int64_t skipped = std::max<int64_t>(0, s.first_pos - observed_.first_pos);
    const int64_t first = observed_.first_pos +
                          (skipped + observed_.stride - 1) / observed_.stride * observed_.stride;
    const int64_t rows_end = std::min(observed_.end_pos, s.first_pos + s.n_rows);
    observation = {.tallies = scores_->tallies.data(),
                   .segment = static_cast<int32_t>(i),
                   .first_row = static_cast<int32_t>(std::min(first, rows_end) - s.first_pos),
                   .end_row = static_cast<int32_t>(rows_end - s.first_pos),
                   .stride = static_cast<int32_t>(observed_.stride)};
  }
  stages_.synchronize();  // graphs under way tell what they were given
  for (int layer = begin; layer < end; ++layer) {
    if (observation.any()) {
      observation.tallies =
          scores_->tallies.data() + static_cast<std::ptrdiff_t>(layer) * scores_->n_head_kv;
    }
    stages_.of(layer).attention(sequences_.group_of(layer)).observe(layer, observation);
  }
}

Status StepRunner::check_range(const StepState& step, int begin, int end) const {
  if (step.finished || begin != step.next_layer || end < begin || end > model_.hparams().n_layer) {
    return failed_precondition(fmt::format("layers [{}, {}) can't follow layer {} of a step", begin,
                                           end, step.next_layer - 1));
  }
  return {};
}

Status StepRunner::run_layers(StepState& step, int end) { return run_range(step, end, false); }

Status StepRunner::run_range(StepState& step, int end, bool kv_only_last) {
  const bool layer_0_tail = kv_only_last && step.next_layer == 0 && end == 1;
  if (!step.token_rows.empty() && !layer_0_tail) {
    return failed_precondition("the step keeps no more than layer 0's K and V need");
  }
  HCACHE_RETURN_IF_ERROR(check_room(step));
  if (step.next_layer == end) return {};
  // Layer 0's K and V see no other rows.
  if (!layer_0_tail) HCACHE_RETURN_IF_ERROR(check_windows(step));
  if (layer_0_tail && step.capture.empty() && step.adapters.empty()) {
    table_.keep_unknown_tokens(step);
  }
  place(step);
  if (scores_ != nullptr) observe(step, step.next_layer, end);
  if (stages_.shares_layers()) return run_shared(step, end, kv_only_last);
  while (step.next_layer < end) {
    Stage& stage = stages_.of(step.next_layer);
    if (step.next_layer > 0) stages_.of(step.next_layer - 1).pass_rows_to(stage, step);
    const int stage_end = weights_.graph_end(step.next_layer, std::min(end, stage.end()));
    HCACHE_RETURN_IF_ERROR(run_stage(stage, step, stage_end, kv_only_last && stage_end == end));
  }
  return {};
}

std::vector<model::LayerPart> StepRunner::parts_of(const StepState& step, int layer,
                                                   bool kv_only) const {
  using model::LayerPart;
  const bool last = layer == model_.hparams().n_layer - 1;
  if (kv_only || (last && step.output_rows.empty())) return {LayerPart::kKv};
  if (weights_.in_halves(layer)) return {LayerPart::kAttention, LayerPart::kFeedForward};
  return {LayerPart::kAll};
}

// Layers [next_layer, end), which are all `stage`'s and one where their weights are streamed.
Status StepRunner::run_stage(Stage& stage, StepState& step, int end, bool kv_only_last) {
  const int begin = step.next_layer;
  StepOutputs outputs;
  const std::vector<model::LayerPart> parts = parts_of(step, begin, kv_only_last);
  for (const model::LayerPart part : parts) {
    const HeldWeights weights(weights_, begin, part);
    HCACHE_RETURN_IF_ERROR(weights.status());
    if (part == parts.front()) {
      tap_.own_block(stage, step);
      HCACHE_RETURN_IF_ERROR(stage.load(step));
      stage.queue().before_compute(stage.arena().last_upload(begin, end));
      stage.set_rows_owner(nullptr);
      stage.set_computed_last(&step);
      step.next_layer = -1;  // no way on from a failure below: some of the rows may be written
    }
    const model::LayerPart built = parts.size() > 1 ? part : model::LayerPart::kAll;
    HCACHE_ASSIGN_OR_RETURN(outputs, graphs_.run(stage, step, begin, end, kv_only_last, built));
  }
  table_.learn(step);
  fetch(outputs, stage, step);
  step.next_layer = end;
  if (end < model_.hparams().n_layer) stage.set_rows_owner(&step);
  return {};
}

void StepRunner::fetch(const StepOutputs& outputs, Stage& stage, StepState& step) {
  const auto get = [&stage](const ggml_tensor* from, std::vector<float>& to) {
    if (from == nullptr) return;
    to.resize(static_cast<size_t>(ggml_nelements(from)));
    stage.graphs().get(from, to.data(), ggml_nbytes(from));
  };
  if (outputs.logits != nullptr) step.logits.swap(spare_logits_);  // for its memory
  get(outputs.logits, step.logits);
  get(outputs.hidden, step.hidden);
}

// Layers [next_layer, end) on the devices that share them. The rows return to the host.
Status StepRunner::run_shared(StepState& step, int end, bool kv_only_last) {
  const int begin = step.next_layer;
  for (Stage* stage : stages_.members(begin)) {
    tap_.own_block(*stage, step);
    stage->queue().before_compute(stage->arena().last_upload(begin, end));
    stage->set_computed_last(&step);
  }
  step.next_layer = -1;  // as in run_stage()
  HCACHE_ASSIGN_OR_RETURN(ggml_tensor * logits, shared_.run(step, begin, end, kv_only_last));
  table_.learn(step);
  fetch({.logits = logits}, stages_.of(begin), step);
  step.next_layer = end;
  return {};
}

// The step's rows count as their sequences' from here on.
void StepRunner::end_step(StepState& step) {
  step.finished = true;
  for (const auto& stage : stages_) stage->forget(step);
  for (const StepState::Segment& s : step.segments) {
    sequences_.set_length(s.seq, std::max(sequences_.length(s.seq), s.first_pos + s.n_rows));
    sequences_.drop_unseen(s.seq);
  }
}

Status StepRunner::finish_with_kv(StepState& step, int layer) {
  HCACHE_RETURN_IF_ERROR(check_range(step, step.next_layer, layer + 1));
  HCACHE_RETURN_IF_ERROR(run_range(step, layer + 1, true));
  tap_.abandon(step);
  end_step(step);
  return {};
}

Result<Logits> StepRunner::finish(StepState& step) {
  const int n_layer = model_.hparams().n_layer;
  if (step.finished || step.next_layer != n_layer) {
    return failed_precondition(
        fmt::format("a step can't finish after {} of {} layers", step.next_layer, n_layer));
  }
  HCACHE_RETURN_IF_ERROR(check_room(step));
  tap_.publish(step);
  // The logits come out of the last stage, which has had its rows from the others. Those may have
  // gone on to another step by now, which is not waited for.
  for (const auto& stage : stages_) {
    if (stage->end() != n_layer && !stage->computed_last(step)) continue;
    if (step.output_rows.empty() && stage->graphs().is_async()) {
      stage->wait_for_step_before();
    } else {
      stage->graphs().synchronize();
    }
  }
  tap_.poll(false);
  end_step(step);
  spare_x_.swap(step.x);
  spare_logits_.swap(logits_);
  logits_.swap(step.logits);
  hidden_.swap(step.hidden);
  Logits logits;
  const auto n_vocab = static_cast<size_t>(model_.hparams().n_vocab);
  const auto n_embd = static_cast<size_t>(model_.hparams().n_embd);
  const float* next_logits = logits_.data();
  const float* next_hidden = hidden_.data();
  for (const bool is_hidden : step.hidden_outputs) {
    const size_t n = is_hidden ? n_embd : n_vocab;
    const float*& next = is_hidden ? next_hidden : next_logits;
    logits.rows.emplace_back(next, n);
    next += n;
  }
  return logits;
}

}  // namespace hcache::engine
