#include "policy/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/units.h"

namespace hcache::policy {

namespace {

std::string seconds_text(double seconds) { return format_duration(std::llround(seconds * 1e9)); }
std::string bytes_text(int64_t bytes) { return format_bytes(static_cast<uint64_t>(bytes)); }

// Columns as wide as their widest cell; the first `left` ones are aligned left.
std::string align(const std::vector<std::vector<std::string>>& rows, size_t left) {
  std::vector<size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      if (i > 0) line += "  ";
      line += i < left ? fmt::format("{:<{}}", row[i], width[i])
                       : fmt::format("{:>{}}", row[i], width[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

PlanRow row_of(const Plan& plan) {
  return {std::string(mode_name(plan.mode)), plan.schedule, plan.predicted, plan.restored_tokens,
          plan.prefill_tokens};
}

}  // namespace

Result<std::vector<PlanRow>> compare_modes(const RestoreCosts& costs, const RestoreRequest& request,
                                           const std::vector<Mode>& modes) {
  std::vector<PlanRow> rows;
  RestoreRequest one = request;
  for (Mode mode : modes) {
    one.mode = mode;
    HCACHE_ASSIGN_OR_RETURN(const Plan plan, plan_restore(costs, one));
    rows.push_back(row_of(plan));
  }
  return rows;
}

std::string format_table(const std::vector<PlanRow>& rows) {
  std::vector<std::vector<std::string>> cells = {
      {"method", "schedule", "first token", "restored", "I/O busy", "compute", "read", "prefill"}};
  for (const PlanRow& row : rows) {
    const Prediction& p = row.predicted;
    cells.push_back({row.method, row.schedule, seconds_text(p.makespan_s),
                     seconds_text(p.restored_s), seconds_text(p.io_busy_s),
                     seconds_text(p.compute_busy_s), bytes_text(p.bytes_read),
                     fmt::format("{} tokens", row.prefill_tokens)});
  }
  return align(cells, 2);
}

std::string format_timeline(const Plan& plan, const Timeline& timeline) {
  // The methods of layer l over the runs: "H", or "H/KV" where runs differ.
  auto methods = [&](size_t l) {
    std::string text;
    for (const PlanRun& run : plan.runs) {
      if (!text.empty()) text += '/';
      text += method_name(run.layers[l]);
    }
    return text.empty() ? std::string("prefill") : text;
  };
  std::vector<std::vector<std::string>> cells = {
      {"layers", "method", "read from", "to", "compute from", "to", "prefill to"}};
  const auto& layers = timeline.layers;
  for (size_t begin = 0; begin < layers.size();) {
    size_t end = begin + 1;
    while (end < layers.size() && methods(end) == methods(begin)) ++end;
    const LayerTimes& a = layers[begin];
    const LayerTimes& b = layers[end - 1];
    const bool reads = b.io_end > 0;
    const bool restores = plan.restored_tokens > 0;
    cells.push_back(
        {end - begin == 1 ? fmt::format("{}", begin) : fmt::format("{}-{}", begin, end - 1),
         methods(begin), reads ? seconds_text(a.io_begin) : "", reads ? seconds_text(b.io_end) : "",
         restores ? seconds_text(a.compute_begin) : "", restores ? seconds_text(b.compute_end) : "",
         b.prefill_end > 0 ? seconds_text(b.prefill_end) : ""});
    begin = end;
  }
  return align(cells, 2);
}

std::string format_save_plan(const SavePlan& plan) {
  const double share =
      plan.kv_bytes_per_token > 0
          ? static_cast<double>(plan.bytes_per_token) / static_cast<double>(plan.kv_bytes_per_token)
          : 0;
  return fmt::format("save {}: {} ({} per token, {:.2f} of the KV cache), first token after {}\n",
                     save_mode_name(plan.mode), plan.schedule, bytes_text(plan.bytes_per_token),
                     share, seconds_text(plan.predicted.makespan_s));
}

std::string format_hardware(const HardwareSetup& setup, const HardwarePlan& plan) {
  std::string text = fmt::format(
      "{} on {} x {}, {}; history {} tokens\n"
      "  products {:.1f} TFLOP/s ({:.0f} % of peak, {}), link {}, {:.0f} FLOP per byte\n",
      setup.model.title, setup.n_gpu, setup.device.title,
      setup.n_ssd > 0 ? fmt::format("{} SSD", setup.n_ssd) : std::string("host DRAM"),
      setup.history, plan.flops / 1e12, setup.model.gemm_efficiency * 100,
      setup.model.calibrated ? "calibrated" : "assumed", format_rate(plan.link_bytes_per_s),
      plan.flops / plan.link_bytes_per_s);
  text += plan.balanced_bytes_per_s > 0
              ? fmt::format("  hidden states alone are balanced at {}\n",
                            format_rate(plan.balanced_bytes_per_s))
              : std::string("  hidden states are no smaller than the KV cache here\n");
  text += fmt::format("  per layer: IO_H {}, IO_KV {}, C_H {}, C_token {}\n\n",
                      seconds_text(plan.layer.io_hidden), seconds_text(plan.layer.io_kv),
                      seconds_text(plan.layer.c_hidden), seconds_text(plan.layer.c_token));

  const Plan& exact = plan.exact;
  int32_t counts[4] = {};
  if (exact.runs.empty()) {
    counts[static_cast<size_t>(Method::kRecompute)] = exact.n_layer;
  } else {
    for (Method m : exact.runs.front().layers) ++counts[static_cast<size_t>(m)];
  }
  auto ratio = [&](int64_t bytes) {
    return bytes > 0 ? fmt::format("{:.2f}x", static_cast<double>(plan.kv_bytes_per_token) /
                                                  static_cast<double>(bytes))
                     : std::string("-");
  };
  text += align({{"", "schedule", "time", "per token", "KV / this"},
                 {"closed form (paper)", plan.paper.schedule, seconds_text(plan.paper.makespan_s),
                  bytes_text(plan.paper_bytes_per_token), ratio(plan.paper_bytes_per_token)},
                 {"exact search",
                  paper_schedule_string(counts[static_cast<size_t>(Method::kHidden)],
                                        counts[static_cast<size_t>(Method::kKv)],
                                        counts[static_cast<size_t>(Method::kRecompute)]),
                  seconds_text(exact.predicted.makespan_s), bytes_text(plan.exact_bytes_per_token),
                  ratio(plan.exact_bytes_per_token)}},
                2);
  std::vector<PlanRow> rows = {row_of(exact)};
  for (const ModePrediction& m : plan.modes) rows.push_back(row_of(m.plan));
  return text + '\n' + format_table(rows);
}

}  // namespace hcache::policy
