#include "state/budget_quality.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "base/log.h"
#include "predictions.h"
#include "state/kept_state.h"
#include "state/second_reading.h"

namespace hcache::state {
namespace {

constexpr double kBudgets[] = {0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1};
constexpr int64_t kPredicted = 128;  // tokens behind the rows
constexpr int64_t kLeastContext = 256;

Result<policy::RowScores> score_rows(engine::Engine& engine, engine::SeqId seq,
                                     policy::Compression how, std::span<const int32_t> context) {
  return how == policy::Compression::kSelf ? SecondReading::all_of(engine, seq, context)
                                           : score_by_last_rows(engine, seq, context);
}

Status keep_rows(engine::Engine& engine, engine::SeqId seq, policy::Compression how,
                 const policy::RowScores& scores, double budget) {
  const std::vector<double> shares = policy::served_budgets(how, scores, budget);
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    const double share = shares[static_cast<size_t>(layer)];
    HCACHE_RETURN_IF_ERROR(
        engine.keep_rows(seq, layer, policy::choose_rows(how, scores, layer, share, 0)));
  }
  return {};
}

// `exact` holds the context.
Result<std::vector<policy::BudgetKl>> measure(engine::Engine& engine, engine::SeqId exact,
                                              policy::Compression how,
                                              std::span<const int32_t> context,
                                              std::span<const int32_t> behind) {
  const auto n_context = static_cast<int64_t>(context.size());
  HCACHE_ASSIGN_OR_RETURN(const policy::RowScores scores, score_rows(engine, exact, how, context));
  HCACHE_ASSIGN_OR_RETURN(const Predictions expected, predict(engine, exact, behind));
  std::vector<policy::BudgetKl> measured;
  for (const double budget : kBudgets) {
    HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine.fork_sequence(exact, n_context));
    Status status = keep_rows(engine, seq, how, scores, budget);
    Result<Predictions> predicted = status.ok() ? predict(engine, seq, behind) : status;
    HCACHE_RETURN_IF_ERROR(engine.release_sequence(seq));
    HCACHE_RETURN_IF_ERROR(predicted.status());
    measured.push_back({budget, mean_kl(expected, *predicted)});
  }
  return measured;
}

std::vector<policy::BudgetKl> from_json(const nlohmann::json& json) {
  std::vector<policy::BudgetKl> measured;
  if (!json.is_array()) return {};
  for (const nlohmann::json& each : json) {
    if (!each.is_array() || each.size() != 2 || !each[0].is_number() || !each[1].is_number()) {
      return {};
    }
    measured.push_back({each[0].get<double>(), each[1].get<double>()});
    const policy::BudgetKl& last = measured.back();
    if (!(last.budget > 0 && last.budget <= 1 && last.kl >= 0)) return {};
  }
  return measured;
}

}  // namespace

Result<std::vector<policy::BudgetKl>> measure_budgets(engine::Engine& engine,
                                                      policy::Compression how,
                                                      std::span<const int32_t> tokens) {
  const int64_t free = engine.arena_free_cells();
  const auto n =
      std::min<int64_t>({static_cast<int64_t>(tokens.size()), (free - SecondReading::kRows) / 2,
                         engine.model().hparams().n_ctx_train - SecondReading::kRows});
  if (n < kLeastContext + kPredicted) {
    return resource_exhausted(fmt::format(
        "measuring what fewer rows cost takes {} tokens of context, and room for {} of the KV "
        "cache, of which {} are free",
        kLeastContext + kPredicted, 2 * (kLeastContext + kPredicted) + SecondReading::kRows, free));
  }
  const auto context = tokens.first(static_cast<size_t>(n - kPredicted));
  const auto behind = tokens.subspan(context.size(), kPredicted);
  HCACHE_ASSIGN_OR_RETURN(const engine::SeqId exact, engine.create_sequence());
  const Status filled = engine.prefill(exact, context);
  Result<std::vector<policy::BudgetKl>> measured =
      filled.ok() ? measure(engine, exact, how, context, behind) : filled;
  HCACHE_RETURN_IF_ERROR(engine.release_sequence(exact));
  return measured;
}

Result<std::vector<policy::BudgetKl>> budget_kls(
    Env& env, engine::Engine& engine, policy::Compression how, const std::string& dir,
    const std::string& model, const std::function<Result<std::vector<int32_t>>()>& sample) {
  const std::string path =
      join_path(dir, fmt::format("rows-{}-{}", policy::compression_info(how).name, model));
  if (const auto text = read_whole_file(env, path); text.ok()) {
    auto before = from_json(nlohmann::json::parse(*text, nullptr, false));
    if (!before.empty()) return before;
  }
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, sample());
  HCACHE_ASSIGN_OR_RETURN(auto measured, measure_budgets(engine, how, tokens));
  nlohmann::json json;
  for (const policy::BudgetKl& each : measured) json.push_back({each.budget, each.kl});
  HCACHE_RETURN_IF_ERROR(env.make_dirs(dir));
  HCACHE_RETURN_IF_ERROR(write_whole_file(env, path, json.dump()));
  return measured;
}

double budget_within(std::span<const policy::BudgetKl> measured, double most_kl) {
  const double budget = policy::choose_budget(measured, most_kl);
  std::string all;
  for (const policy::BudgetKl& each : measured) {
    all += fmt::format("{}{:.2g} of {:g}", all.empty() ? "" : ", ", each.kl, each.budget);
  }
  log::info("conversations are restored from {:g} of their rows: by shares the mean KL is {}",
            budget, all);
  return budget;
}

}  // namespace hcache::state
