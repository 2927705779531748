// What leaves the disks when a quota, of the store or of an owner, is full.
#include "store_fixture.h"

namespace hcache::store {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST_F(StoreTest, TheQuotaEvictsLeavesThatWereLeastRecentlyUsed) {
  options_.quota_bytes = 2 << 20;
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};  // 128 KiB per chunk
  put(Chain(kModel, kSalt, tokens_of(256, 1), shape));
  put(Chain(kModel, kSalt, tokens_of(256, 2), shape));
  EXPECT_EQ(expect_match(tokens_of(256, 1)), 256U);  // now 2 is the older one
  const PutReport report = put(Chain(kModel, kSalt, tokens_of(512, 3), shape));
  EXPECT_GT(report.chunks_evicted, 0U);
  EXPECT_EQ(expect_match(tokens_of(512, 3)), 512U);
  EXPECT_EQ(expect_match(tokens_of(256, 1)), 256U);
  const std::uint64_t left = expect_match(tokens_of(256, 2));
  EXPECT_LT(left, 256U);
  EXPECT_EQ(left % 64, 0U);  // from the end
  const auto stat = store_->stat();
  EXPECT_LE(stat->allocated_bytes + stat->catalog_bytes, options_.quota_bytes);
  for (std::uint32_t seed = 10; seed < 40; ++seed) {
    put(Chain(kModel, kSalt, tokens_of(256, seed), shape));
    EXPECT_EQ(expect_match(tokens_of(256, seed)), 256U);
    const auto now = store_->stat();
    EXPECT_LE(now->allocated_bytes + now->catalog_bytes, options_.quota_bytes + (64 << 10));
  }
}

// §3.3.2 of AttentionStore: what a request in the queue wants is not evicted while other chunks are
// left, however long ago they were used.
TEST_F(StoreTest, TheDisksKeepWhatTheQueueWants) {
  options_.quota_bytes = 2 << 20;
  options_.disk_policy.evict = policy::EvictPolicy::kSchedulerAware;
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};  // 128 KiB per chunk
  put(Chain(kModel, kSalt, tokens_of(256, 1), shape));
  put(Chain(kModel, kSalt, tokens_of(256, 2), shape));
  {
    const auto match = store_->match(kModel, kSalt, tokens_of(256, 1));
    ASSERT_OK(match);
    store_->want(7, *match);
  }
  EXPECT_EQ(expect_match(tokens_of(256, 2)), 256U);  // 1 is the older one
  put(Chain(kModel, kSalt, tokens_of(512, 3), shape));
  EXPECT_EQ(expect_match(tokens_of(256, 1)), 256U);
  EXPECT_LT(expect_match(tokens_of(256, 2)), 256U);
  EXPECT_OK(store_->check_integrity());
  store_->unwant(7);
  for (std::uint32_t seed = 10; seed < 14; ++seed) {
    put(Chain(kModel, kSalt, tokens_of(256, seed), shape));
  }
  EXPECT_EQ(expect_match(tokens_of(256, 1)), 0U);
}

TEST_F(StoreTest, WholeConversationsLeaveTheDisks) {
  options_.quota_bytes = 2 << 20;
  options_.disk_policy.whole_chains = true;
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};  // 128 KiB per chunk
  put(Chain(kModel, kSalt, tokens_of(256), shape));
  const std::vector<std::int32_t> branch = tokens_of(256, 2, 64);  // shares a chunk with the first
  put(Chain(kModel, kSalt, branch, shape));
  put(Chain(kModel, kSalt, tokens_of(256, 3), shape));
  const PutReport report = put(Chain(kModel, kSalt, tokens_of(320, 4), shape));
  EXPECT_EQ(report.chunks_evicted, 3U);
  EXPECT_EQ(expect_match(tokens_of(256)), 64U);
  EXPECT_EQ(expect_match(branch), 256U);
  EXPECT_EQ(expect_match(tokens_of(256, 3)), 256U);
  EXPECT_OK(store_->check_integrity());
}

// What was saved first leaves first, before and after a restart, whatever was used since.
TEST_F(StoreTest, FirstInFirstOutOutlivesTheProcess) {
  options_.quota_bytes = 2 << 20;
  options_.disk_policy.evict = policy::EvictPolicy::kFifo;
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};  // 128 KiB per chunk
  for (const std::uint32_t seed : {1, 2, 3}) {
    put(Chain(kModel, kSalt, tokens_of(256, seed), shape));
  }
  open();
  EXPECT_EQ(expect_match(tokens_of(256, 1)), 256U);
  put(Chain(kModel, kSalt, tokens_of(384, 4), shape));
  EXPECT_LT(expect_match(tokens_of(256, 1)), 256U);
  EXPECT_EQ(expect_match(tokens_of(256, 2)), 256U);
  EXPECT_EQ(expect_match(tokens_of(256, 3)), 256U);
}

