#include "sim/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

namespace hcache::sim {

namespace {

using policy::BlockKind;
using policy::HybridBatch;
using policy::HybridCosts;
using policy::HybridMode;
using policy::LinearFit;

// Sizes of context at which published hardware is sampled; its formulas are lines.
constexpr std::array kSampledTokens = {1024, 4096, 16384};

Status check(const BatchSetup& s) {
  if (s.batch < 1 || s.prompt_tokens < 1 || s.output_tokens < 1 || s.block_tokens < 1) {
    return invalid_argument(fmt::format(
        "batch: {} requests of {} and {} tokens in blocks of {}; all must be at least 1", s.batch,
        s.prompt_tokens, s.output_tokens, s.block_tokens));
  }
  if (!(s.link_efficiency > 0) || !(s.memory_efficiency > 0)) {
    return invalid_argument("batch: efficiencies of link and memory must be positive");
  }
  return {};
}

template <typename Seconds>
Result<LinearFit> sampled(Seconds seconds) {
  std::vector<policy::SizedTime> samples;
  for (const int tokens : kSampledTokens) {
    samples.push_back({static_cast<double>(tokens), seconds(tokens)});
  }
  return policy::fit_linear(samples);
}

// How the device's memory is divided.
struct DeviceMemory {
  double resident_weights = 0;
  int64_t act_blocks = 0;
  int64_t carried_tokens = 0;
  int64_t buffer_tokens = 0;  // of one mini-batch in one layer
};

Result<DeviceMemory> divide_memory(const BatchSetup& s, const policy::LayerCosts& layer) {
  const double weights = policy::layer_weight_bytes(s.hardware.model);
  const double layers = s.hardware.model.n_layer;
  const double left = static_cast<double>(s.hardware.device.memory_bytes) - s.workspace_bytes -
                      s.buffer_bytes - 2 * weights / layers;
  if (left < 0) {
    return resource_exhausted(fmt::format(
        "batch: {} has {:.1f} GB; workspace, buffers and two layers of {} take {:.1f} more",
        s.hardware.device.title, static_cast<double>(s.hardware.device.memory_bytes) / 1e9,
        s.hardware.model.title, -left / 1e9));
  }
  DeviceMemory memory;
  // KV in two buffers, or activations in two and what is generated from them, take as much.
  memory.buffer_tokens =
      static_cast<int64_t>(s.buffer_bytes / (2 * static_cast<double>(layer.kv_bytes)));
  if (s.weights_on_device) {
    memory.resident_weights = std::min(1.0, left / weights);
  } else if (s.mode == HybridMode::kTokens) {
    memory.carried_tokens = static_cast<int64_t>(left / static_cast<double>(layer.hidden_bytes));
  } else if (s.mode != HybridMode::kKv) {
    memory.act_blocks = static_cast<int64_t>(
        left / (layers * static_cast<double>(layer.hidden_bytes * s.block_tokens)));
  }
  return memory;
}

// All prompts through all layers; their blocks go to the host, those of the device stay.
double prefill_s(const BatchSetup& s, const HybridBatch& batch, const policy::BlockCounts& ratio) {
  const policy::RequestContext request =
      policy::split_context(s.prompt_tokens, s.block_tokens, ratio);
  const int64_t at_once = std::max<int64_t>(1, batch.limits.tokens / s.prompt_tokens);
  const double device_tokens = std::min(static_cast<double>(batch.act_on_device * s.block_tokens),
                                        static_cast<double>(s.batch * request.act_tokens));
  const double host_act = static_cast<double>(s.batch * request.act_tokens) - device_tokens;
  policy::PipelineStep step{.n_layer = batch.costs.n_layer,
                            .load_weights_s = batch.costs.load_weights_s,
                            .step_s = batch.costs.step_s,
                            .layer = {},
                            .recomputing = {},
                            .last_recomputing = {}};
  for (int64_t begun = 0; begun < s.batch; begun += at_once) {
    const auto n = static_cast<double>(std::min(at_once, s.batch - begun));
    const auto prompt = static_cast<double>(s.prompt_tokens);
    step.layer.push_back(
        {.load_s = 0,
         .compute_s = batch.costs.forward.at(n * prompt) +
                      batch.costs.attend_prompt.at(n * prompt * prompt / 2),
         .store_s = batch.costs.store_kv.at(n * static_cast<double>(request.kv_tokens)) +
                    batch.costs.store_act.at(n * host_act / static_cast<double>(s.batch))});
  }
  return policy::step_times(step).step_s;
}

// What one step loads of blocks, over all layers.
void count_traffic(const HybridBatch& batch, const policy::HybridPlan& plan, BatchReport& report) {
  int64_t kv = 0;
  int64_t act = 0;
  for (const policy::MiniBatch& b : plan.mini_batches) {
    kv += b.kv_tokens;
    act += b.act_tokens - b.act_device_tokens;
  }
  const double layers =
      1 - plan.recompute.share * plan.recompute.layers / static_cast<double>(batch.costs.n_layer);
  const auto block = static_cast<double>(batch.sizes.block_tokens);
  report.kv_bytes +=
      layers * static_cast<double>(kv) * static_cast<double>(batch.sizes.kv_bytes) / block;
  report.act_bytes +=
      layers * static_cast<double>(act) * static_cast<double>(batch.sizes.act_bytes) / block;
}

}  // namespace

Result<HybridCosts> batch_costs(const BatchSetup& setup, double resident_weights) {
  HCACHE_ASSIGN_OR_RETURN(const policy::RestoreCosts restore,
                          policy::hardware_costs(setup.hardware));
  const policy::LayerCosts& layer = restore.layers[0];
  const double link = restore.link.bytes_per_s * setup.link_efficiency;
  const double memory = setup.hardware.device.memory_bytes_per_s * setup.memory_efficiency;
  const double weights = policy::layer_weight_bytes(setup.hardware.model) / restore.n_layer;
  HybridCosts costs;
  costs.n_layer = restore.n_layer;
  costs.load_weights_s = weights * (1 - resident_weights) / link;
  HCACHE_ASSIGN_OR_RETURN(costs.kv_gen, sampled([&](int n) { return layer.project.at(n); }));
  HCACHE_ASSIGN_OR_RETURN(costs.load_kv, sampled([&](int n) {
                            return n * static_cast<double>(layer.kv_bytes) / link;
                          }));
  HCACHE_ASSIGN_OR_RETURN(costs.load_act, sampled([&](int n) {
                            return n * static_cast<double>(layer.hidden_bytes) / link;
                          }));
  costs.store_kv = costs.load_kv;
  costs.store_act = costs.load_act;
  // The products read their weights from the device's memory once a mini-batch.
  HCACHE_ASSIGN_OR_RETURN(costs.forward,
                          sampled([&](int n) { return weights / memory + layer.dense.at(n); }));
  // One row's attention reads its keys and values; a prompt's is arithmetic.
  costs.attend.slope = static_cast<double>(layer.kv_bytes) / memory;
  costs.attend_prompt.slope = layer.attn_per_key.at(1);
  return costs;
}

Result<BatchReport> simulate_batch(const BatchSetup& setup) {
  HCACHE_RETURN_IF_ERROR(check(setup));
  HCACHE_ASSIGN_OR_RETURN(const policy::RestoreCosts restore,
                          policy::hardware_costs(setup.hardware));
  const policy::LayerCosts& layer = restore.layers[0];
  HCACHE_ASSIGN_OR_RETURN(const DeviceMemory memory, divide_memory(setup, layer));
  HybridBatch batch;
  HCACHE_ASSIGN_OR_RETURN(batch.costs, batch_costs(setup, memory.resident_weights));
  batch.sizes = {.block_tokens = setup.block_tokens,
                 .kv_bytes = restore.n_layer * layer.kv_bytes * setup.block_tokens,
                 .act_bytes = restore.n_layer * layer.hidden_bytes * setup.block_tokens};
  batch.host_bytes =
      static_cast<int64_t>(setup.host_bytes - policy::layer_weight_bytes(setup.hardware.model) *
                                                  (1 - memory.resident_weights));
  if (batch.host_bytes < 0) {
    return resource_exhausted(
        fmt::format("batch: the weights of {} exceed the host's memory by {:.1f} GB",
                    setup.hardware.model.title, static_cast<double>(-batch.host_bytes) / 1e9));
  }
  batch.act_on_device = memory.act_blocks;
  batch.carried_tokens = memory.carried_tokens;
  batch.limits = {memory.buffer_tokens, memory.buffer_tokens, memory.buffer_tokens};
  batch.steps_overlap = true;
  const auto requests = static_cast<size_t>(setup.batch);

  BatchReport report;
  report.resident_weights = memory.resident_weights;
  report.act_on_device = memory.act_blocks;
  batch.contexts.assign(requests, setup.prompt_tokens + setup.output_tokens / 2);
  HCACHE_ASSIGN_OR_RETURN(report.plan, plan_hybrid(batch, setup.mode, setup.share));
  report.prefill_s = prefill_s(setup, batch, report.plan.ratio);
  double link_s = 0;
  double compute_s = 0;
  // The prefill gives the first token.
  for (int64_t token = 1; token < setup.output_tokens; ++token) {
    batch.contexts.assign(requests, setup.prompt_tokens + token);
    HCACHE_ASSIGN_OR_RETURN(
        const policy::HybridPlan step,
        plan_with(batch, report.plan.ratio, report.plan.recompute, report.plan.packing));
    report.generate_s += step.step.step_s;
    link_s += step.step.link_s;
    compute_s += step.step.compute_s;
    report.weights_bytes +=
        policy::layer_weight_bytes(setup.hardware.model) * (1 - memory.resident_weights);
    count_traffic(batch, step, report);
  }
  report.tokens_per_s = static_cast<double>(setup.batch * setup.output_tokens) /
                        (report.prefill_s + report.generate_s);
  if (report.generate_s > 0) {
    report.link_busy = link_s / report.generate_s;
    report.compute_busy = compute_s / report.generate_s;
  }
  return report;
}

}  // namespace hcache::sim
