// F32 rows to any weight type.
#pragma once

#include <ggml.h>

#include <string>

#include "base/status.h"

namespace hcache::model {

// Whether rows of n elements divide into the type's blocks.
bool row_fits(ggml_type type, int64_t n);

// out = n_rows rows of n_per_row quantised from F32; thread safe. Types that need an importance
// matrix get a uniform one.
void quantise_rows(ggml_type type, const float* rows, int64_t n_rows, int64_t n_per_row,
                   uint8_t* out);

}  // namespace hcache::model