// Of what was used alike, the rows that cost most to compute again per byte stay.
TEST_F(StoreTest, TheDisksKeepWhatIsDearToComputeAgain) {
  options_.quota_bytes = 2 << 20;
  options_.disk_policy.evict = policy::EvictPolicy::kCostAware;
  open();
  policy::RestoreCosts costs;
  costs.n_layer = 4;
  policy::LayerCosts layer;
  layer.dense = policy::CostCurve::affine(0, 1e-3);
  layer.project = policy::CostCurve::affine(0, 1e-9);
  layer.attn_per_key = policy::CostCurve::affine(0, 1e-6);
  costs.layers = {layer};
  costs.link.bytes_per_s = 1e12;
  ASSERT_OK(store_->set_costs(costs, 1e12));
  const Shape small{4, {Encoding::kHiddenQ8_1}, 256};  // 64 KiB per chunk
  const Shape large{4, {Encoding::kHiddenQ8_1}, 512};  // 128 KiB, as many seconds
  put(Chain(kModel, kSalt, tokens_of(384, 1), small));
  put(Chain(kModel, kSalt, tokens_of(384, 2), large));
  put(Chain(kModel, kSalt, tokens_of(512, 3), small));
  put(Chain(kModel, kSalt, tokens_of(512, 4), small));
  EXPECT_EQ(expect_match(tokens_of(384, 1)), 384U);  // older, and yet
  EXPECT_LT(expect_match(tokens_of(384, 2)), 384U);
}

// With a reserve one eviction makes room for several puts.
TEST_F(StoreTest, AReserveIsEvictedAtOnce) {
  options_.quota_bytes = 2 << 20;
  options_.disk_policy.reserve = 0.4;
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};  // 128 KiB per chunk
  std::uint32_t seed = 1;
  PutReport report;
  for (; report.chunks_evicted == 0; ++seed) {
    ASSERT_LT(seed, 20U);
    report = put(Chain(kModel, kSalt, tokens_of(128, seed), shape));
  }
  EXPECT_GE(report.chunks_evicted, 6U);
  for (int i = 0; i < 3; ++i, ++seed) {
    EXPECT_EQ(put(Chain(kModel, kSalt, tokens_of(128, seed), shape)).chunks_evicted, 0U);
  }
}

TEST_F(StoreTest, AnOwnersQuotaEvictsItsOwnChunksOnly) {
  options_.owner_quota_bytes = 1 << 20;
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};  // 128 KiB per chunk: eight fit
  const SaltId owner = salt_id("key");
  const SaltId salts[] = {salt_id("key, user 1"), salt_id("key, user 2"), salt_id("key, user 3")};
  const auto matched = [&](const SaltId& salt, std::uint32_t seed) {
    return store_->match(kModel, salt, tokens_of(256, seed))->n_tokens;
  };
  put(Chain(kModel, kSalt, tokens_of(256, 1), shape));
  std::uint32_t seed = 10;
  for (const SaltId& salt : salts) {
    Chain chain(kModel, salt, tokens_of(256, seed++), shape);
    chain.set_owner(owner);
    put(chain);
    EXPECT_LE(store_->owned_bytes(owner), options_.owner_quota_bytes);
    EXPECT_EQ(store_->owned_bytes(salt), 0U);
  }
  EXPECT_EQ(matched(salts[0], 10), 0U);  // the least recently used of the three
  EXPECT_EQ(matched(salts[1], 11), 256U);
  EXPECT_EQ(matched(salts[2], 12), 256U);
  EXPECT_EQ(expect_match(tokens_of(256, 1)), 256U);  // another owner's, and older
  // Whose is whose is known to the next process.
  open();
  EXPECT_EQ(store_->owned_bytes(owner), 8 * (128U << 10));
  EXPECT_EQ(store_->owned_bytes(kSalt), 4 * (128U << 10));
  Chain chain(kModel, salts[0], tokens_of(256, 10), shape);
  chain.set_owner(owner);
  EXPECT_EQ(put(chain).chunks_evicted, 4U);
  EXPECT_EQ(matched(salts[0], 10), 256U);
  EXPECT_EQ(store_->owned_bytes(owner), 8 * (128U << 10));
}

