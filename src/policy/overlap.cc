#include "policy/overlap.h"

#include <algorithm>
#include <cmath>

namespace hcache::policy {

int64_t read_buffer_bytes(double bytes_per_s, double load_s, double compute_s) {
  return std::llround(bytes_per_s * std::max(0.0, load_s - compute_s));
}

double prefill_behind_load_s(const LayerwiseLoad& load, int32_t buffered_layers) {
  if (buffered_layers < 0) return load.n_layer * (load.load_s + load.compute_s);
  double computed_s = 0;
  for (int32_t l = 0; l < load.n_layer; ++l) {
    const double loaded_s = std::max(0, l + 1 - buffered_layers) * load.load_s;
    computed_s = std::max(computed_s, loaded_s) + load.compute_s;
  }
  return computed_s;
}

double unsaved_s(const LayerwiseSave& save) {
  double saved_s = 0;
  for (int32_t l = 1; l <= save.n_layer; ++l) {
    saved_s = std::max(saved_s, l * save.prefill_s) + save.save_s;
  }
  double end_s = save.n_layer * save.prefill_s;
  for (int64_t step = 0; step < save.decode_steps; ++step) {
    end_s += save.decode_s;
    saved_s = std::max(saved_s, end_s) + save.save_decode_s;
  }
  return std::max(0.0, saved_s - end_s);
}

}  // namespace hcache::policy
