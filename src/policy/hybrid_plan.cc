#include "policy/hybrid_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

namespace hcache::policy {

namespace {

constexpr double kObservedWeight = 0.3;
constexpr double kMaxSurprise = 2;
constexpr double kMaxScale = 8;
constexpr double kWorthChanging = 0.03;  // of a step
constexpr double kEqual = 1e-9;          // of a step: rounding
constexpr int64_t kRatioParts = 1'000'000;

constexpr std::array kModes = {
    HybridModeInfo{
        HybridMode::kSearch, "search",
        "the fastest ratio, recomputed layers and mini-batches by the model of the pipeline"},
    HybridModeInfo{HybridMode::kPolicies, "policies",
                   "host blocks by Algorithm 1, mini-batches by balance"},
    HybridModeInfo{HybridMode::kUnmanaged, "unmanaged",
                   "as many ACT as KV blocks, mini-batches by arrival"},
    HybridModeInfo{HybridMode::kFixedShare, "fixed", "a given share of ACT blocks"},
    HybridModeInfo{HybridMode::kKv, "kv", "KV blocks alone"},
    HybridModeInfo{HybridMode::kAct, "act", "ACT blocks alone"},
    HybridModeInfo{HybridMode::kTokens, "tokens",
                   "a given share recomputed from tokens, the rest KV"},
};

BlockCounts ratio_of(double share) {
  const int64_t act = std::llround(share * static_cast<double>(kRatioParts));
  return {.act = act, .kv = kRatioParts - act};
}

// The device's ACT blocks are spread over the requests in proportion to their ACT tokens.
std::vector<RequestContext> split_contexts(const HybridBatch& batch, const BlockCounts& ratio) {
  std::vector<RequestContext> contexts;
  contexts.reserve(batch.contexts.size());
  int64_t act_tokens = 0;
  for (const int64_t tokens : batch.contexts) {
    contexts.push_back(split_context(tokens, batch.sizes.block_tokens, ratio));
    contexts.back().rows = batch.rows;
    act_tokens += contexts.back().act_tokens;
  }
  const int64_t device_tokens =
      std::min(act_tokens, batch.act_on_device * batch.sizes.block_tokens);
  if (device_tokens == 0) return contexts;
  const double share = static_cast<double>(device_tokens) / static_cast<double>(act_tokens);
  for (RequestContext& c : contexts) {
    c.act_device_tokens = static_cast<int64_t>(share * static_cast<double>(c.act_tokens));
  }
  return contexts;
}

// Whole blocks, those on the device not counted, less what is recomputed.
int64_t host_bytes(const HybridBatch& batch, const std::vector<RequestContext>& contexts,
                   const Recompute& recompute) {
  double bytes = 0;
  const int64_t block_tokens = batch.sizes.block_tokens;
  const auto blocks = [&](int64_t tokens) {
    const int64_t whole = (tokens + block_tokens - 1) / block_tokens;
    return static_cast<double>(whole);
  };
  for (const RequestContext& c : contexts) {
    bytes +=
        blocks(c.kv_tokens) * static_cast<double>(batch.sizes.kv_bytes) +
        blocks(c.act_tokens - c.act_device_tokens) * static_cast<double>(batch.sizes.act_bytes);
  }
  const double layers = std::min(recompute.layers, batch.costs.n_layer);
  return std::llround(bytes * (1 - recompute.share * layers / batch.costs.n_layer));
}

// Whether the device can pass on the rows that are recomputed.
bool can_carry(const HybridBatch& batch, const Recompute& recompute) {
  if (recompute.layers < 2) return true;
  double tokens = 0;
  for (const int64_t context : batch.contexts) tokens += static_cast<double>(context);
  return recompute.share * tokens <= static_cast<double>(batch.carried_tokens);
}

Status check(const HybridBatch& batch, const Recompute& recompute) {
  if (batch.sizes.block_tokens < 1 || batch.costs.n_layer < 1 || batch.rows < 1) {
    return invalid_argument(
        fmt::format("batch plan: blocks of {} tokens, {} layers, {} rows a request; all must be "
                    "at least 1",
                    batch.sizes.block_tokens, batch.costs.n_layer, batch.rows));
  }
  if (!(recompute.share >= 0 && recompute.share <= 1) || recompute.layers < 0) {
    return invalid_argument(fmt::format(
        "batch plan: {} of the tokens recomputed in {} layers; a share is 0 to 1, layers are 0 or "
        "more",
        recompute.share, recompute.layers));
  }
  return {};
}

StepTimes times_of(const HybridBatch& batch, const PipelineStep& step) {
  return batch.steps_overlap ? following_step_times(step) : step_times(step);
}

class Planner {
 public:
  explicit Planner(const HybridBatch& batch) : batch_(batch) {}

