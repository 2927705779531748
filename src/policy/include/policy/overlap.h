// Loading and saving KV beside computation, layer by layer (AttentionStore §3.2): how much of
// either a request waits for, and the buffers that hide the rest.
//
// Pure functions. Units: seconds, bytes. Threading: plain values.
#pragma once

#include <cstdint>

namespace hcache::policy {

// §3.2.1's S_buf = B (T_load L_hist - T_pref L_new): how far reading must be ahead when computation
// begins for computation never to wait. load_s: reading all of it takes so long at bytes_per_s;
// compute_s: what is computed meanwhile. 0 where reading is the faster one.
[[nodiscard]] int64_t read_buffer_bytes(double bytes_per_s, double load_s, double compute_s);

// The state of a batch's histories, loaded while the new tokens are prefilled.
struct LayerwiseLoad {
  int32_t n_layer = 1;
  double load_s = 0;     // one layer's state
  double compute_s = 0;  // one layer of the prefill, which needs that state
};

// From when the device is free for the batch until its prefill ends. The state of
// `buffered_layers` was read while the device was busy with others; of the rest one layer after the
// other is read from now on. Below 0: nothing overlaps, everything is read first ("no
// pre-loading").
[[nodiscard]] double prefill_behind_load_s(const LayerwiseLoad& load, int32_t buffered_layers);

// The state that a batch computes, written while it computes (§3.2.2).
struct LayerwiseSave {
  int32_t n_layer = 1;
  double prefill_s = 0;  // one layer, after which its state can be written
  double save_s = 0;     // … which takes so long
  int64_t decode_steps = 0;
  double decode_s = 0;       // one step
  double save_decode_s = 0;  // what one step adds
};

// What is left to write when the last step ends. The next batch waits for it, unless a write buffer
// on the device takes it in.
[[nodiscard]] double unsaved_s(const LayerwiseSave& save);

}  // namespace hcache::policy
