// The kinds of remote tiers: one row each.
#include <fmt/format.h>

#include <string>
#include <string_view>

#include "redis/redis_tier.h"
#include "s3/s3_tier.h"
#include "tier.h"

namespace hcache::store {
namespace {

struct TierKind {
  std::string_view scheme;
  Result<std::unique_ptr<Tier>> (*open)(Env& env, const RemoteOptions& options, const Seal& seal);
};

constexpr TierKind kTiers[] = {
    {"redis", open_redis_tier},
    {"rediss", open_redis_tier},  // with TLS
    {"s3", open_s3_tier},
};

}  // namespace

Result<std::unique_ptr<Tier>> open_tier(Env& env, const RemoteOptions& options, const Seal& seal) {
  const std::string_view url = options.url;
  const std::string_view scheme = url.substr(0, url.find("://"));
  std::string known;
  for (const TierKind& kind : kTiers) {
    if (kind.scheme == scheme) return kind.open(env, options, seal);
    known += fmt::format("{}{}://", known.empty() ? "" : ", ", kind.scheme);
  }
  return invalid_argument(fmt::format("a remote store's URL begins with one of {}", known));
}

}  // namespace hcache::store
