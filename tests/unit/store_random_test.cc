// Random batches, forks, removals, pins and reopenings: whatever comes, the store is whole, what it
// offers is right, and without a quota or a removal nothing is lost. HCACHE_TEST_SEED begins with
// other sequences.

#include <fmt/format.h>

#include <cstdlib>
#include <random>
#include <unordered_set>

#include "store_fixture.h"

namespace hcache::store::testing {
namespace {

class RandomStoreTest : public StoreTest, public ::testing::WithParamInterface<std::uint32_t> {
 protected:
  std::size_t below(std::size_t n) { return random_() % n; }
  bool chance(int percent) { return below(100) < static_cast<std::size_t>(percent); }

  // Goes on from a known sequence, anywhere in it.
  std::vector<std::int32_t> new_tokens() {
    std::vector<std::int32_t> tokens;
    if (!known_.empty() && chance(85)) {
      tokens = known_[below(known_.size())];
      if (chance(60)) tokens.resize(below(tokens.size() + 1));
    }
    const std::size_t n = 1 + below(chance(50) ? 30 : 150);
    // Few tokens to choose from: sequences that part meet each other's first tokens.
    for (std::size_t i = 0; i < n; ++i) tokens.push_back(static_cast<std::int32_t>(below(3)));
    return tokens;
  }
  Shape new_shape() {
    if (snapshots_) return {.layers = 2, .encodings = {Encoding::kRows}, .row_size = 36};
    const std::vector<std::vector<Encoding>> encodings = {
        {Encoding::kKv}, {Encoding::kHiddenQ8_1}, {Encoding::kHiddenQ8_1, Encoding::kKv}};
    return {.layers = static_cast<std::uint16_t>(1 + below(3)),
            .encodings = chance(70) ? encodings[0] : encodings[below(3)],
            .row_size = 36};
  }

  // Several sequences at once, as the saver gives them: a chunk stands in a batch once.
  void put_some() {
    std::deque<Chain> chains;  // which point into themselves
    const std::size_t n = 1 + below(4);
    for (std::size_t i = 0; i < n; ++i) {
      chains.emplace_back(kModel, kSalt, new_tokens(), new_shape());
      known_.push_back(chains.back().tokens());
      for (std::size_t i = 0; snapshots_ && i < chains.back().chunks().size(); ++i) {
        if (chance(30)) chains.back().add_snapshot(i, 2, 40);
      }
    }
    std::vector<ChunkWrite> batch;
    std::unordered_set<ChunkId> ids;
    for (const Chain& chain : chains) {
      for (const ChunkWrite& write : chain.chunks()) {
        if (ids.insert(write.id).second) batch.push_back(write);
      }
    }
    const auto report = store_->put(batch);
    ASSERT_OK(report);
    EXPECT_EQ(report->chunks_without_parent, 0U);
  }
  void remove_some() {
    const std::vector<std::int32_t>& tokens = known_[below(known_.size())];
    if (tokens.size() < kChunkTokens) return;
    RemoveFilter filter;
    filter.chunk = first_chunk(kModel, kSalt, tokens);
    EXPECT_OK(store_->remove(filter));
    lost_ = true;
  }
  void quarantine_a_page() {
    auto match = store_->match(kModel, kSalt, known_[below(known_.size())]);
    ASSERT_OK(match);
    if (match->chunks.empty()) return;
    const ChunkInfo& info = match->chunks[below(match->chunks.size())].chunk.info();
    if (info.pages.empty()) return;
    const PageInfo& page = info.pages[below(info.pages.size())];
    EXPECT_OK(store_->quarantine(info.id, page.layer, page.encoding));
    lost_ = true;
  }
  void pin_or_release() {
    if (!pinned_.empty() && chance(50)) {
      const Match& match = pinned_.back();
      EXPECT_TRUE(read_back(*store_, match).failed.empty());
      pinned_.pop_back();
      return;
    }
    const std::vector<std::int32_t>& tokens = known_[below(known_.size())];
    auto match = store_->match(kModel, kSalt, tokens);
    ASSERT_OK(match);
    expect_prefix(*match, tokens);
    pinned_.push_back(std::move(*match));
  }
  void run(int n_steps) {
    for (int step = 0; step < n_steps && !HasFailure(); ++step) {
      SCOPED_TRACE(fmt::format("step {}", step));
      const std::size_t what = below(20);
      if (what == 0 && removes_ && !known_.empty()) {
        chance(50) ? remove_some() : quarantine_a_page();
      } else if (what == 1) {
        EXPECT_OK(store_->gc());
      } else if (what == 2) {
        pinned_.clear();
        open();
      } else if (what < 6 && !known_.empty()) {
        pin_or_release();
      } else {
        put_some();
      }
      EXPECT_OK(store_->check_integrity());
      if (options_.snapshot_quota_bytes > 0) {
        EXPECT_LE(store_->stat()->snapshot_bytes, options_.snapshot_quota_bytes);
      }
    }
    for (const Match& match : pinned_) EXPECT_TRUE(read_back(*store_, match).failed.empty());
    for (const std::vector<std::int32_t>& tokens : known_) {
      const std::uint64_t n = expect_match(tokens);
      if (!lost_) {
        EXPECT_EQ(n, tokens.size());
      }
    }
    pinned_.clear();
  }

  std::mt19937 random_{GetParam()};
  bool removes_ = false;
  bool snapshots_ = false;
  bool lost_ = false;
  std::vector<std::vector<std::int32_t>> known_;
  std::vector<Match> pinned_;
};

TEST_P(RandomStoreTest, NothingIsLost) {
  options_.segment_bytes = 1 << 20;
  open();
  run(60);
}

TEST_P(RandomStoreTest, RemovalsAndAQuotaLeaveItWhole) {
  options_.segment_bytes = 1 << 20;
  options_.quota_bytes = 1 << 20;
  removes_ = true;
  lost_ = true;
  open();
  run(60);
}

TEST_P(RandomStoreTest, SnapshotsThatGoTakeNoRowsAlong) {
  options_.segment_bytes = 1 << 20;
  options_.snapshot_quota_bytes = 40 << 10;  // eight of whole chunks
  snapshots_ = true;
  open();
  run(60);
  EXPECT_GT(store_->stat()->snapshots, 0U);
}

TEST_P(RandomStoreTest, SnapshotsMayGoForSeveralReasons) {
  options_.segment_bytes = 1 << 20;
  options_.snapshot_quota_bytes = 80 << 10;
  options_.quota_bytes = 1 << 20;
  snapshots_ = removes_ = lost_ = true;
  open();
  run(60);
}

std::uint32_t first_seed() {
  const char* given = std::getenv("HCACHE_TEST_SEED");
  return given == nullptr ? 1 : static_cast<std::uint32_t>(std::strtoul(given, nullptr, 10));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomStoreTest, ::testing::Range(first_seed(), first_seed() + 12));

}  // namespace
}  // namespace hcache::store::testing
