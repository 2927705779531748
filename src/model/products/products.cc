#include "products.h"

#ifdef HCACHE_PRODUCTS_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "product_kernel.h"

namespace hcache::model {
namespace {

constexpr size_t kCacheLine = 64;

bool always() { return true; }

#ifdef HCACHE_PRODUCTS_X86
// A register of CPUID's leaf 7, for what compilers have no name for yet.
uint32_t leaf_7(uint32_t subleaf, int reg) {
  std::array<uint32_t, 4> r{};
  return __get_cpuid_count(7, subleaf, &r[0], &r[1], &r[2], &r[3]) == 0 ? 0 : r[reg];
}
bool has_bit(uint32_t word, int bit) { return (word >> bit & 1U) != 0; }

bool has_avx2() { return __builtin_cpu_supports("avx2") > 0 && __builtin_cpu_supports("fma") > 0; }
bool has_avx_vnni() {
  constexpr int kEax = 0;
  return has_avx2() && has_bit(leaf_7(1, kEax), 4);
}
bool has_avx512_vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") > 0 &&
         __builtin_cpu_supports("avx512bw") > 0 && __builtin_cpu_supports("avx512dq") > 0 &&
         __builtin_cpu_supports("avx512vl") > 0 && __builtin_cpu_supports("avx512vnni") > 0;
}
// The system gives a process its tiles when it asks for them.
bool has_amx() {
  constexpr int kEdx = 3;
  constexpr int kTileBit = 24;
  constexpr int kInt8Bit = 25;
  const uint32_t features = leaf_7(0, kEdx);
  if (!has_avx512_vnni() || !has_bit(features, kTileBit) || !has_bit(features, kInt8Bit)) {
    return false;
  }
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
// Whether weights come faster if memory is asked for them a panel ahead, in their order: on Zen 4
// they do, which reads 16 outputs' rows side by side at three quarters of its memory's speed. On
// Intel's it was not measured (ADR 47).
bool reads_ahead() {
  static const bool is_amd = __builtin_cpu_is("amd") > 0;
  return is_amd;
}
#else
bool reads_ahead() { return false; }
#endif

// The fastest first; the plain one is slower than ggml's.
constexpr std::string_view kPlain = "portable";
constexpr struct {
  NamedProductKernel named;
  bool (*runs)();
} kKernels[] = {
#ifdef HCACHE_PRODUCTS_X86
    {{"amx", &kProductAmx}, has_amx},
    {{"avx512-vnni", &kProductAvx512Vnni}, has_avx512_vnni},
    {{"avx-vnni", &kProductAvxVnni}, has_avx_vnni},
    {{"avx2", &kProductAvx2}, has_avx2},
#endif
    {{kPlain, &kProductPortable}, always},
};

std::string_view wanted() {
  const char* value = std::getenv("HCACHE_PRODUCTS");
  return value == nullptr ? "" : value;
}

std::optional<NamedProductKernel> choose() {
  for (const NamedProductKernel& k : usable_kernels()) {
    if (wanted().empty() ? k.name != kPlain : k.name == wanted()) return k;
  }
  return std::nullopt;
}

const std::optional<NamedProductKernel>& chosen() {
  static const std::optional<NamedProductKernel> kernel = choose();
  return kernel;
}

struct Covered {
  ggml_type weight;
  BlockKind kind;
  ggml_type rows;
};

constexpr std::array kCovered = {
    Covered{GGML_TYPE_Q8_0, BlockKind::kQ8_0, GGML_TYPE_Q8_0},
    Covered{GGML_TYPE_Q4_0, BlockKind::kQ4_0, GGML_TYPE_Q8_0},
    Covered{GGML_TYPE_Q4_1, BlockKind::kQ4_1, GGML_TYPE_Q8_1},
    Covered{GGML_TYPE_Q5_0, BlockKind::kQ5_0, GGML_TYPE_Q8_0},
    Covered{GGML_TYPE_Q5_1, BlockKind::kQ5_1, GGML_TYPE_Q8_1},
    Covered{GGML_TYPE_Q4_K, BlockKind::kQ4K, GGML_TYPE_Q8_K},
    Covered{GGML_TYPE_Q5_K, BlockKind::kQ5K, GGML_TYPE_Q8_K},
    Covered{GGML_TYPE_Q6_K, BlockKind::kQ6K, GGML_TYPE_Q8_K},
    Covered{GGML_TYPE_IQ4_NL, BlockKind::kIq4Nl, GGML_TYPE_Q8_0},
    Covered{GGML_TYPE_IQ4_XS, BlockKind::kIq4Xs, GGML_TYPE_Q8_K},
    Covered{GGML_TYPE_MXFP4, BlockKind::kMxfp4, GGML_TYPE_Q8_0},
};

const Covered* find_covered(ggml_type weight) {
  const auto* it = std::ranges::find(kCovered, weight, &Covered::weight);
  return it == kCovered.end() ? nullptr : it;
}

RowKind row_kind(ggml_type rows) {
  return rows == GGML_TYPE_Q8_0   ? RowKind::kQ8_0
         : rows == GGML_TYPE_Q8_1 ? RowKind::kQ8_1
                                  : RowKind::kQ8K;
}

int64_t n_chunks(int64_t n_in) { return (n_in + kChunk - 1) / kChunk; }

// Aligned memory that grows and stays.
class Memory {
 public:
  void* of(size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(::operator new(bytes, static_cast<std::align_val_t>(kCacheLine)));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Release {
    void operator()(void* p) const {
      ::operator delete(p, static_cast<std::align_val_t>(kCacheLine));
    }
  };
  std::unique_ptr<void, Release> memory_;
  size_t size_ = 0;
};

// Of one thread.
struct Scratch {
  Memory kernel;
  Memory rows;                // of one expert, one behind the other
  std::vector<int64_t> ends;  // by expert, in `slots`
  std::vector<int64_t> slots;
};

Scratch& scratch() {
  thread_local Scratch own;
  return own;
}

// The chunks of src[0]'s rows, which are of the type that the weights of *covered multiply: chunk
// by chunk of all rows.
void run_prepare(ggml_tensor* dst, int ith, int nth, void* covered) {
  const ggml_tensor* x = dst->src[0];
  const RowKind kind = row_kind(static_cast<const Covered*>(covered)->rows);
  const ProductKernel& kernel = *chosen()->kernel;
  const int64_t n_in = x->ne[0];
  const int64_t in_row = n_chunks(n_in);
  const int64_t n_rows = x->ne[1] * x->ne[2];
  const int64_t n = in_row * n_rows;
  for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; ++i) {
    const int64_t row = i / in_row;
    const int64_t chunk = i % in_row;
    const int64_t first = chunk * kChunk;
    const auto* from = static_cast<const uint8_t*>(x->data) + row % x->ne[1] * x->nb[1] +
                       row / x->ne[1] * x->nb[2] + ggml_row_size(x->type, first);
    kernel.prepare(kind, from, std::min<int64_t>(kChunk, n_in - first),
                   static_cast<RowChunk*>(dst->data) + chunk * n_rows + row);
  }
}

// What thread `ith` does of `dst`: some outputs of all rows.
ProductTask task_of(const ggml_tensor& dst, const Covered& covered, int ith, int nth) {
  const ggml_tensor* weight = dst.src[0];
  const int64_t n_panels = (weight->ne[1] + kPanel - 1) / kPanel;
  return {.kind = covered.kind,
          .weight = static_cast<const uint8_t*>(weight->data),
          .weight_stride = weight->nb[1],
          .n_in = weight->ne[0],
          .rows = static_cast<const RowChunk*>(dst.src[1]->data),
          .n_rows = dst.ne[1],
          .out = static_cast<float*>(dst.data),
          .out_stride = dst.nb[1] / sizeof(float),
          .out_rows = nullptr,
          .first_out = n_panels * ith / nth * kPanel,
          .end_out = std::min(n_panels * (ith + 1) / nth * kPanel, weight->ne[1]),
          .reads_ahead = reads_ahead()};
}

void multiply(const ProductTask& task) {
  const ProductKernel& kernel = *chosen()->kernel;
  kernel.multiply(task, scratch().kernel.of(kernel.scratch_bytes(task.n_rows)));
}

void run_product(ggml_tensor* dst, int ith, int nth, void* covered) {
  const ProductTask task = task_of(*dst, *static_cast<const Covered*>(covered), ith, nth);
  if (task.first_out < task.end_out) multiply(task);
}

// The slots (row · n_used + place among its experts) of each expert, one expert's behind another's.
void sort_by_expert(const ggml_tensor& experts, int64_t n_expert, Scratch& own) {
  const int64_t n_used = experts.ne[0];
  const auto expert_of = [&](int64_t slot) {
    const auto* row = static_cast<const std::byte*>(experts.data) + slot / n_used * experts.nb[1];
    int32_t expert = 0;
    std::memcpy(&expert, row + slot % n_used * experts.nb[0], sizeof expert);
    return static_cast<size_t>(expert);
  };
  const int64_t n = n_used * experts.ne[1];
  own.ends.assign(static_cast<size_t>(n_expert) + 1, 0);
  own.slots.resize(static_cast<size_t>(n));
  for (int64_t slot = 0; slot < n; ++slot) ++own.ends[expert_of(slot) + 1];
  for (size_t e = 1; e < own.ends.size(); ++e) own.ends[e] += own.ends[e - 1];
  for (int64_t slot = 0; slot < n; ++slot) {
    own.slots[static_cast<size_t>(own.ends[expert_of(slot)]++)] = slot;
  }
}

void run_expert_product(ggml_tensor* dst, int ith, int nth, void* covered) {
  const ggml_tensor& weights = *dst->src[0];
  const ggml_tensor& experts = *dst->src[2];
  ProductTask task = task_of(*dst, *static_cast<const Covered*>(covered), ith, nth);
  if (task.first_out >= task.end_out) return;
  const RowChunk* all_rows = task.rows;
  const int64_t n_used = experts.ne[0];
  const int64_t n_rows = dst->src[1]->ne[1];
  const bool shared = n_rows == experts.ne[1];  // one row for all of a token's experts
  const int64_t in_row = n_chunks(task.n_in);
  Scratch& own = scratch();
  sort_by_expert(experts, weights.ne[2], own);
  int64_t begin = 0;
  for (int64_t e = 0; e < weights.ne[2]; ++e) {
    const int64_t end = own.ends[static_cast<size_t>(e)];
    const int64_t n = end - begin;
    if (n == 0) continue;
    auto* rows =
        static_cast<RowChunk*>(own.rows.of(static_cast<size_t>(n * in_row) * sizeof(RowChunk)));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t slot = own.slots[static_cast<size_t>(begin + i)];
      const RowChunk* row = all_rows + (shared ? slot / n_used : slot);
      for (int64_t c = 0; c < in_row; ++c) rows[c * n + i] = row[c * n_rows];
    }
    task.weight =
        static_cast<const uint8_t*>(weights.data) + static_cast<size_t>(e) * weights.nb[2];
    task.rows = rows;
    task.n_rows = n;
    task.out_rows = own.slots.data() + begin;
    multiply(task);
    begin = end;
  }
}

// Whether `t` is prepared() of x.
bool is_prepared(const ggml_tensor* t, const ggml_tensor* x, ggml_type rows) {
  if (t->op != GGML_OP_CUSTOM) return false;
  struct {
    ggml_custom_op_t fun;
    int n_tasks;
    void* userdata;
  } op;
  static_assert(sizeof op <= sizeof t->op_params);
  std::memcpy(&op, t->op_params, sizeof op);
  const ggml_tensor* quantised = t->src[0];
  if (op.fun != run_prepare || quantised->type != rows) return false;
  return quantised == x || (quantised->op == GGML_OP_CPY && quantised->src[0] == x);
}

// `x`, quantised by ggml and laid out for the kernels. The context is searched from `x` on for what
// another product had made.
ggml_tensor* prepared(ggml_context* ctx, const Covered& covered, ggml_tensor* x) {
  const auto* memory = static_cast<const std::byte*>(ggml_get_mem_buffer(ctx));
  const auto* at = reinterpret_cast<const std::byte*>(x);
  if (at >= memory && at < memory + ggml_get_mem_size(ctx)) {
    for (ggml_tensor* t = ggml_get_next_tensor(ctx, x); t != nullptr;
         t = ggml_get_next_tensor(ctx, t)) {
      if (is_prepared(t, x, covered.rows)) return t;
    }
  }
  std::array<ggml_tensor*, 1> args = {x->type == covered.rows ? x
                                                              : ggml_cast(ctx, x, covered.rows)};
  return ggml_custom_4d(ctx, GGML_TYPE_I8,
                        n_chunks(x->ne[0]) * static_cast<int64_t>(sizeof(RowChunk)),
                        x->ne[1] * x->ne[2], 1, 1, args.data(), 1, run_prepare, GGML_N_TASKS_MAX,
                        const_cast<Covered*>(&covered));
}

}  // namespace

