#include "policy/compression.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>

namespace hcache::policy {
namespace {

constexpr std::array kPolicies = {
    CompressionInfo{Compression::kNone, "none", "every row is kept", ScoreSource::kNobody, false},
    CompressionInfo{Compression::kRecent, "recent", "the first rows and the last ones",
                    ScoreSource::kNobody, false},
    CompressionInfo{Compression::kRandom, "random", "any rows: what a score has to beat",
                    ScoreSource::kNobody, true},
    CompressionInfo{Compression::kCar, "car",
                    "the rows that the context's own attention used most, the same for all heads",
                    ScoreSource::kEveryRow, false},
    CompressionInfo{Compression::kSnap, "snap",
                    "by head, the rows that the last rows' attention used most, and their "
                    "neighbours",
                    ScoreSource::kLastRows, true},
    CompressionInfo{Compression::kSelf, "self",
                    "by head, the rows that repeating the context needs most",
                    ScoreSource::kRepeated, true},
};
constexpr std::array<std::string_view, 3> kBudgetNames = {"uniform", "profile", "ranked"};

// A row's neighbours on either side whose score it may have: what answers lies beside what is asked
// for.
constexpr int64_t kPooled = 3;

template <typename Names>
Status no_such(std::string_view what, std::string_view name, const Names& names) {
  return invalid_argument(
      fmt::format("no {} '{}'; there are {}", what, name, fmt::join(names, ", ")));
}

// The largest of each value and its neighbours.
std::vector<double> pooled(const std::vector<double>& values) {
  const auto n = static_cast<int64_t>(values.size());
  std::vector<double> out(values.size());
  for (int64_t i = 0; i < n; ++i) {
    const auto from = values.begin() + std::max<int64_t>(0, i - kPooled);
    const auto to = values.begin() + std::min(n, i + kPooled + 1);
    out[static_cast<size_t>(i)] = *std::max_element(from, to);
  }
  return out;
}

void add(std::span<const float> values, std::vector<double>& sums) {
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(values[i]);
}

std::vector<double> scores_of(Compression policy, const RowScores& scores, int layer, int head,
                              std::mt19937_64& random) {
  const int64_t n_rows = scores.n_rows;
  std::vector<double> out(static_cast<size_t>(n_rows));
  switch (policy) {
    case Compression::kNone:
    case Compression::kRecent: std::iota(out.begin(), out.end(), 0.0); break;
    case Compression::kRandom:
      for (double& score : out) score = static_cast<double>(random() >> 11);
      break;
    case Compression::kCar:
      for (int each = 0; each < scores.n_head_kv; ++each) {
        add(scores.of(scores.sum, layer, each), out);
      }
      break;
    case Compression::kSnap:
      add(scores.of(scores.sum, layer, head), out);
      out = pooled(out);
      break;
    case Compression::kSelf: add(scores.of(scores.top, layer, head), out); break;
  }
  for (int64_t i = 0; i < n_rows; ++i) {
    if (i >= kSinks && i < n_rows - kWindow) continue;
    out[static_cast<size_t>(i)] = std::numeric_limits<double>::infinity();
  }
  return out;
}

// The n that score highest come first, of equals the later ones.
void rank_first(std::vector<int32_t>& indices, int64_t n, const std::vector<double>& score) {
  std::iota(indices.begin(), indices.end(), 0);
  std::nth_element(indices.begin(), indices.begin() + n, indices.end(), [&](int32_t a, int32_t b) {
    const double of_a = score[static_cast<size_t>(a)];
    const double of_b = score[static_cast<size_t>(b)];
    return of_a != of_b ? of_a > of_b : a > b;
  });
}

}  // namespace

std::span<const CompressionInfo> compressions() { return kPolicies; }

const CompressionInfo& compression_info(Compression policy) {
  return kPolicies.at(static_cast<size_t>(policy));
}

Result<Compression> parse_compression(std::string_view name) {
  std::vector<std::string_view> names;
  for (const CompressionInfo& info : kPolicies) {
    if (info.name == name) return info.policy;
    names.push_back(info.name);
  }
  return no_such("policy of compression", name, names);
}

Result<LayerBudgets> parse_layer_budgets(std::string_view name) {
  const auto at = std::find(kBudgetNames.begin(), kBudgetNames.end(), name);
  if (at != kBudgetNames.end()) return static_cast<LayerBudgets>(at - kBudgetNames.begin());
  return no_such("way to share rows out", name, kBudgetNames);
}

std::vector<double> layer_budgets(LayerBudgets how, double budget,
                                  std::span<const double> density) {
  std::vector<double> shares(density.size(), budget);
  if (how == LayerBudgets::kUniform) return shares;
  // Layers that keep all leave the others what they do not need; each round finds one at least.
  double left = budget * static_cast<double>(density.size());
  std::vector<size_t> open(density.size());
  std::iota(open.begin(), open.end(), size_t{0});
  while (!open.empty()) {
    double sum = 0;
    for (const size_t layer : open) sum += density[layer];
    const auto share = [&](size_t layer) {
      return sum > 0 ? left * density[layer] / sum : left / static_cast<double>(open.size());
    };
    const auto full = std::stable_partition(open.begin(), open.end(),
                                            [&](size_t layer) { return share(layer) < 1; });
    if (full == open.end()) {
      for (const size_t layer : open) shares[layer] = share(layer);
      break;
    }
    for (auto layer = full; layer != open.end(); ++layer) shares[*layer] = 1;
    left -= static_cast<double>(open.end() - full);
    open.erase(full, open.end());
  }
  return shares;
}

std::vector<double> ranked_budgets(Compression policy, const RowScores& scores, double budget) {
  std::vector<double> shares(static_cast<size_t>(scores.n_layer), budget);
  if (compression_info(policy).source == ScoreSource::kNobody || budget >= 1) return shares;
  std::mt19937_64 random;
  std::vector<double> score;
  for (int layer = 0; layer < scores.n_layer; ++layer) {
    for (int head = 0; head < scores.n_head_kv; ++head) {
      const std::vector<double> own = scores_of(policy, scores, layer, head, random);
      score.insert(score.end(), own.begin(), own.end());
    }
  }
  const auto n_all = static_cast<int64_t>(score.size());
  const int64_t of_layer = n_all / scores.n_layer;
  const int64_t n = std::min<int64_t>(n_all, std::llround(budget * static_cast<double>(n_all)));
  std::vector<int32_t> ranked(score.size());
  rank_first(ranked, n, score);
  std::fill(shares.begin(), shares.end(), 0);
  for (int64_t i = 0; i < n; ++i) {
    shares[static_cast<size_t>(ranked[static_cast<size_t>(i)] / of_layer)] += 1;
  }
  for (double& share : shares) share /= static_cast<double>(of_layer);
  return shares;
}

std::vector<double> served_budgets(Compression policy, const RowScores& scores, double budget) {
  if (policy == Compression::kSelf) return ranked_budgets(policy, scores, budget);
  return std::vector<double>(static_cast<size_t>(scores.n_layer), budget);
}

double choose_budget(std::span<const BudgetKl> measured, double most_kl) {
  double least = 1;
  double refused = 0;  // the largest that diverges by more
  for (const BudgetKl& each : measured) {
    if (each.kl > most_kl) refused = std::max(refused, each.budget);
  }
  for (const BudgetKl& each : measured) {
    if (each.budget > refused) least = std::min(least, each.budget);
  }
  return least;
}

int64_t kept_rows(int64_t n_rows, double budget) {
  const auto wanted = std::llround(budget * static_cast<double>(n_rows));
  return std::min(n_rows, std::max<int64_t>(wanted, kSinks + kWindow));
}

std::vector<int32_t> choose_rows(Compression policy, const RowScores& scores, int layer,
                                 double budget, uint64_t seed) {
  const int64_t n_rows = scores.n_rows;
  const int64_t n = policy == Compression::kNone ? n_rows : kept_rows(n_rows, budget);
  std::mt19937_64 random(seed + static_cast<uint64_t>(layer));
  std::vector<int32_t> kept;
  kept.reserve(static_cast<size_t>(n * scores.n_head_kv));
  std::vector<int32_t> rows(static_cast<size_t>(n_rows));
  for (int head = 0; head < scores.n_head_kv; ++head) {
    if (head > 0 && !compression_info(policy).by_head) {
      std::copy_n(rows.begin(), n, std::back_inserter(kept));
      continue;
    }
    rank_first(rows, n, scores_of(policy, scores, layer, head, random));
    std::sort(rows.begin(), rows.begin() + n);
    kept.insert(kept.end(), rows.begin(), rows.begin() + n);
  }
  return kept;
}

}  // namespace hcache::policy
