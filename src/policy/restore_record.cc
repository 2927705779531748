#include "policy/restore_record.h"

#include <algorithm>

namespace hcache::policy {

TierBytes& TierBytes::operator+=(const TierBytes& other) {
  dram += other.dram;
  disk += other.disk;
  remote += other.remote;
  return *this;
}

RestoreRecord planned_record(const Plan& plan, int32_t n_layer) {
  RestoreRecord record;
  record.layers.resize(static_cast<size_t>(n_layer));
  for (size_t l = 0; l < record.layers.size(); ++l) {
    for (const PlanRun& run : plan.runs) {
      record.layers[l].method = run.layers[l];
      if (run.layers[l] != Method::kNone) break;
    }
  }
  record.schedule = plan.schedule;
  record.restored_tokens = plan.restored_tokens;
  record.predicted_first_s = plan.predicted.makespan_s;
  record.predicted_restore_s = plan.predicted.restored_s;
  record.predicted_project_s = plan.predicted.project_busy_s;
  for (const PlanRun& run : plan.runs) {
    const auto count = [&](Method m) {
      return std::count(run.layers.begin(), run.layers.end(), m);
    };
    const auto hidden = count(Method::kHidden);
    const auto kv = count(Method::kKv);
    const auto recomputed = count(Method::kRecompute);
    if (recomputed > hidden && recomputed > kv) {
      record.recomputed_tokens += run.tokens;
    } else if (hidden >= kv) {
      record.hidden_tokens += run.tokens;
    } else {
      record.kv_tokens += run.tokens;
    }
  }
  return record;
}

// What both took beyond the time that passed, they did at the same time.
double overlap(double io_busy_s, double compute_busy_s, double restore_s) {
  const double shorter = std::min(io_busy_s, compute_busy_s);
  if (shorter <= 0) return 0;
  return std::clamp((io_busy_s + compute_busy_s - restore_s) / shorter, 0.0, 1.0);
}

}  // namespace hcache::policy
