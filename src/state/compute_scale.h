// What the measured costs of computing may be scaled by.
#pragma once

namespace hcache::state {

// Up or down; beyond, the costs are wrong.
inline constexpr double kMaxComputeScale = 8;

}  // namespace hcache::state
