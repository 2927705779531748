// Microbenchmark of the CPU attention kernel: milliseconds per layer, GFLOP/s and the share of the
// machine's measured F32 FMA peak. It checks a sample of rows against an F64 reference before it
// times anything.
//
//   attention_bench [--threads N] [--reps N] [--isa best|portable|avx2|avx512] [--json FILE|-]
//
// Each repetition reads another layer's arena, as a model's step does, so small caches stay cold.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "engine/attention.h"

namespace {

using hcache::engine::AttentionIsa;
using hcache::engine::AttentionPlan;
using hcache::engine::AttentionSegment;
using hcache::engine::AttentionShape;
using hcache::engine::AttentionTensors;

double now_ms() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
}

// Threads that wait by spinning, like ggml's pool, so that start-up does not drown one row.
class Pool {
 public:
  explicit Pool(int n) : n_(n) {
    for (int i = 1; i < n; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    task_ = nullptr;
    generation_.fetch_add(1, std::memory_order_release);
    for (std::thread& t : workers_) t.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Calls fn(ith, nth) on every thread and waits.
  template <typename Fn>
  void run(Fn fn) {
    Fn* target = &fn;
    context_ = target;
    task_ = [](void* context, int ith, int nth) { (*static_cast<Fn*>(context))(ith, nth); };
    busy_.store(n_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    fn(0, n_);
    while (busy_.load(std::memory_order_acquire) != 0) pause();
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  void work(int ith) {
    for (uint64_t seen = 0;; ++seen) {
      while (generation_.load(std::memory_order_acquire) == seen) pause();
      if (task_ == nullptr) return;
      task_(context_, ith, n_);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  int n_;
  void* context_ = nullptr;
  void (*task_)(void*, int, int) = nullptr;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> busy_{0};
  std::vector<std::thread> workers_;
};

// Twelve independent chains of fused multiply-adds, in FLOP.
constexpr int kPeakRounds = 200000;
#if defined(__x86_64__)
__attribute__((target("avx512f"))) double fma_chain_avx512() {
  __m512 x[12];
  for (auto& v : x) v = _mm512_set1_ps(1.0F);
  const __m512 a = _mm512_set1_ps(0.999F);
  for (int i = 0; i < kPeakRounds; ++i) {
#pragma GCC unroll 12
    for (auto& v : x) v = _mm512_fmadd_ps(v, a, a);
  }
  __m512 sum = x[0];
  for (int i = 1; i < 12; ++i) sum = _mm512_add_ps(sum, x[i]);
  float lanes[16];
  _mm512_storeu_ps(lanes, sum);
  volatile float sink = lanes[0];
  static_cast<void>(sink);
  return 2.0 * 12 * 16 * kPeakRounds;
}

__attribute__((target("avx2,fma"))) double fma_chain_avx2() {
  __m256 x[12];
  for (auto& v : x) v = _mm256_set1_ps(1.0F);
  const __m256 a = _mm256_set1_ps(0.999F);
  for (int i = 0; i < kPeakRounds; ++i) {
#pragma GCC unroll 12
    for (auto& v : x) v = _mm256_fmadd_ps(v, a, a);
  }
  __m256 sum = x[0];
  for (int i = 1; i < 12; ++i) sum = _mm256_add_ps(sum, x[i]);
  volatile float sink = _mm256_cvtss_f32(sum);
  static_cast<void>(sink);
  return 2.0 * 12 * 8 * kPeakRounds;
}
#endif

// GFLOP/s of all threads together, best of several; 0 where it is not measured.
double measure_peak(Pool& pool, AttentionIsa isa) {
  double (*chain)() = nullptr;
#if defined(__x86_64__)
  if (isa == AttentionIsa::kAvx512) chain = fma_chain_avx512;
  if (isa == AttentionIsa::kAvx2) chain = fma_chain_avx2;
#endif
  if (chain == nullptr) return 0;
  double best = 0;
  for (int i = 0; i < 20; ++i) {
    std::atomic<int64_t> flop{0};
    const double start = now_ms();
    pool.run([&](int, int) { flop += static_cast<int64_t>(chain()); });
    best = std::max(best, static_cast<double>(flop.load()) / (now_ms() - start) * 1e-6);
  }
  return best;
}

uint16_t to_half(float x) {  // normal, finite values
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const int exponent = static_cast<int>((bits >> 23) & 0xffU) - 127 + 15;
  if (exponent <= 0) return static_cast<uint16_t>(sign);
  return static_cast<uint16_t>(sign | (static_cast<uint32_t>(exponent) << 10) |
                               ((bits >> 13) & 0x3ffU));
}

double from_half(uint16_t h) {
  const int exponent = (h >> 10) & 0x1f;
  const double magnitude =
      exponent == 0 ? std::ldexp(h & 0x3ff, -24) : std::ldexp((h & 0x3ff) + 1024, exponent - 25);
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

struct Case {
  AttentionShape shape;
  int rows;
  int depth;
};

struct Layer {
  std::vector<uint16_t> k, v;
};

// The largest error of sampled rows, relative to the largest |v|.
double check(const Case& c, const Layer& layer, const std::vector<float>& q,
             const std::vector<float>& out) {
  const AttentionShape& s = c.shape;
  double worst = 0;
  for (int row = 0; row < c.rows; row += std::max(1, c.rows / 3)) {
    for (int head = 0; head < s.n_head; head += 4) {
      const int kv = head / (s.n_head / s.n_head_kv);
      const size_t q_at = (static_cast<size_t>(row) * s.n_head + head) * s.head_dim_k;
      const int n = c.depth + row + 1;
      std::vector<double> p(static_cast<size_t>(n));
      double top = -INFINITY;
      for (int j = 0; j < n; ++j) {
        const size_t at = (static_cast<size_t>(j) * s.n_head_kv + kv) * s.head_dim_k;
        double dot = 0;
        for (int d = 0; d < s.head_dim_k; ++d) dot += q[q_at + d] * from_half(layer.k[at + d]);
        p[j] = dot * s.scale;
        top = std::max(top, p[j]);
      }
      double sum = 0;
      for (double& x : p) sum += x = std::exp(x - top);
      for (int d = 0; d < s.head_dim_v; ++d) {
        double value = 0;
        for (int j = 0; j < n; ++j) {
          value +=
              p[j] *
              from_half(layer.v[(static_cast<size_t>(j) * s.n_head_kv + kv) * s.head_dim_v + d]);
        }
        const double got = out[(static_cast<size_t>(row) * s.n_head + head) * s.head_dim_v + d];
        worst = std::max(worst, std::abs(got - value / sum));
      }
    }
  }
  return worst;
}

struct Options {
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  int reps = 20;
  AttentionIsa isa = hcache::engine::attention_best_isa();
  std::string json;
};

bool parse(int argc, char** argv, Options& o) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (i + 1 >= argc) return false;
    const std::string value = argv[++i];
    if (flag == "--threads") {
      o.threads = std::atoi(value.c_str());
    } else if (flag == "--reps") {
      o.reps = std::atoi(value.c_str());
    } else if (flag == "--json") {
      o.json = value;
    } else if (flag == "--isa") {
      bool known = false;
      for (const AttentionIsa isa : {AttentionIsa::kBest, AttentionIsa::kPortable,
                                     AttentionIsa::kAvx2, AttentionIsa::kAvx512}) {
        if (value != hcache::engine::attention_isa_name(isa)) continue;
        o.isa = isa == AttentionIsa::kBest ? hcache::engine::attention_best_isa() : isa;
        known = hcache::engine::attention_isa_available(isa);
      }
      if (!known) return false;
    } else {
      return false;
    }
  }
  return o.threads > 0 && o.reps > 0;
}

std::string cpu_name() {
  std::string name = "unknown";
  if (FILE* f = std::fopen("/proc/cpuinfo", "r")) {
    char line[512];
    while (std::fgets(line, sizeof(line), f) != nullptr) {
      if (std::strncmp(line, "model name", 10) != 0) continue;
      name = std::strchr(line, ':') + 2;
      name.erase(name.find_last_not_of("\n ") + 1);
      break;
    }
    std::fclose(f);
  }
  return name;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr,
                 "usage: attention_bench [--threads N] [--reps N] "
                 "[--isa best|portable|avx2|avx512] [--json FILE|-]\n"
                 "(an instruction set that this machine lacks is an error)\n");
    return 2;
  }
#ifndef NDEBUG
  std::fprintf(stderr, "warning: built with assertions; timings may be off\n");
#endif

  Pool pool(options.threads);
  const double peak = measure_peak(pool, options.isa);
  const std::string cpu = cpu_name();
  const char* isa = hcache::engine::attention_isa_name(options.isa);
  FILE* text = options.json == "-" ? stderr : stdout;
  std::fprintf(text, "%s, %d threads, %s, FMA peak %.0f GFLOP/s\n", cpu.c_str(), options.threads,
               isa, peak);
  std::fprintf(text, "%-12s %5s %6s %9s %9s %9s %7s %9s\n", "q/kv/dim", "rows", "depth", "min ms",
               "median", "GFLOP/s", "peak", "error");

  std::string json;
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  for (const AttentionShape shape :
       {AttentionShape{9, 3, 64, 64, 0.125F}, AttentionShape{32, 32, 128, 128, 0.088388F}}) {
    const size_t k_cell = static_cast<size_t>(shape.n_head_kv) * shape.head_dim_k;
    const size_t v_cell = static_cast<size_t>(shape.n_head_kv) * shape.head_dim_v;
    for (const int depth : {0, 4096}) {
      for (const int rows : {1, 8, 50, 512}) {
        const Case c{shape, rows, depth};
        const size_t cells = static_cast<size_t>(rows) + depth;
        const size_t bytes = cells * (k_cell + v_cell) * 2;
        const size_t n_layers = std::clamp<size_t>((size_t{192} << 20) / bytes, 2, 32);
        std::vector<Layer> layers(n_layers);
        for (Layer& layer : layers) {
          layer.k.resize(cells * k_cell);
          layer.v.resize(cells * v_cell);
          // A short random pattern, repeated with another period per layer: quick to make.
          std::vector<uint16_t> pattern(8191);
          for (uint16_t& x : pattern) x = to_half(normal(rng));
          for (size_t i = 0; i < layer.k.size(); ++i) layer.k[i] = pattern[i % pattern.size()];
          for (size_t i = 0; i < layer.v.size(); ++i) layer.v[i] = pattern[i % 8179];
        }
        std::vector<float> q(static_cast<size_t>(rows) * shape.n_head * shape.head_dim_k);
        for (float& x : q) x = normal(rng);
        std::vector<float> out(static_cast<size_t>(rows) * shape.n_head * shape.head_dim_v);

        AttentionPlan plan(shape, options.threads, options.isa);
        const AttentionSegment segment{0, rows, 0, depth};
        plan.set_batch({&segment, 1});
        const auto run = [&](const Layer& layer) {
          AttentionTensors t;
          t.q = q.data();
          t.q_stride = static_cast<size_t>(shape.n_head) * shape.head_dim_k * sizeof(float);
          t.k = layer.k.data();
          t.k_stride = k_cell * 2;
          t.v = layer.v.data();
          t.v_stride = v_cell * 2;
          t.out = out.data();
          t.out_stride = static_cast<size_t>(shape.n_head) * shape.head_dim_v * sizeof(float);
          pool.run([&](int ith, int nth) { plan.run(t, ith, nth); });
        };

        run(layers[0]);
        const double error = check(c, layers[0], q, out);
        if (!(error < 1e-4)) {
          std::fprintf(stderr, "error: %d/%d/%d, %d rows at depth %d: off by %g\n", shape.n_head,
                       shape.n_head_kv, shape.head_dim_k, rows, depth, error);
          return 1;
        }
        std::vector<double> ms;
        const int reps = depth == 0 ? options.reps * 4 : options.reps;
        for (int i = 0; i < reps; ++i) {
          const double start = now_ms();
          run(layers[static_cast<size_t>(i) % n_layers]);
          ms.push_back(now_ms() - start);
        }
        std::sort(ms.begin(), ms.end());
        const double median = ms[ms.size() / 2];
        const double pairs = static_cast<double>(rows) * depth + 0.5 * rows * (rows + 1.0);
        const double gflops =
            2.0 * pairs * shape.n_head * (shape.head_dim_k + shape.head_dim_v) / ms.front() * 1e-6;
        char name[64];
        std::snprintf(name, sizeof(name), "%d/%d/%d", shape.n_head, shape.n_head_kv,
                      shape.head_dim_k);
        std::fprintf(text, "%-12s %5d %6d %9.4f %9.4f %9.1f %6.1f%% %9.1e\n", name, rows, depth,
                     ms.front(), median, gflops, peak > 0 ? 100 * gflops / peak : 0.0, error);
        char row[512];
        std::snprintf(row, sizeof(row),
                      "%s\n  {\"n_head\":%d,\"n_head_kv\":%d,\"head_dim\":%d,\"rows\":%d,"
                      "\"depth\":%d,\"ms\":{\"min\":%.5f,\"median\":%.5f,\"max\":%.5f},"
                      "\"gflops\":%.2f,\"error\":%.3g}",
                      json.empty() ? "" : ",", shape.n_head, shape.n_head_kv, shape.head_dim_k,
                      rows, depth, ms.front(), median, ms.back(), gflops, error);
        json += row;
      }
    }
  }

  if (!options.json.empty()) {
    FILE* f = options.json == "-" ? stdout : std::fopen(options.json.c_str(), "w");
    if (f == nullptr) {
      std::fprintf(stderr, "error: cannot write %s\n", options.json.c_str());
      return 1;
    }
    std::fprintf(f,
                 "{\"machine\":{\"cpu\":\"%s\",\"threads\":%d,\"isa\":\"%s\","
                 "\"fma_peak_gflops\":%.1f},\"rows\":[%s\n]}\n",
                 cpu.c_str(), options.threads, isa, peak, json.c_str());
    if (f != stdout) std::fclose(f);
  }
  return 0;
}
