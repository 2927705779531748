#include "product_avx512.h"

namespace hcache::model {

const ProductKernel kProductAvx512Vnni = {.prepare = prepare<Avx512Vnni>,
                                          .scratch_bytes = scratch_bytes<Avx512Vnni>,
                                          .multiply = multiply<Avx512Vnni>};

}  // namespace hcache::model