  // All numbers of recomputed layers for one ratio, with mini-batches by balance and even ones;
  // these are the same for all numbers.
  Status try_ratio(const BlockCounts& ratio) {
    const std::vector<RequestContext> contexts = split_contexts(batch_, ratio);
    for (const Packing packing : {Packing::kBalance, Packing::kEven}) {
      HCACHE_RETURN_IF_ERROR(try_packing(ratio, contexts, packing));
    }
    return {};
  }
  [[nodiscard]] const std::optional<HybridPlan>& best() const { return best_; }

 private:
  Status try_packing(const BlockCounts& ratio, const std::vector<RequestContext>& contexts,
                     Packing packing) {
    auto batches = form_mini_batches(batch_.costs, contexts, batch_.limits, packing);
    if (!batches.ok()) return batches.status();
    PipelineStep step =
        pipeline_step(batch_.costs, *batches, {.layers = batch_.costs.n_layer, .share = 1});
    const int32_t most = std::min(batch_.costs.n_layer, batch_.most_recomputed_layers);
    for (int32_t layers = 0; layers <= most; ++layers) {
      const Recompute recompute{.layers = layers, .share = 1};
      if (!can_carry(batch_, recompute)) break;
      if (host_bytes(batch_, contexts, recompute) > batch_.host_bytes) continue;
      step.recompute_layers = layers;
      const StepTimes times = times_of(batch_, step);
      if (best_ && !better(times.step_s, recompute, ratio)) continue;
      best_ = HybridPlan{.ratio = ratio,
                         .recompute = recompute,
                         .packing = packing,
                         .mini_batches = *batches,
                         .host_bytes = host_bytes(batch_, contexts, recompute),
                         .step = times};
    }
    return {};
  }

  [[nodiscard]] bool better(double step_s, const Recompute& recompute,
                            const BlockCounts& ratio) const {
    const double now_s = best_->step.step_s;
    if (step_s < now_s * (1 - kEqual)) return true;
    if (step_s > now_s * (1 + kEqual)) return false;
    if (recompute.layers != best_->recompute.layers) {
      return recompute.layers < best_->recompute.layers;
    }
    return ratio.act_share() < best_->ratio.act_share();
  }

