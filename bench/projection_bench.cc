// Microbenchmark of our products of quantised weights: ours against ggml's on the same data, in
// turns, with the rate of each and the share of what this machine reaches, in turns with them as
// well: int8 products of vectors in registers (AMX may exceed them), and memory read in order, a
// stream for each thread (the kernels read sixteen, which may be faster). Results that differ from
// ggml's by more than rounding end it with 1; the bits are model_products_test's business.
//
//   projection_bench [--threads N] [--reps N] [--rows N] [--in N] [--out N] [--type NAME]
//   projection_bench --limits [--threads N] [--reps N]    what the machine reaches alone, as JSON
//
// Without --rows it goes through 1, 2, 4, 8, 16, 64 and 512. Weights of several matrices take
// turns, so that few rows read them from memory.
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "int8_peak.h"
#include "product_kernel.h"
#include "products.h"

namespace {

using hcache::model::build_own_product;

struct Settings {
  int threads = 2;
  int reps = 9;
  int rows = 0;
  int in = 4096;
  int out = 4096;
  std::string type;
  bool limits = false;
};

constexpr size_t kTurnBytes = size_t{256} << 20;  // of weights, beyond any cache

double now_s() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Of `n` threads that do it at once, the seconds until all have.
template <typename F>
double timed_threads(int n, const F& work) {
  const double start = now_s();
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back([&, i] { work(i); });
  for (std::thread& t : threads) t.join();
  return now_s() - start;
}

// Integer operations a second of products in registers.
double peak_ops_per_s(const Settings& s) {
  constexpr int kLoops = 2'000'000;
  const double seconds =
      timed_threads(s.threads, [](int) { hcache::bench::run_int8_products(kLoops); });
  return s.threads * hcache::bench::int8_products_ops(kLoops) / seconds;
}

// Bytes of `memory` a second, of which each thread reads its part.
double read_bytes_per_s(const Settings& s, const std::vector<uint8_t>& memory) {
  const size_t share = memory.size() / static_cast<size_t>(s.threads);
  const double seconds = timed_threads(s.threads, [&](int i) {
    const uint8_t* at = memory.data() + share * static_cast<size_t>(i);
    std::array<uint64_t, 8> sums{};  // a cache line's words: independent of each other
    for (size_t j = 0; j + sizeof sums <= share; j += sizeof sums) {
      std::array<uint64_t, 8> line;
      std::memcpy(line.data(), at + j, sizeof line);
      for (size_t k = 0; k < line.size(); ++k) sums[k] += line[k];
      __builtin_prefetch(at + j + 1024);
    }
    volatile uint64_t sink = std::accumulate(sums.begin(), sums.end(), uint64_t{0});
    (void)sink;
  });
  return static_cast<double>(memory.size()) / seconds;
}

bool compare(const Settings& s, ggml_type type, int n_rows, const std::vector<uint8_t>& memory) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  const size_t weight_bytes = ggml_row_size(type, s.in) * static_cast<size_t>(s.out);
  const size_t turns = std::clamp<size_t>(kTurnBytes / weight_bytes, 1, n_rows > 64 ? 2 : 64);
  const size_t outputs = static_cast<size_t>(s.out) * n_rows * 2 * (turns + 1);
  ggml_context* ctx =
      ggml_init({.mem_size = weight_bytes * turns + static_cast<size_t>(s.in) * n_rows * 16 +
                             outputs * 4 + (64U << 20),
                 .mem_buffer = nullptr,
                 .no_alloc = false});
  std::vector<float> values(static_cast<size_t>(s.in) * std::max(s.out, n_rows));
  for (float& v : values) v = normal(rng);
  std::vector<ggml_tensor*> weights;
  for (size_t i = 0; i < turns; ++i) {
    weights.push_back(ggml_new_tensor_2d(ctx, type, s.in, s.out));
    if (i == 0) {
      ggml_quantize_chunk(type, values.data(), weights[0]->data, 0, s.out, s.in, nullptr);
    } else {
      std::memcpy(weights[i]->data, weights[0]->data, weight_bytes);
    }
  }
  ggml_tensor* x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.in, n_rows);
  std::memcpy(x->data, values.data(), ggml_nbytes(x));
  ggml_cgraph* graphs[2];
  ggml_tensor* first[2];
  for (int ours = 0; ours < 2; ++ours) {
    graphs[ours] = ggml_new_graph(ctx);
    for (size_t i = 0; i < turns; ++i) {
      ggml_tensor* product =
          ours == 1 ? build_own_product(ctx, weights[i], x) : ggml_mul_mat(ctx, weights[i], x);
      if (i == 0) first[ours] = product;
      ggml_build_forward_expand(graphs[ours], product);
    }
  }
  ggml_backend_t backend = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(backend, s.threads);
  const double ops = 2.0 * s.in * s.out * n_rows;
  std::vector<double> seconds[2];
  std::vector<double> peaks;   // int8 operations a second
  std::vector<double> reads;   // bytes a second
  std::vector<double> shares;  // of the bound, by repetition: the machine's speed changes
  for (int rep = -1; rep < s.reps; ++rep) {
    double each[2];
    for (int i = 0; i < 2; ++i) {
      const double start = now_s();
      ggml_backend_graph_compute(backend, graphs[i]);
      each[i] = (now_s() - start) / static_cast<double>(turns);
    }
    const double peak = peak_ops_per_s(s);
    const double read = read_bytes_per_s(s, memory);
    if (rep < 0) continue;
    for (int i = 0; i < 2; ++i) seconds[i].push_back(each[i]);
    peaks.push_back(peak);
    reads.push_back(read);
    shares.push_back(std::max(ops / peak, static_cast<double>(weight_bytes) / read) / each[1]);
  }
  double error = 0;
  double norm = 0;
  for (int64_t i = 0; i < ggml_nelements(first[0]); ++i) {
    const double a = static_cast<const float*>(first[0]->data)[i];
    const double b = static_cast<const float*>(first[1]->data)[i];
    error += (a - b) * (a - b);
    norm += a * a;
  }
  const bool agrees = std::sqrt(error / norm) < 1e-5;
  const double ours_s = median(seconds[1]);
  std::printf(
      "%-6s %4d rows: ggml %8.3f ms, ours %8.3f ms (%5.2f times), %5.0f of %5.0f GOP/s, "
      "%4.1f of %4.1f GB/s of weights, %.2f of the bound (%.2f to %.2f)%s\n",
      ggml_type_name(type), n_rows, median(seconds[0]) * 1e3, ours_s * 1e3,
      median(seconds[0]) / ours_s, ops / ours_s * 1e-9, median(peaks) * 1e-9,
      static_cast<double>(weight_bytes) / ours_s * 1e-9, median(reads) * 1e-9, median(shares),
      *std::min_element(shares.begin(), shares.end()),
      *std::max_element(shares.begin(), shares.end()), agrees ? "" : "  DIFFERS FROM GGML");
  ggml_backend_free(backend);
  ggml_free(ctx);
  return agrees;
}