std::vector<NamedProductKernel> usable_kernels() {
  std::vector<NamedProductKernel> kernels;
  for (const auto& k : kKernels) {
    if (k.runs()) kernels.push_back(k.named);
  }
  return kernels;
}

std::string_view unusable_product_kernels() {
  const bool in_vain = !wanted().empty() && wanted() != "ggml" && !chosen();
  return in_vain ? wanted() : std::string_view{};
}

std::string_view product_kernels() { return chosen() ? chosen()->name : std::string_view{}; }

bool has_own_product(ggml_type weight) {
  return chosen().has_value() && find_covered(weight) != nullptr;
}

ggml_tensor* build_own_product(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* x) {
  const Covered* covered = find_covered(weight->type);
  std::array<ggml_tensor*, 2> args = {weight, prepared(ctx, *covered, x)};
  return ggml_custom_4d(ctx, GGML_TYPE_F32, weight->ne[1], x->ne[1], 1, 1, args.data(), 2,
                        run_product, GGML_N_TASKS_MAX, const_cast<Covered*>(covered));
}

ggml_tensor* build_own_expert_product(ggml_context* ctx, ggml_tensor* weights, ggml_tensor* x,
                                      ggml_tensor* chosen) {
  const Covered* covered = find_covered(weights->type);
  std::array<ggml_tensor*, 3> args = {weights, prepared(ctx, *covered, x), chosen};
  return ggml_custom_4d(ctx, GGML_TYPE_F32, weights->ne[1], chosen->ne[0], chosen->ne[1], 1,
                        args.data(), 3, run_expert_product, GGML_N_TASKS_MAX,
                        const_cast<Covered*>(covered));
}

}  // namespace hcache::model