  const HybridBatch& batch_;
  std::optional<HybridPlan> best_;
};

Result<HybridPlan> search(const HybridBatch& batch) {
  HCACHE_RETURN_IF_ERROR(check(batch, {}));
  int64_t longest = 1;
  for (const int64_t tokens : batch.contexts) {
    longest = std::max(longest, (tokens + batch.sizes.block_tokens - 1) / batch.sizes.block_tokens);
  }
  Planner planner(batch);
  Status last;
  const int64_t most_act = batch.sizes.act_pays() ? longest : 0;
  for (int64_t act = 0; act <= most_act; ++act) {
    if (Status tried = planner.try_ratio({.act = act, .kv = longest - act}); !tried.ok()) {
      last = std::move(tried);
    }
  }
  if (planner.best()) return *planner.best();
  if (!last.ok()) return last;
  return resource_exhausted(fmt::format(
      "batch plan: no ratio of blocks fits into {} bytes of host memory; take fewer requests or "
      "allow more memory",
      batch.host_bytes));
}

}  // namespace

std::span<const HybridModeInfo> hybrid_modes() { return kModes; }

std::string_view hybrid_mode_name(HybridMode mode) {
  return kModes.at(static_cast<size_t>(mode)).name;
}

Result<HybridMode> parse_hybrid_mode(std::string_view name) {
  std::string names;
  for (const HybridModeInfo& info : kModes) {
    if (info.name == name) return info.mode;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", info.name);
  }
  return invalid_argument(
      fmt::format("no mode '{}' of the batch cache; there are {}", name, names));
}

Result<HybridPlan> plan_with(const HybridBatch& batch, const BlockCounts& ratio,
                             const Recompute& recompute, Packing packing) {
  HCACHE_RETURN_IF_ERROR(check(batch, recompute));
  const std::vector<RequestContext> contexts = split_contexts(batch, ratio);
  HybridPlan plan{.ratio = ratio,
                  .recompute = recompute,
                  .packing = packing,
                  .mini_batches = {},
                  .host_bytes = host_bytes(batch, contexts, recompute),
                  .step = {}};
  if (plan.host_bytes > batch.host_bytes) {
    return resource_exhausted(fmt::format(
        "batch plan: {} ACT to {} KV blocks take {} bytes of host memory, {} are there; take fewer "
        "requests, another ratio, or allow more memory",
        ratio.act, ratio.kv, plan.host_bytes, batch.host_bytes));
  }
  if (!can_carry(batch, recompute)) {
    return resource_exhausted(fmt::format(
        "batch plan: recomputing {} of the context in {} layers passes more rows from layer to "
        "layer than the {} that the device holds; recompute less, or take fewer requests",
        recompute.share, recompute.layers, batch.carried_tokens));
  }
  HCACHE_ASSIGN_OR_RETURN(plan.mini_batches,
                          form_mini_batches(batch.costs, contexts, batch.limits, packing));
  plan.step = times_of(batch, pipeline_step(batch.costs, plan.mini_batches, recompute));
  return plan;
}

Result<HybridPlan> plan_hybrid(const HybridBatch& batch, HybridMode mode, double share) {
  if (!(share >= 0 && share <= 1)) {
    return invalid_argument(fmt::format("batch plan: a share of {}; it takes 0 to 1", share));
  }
  switch (mode) {
    case HybridMode::kSearch: return search(batch);
    case HybridMode::kPolicies: {
      HCACHE_ASSIGN_OR_RETURN(
          const HostBlocks host,
          allocate_host_blocks(batch.costs, {.sizes = batch.sizes,
                                             .bytes = batch.host_bytes,
                                             .act_on_device = batch.act_on_device}));
      return plan_with(batch, host.total(), {}, Packing::kBalance);
    }
    case HybridMode::kUnmanaged:
      return plan_with(batch, {.act = 1, .kv = 1}, {}, Packing::kArrival);
    case HybridMode::kFixedShare: return plan_with(batch, ratio_of(share), {}, Packing::kBalance);
    case HybridMode::kKv: return plan_with(batch, {.act = 0, .kv = 1}, {}, Packing::kArrival);
    case HybridMode::kAct: return plan_with(batch, {.act = 1, .kv = 0}, {}, Packing::kArrival);
    case HybridMode::kTokens:
      return plan_with(batch, {.act = 0, .kv = 1}, {.layers = batch.costs.n_layer, .share = share},
                       Packing::kArrival);
  }
  return internal_error("batch plan: a mode without a plan");
}

void observe(double& scale, double predicted_s, double observed_s) {
  if (!(predicted_s > 0) || !(observed_s > 0) || !std::isfinite(observed_s / predicted_s)) return;
  const double target =
      std::clamp(observed_s / predicted_s, scale / kMaxSurprise, scale * kMaxSurprise);
  scale = std::clamp(scale + kObservedWeight * (target - scale), 1 / kMaxScale, kMaxScale);
}

HybridCosts corrected(const HybridCosts& costs, const HybridScales& scales) {
  HybridCosts c = costs;
  c.load_weights_s *= scales.link;
  for (LinearFit* fit : {&c.load_kv, &c.load_act, &c.store_kv, &c.store_act}) {
    *fit = fit->scaled(scales.link);
  }
  c.kv_gen = c.kv_gen.scaled(scales.kv_gen);
  for (LinearFit* fit : {&c.forward, &c.attend, &c.attend_prompt}) {
    *fit = fit->scaled(scales.forward);
  }
  c.step_s *= scales.forward;
  return c;
}

Result<HybridPlan> replan_hybrid(const HybridBatch& batch, const HybridPlan& in_force,
                                 const HybridScales& scales) {
  HybridBatch now = batch;
  now.costs = corrected(batch.costs, scales);
  HCACHE_ASSIGN_OR_RETURN(HybridPlan best, plan_hybrid(now, HybridMode::kSearch));
  auto same = plan_with(now, in_force.ratio, in_force.recompute, in_force.packing);
  if (same.ok() && best.step.step_s > same->step.step_s * (1 - kWorthChanging)) return same;
  return best;
}

}  // namespace hcache::policy
