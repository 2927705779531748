// Microbenchmark of the product behind restoration: ours against ggml's on the same data, in turns,
// with GFLOP/s of each. It checks that both give the same bits before it times anything.
//
//   projection_bench [--threads N] [--reps N] [--rows N] [--in N] [--out N]
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "projection.h"

namespace {

struct Settings {
  int threads = 2;
  int reps = 15;
  int rows = 512;
  int in = 4096;
  int out = 4096;
};

double now_s() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// A tensor of random values; F16 is there for comparison and is not covered by ours.
ggml_tensor* random_tensor(ggml_context* ctx, ggml_type type, int width, int n, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(width) * n);
  for (float& v : values) v = normal(rng);
  ggml_tensor* t = ggml_new_tensor_2d(ctx, type, width, n);
  ggml_get_type_traits_cpu(type)->from_float(values.data(), t->data, ggml_nelements(t));
  return t;
}

bool compare(const Settings& s, ggml_type weight_type, ggml_type row_type) {
  std::mt19937 rng(1);
  const size_t memory =
      (static_cast<size_t>(s.in) * s.out + static_cast<size_t>(s.in) * s.rows) * 3 +
      static_cast<size_t>(s.out) * s.rows * 8 + (16U << 20);
  ggml_context* ctx = ggml_init({.mem_size = memory, .mem_buffer = nullptr, .no_alloc = false});
  ggml_tensor* weight = random_tensor(ctx, weight_type, s.in, s.out, rng);
  ggml_tensor* rows = random_tensor(ctx, row_type, s.in, s.rows, rng);
  const bool covered = hcache::engine::can_project_fast(weight_type, row_type);
  std::vector<ggml_tensor*> products = {ggml_mul_mat(ctx, weight, rows)};
  if (covered) products.push_back(hcache::engine::build_fast_product(ctx, weight, rows));
  std::vector<ggml_cgraph*> graphs;
  for (ggml_tensor* product : products) {
    graphs.push_back(ggml_new_graph(ctx));
    ggml_build_forward_expand(graphs.back(), product);
  }
  ggml_backend_t backend = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(backend, s.threads);
  std::vector<std::vector<double>> seconds(graphs.size());
  bool equal = true;
  for (int rep = -1; rep < s.reps; ++rep) {
    for (size_t i = 0; i < graphs.size(); ++i) {
      const double start = now_s();
      ggml_backend_graph_compute(backend, graphs[i]);
      if (rep >= 0) seconds[i].push_back(now_s() - start);
    }
    if (rep < 0 && covered) {
      equal = std::memcmp(products[0]->data, products[1]->data, ggml_nbytes(products[0])) == 0;
    }
  }
  const double flop = 2.0 * s.in * s.out * s.rows;
  std::printf("%-5s x %-5s ggml %6.1f GFLOP/s", ggml_type_name(weight_type),
              ggml_type_name(row_type), flop / median(seconds[0]) * 1e-9);
  if (covered) {
    std::printf(", ours %6.1f (%.2f times, %s)", flop / median(seconds[1]) * 1e-9,
                median(seconds[0]) / median(seconds[1]), equal ? "identical" : "DIFFERENT");
  }
  std::printf("\n");
  ggml_backend_free(backend);
  ggml_free(ctx);
  return equal;
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
  for (int i = 1; i < argc; i += 2) {
    const auto* option = std::find_if(std::begin(options), std::end(options),
                                      [&](const auto& o) { return o.name == argv[i]; });
    if (option == std::end(options) || i + 1 == argc || std::atoi(argv[i + 1]) < 1) {
      std::fprintf(
          stderr,
          "usage: projection_bench [--threads N] [--reps N] [--rows N] [--in N] [--out N]\n");
      return 2;
    }
    *option->value = std::atoi(argv[i + 1]);
  }
  if (s.in % 32 != 0) {
    std::fprintf(stderr, "--in must be a multiple of 32\n");
    return 2;
  }
#ifndef NDEBUG
  std::fprintf(stderr, "a debug build: its times mean nothing\n");
#endif
  std::printf("%d x %d times %d rows, %d threads, median of %d\n", s.in, s.out, s.rows, s.threads,
              s.reps);
  bool equal = compare(s, GGML_TYPE_F16, GGML_TYPE_F16);
  equal = compare(s, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0) && equal;
  equal = compare(s, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0) && equal;
  equal = compare(s, GGML_TYPE_Q4_1, GGML_TYPE_Q8_1) && equal;
  return equal ? 0 : 1;
}