TEST_F(StoreTest, TheOldestConversationGoesAsAWhole) {
  options_.owner_quota_bytes = 2 << 20;  // sixteen chunks
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};
  // Two that share 128 tokens, and a third; saved piece by piece, so the ends are the youngest.
  const Chain first(kModel, kSalt, tokens_of(384, 1, 128), shape);
  const Chain fork(kModel, kSalt, tokens_of(256, 2, 128), shape);
  const Chain third(kModel, kSalt, tokens_of(384, 3), shape);
  for (const ChunkWrite& chunk : first.chunks()) ASSERT_OK(store_->put({&chunk, 1}));
  for (const ChunkWrite& chunk : third.chunks()) ASSERT_OK(store_->put({&chunk, 1}));
  put(fork);
  // 6 + 6 + 2 are there; five more are three too many.
  EXPECT_EQ(put(Chain(kModel, kSalt, tokens_of(320, 5), shape)).chunks_evicted, 3U);
  EXPECT_EQ(expect_match(third.tokens()), 384U);
  EXPECT_EQ(expect_match(fork.tokens()), 256U);
  EXPECT_EQ(expect_match(first.tokens()), 192U);
  EXPECT_EQ(expect_match(tokens_of(320, 5)), 320U);
  EXPECT_EQ(expect_match(third.tokens()), 384U);
  // The fork's own two go, then what is left of the first, and with it what both followed.
  EXPECT_EQ(put(Chain(kModel, kSalt, tokens_of(320, 6), shape)).chunks_evicted, 5U);
  EXPECT_EQ(expect_match(third.tokens()), 384U);
  EXPECT_EQ(expect_match(fork.tokens()), 0U);
}

TEST_F(StoreTest, AnOwnersQuotaThatCannotBeMetIsNamed) {
  options_.owner_quota_bytes = 1 << 20;
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};
  const Chain first(kModel, kSalt, tokens_of(512, 1), shape);
  put(first);
  auto match = store_->match(kModel, kSalt, first.tokens());
  ASSERT_OK(match);
  const auto second = store_->put(Chain(kModel, kSalt, tokens_of(64, 2), shape).chunks());
  EXPECT_EQ(second.code(), Code::kResourceExhausted);
  EXPECT_NE(second.status().message().find("quota of 1048576 bytes for each key"),
            std::string::npos);
  EXPECT_OK(store_->check_integrity());
  put(Chain(kModel, salt_id("other"), tokens_of(64, 2), shape));  // has room of its own
  match = Match{};
  EXPECT_EQ(put(Chain(kModel, kSalt, tokens_of(64, 2), shape)).chunks_evicted, 1U);
}

TEST_F(StoreTest, WhatASaltHadCountsForItsOwnerFromTheFirstPutOn) {
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};
  const SaltId owner = salt_id("key");
  put(Chain(kModel, kSalt, tokens_of(256, 1), shape));
  EXPECT_EQ(store_->owned_bytes(kSalt), 4 * (128U << 10));
  Chain more(kModel, kSalt, tokens_of(64, 2), shape);
  more.set_owner(owner);
  put(more);
  EXPECT_EQ(store_->owned_bytes(owner), 5 * (128U << 10));
  EXPECT_EQ(store_->owned_bytes(kSalt), 0U);
  // Without chunks nobody needs to know.
  EXPECT_EQ(*store_->remove({}), 5U);
  EXPECT_OK(store_->gc());
  open();
  put(Chain(kModel, kSalt, tokens_of(64, 2), shape));
  EXPECT_EQ(store_->owned_bytes(owner), 0U);
  EXPECT_EQ(store_->owned_bytes(kSalt), 128U << 10);
}

TEST_F(StoreTest, PinnedChunksAreNotEvicted) {
  options_.quota_bytes = 2 << 20;
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};
  const Chain first(kModel, kSalt, tokens_of(640, 1), shape);
  put(first);
  auto match = store_->match(kModel, kSalt, first.tokens());
  ASSERT_OK(match);
  EXPECT_EQ(store_->put(Chain(kModel, kSalt, tokens_of(640, 2), shape).chunks()).code(),
            Code::kResourceExhausted);
  EXPECT_TRUE(read_back(*store_, *match).failed.empty());
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(store_->put(Chain(kModel, kSalt, tokens_of(6400, 2), shape).chunks()).code(),
            Code::kResourceExhausted);
  match = Match{};
  put(Chain(kModel, kSalt, tokens_of(640, 2), shape));
  EXPECT_EQ(expect_match(tokens_of(640, 2)), 640U);
}

}  // namespace
}  // namespace hcache::store
