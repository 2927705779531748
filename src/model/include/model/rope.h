// Rotary positions as a user wants them instead of how the model's file has them: longer contexts
// than it was trained for, mostly.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace hcache::model {

// What is not set is the file's.
struct RopeOverride {
  enum class Scaling : uint8_t { kFile, kNone, kLinear, kYarn };
  Scaling scaling = Scaling::kFile;
  float freq_base = 0;    // 0: not set
  float freq_scale = 0;   // what positions are multiplied by; 0: not set
  int orig_ctx = 0;       // tokens of context that YaRN starts from; 0: not set
  float ext_factor = -1;  // YaRN's; below 0: not set
  float attn_factor = -1;
  float beta_fast = -1;
  float beta_slow = -1;

  [[nodiscard]] bool any() const;
  friend bool operator==(const RopeOverride&, const RopeOverride&) = default;
};

// The context of a model that was trained for n_ctx tokens with a file's numbers, as positions are
// now: by as much longer as they are closer together; for a base that is raised, by as much as
// keeps the slowest angle (NTK-aware scaling). n_rot: dimensions of a head that are turned.
[[nodiscard]] int64_t extended_context(const RopeOverride& rope, int64_t n_ctx, int n_rot,
                                       float file_base, float file_scale);

}  // namespace hcache::model
