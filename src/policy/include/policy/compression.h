// Which rows of the KV cache layers can do without: compression by attention (CaR §III-D), and the
// policies that it is measured against.
//
// A policy scores rows by what attention fell on, and each KV head of a layer keeps those with the
// highest scores, all heads of a layer as many. Pure functions. Threading: no state.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::policy {

enum class Compression : uint8_t {
  kNone,
  kRecent,
  kRandom,
  kCar,
  kSnap,
  kSelf,
};

// Whose attention scores the rows.
enum class ScoreSource : uint8_t {
  kNobody,
  kEveryRow,  // of the context itself
  kLastRows,  // those that kWindow keeps
  kRepeated,  // of the context once more, behind itself, part by part
};

struct CompressionInfo {
  Compression policy;
  std::string_view name;
  std::string_view summary;
  ScoreSource source;
  bool by_head;  // whether a layer's heads keep different rows
};

[[nodiscard]] std::span<const CompressionInfo> compressions();
[[nodiscard]] const CompressionInfo& compression_info(Compression policy);
// kInvalidArgument names those that there are.
[[nodiscard]] Result<Compression> parse_compression(std::string_view name);

// Rows that every policy but kNone keeps: attention sinks, and what was said last.
inline constexpr int64_t kSinks = 4;
inline constexpr int64_t kWindow = 32;

// Of budgets that saved conversations may have.
inline constexpr double kLeastKvBudget = 0.01;

// Of kEveryRow, rows whose attention stands for all rows': every so many. Their weights cost at
// most a thirty-second of what attention does.
inline constexpr int64_t kScoredStride = 16;

// What attention fell on, by layer, KV head and row.
struct RowScores {
  int n_layer = 0;
  int n_head_kv = 0;
  int64_t n_rows = 0;
  std::vector<float> sum{};  // of all observed weights
  std::vector<float> top{};  // the largest

  [[nodiscard]] std::span<const float> of(const std::vector<float>& values, int layer,
                                          int head) const {
    return std::span(values).subspan(
        static_cast<size_t>((static_cast<int64_t>(layer) * n_head_kv + head) * n_rows),
        static_cast<size_t>(n_rows));
  }
};

// How the rows that are kept are shared out over the layers.
enum class LayerBudgets : uint8_t {
  kUniform,
  kProfile,  // in proportion to the weights that count in a layer (CaR §III-D)
  kRanked,   // by their scores, all layers' rows together
};
[[nodiscard]] Result<LayerBudgets> parse_layer_budgets(std::string_view name);

// Each layer's share of the rows, whose mean is `budget`, in (0, 1]. density: per layer, the share
// of attention weights that count, by a profile; its size is the number of layers. A layer that the
// proportion would give more than all keeps all. With kRanked see ranked_budgets().
[[nodiscard]] std::vector<double> layer_budgets(LayerBudgets how, double budget,
                                                std::span<const double> density);

// With kRanked: the rows of all layers and heads are ranked by their scores, and a layer's share
// are those of its rows that are among the first `budget` of all. Sinks and window come first in
// each. Where nobody scores them, layers share evenly.
[[nodiscard]] std::vector<double> ranked_budgets(Compression policy, const RowScores& scores,
                                                 double budget);

// The layers' shares of a conversation that is saved so: ranked by kSelf, whose scores compare
// between layers; by others even, since sums of weights do not.
[[nodiscard]] std::vector<double> served_budgets(Compression policy, const RowScores& scores,
                                                 double budget);

// Mean KL divergence, in nats, of predictions behind a share of the rows.
struct BudgetKl {
  double budget = 1;
  double kl = 0;
};
// The smallest share that diverges by `most_kl` at most, and no larger one by more; 1: none does.
[[nodiscard]] double choose_budget(std::span<const BudgetKl> measured, double most_kl);

// Of so many rows, what a layer keeps at a budget: never fewer than sinks and window.
[[nodiscard]] int64_t kept_rows(int64_t n_rows, double budget);

// The rows that a layer's heads keep, [n_head_kv][n] in ascending order; all of them with kNone.
// `seed`: of kRandom. scores.sum and .top are empty where the policy's source is kNobody.
[[nodiscard]] std::vector<int32_t> choose_rows(Compression policy, const RowScores& scores,
                                               int layer, double budget, uint64_t seed);

}  // namespace hcache::policy
