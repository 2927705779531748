#include "policy/hybrid_pipeline.h"

namespace hcache::policy {

namespace {

double count(int64_t n) { return static_cast<double>(n); }

// Times at which the link and computation are done with what they were given so far.
class Pipeline {
 public:
  explicit Pipeline(const PipelineStep& step) : step_(step) {}

  void load_first_weights() {
    link_ += step_.load_weights_s;
    weights_ready_ = link_;
  }

  void run_step(bool another_follows) {
    for (int32_t l = 0; l < step_.n_layer; ++l) {
      run_layer(jobs_of(l), another_follows || l + 1 < step_.n_layer);
    }
    compute_ += step_.step_s;
  }

  // Stores what the last two mini-batches computed, and returns when all is done.
  double drain() {
    store(before_);
    store(last_);
    return std::max(link_, compute_);
  }
  [[nodiscard]] double computed_s() const { return compute_; }

 private:
  struct Job {
    double done_s = 0;
    double store_s = 0;
  };

  const std::vector<MiniBatchTimes>& jobs_of(int32_t layer) const {
    if (layer >= step_.recompute_layers) return step_.layer;
    return layer + 1 < step_.recompute_layers ? step_.recomputing : step_.last_recomputing;
  }

  void store(Job& job) {
    if (job.store_s > 0) link_ = std::max(link_, job.done_s) + job.store_s;
    job.store_s = 0;
  }

  void run_layer(const std::vector<MiniBatchTimes>& jobs, bool load_next_weights) {
    const double slot_free_s = last_.done_s;  // the layer before has computed
    double next_weights_s = weights_ready_;
    for (const MiniBatchTimes& job : jobs) {
      double loaded_s = 0;
      if (job.load_s > 0) {
        link_ = std::max(link_, before_.done_s) + job.load_s;
        loaded_s = link_;
      }
      store(before_);
      if (load_next_weights && step_.load_weights_s > 0) {
        link_ =
            std::max(link_, slot_free_s) + step_.load_weights_s / static_cast<double>(jobs.size());
        next_weights_s = link_;
      }
      compute_ = std::max({compute_, loaded_s, weights_ready_}) + job.compute_s;
      before_ = last_;
      last_ = {compute_, job.store_s};
    }
    weights_ready_ = next_weights_s;
  }

  const PipelineStep& step_;
  double link_ = 0;
  double compute_ = 0;
  double weights_ready_ = 0;
  Job last_;
  Job before_;
};

// What a step takes of the link and of computation, whatever waits.
StepTimes busy_times(const PipelineStep& step) {
  StepTimes times{.link_s = step.n_layer * step.load_weights_s, .compute_s = step.step_s};
  const auto add = [&](const std::vector<MiniBatchTimes>& jobs, int32_t layers) {
    for (const MiniBatchTimes& job : jobs) {
      times.link_s += layers * (job.load_s + job.store_s);
      times.compute_s += layers * job.compute_s;
    }
  };
  add(step.layer, step.n_layer - step.recompute_layers);
  if (step.recompute_layers > 0) {
    add(step.recomputing, step.recompute_layers - 1);
    add(step.last_recomputing, 1);
  }
  return times;
}

}  // namespace

double products_s(const HybridCosts& costs, int64_t rows, int64_t step_rows) {
  if (rows <= 0) return 0;
  if (costs.pass_rows == 0) return costs.forward.at(count(rows));
  const int64_t n_passes = (step_rows - 1) / costs.pass_rows + 1;
  const double step_s =
      costs.forward.slope * count(step_rows) + costs.forward.intercept * count(n_passes);
  return step_s * count(rows) / count(step_rows);
}

MiniBatchTimes mini_batch_times(const HybridCosts& costs, const MiniBatch& batch,
                                int64_t step_rows) {
  MiniBatchTimes times;
  times.load_s = costs.load_kv.at(count(batch.kv_tokens)) +
                 costs.load_act.at(count(batch.act_tokens - batch.act_device_tokens));
  times.compute_s = costs.kv_gen.at(count(batch.act_tokens)) +
                    products_s(costs, batch.rows, step_rows) +
                    costs.attend.at(count(batch.tokens() + batch.rows));
  times.store_s =
      costs.store_kv.at(count(batch.kv_rows)) + costs.store_act.at(count(batch.act_rows));
  return times;
}

MiniBatchTimes recomputing_times(const HybridCosts& costs, const MiniBatch& batch,
                                 int64_t step_rows, double share, bool last) {
  const double kept = 1 - share;
  const double tokens = share * count(batch.tokens());
  MiniBatchTimes times;
  times.load_s = costs.load_kv.at(kept * count(batch.kv_tokens)) +
                 costs.load_act.at(kept * count(batch.act_tokens - batch.act_device_tokens));
  times.compute_s = products_s(costs, batch.rows, step_rows) +
                    costs.attend.at(count(batch.tokens() + batch.rows));
  if (last) {
    times.compute_s += costs.kv_gen.at(kept * count(batch.act_tokens) + tokens);
  } else {
    times.compute_s += costs.kv_gen.at(kept * count(batch.act_tokens)) + costs.forward.at(tokens) +
                       costs.attend_prompt.at(share * share * batch.squared_tokens / 2);
  }
  times.store_s = costs.store_kv.at(kept * count(batch.kv_rows)) +
                  costs.store_act.at(kept * count(batch.act_rows));
  return times;
}

PipelineStep pipeline_step(const HybridCosts& costs, const std::vector<MiniBatch>& batches,
                           const Recompute& recompute) {
  PipelineStep step{.n_layer = costs.n_layer,
                    .load_weights_s = costs.load_weights_s,
                    .step_s = costs.step_s,
                    .layer = {},
                    .recomputing = {},
                    .last_recomputing = {},
                    .recompute_layers = std::min(recompute.layers, costs.n_layer)};
  int64_t rows = 0;
  for (const MiniBatch& batch : batches) rows += batch.rows;
  for (const MiniBatch& batch : batches) {
    step.layer.push_back(mini_batch_times(costs, batch, rows));
    if (step.recompute_layers == 0) continue;
    step.recomputing.push_back(recomputing_times(costs, batch, rows, recompute.share, false));
    step.last_recomputing.push_back(recomputing_times(costs, batch, rows, recompute.share, true));
  }
  return step;
}

StepTimes step_times(const PipelineStep& step) {
  StepTimes times = busy_times(step);
  Pipeline pipeline(step);
  pipeline.load_first_weights();
  pipeline.run_step(/*another_follows=*/false);
  times.step_s = pipeline.drain();
  return times;
}

StepTimes following_step_times(const PipelineStep& step) {
  StepTimes times = busy_times(step);
  Pipeline pipeline(step);
  pipeline.load_first_weights();
  pipeline.run_step(/*another_follows=*/true);
  const double first_s = pipeline.computed_s();
  pipeline.run_step(/*another_follows=*/true);
  times.step_s = pipeline.computed_s() - first_s;
  return times;
}

}  // namespace hcache::policy
