#include "hidden_rows.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "model/graph.h"

namespace hcache::engine {
namespace {

// Blocks of 32 values as ggml lays them out: an F16 scale, in Q8_1 the F16 sum, 32 integers.
constexpr size_t kScaleBytes = 2;
constexpr size_t kIntegerBytes = 32;
constexpr size_t kQ8_0Bytes = kScaleBytes + kIntegerBytes;
constexpr size_t kQ8_1Bytes = 2 * kScaleBytes + kIntegerBytes;

void copy_without_sums(ggml_tensor* dst, int ith, int nth, void* /*userdata*/) {
  const ggml_tensor* src = dst->src[0];
  const int64_t n_blocks = src->ne[0] / ggml_blck_size(src->type);
  for (int64_t row = ith; row < src->ne[1]; row += nth) {
    const auto* from = static_cast<const std::byte*>(src->data) + row * src->nb[1];
    auto* to = static_cast<std::byte*>(dst->data) + row * dst->nb[1];
    for (int64_t i = 0; i < n_blocks; ++i, from += kQ8_1Bytes, to += kQ8_0Bytes) {
      std::memcpy(to, from, kScaleBytes);
      std::memcpy(to + kScaleBytes, from + 2 * kScaleBytes, kIntegerBytes);
    }
  }
}

}  // namespace

ggml_tensor* saved_as(ggml_context* ctx, ggml_type type, ggml_tensor* rows, ggml_tensor* order) {
  ggml_tensor* target = ggml_new_tensor_2d(ctx, type, rows->ne[0], rows->ne[1]);
  ggml_set_input(target);  // set_rows writes into it: it must have memory of its own
  return ggml_set_rows(ctx, target, rows, order);
}

ggml_tensor* without_sums(ggml_context* ctx, ggml_tensor* rows) {
  std::array<ggml_tensor*, 1> args = {rows};
  return ggml_custom_4d(ctx, GGML_TYPE_Q8_0, rows->ne[0], rows->ne[1], 1, 1, args.data(),
                        static_cast<int>(args.size()), copy_without_sums, GGML_N_TASKS_MAX,
                        nullptr);
}

ggml_tensor* padded_product(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* x,
                            int64_t n_rows) {
  const int64_t n = x->ne[1];
  const int64_t missing = std::max<int64_t>(n_rows - n, 0);
  ggml_tensor* rows = missing == 0 ? x : ggml_pad(ctx, x, 0, static_cast<int>(missing), 0, 0);
  ggml_tensor* y = model::build_product(ctx, weight, rows);
  return ggml_view_2d(ctx, y, y->ne[0], n, y->nb[1], 0);
}

}  // namespace hcache::engine
