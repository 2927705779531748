#include "quantise.h"

#include <vector>

namespace hcache::model {

bool row_fits(ggml_type type, int64_t n) { return n % ggml_blck_size(type) == 0; }

void quantise_rows(ggml_type type, const float* rows, int64_t n_rows, int64_t n_per_row,
                   uint8_t* out) {
  std::vector<float> importance;
  if (ggml_quantize_requires_imatrix(type)) {
    importance.assign(static_cast<size_t>(n_per_row), 1.0F);
  }
  ggml_quantize_chunk(type, rows, out, 0, n_rows, n_per_row,
                      importance.empty() ? nullptr : importance.data());
}

}  // namespace hcache::model
