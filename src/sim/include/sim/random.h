// Random numbers for simulated and sent load: the same key gives the same ones.
// Threading: values, one thread each.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numbers>

namespace hcache::sim {

// splitmix64's step and its finaliser, which spreads every bit over all others.
inline constexpr uint64_t kSplitMixStep = 0x9E3779B97F4A7C15;
inline uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EB;
  return z ^ (z >> 31U);
}

// splitmix64. Streams with different keys have nothing to do with each other.
class Random {
 public:
  explicit Random(std::initializer_list<uint64_t> key) {
    for (const uint64_t part : key) state_ = mixed(state_ ^ mixed(part + kSplitMixStep));
  }

  uint64_t next() { return mixed(state_ += kSplitMixStep); }
  size_t below(size_t n) { return static_cast<size_t>(next() % n); }                 // n > 0
  double uniform() { return static_cast<double>((next() >> 11U) + 1) * 0x1.0p-53; }  // (0, 1]
  double exponential(double mean) { return -mean * std::log(uniform()); }
  double log_normal(double mean, double sigma) {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    const double z = radius * std::cos(2 * std::numbers::pi * uniform());
    return mean * std::exp(sigma * z - sigma * sigma / 2);
  }

 private:
  uint64_t state_ = 0;
};

}  // namespace hcache::sim
