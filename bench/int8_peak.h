// Integer products in registers alone, as fast as the processor has them for our kernels: the limit
// that the products are held against.
#pragma once

namespace hcache::bench {

// On the calling thread.
void run_int8_products(int loops);
// Operations (a multiplication and an addition are two) of run_int8_products(loops).
double int8_products_ops(int loops);

}  // namespace hcache::bench
