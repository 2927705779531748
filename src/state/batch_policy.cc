#include "state/batch_policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <utility>

namespace hcache::state {
namespace {

using engine::BatchMember;
using engine::BatchSample;
using engine::BlockKind;
using engine::HybridEngine;
using policy::LinearFit;
using policy::SizedTime;

constexpr double kMinObservedLoads = 0.05;  // of a step
constexpr int kSampledSteps = 3;            // that are timed of each batch, behind one that is not
// Of generation, which the ratio hangs on: over some seconds of a machine whose speed wavers.
constexpr int kGeneratingSteps = 12;
constexpr int64_t kMostLong = 4;  // of the longest contexts, in one mini-batch
constexpr double kSampledS = 15;  // steps beyond the fewest end after so long; weights may stream

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The line through mini-batches' medians; nothing where nothing was timed.
Result<LinearFit> fit_generation(const std::vector<SizedTime>& points) {
  const bool timed = std::any_of(points.begin(), points.end(),
                                 [](const SizedTime& s) { return s.size > 0 && s.seconds > 0; });
  if (!timed) return LinearFit{};
  auto line = policy::fit_linear(points);
  if (!line.ok()) return line.status().with_context("generating K and V");
  return line;
}

// The same for times that may be small beside noise: a constant where they don't grow with the
// size.
LinearFit fit_small(const std::vector<SizedTime>& points) {
  const auto line = policy::fit_linear(points);
  if (line.ok()) return *line;
  double sum = 0;
  for (const SizedTime& s : points) sum += s.seconds;
  const double mean = points.empty() ? 0 : sum / static_cast<double>(points.size());
  return {.slope = 0, .intercept = mean, .r2 = 0};
}

// One batch on an engine of its own: sequences of `contexts` tokens, in mini-batches of `group`.
struct SampledBatch {
  std::vector<int64_t> contexts;
  int group = 1;
  BlockKind kind = BlockKind::kKv;
  int steps = kSampledSteps;
};

Result<std::vector<BatchSample>> sample(const model::Model& model, engine::HybridOptions options,
                                        const SampledBatch& batch, policy::BlockSizes* sizes,
                                        double* load_weights_s = nullptr) {
  options.recomputed_layers = 0;
  options.decisions.next_kind = [kind = batch.kind](const engine::BlockQuestion&) { return kind; };
  options.decisions.form_batches = [group = static_cast<size_t>(batch.group)](
                                       std::span<const BatchMember> members, int64_t) {
    std::vector<std::vector<int>> formed;
    for (size_t i = 0; i < members.size(); ++i) {
      if (i % group == 0) formed.emplace_back();
      formed.back().push_back(static_cast<int>(i));
    }
    return formed;
  };
  // Room for the samples, whatever the batch will have: rows are F32 at most.
  if (options.disk_bytes > 0) {
    const model::HParams& hp = model.hparams();
    const auto row_bytes = static_cast<size_t>(std::max(2 * hp.n_embd_kv(), hp.n_embd)) * 4;
    for (const int64_t n : batch.contexts) {
      options.disk_bytes += static_cast<size_t>(n + 2 * engine::kBlockTokens) * row_bytes *
                            static_cast<size_t>(hp.n_layer);
    }
  }
  HCACHE_ASSIGN_OR_RETURN(const auto engine, HybridEngine::create(model, options));
  const auto n_layer = static_cast<double>(model.hparams().n_layer);
  *sizes = {
      .block_tokens = engine::kBlockTokens,
      .kv_bytes = static_cast<int64_t>(engine->kv_token_bytes() * engine::kBlockTokens * n_layer),
      .act_bytes =
          static_cast<int64_t>(engine->act_token_bytes() * engine::kBlockTokens * n_layer)};
  std::mt19937 random(1);
  for (const int64_t n : batch.contexts) {
    std::vector<int32_t> prompt(static_cast<size_t>(n));
    for (int32_t& t : prompt) {
      t = static_cast<int32_t>(random() % static_cast<uint64_t>(model.hparams().n_vocab));
    }
    HCACHE_RETURN_IF_ERROR(engine->add(prompt, n + batch.steps + 1).status());
  }
  std::vector<BatchSample> samples;
  double sampled_s = 0;
  for (int decoded = -1; decoded < batch.steps;) {
    if (decoded >= kSampledSteps && sampled_s > kSampledS) break;
    HCACHE_ASSIGN_OR_RETURN(const engine::HybridStep step, engine->step());
    if (step.rows.size() < batch.contexts.size()) {
      return invalid_argument("the sampled contexts are more than a step's rows");
    }
    HCACHE_RETURN_IF_ERROR(engine->flush());
    if (++decoded > 0) {
      samples.insert(samples.end(), step.times.samples.begin(), step.times.samples.end());
      sampled_s += step.times.total_s;
    }
    for (const engine::RequestLogits& row : step.rows) {
      if (decoded < batch.steps) HCACHE_RETURN_IF_ERROR(engine->append(row.id, 0));
    }
  }
  const engine::WeightStats weights = engine->weights().stats();
  if (load_weights_s != nullptr && weights.bytes > 0) {
    // The mean of all layers: those that stay on the device take no time. What is read from a disk
    // is uploaded beside that, and sooner.
    const double brought_s = weights.read_s > 0 ? weights.read_s : weights.upload_s;
    *load_weights_s = brought_s / static_cast<double>(weights.bytes) *
                      static_cast<double>(model.streamed()->n_bytes()) / n_layer;
  }
  return samples;
}

// Of each mini-batch the median time, at its median size: it has a token more in each step, and one
// step may have been interrupted.
std::vector<SizedTime> points(const std::vector<BatchSample>& samples, int64_t BatchSample::*size,
                              double BatchSample::*seconds) {
  std::map<int, std::pair<std::vector<double>, std::vector<double>>> by_batch;
  for (const BatchSample& s : samples) {
    if (s.*size <= 0) continue;
    auto& [sizes, times] = by_batch[s.batch];
    sizes.push_back(static_cast<double>(s.*size));
    times.push_back(s.*seconds);
  }
  std::vector<SizedTime> out;
  for (const auto& [batch, sampled] : by_batch) {
    out.push_back({median(sampled.first), median(sampled.second)});
  }
  return out;
}

// The mini-batch of a sample as the model knows it: what was not read lies on the device.
policy::MiniBatch loaded_batch(const BatchSample& s) {
  policy::MiniBatch batch;
  batch.rows = s.rows;
  batch.kv_tokens = s.read_kv_tokens;
  batch.act_tokens = s.act_tokens;
  batch.act_device_tokens = s.act_tokens - s.read_act_tokens;
  // Of sequences of one length.
  const auto cells = static_cast<double>(s.cells);
  batch.squared_tokens = s.rows > 0 ? cells * cells / static_cast<double>(s.rows) : 0;
  return batch;
}

}  // namespace

Result<MeasuredBatchCosts> measure_batch_costs(const model::Model& model,
                                               const engine::HybridOptions& options,
                                               const std::vector<int64_t>& sizes) {
  if (sizes.size() < 2 || !std::is_sorted(sizes.begin(), sizes.end()) || sizes.front() < 1) {
    return invalid_argument("costs of a batch want two context sizes or more, ascending");
  }
  engine::HybridOptions sampled = options;
  sampled.max_step_rows = std::max(options.max_step_rows, int64_t{1} << 20);
  sampled.waits_for_graphs = true;
  MeasuredBatchCosts measured;
  policy::HybridCosts& costs = measured.costs;
  costs.n_layer = model.hparams().n_layer;
  costs.pass_rows = options.max_batch_rows;

  HCACHE_ASSIGN_OR_RETURN(
      const auto kv, sample(model, sampled, {.contexts = sizes, .group = 1, .kind = BlockKind::kKv},
                            &measured.sizes, &costs.load_weights_s));
  measured.load_kv = points(kv, &BatchSample::read_kv_tokens, &BatchSample::load_kv_s);
  costs.load_kv = fit_small(measured.load_kv);
  // One row each: what grows with the context is attention. From memory, so that nothing is waited
  // for between two of them.
  engine::HybridOptions resident = sampled;
  resident.host_bytes = std::numeric_limits<size_t>::max() / 2;
  HCACHE_ASSIGN_OR_RETURN(
      const auto attended,
      sample(model, resident,
             {.contexts = {sizes.front(), sizes[sizes.size() / 2], sizes.back()},
              .group = 1,
              .kind = BlockKind::kKv},
             &measured.sizes));
  const LinearFit one_row =
      fit_small(points(attended, &BatchSample::cells, &BatchSample::forward_s));
  costs.attend = {.slope = one_row.slope, .intercept = 0, .r2 = one_row.r2};

  if (measured.sizes.act_bytes > 0) {
    HCACHE_ASSIGN_OR_RETURN(
        const auto act,
        sample(model, sampled,
               {.contexts = sizes, .group = 1, .kind = BlockKind::kAct, .steps = kGeneratingSteps},
               &measured.sizes));
    measured.kv_gen = points(act, &BatchSample::act_tokens, &BatchSample::generate_s);
    measured.load_act = points(act, &BatchSample::read_act_tokens, &BatchSample::load_act_s);
    // And as many tokens as a buffer holds: what fits the processor's caches takes less for each.
    const auto n = static_cast<int>(std::min<int64_t>(
        options.buffer_tokens / (sizes.back() + engine::kBlockTokens), kMostLong));
    if (n > 1) {
      const SampledBatch many{
          .contexts = std::vector<int64_t>(static_cast<size_t>(n), sizes.back()),
          .group = n,
          .kind = BlockKind::kAct,
          .steps = kGeneratingSteps};
      HCACHE_ASSIGN_OR_RETURN(const auto full, sample(model, sampled, many, &measured.sizes));
      const auto more = points(full, &BatchSample::act_tokens, &BatchSample::generate_s);
      measured.kv_gen.insert(measured.kv_gen.end(), more.begin(), more.end());
    }
    HCACHE_ASSIGN_OR_RETURN(costs.kv_gen, fit_generation(measured.kv_gen));
    costs.load_act = fit_small(measured.load_act);
  }

  // Many rows of short contexts: what grows with the rows is the rest of a layer.
  std::vector<SizedTime> rows;
  const auto most = static_cast<int>(std::max<int64_t>(options.buffer_tokens / engine::kBlockTokens,
                                                       1));  // sequences that a buffer holds
  for (const int wanted : {1, 8, 32}) {
    const int group = std::min(wanted, most);
    const SampledBatch many{.contexts = std::vector<int64_t>(static_cast<size_t>(group), 8),
                            .group = group,
                            .kind = BlockKind::kKv};
    HCACHE_ASSIGN_OR_RETURN(const auto samples, sample(model, sampled, many, &measured.sizes));
    for (const SizedTime& s : points(samples, &BatchSample::cells, &BatchSample::forward_s)) {
      rows.push_back(
          {static_cast<double>(group), std::max(0.0, s.seconds - costs.attend.at(s.size))});
    }
  }
  costs.forward = fit_small(rows);
  // A prompt's attention, over pairs of row and key: as decoding reads them, at worst.
  costs.attend_prompt = {.slope = costs.attend.slope, .intercept = 0, .r2 = costs.attend.r2};
  return measured;
}

BatchPolicy::BatchPolicy(const BatchPolicyOptions& options) : options_(options) {}

policy::HybridBatch BatchPolicy::batch(std::vector<int64_t> contexts) const {
  const policy::MiniBatchLimits limits{.kv_tokens = options_.buffer_tokens,
                                       .act_tokens = options_.buffer_tokens,
                                       .tokens = options_.buffer_tokens};
  // The engine's rows between two layers grow with what is recomputed.
  const int64_t carried = std::accumulate(contexts.begin(), contexts.end(), int64_t{0});
  return {.costs = options_.costs,
          .sizes = options_.sizes,
          .host_bytes = options_.cache_bytes,
          .act_on_device = 0,
          .limits = limits,
          .carried_tokens = carried,
          .most_recomputed_layers = options_.most_recomputed_layers,
          .contexts = std::move(contexts),
          .rows = 1,
          .steps_overlap = true};
}

Status BatchPolicy::plan(std::vector<int64_t> contexts) {
  HCACHE_ASSIGN_OR_RETURN(
      policy::HybridPlan made,
      policy::plan_hybrid(batch(std::move(contexts)), options_.mode, options_.share));
  plan_ = std::make_shared<policy::HybridPlan>(std::move(made));
  return {};
}

Status BatchPolicy::replan(std::vector<int64_t> contexts) {
  if (plan_ == nullptr) return failed_precondition("no plan is in force");
  HCACHE_ASSIGN_OR_RETURN(policy::HybridPlan made,
                          policy::replan_hybrid(batch(std::move(contexts)), *plan_, scales_));
  // What is recomputed was decided with the engine.
  made.recompute = plan_->recompute;
  plan_ = std::make_shared<policy::HybridPlan>(std::move(made));
  return {};
}

int BatchPolicy::recomputed_layers() const {
  return options_.mode == policy::HybridMode::kTokens ? 0 : plan_->recompute.layers;
}

engine::HybridDecisions BatchPolicy::decisions() const {
  engine::HybridDecisions decisions;
  const bool tokens = options_.mode == policy::HybridMode::kTokens;
  decisions.next_kind = [plan = plan_, tokens,
                         share = options_.share](const engine::BlockQuestion& asked) {
    const int64_t n_blocks = asked.prompt_tokens / engine::kBlockTokens;
    const auto n_prompt = static_cast<double>(n_blocks);
    if (tokens && static_cast<double>(asked.n_recomputed) < std::floor(share * n_prompt)) {
      return BlockKind::kTokens;
    }
    const policy::BlockKind kind =
        policy::next_block({.act = asked.n_act, .kv = asked.n_kv}, plan->ratio);
    return kind == policy::BlockKind::kAct ? BlockKind::kAct : BlockKind::kKv;
  };
  decisions.form_batches = [plan = plan_, costs = options_.costs](
                               std::span<const BatchMember> members,
                               int64_t max_cells) -> std::vector<std::vector<int>> {
    std::vector<policy::RequestContext> contexts;
    for (const BatchMember& m : members) {
      // A sequence's extent is a whole number of blocks: that is what has to fit.
      contexts.push_back({.kv_tokens = m.cells - m.act_tokens,
                          .act_tokens = m.act_tokens,
                          .act_device_tokens = 0,
                          .new_rows = policy::BlockKind::kKv,
                          .rows = m.new_rows});
    }
    const auto formed = policy::form_mini_batches(
        costs, contexts, {.kv_tokens = max_cells, .act_tokens = max_cells, .tokens = max_cells},
        plan->packing);
    std::vector<std::vector<int>> batches;
    if (!formed.ok()) return batches;  // the engine says that sequences are left out
    for (const policy::MiniBatch& batch : *formed) batches.push_back(batch.members);
    return batches;
  };
  return decisions;
}

StepComparison BatchPolicy::observe(const engine::StepTimes& times) {
  const policy::HybridCosts costs = policy::corrected(options_.costs, scales_);
  policy::PipelineStep step{.n_layer = costs.n_layer,
                            .load_weights_s = costs.load_weights_s,
                            .step_s = costs.step_s,
                            .layer = {},
                            .recomputing = {},
                            .last_recomputing = {},
                            .recompute_layers = recomputed_layers()};
  double link_s = 0;
  double observed_link_s = 0;
  double gen_s = 0;
  double observed_gen_s = 0;
  double forward_s = 0;
  double observed_forward_s = 0;
  for (const BatchSample& s : times.samples) {
    const policy::MiniBatch batch = loaded_batch(s);
    policy::MiniBatchTimes t = policy::mini_batch_times(costs, batch, times.rows);
    const double attended_s = policy::products_s(costs, s.rows, times.rows) +
                              costs.attend.at(static_cast<double>(s.cells));
    const double generated_s = costs.kv_gen.at(static_cast<double>(s.act_tokens));
    t.compute_s = generated_s + attended_s;
    t.store_s = 0;  // new rows go to host memory, which is no link's
    if (s.layer >= step.recompute_layers) {
      link_s += t.load_s;
      gen_s += generated_s;
      forward_s += attended_s;
      observed_link_s += s.load_act_s + s.load_kv_s;
      observed_gen_s += s.generate_s;
      observed_forward_s += s.forward_s;
    }
    if (s.layer != costs.n_layer - 1) continue;
    step.layer.push_back(t);
    step.recomputing.push_back(
        policy::recomputing_times(costs, batch, times.rows, 1, /*last=*/false));
    step.last_recomputing.push_back(
        policy::recomputing_times(costs, batch, times.rows, 1, /*last=*/true));
  }
  const policy::StepTimes predicted = policy::following_step_times(step);
  if (times.decode_only) {
    // Loads that are a small part of a step say little of the link, which weights come over too.
    if (link_s > kMinObservedLoads * times.total_s) {
      policy::observe(scales_.link, link_s / scales_.link, observed_link_s);
    }
    policy::observe(scales_.kv_gen, gen_s / scales_.kv_gen, observed_gen_s);
    policy::observe(scales_.forward, forward_s / scales_.forward, observed_forward_s);
  }
  const auto idle = [&](double busy_s) {
    return times.total_s > 0 ? std::max(0.0, 1 - busy_s / times.total_s) : 0;
  };
  return {.predicted_s = predicted.step_s,
          .measured_s = times.total_s,
          .link_idle = idle(times.link_busy_s),
          .compute_idle = idle(times.total_s - times.wait_s)};
}

}  // namespace hcache::state
