// Chunks in an S3-compatible object store (docs/format.md, "In S3").
#pragma once

#include <memory>

#include "tier.h"

namespace hcache::store {

// A row of the table in tiers.cc.
[[nodiscard]] Result<std::unique_ptr<Tier>> open_s3_tier(Env& env, const RemoteOptions& options);

}  // namespace hcache::store
