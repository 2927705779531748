// Chunks in an S3-compatible object store (docs/format.md, "In S3").
#pragma once

#include <memory>
#include <string>

#include "s3/s3_client.h"
#include "tier.h"

namespace hcache::store {

// A row of the table in tiers.cc.
[[nodiscard]] Result<std::unique_ptr<Tier>> open_s3_tier(Env& env, const RemoteOptions& options,
                                                         const Seal& seal);

// The same over a client of the caller's; `name` is what messages call the store.
[[nodiscard]] std::unique_ptr<Tier> make_s3_tier(Env& env, const RemoteOptions& options,
                                                 const Seal& seal, std::string name,
                                                 std::unique_ptr<S3Client> client);

}  // namespace hcache::store