void print_limits(const Settings& s, const std::vector<uint8_t>& memory) {
  std::vector<double> peaks;
  std::vector<double> reads;
  for (int rep = 0; rep < s.reps; ++rep) {
    peaks.push_back(peak_ops_per_s(s));
    reads.push_back(read_bytes_per_s(s, memory));
  }
  std::printf("{\"int8_ops_per_s\": %.6g, \"read_bytes_per_s\": %.6g}\n", median(peaks),
              median(reads));
}

int usage() {
  std::fprintf(stderr,
               "usage: projection_bench [--threads N] [--reps N] [--rows N] [--in N] [--out N] "
               "[--type NAME]\n       projection_bench --limits [--threads N] [--reps N]\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  Settings s;
  const struct {
    std::string_view name;
    int* value;
  } options[] = {{"--threads", &s.threads},
                 {"--reps", &s.reps},
                 {"--rows", &s.rows},
                 {"--in", &s.in},
                 {"--out", &s.out}};
  s.limits = argc > 1 && std::string_view(argv[1]) == "--limits";
  for (int i = s.limits ? 2 : 1; i < argc; i += 2) {
    if (i + 1 == argc) return usage();
    if (std::string_view(argv[i]) == "--type") {
      s.type = argv[i + 1];
      continue;
    }
    const auto* option = std::find_if(std::begin(options), std::end(options),
                                      [&](const auto& o) { return o.name == argv[i]; });
    if (option == std::end(options) || std::atoi(argv[i + 1]) < 1) return usage();
    *option->value = std::atoi(argv[i + 1]);
  }
  if (s.in % hcache::model::kChunk != 0) {
    std::fprintf(stderr, "--in must be a multiple of %d\n", hcache::model::kChunk);
    return 2;
  }
  if (hcache::model::product_kernels().empty()) {
    std::fprintf(stderr, "this processor has none of our kernels: ggml's products serve best\n");
    return 1;
  }
#ifndef NDEBUG
  std::fprintf(stderr, "a debug build: its times mean nothing\n");
#endif
  const std::vector<uint8_t> memory(kTurnBytes, 1);
  if (s.limits) {
    print_limits(s, memory);
    return 0;
  }
  std::printf("%s kernels, %d x %d, %d threads, medians of %d; of what int8 and memory give\n",
              std::string(hcache::model::product_kernels()).c_str(), s.in, s.out, s.threads,
              s.reps);
  bool agree = true;
  for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0,
                               GGML_TYPE_Q5_1, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K,
                               GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4}) {
    if (!s.type.empty() && s.type != ggml_type_name(type)) continue;
    for (const int rows : s.rows > 0 ? std::vector{s.rows} : std::vector{1, 2, 4, 8, 16, 64, 512}) {
      agree = compare(s, type, rows, memory) && agree;
    }
  }
  return agree ? 0 : 1;
}
