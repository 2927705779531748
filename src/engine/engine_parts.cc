#include "engine_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "attention_choice.h"
#include "windows.h"

namespace hcache::engine {
namespace {

using model::Model;

std::unique_ptr<model::ComputeThreads> threads_of(const Stages& stages) {
  const model::Device& device = stages.front().device();
  if (stages.size() != 1 || !device.is_cpu()) return nullptr;
  return std::make_unique<model::ComputeThreads>(device);
}

Status check_options(const Model& model, const EngineOptions& options) {
  if (options.arena_tokens < 1 || options.max_batch_rows < 1) {
    return invalid_argument("the arena and the batch need at least one token");
  }
  return check_kv_type(model, options.kv_type);
}

// Where devices share the layers each has them all.
Status check_shared(const Model& model, const EngineOptions& options) {
  if (model.parts().empty() || options.stage_layers.size() <= 1) return {};
  return unimplemented(
      "devices that share every layer (--split-mode tensor) have one stage each; cut no stages, or "
      "use --split-mode layer");
}

// Layers per stage: as the options cut them, and wherever the device changes.
Result<std::vector<int>> stage_lengths(const Model& model, const EngineOptions& options) {
  const int n_layer = model.hparams().n_layer;
  std::vector<int> lengths = options.stage_layers;
  if (lengths.empty()) lengths = {n_layer};
  if (*std::min_element(lengths.begin(), lengths.end()) < 1 ||
      std::accumulate(lengths.begin(), lengths.end(), 0) != n_layer) {
    return invalid_argument(
        fmt::format("the stages must have one layer each "
                    "at least, and the model's {} together",
                    n_layer));
  }
  std::vector<int> cut;
  int layer = 0;
  for (const int length : lengths) {
    for (int i = 0; i < length; ++i, ++layer) {
      const bool begins = i == 0 || &model.device(layer) != &model.device(layer - 1);
      if (begins) cut.push_back(0);
      ++cut.back();
    }
  }
  return cut;
}

// The streamed layers share two slots, whose order one copy queue keeps.
Result<std::unique_ptr<WeightStream>> open_weights(
    const Model& model, const std::vector<std::unique_ptr<Stage>>& stages) {
  Stage* stage = stages.back().get();
  if (model.streamed() != nullptr && model.streamed()->first_layer < stage->begin()) {
    return unimplemented(
        "layers whose weights are streamed must be in one stage, the last; keep more of them on "
        "the device (--device-memory), or use fewer stages");
  }
  return WeightStream::open(model, stage->queue(), stage->graphs().is_async());
}

// Of layers that see so many rows; 0: all.
Sequences::GroupOptions group_options(int64_t window, const EngineOptions& options) {
  if (window == 0) return {.n_cells = options.arena_tokens};
  const int64_t of_a_step = most_cells(window) + options.max_batch_rows;
  // Rows that a step adds are those of all its sequences.
  const int64_t wanted =
      options.window_sequences == 0
          ? options.arena_tokens
          : options.window_sequences * most_cells(window) + options.max_batch_rows;
  return {.n_cells = std::min(options.arena_tokens, wanted),
          .window = window,
          .most_cells = std::min(options.arena_tokens, of_a_step)};
}

}  // namespace

uint64_t estimate_device_bytes(const model::HParams& hp, const EngineOptions& options) {
  constexpr uint64_t kOther = 48 << 20;  // the token table, graphs, allocators
  constexpr int kStagedSlices = 4;
  const auto rows = static_cast<uint64_t>(options.max_batch_rows);
  const auto n_layer = static_cast<uint64_t>(hp.n_layer);
  uint64_t cells = 0;
  for (int layer = 0; layer < hp.n_layer; ++layer) {
    cells += static_cast<uint64_t>(group_options(hp.window_of(layer), options).n_cells) +
             2 * AttentionOp::kKvPadding;
  }
  const uint64_t arena = cells * 2 * ggml_row_size(options.kv_type, hp.n_embd_kv());
  const auto width = static_cast<uint64_t>(hp.n_embd);
  const int widest = std::max(hp.n_ff, hp.n_expert_used * std::max(hp.n_ff_expert, hp.n_embd));
  const uint64_t activations =
      rows * sizeof(float) *
      (6 * width + 3 * static_cast<uint64_t>(widest) + 3 * static_cast<uint64_t>(hp.n_embd_q()));
  const uint64_t logits = static_cast<uint64_t>(hp.n_vocab) * sizeof(float) * 16;
  const uint64_t captured = n_layer * rows * width * sizeof(uint16_t);
  const uint64_t staged = kStagedSlices * rows * width * sizeof(float);
  return arena + activations + logits + captured + staged + kOther;
}

Result<std::unique_ptr<EngineParts>> EngineParts::create(const Model& model,
                                                         const EngineOptions& options,
                                                         const MakeQueues& make_queues,
                                                         std::vector<int> row_groups) {
  HCACHE_RETURN_IF_ERROR(check_options(model, options));
  HCACHE_RETURN_IF_ERROR(check_shared(model, options));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int> lengths, stage_lengths(model, options));
  const int n_groups = 1 + *std::max_element(row_groups.begin(), row_groups.end());
  std::vector<int64_t> windows(static_cast<size_t>(n_groups), 0);
  for (int layer = 0; layer < model.hparams().n_layer; ++layer) {
    const int group = row_groups[static_cast<size_t>(layer)];
    windows[static_cast<size_t>(group)] = model.hparams().window_of(layer);
  }
  std::vector<Sequences::GroupOptions> groups;
  for (const int64_t window : windows) groups.push_back(group_options(window, options));
  std::vector<std::unique_ptr<Stage>> stages;
  const auto add_stage = [&](const Model& part, int begin, int end) -> Status {
    model::Device& device = part.device(begin);
    HCACHE_ASSIGN_OR_RETURN(const bool ours, choose_attention(part, device, options));
    constexpr int64_t kPadding = AttentionOp::kKvPadding;
    std::vector<int64_t> cells;
    for (int layer = begin; layer < end; ++layer) {
      const auto group = static_cast<size_t>(row_groups[static_cast<size_t>(layer)]);
      const int64_t padded = (groups[group].n_cells + kPadding - 1) / kPadding * kPadding;
      cells.push_back(padded + (ours ? 0 : kPadding));
    }
    stages.push_back(std::make_unique<Stage>(
        part, options,
        StageOptions{.index = static_cast<int>(stages.size()),
                     .begin = begin,
                     .end = end,
                     .device = &device,
                     .queues = make_queues ? make_queues(device) : make_device_queues(device),
                     .own_attention = ours,
                     .n_groups = n_groups,
                     .windows = windows,
                     .cells = std::move(cells)}));
    return stages.back()->allocate();
  };
  for (const auto& part : model.parts()) {
    HCACHE_RETURN_IF_ERROR(add_stage(*part, 0, model.hparams().n_layer));
  }
  int begin = 0;
  for (const int length : lengths) {
    if (!model.parts().empty()) break;
    HCACHE_RETURN_IF_ERROR(add_stage(model, begin, begin + length));
    begin += length;
  }
  HCACHE_ASSIGN_OR_RETURN(auto weights, open_weights(model, stages));
  std::unique_ptr<EngineParts> parts(new EngineParts(
      model, options, Sequences(std::move(row_groups), options.arena_tokens, groups),
      std::move(stages), std::move(weights)));
  HCACHE_RETURN_IF_ERROR(parts->table.allocate(options.max_batch_rows));
  return parts;
}

EngineParts::EngineParts(const Model& m, const EngineOptions& o, Sequences of_rows,
                         std::vector<std::unique_ptr<Stage>> s, std::unique_ptr<WeightStream> w)
    : model(m),
      options(o),
      sequences(std::move(of_rows)),
      stages(std::move(s)),
      weights(std::move(w)),
      threads(threads_of(stages)),
      rows(model, options, sequences, stages),
      types(model, options, stages, *weights),
      tap(model, options, stages, types),
      table(model, stages.members(0)),
      steps(model, options, sequences, rows, stages, types, tap, table, *weights),
      restore(model, options, sequences, stages, types, *weights),
      kept(model, options, sequences, stages, restore) {}

// The parts' device memory is in use until then.
EngineParts::~EngineParts() {
  for (const auto& stage : stages) stage->close();
}

}  // namespace hcache::engine
