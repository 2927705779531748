#include "policy/return_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace hcache::policy {
namespace {

constexpr double kFirstSpanS = 2;
constexpr double kGrowth = 1.6;
// A class's own rate counts as much as everybody's once so many of its objects have returned.
constexpr double kPriorReturns = 20;
// What is believed before anything was seen: one return in an hour of watching.
constexpr double kPriorSeconds = 3600;
// The last span has no end; it is looked at for this long.
constexpr double kLastSpanS = 24 * 3600;

double span_s(int age) {
  return age == ReturnModel::kAges - 1
             ? kLastSpanS
             : ReturnModel::age_begin_s(age + 1) - ReturnModel::age_begin_s(age);
}

}  // namespace

int ReturnModel::class_of(uint32_t uses) {
  if (uses <= 4) return static_cast<int>(std::max<uint32_t>(uses, 1)) - 1;
  return std::min(static_cast<int>(std::bit_width(uses - 1)) + 1, kClasses - 1);
}

double ReturnModel::age_begin_s(int age) {
  if (age <= 0) return 0;
  if (age >= kAges) return std::numeric_limits<double>::infinity();
  // 2 s * (1 + 1.6 + ... + 1.6^(age - 1))
  return kFirstSpanS * (std::pow(kGrowth, age) - 1) / (kGrowth - 1);
}

int ReturnModel::age_of(double age_s) {
  if (!(age_s > 0)) return 0;
  const double spans = std::log1p(age_s * (kGrowth - 1) / kFirstSpanS) / std::log(kGrowth);
  return std::clamp(static_cast<int>(std::min(spans, double{kAges})), 0, kAges - 1);
}

void ReturnModel::returned(int object_class, double age_s) {
  cells_[static_cast<size_t>(object_class)][static_cast<size_t>(age_of(age_s))].returns += 1;
}

void ReturnModel::watched(int object_class, double from_age_s, double to_age_s) {
  Row& row = cells_[static_cast<size_t>(object_class)];
  double from = std::max(from_age_s, 0.0);
  for (int age = age_of(from); age < kAges && from < to_age_s; ++age) {
    const double until = std::min(to_age_s, age_begin_s(age + 1));
    if (until <= from) continue;  // rounding put `from` a span too early
    row[static_cast<size_t>(age)].seconds += until - from;
    from = until;
  }
}

// A class's rates, drawn towards everybody's where it has been seen little.
std::array<double, ReturnModel::kAges> ReturnModel::rates(const Row& row, const Row& pooled) const {
  std::array<double, kAges> rates{};
  for (size_t age = 0; age < kAges; ++age) {
    const double common = (pooled[age].returns + 1) / (pooled[age].seconds + kPriorSeconds);
    rates[age] = (row[age].returns + kPriorReturns) / (row[age].seconds + kPriorReturns / common);
  }
  return rates;
}

void ReturnModel::learn() {
  Row pooled{};
  for (const Row& row : cells_) {
    for (size_t age = 0; age < kAges; ++age) {
      pooled[age].returns += row[age].returns;
      pooled[age].seconds += row[age].seconds;
    }
  }
  for (size_t c = 0; c < kClasses; ++c) {
    const auto rate = rates(cells_[c], pooled);
    for (int age = 0; age < kAges; ++age) {
      double still_out = 1;  // chance that it has not returned
      double taken_up_s = 0;
      double best = 0;
      for (int ahead = age; ahead < kAges; ++ahead) {
        const double r = rate[static_cast<size_t>(ahead)];
        const double stays_out = std::exp(-r * span_s(ahead));
        taken_up_s += still_out * (1 - stays_out) / r;
        still_out *= stays_out;
        best = std::max(best, (1 - still_out) / taken_up_s);
      }
      index_[c][static_cast<size_t>(age)] = best;
    }
  }
}

}  // namespace hcache::policy
