// A store on the real file system, behind a link that tests may slow.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>

#include "base/throttled_env.h"
#include "store_testing.h"

namespace hcache::store::testing {

inline const Fingerprint kModel = fingerprint_of("model");
inline const SaltId kSalt = salt_id("");

class StoreTest : public ::testing::Test {
 protected:
  void SetUp() override { options_.dirs = {dir_ / "a"}; }

  void open() {
    store_.reset();
    store_ = open_store(env_, options_);
    ASSERT_NE(store_, nullptr);
  }
  PutReport put(const Chain& chain) {
    auto report = store_->put(chain.chunks());
    EXPECT_OK(report);
    EXPECT_OK(store_->check_integrity());
    return report.value_or({});
  }
  std::string first_segment() const { return dir_ / "a/segment-00000001.hcs"; }
  // Opens the store anew after a byte of its first segment has changed, counted from the end of the
  // header on.
  void damage(std::uint64_t at) {
    ASSERT_OK(store_->close());
    store_.reset();
    damage_byte(first_segment(), at);
    open();
  }
  // Matches, checks tokens and every page.
  std::uint64_t expect_match(std::span<const std::int32_t> tokens, std::size_t failing = 0) {
    auto match = store_->match(kModel, kSalt, tokens);
    EXPECT_OK(match);
    if (!match.ok()) return 0;
    expect_prefix(*match, tokens);
    EXPECT_EQ(read_back(*store_, *match).failed.size(), failing);
    return match->n_tokens;
  }

  TempDir dir_;
  ThrottledEnv env_{Env::real()};
  TestOptions options_;
  std::unique_ptr<Store> store_;
};

}  // namespace hcache::store::testing
