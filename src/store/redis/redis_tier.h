// Chunks in a Redis server or cluster (docs/format.md, "In Redis").
#pragma once

#include <memory>

#include "tier.h"

namespace hcache::store {

// A row of the table in tiers.cc.
[[nodiscard]] Result<std::unique_ptr<Tier>> open_redis_tier(Env& env, const RemoteOptions& options,
                                                            const Seal& seal);

}  // namespace hcache::store
