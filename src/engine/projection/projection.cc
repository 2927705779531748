#include "projection.h"

#include <algorithm>
#include <array>
#include <memory>
#include <new>

#include "projection_kernel.h"

namespace hcache::engine {
namespace {

constexpr size_t kCacheLine = 64;

bool has_instructions() {
#ifdef HCACHE_PROJECTION_X86
  static const bool has =
      __builtin_cpu_supports("avx512f") > 0 && __builtin_cpu_supports("avx512bw") > 0 &&
      __builtin_cpu_supports("avx512vl") > 0 && __builtin_cpu_supports("avx512vnni") > 0;
  return has;
#else
  return false;
#endif
}

#ifdef HCACHE_PROJECTION_X86
// A thread's scratch; grows and stays.
uint8_t* scratch(size_t bytes) {
  struct Release {
    void operator()(uint8_t* p) const {
      ::operator delete(p, static_cast<std::align_val_t>(kCacheLine));
    }
  };
  thread_local std::unique_ptr<uint8_t, Release> memory;
  thread_local size_t size = 0;
  if (bytes > size) {
    memory.reset();
    memory.reset(
        static_cast<uint8_t*>(::operator new(bytes, static_cast<std::align_val_t>(kCacheLine))));
    size = bytes;
  }
  return memory.get();
}

BlockKind block_kind(ggml_type weight) {
  switch (weight) {
    case GGML_TYPE_Q4_0: return BlockKind::kQ4_0;
    case GGML_TYPE_Q4_1: return BlockKind::kQ4_1;
    default: return BlockKind::kQ8_0;
  }
}
#endif

void run_product(ggml_tensor* dst, int ith, int nth, void* /*userdata*/) {
#ifdef HCACHE_PROJECTION_X86
  const ggml_tensor* weight = dst->src[0];
  const ggml_tensor* rows = dst->src[1];
  const int64_t n_panels = (weight->ne[1] + kPanel - 1) / kPanel;
  const ProjectionTask task = {
      .kind = block_kind(weight->type),
      .weight = static_cast<const uint8_t*>(weight->data),
      .weight_stride = weight->nb[1],
      .rows = static_cast<const uint8_t*>(rows->data),
      .row_stride = rows->nb[1],
      .n_rows = rows->ne[1],
      .n_blocks = weight->ne[0] / ggml_blck_size(weight->type),
      .out = static_cast<float*>(dst->data),
      .out_stride = dst->nb[1] / sizeof(float),
      .first_out = n_panels * ith / nth * kPanel,
      .end_out = std::min(n_panels * (ith + 1) / nth * kPanel, weight->ne[1]),
  };
  if (task.first_out >= task.end_out) return;
  project_avx512vnni(task, scratch(projection_scratch_avx512vnni(task.n_rows, task.n_blocks)));
#else
  (void)dst, (void)ith, (void)nth;
#endif
}

}  // namespace

bool can_project_fast(ggml_type weight, ggml_type rows) {
  const bool covered =
      (rows == GGML_TYPE_Q8_0 && (weight == GGML_TYPE_Q8_0 || weight == GGML_TYPE_Q4_0)) ||
      (rows == GGML_TYPE_Q8_1 && weight == GGML_TYPE_Q4_1);
  return covered && has_instructions();
}

ggml_tensor* build_fast_product(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* rows) {
  std::array<ggml_tensor*, 2> args = {weight, rows};
  return ggml_custom_4d(ctx, GGML_TYPE_F32, weight->ne[1], rows->ne[1], 1, 1, args.data(),
                        static_cast<int>(args.size()), run_product, GGML_N_TASKS_MAX, nullptr);
}

}  // namespace hcache::engine
