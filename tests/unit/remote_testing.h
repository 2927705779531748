// What the tests of remote tiers share: stores that use one, and patience.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "patience.h"
#include "seal.h"
#include "store_testing.h"

namespace hcache::store::testing {

using hcache::test::eventually;

inline constexpr double kPatienceS = 60;
inline const Fingerprint kModel = fingerprint_of("model");
inline const SaltId kSalt = salt_id("");

// A store of its own with the remote tier at `url`.
class Machine {
 public:
  explicit Machine(const std::string& url, const RemoteOptions& remote = {},
                   std::uint64_t quota_bytes = 0, std::uint64_t snapshot_quota_bytes = 0) {
    options_.dirs = {folder_.path()};
    options_.quota_bytes = quota_bytes;
    options_.snapshot_quota_bytes = snapshot_quota_bytes;
    options_.remote = remote;
    options_.remote.url = url;
    options_.remote.timeout_s = kPatienceS;  // tests don't race with the machine
    if (remote.timeout_s != RemoteOptions().timeout_s) options_.remote.timeout_s = remote.timeout_s;
    open();
  }
  void open() { store_ = open_store(Env::real(), options_); }
  // Closes it and opens it without a remote tier.
  void cut_off() {
    EXPECT_OK(store_->close());
    store_.reset();
    options_.remote.url.clear();
    open();
  }
  Store& store() { return *store_; }
  RemoteStat stat() { return store_->stat()->remote.value(); }
  // Everything accepted has been written or has failed.
  bool settled() {
    return eventually([this] { return stat().backlog_requests == 0; });
  }
  Match look_up(std::span<const std::int32_t> tokens, const SaltId& salt = kSalt) {
    store_->look_up(kModel, salt, tokens);
    auto match = store_->match(kModel, salt, tokens);
    EXPECT_OK(match);
    return std::move(*match);
  }

 private:
  TempDir folder_;
  TestOptions options_;
  std::unique_ptr<Store> store_;
};

// What their pages and ids are sealed with.
inline Seal test_seal() {
  const TestOptions options;
  return options.key ? Seal(*options.key) : Seal();
}

// The defaults but for one field.
template <typename T, typename Value>
RemoteOptions with(T RemoteOptions::*field, Value value) {
  RemoteOptions options;
  options.*field = static_cast<T>(value);
  return options;
}

inline Chain chain(std::size_t tokens, std::uint32_t seed = 0) {
  return {kModel, kSalt, tokens_of(tokens, seed), {}};
}

}  // namespace hcache::store::testing
