// Snapshots of state have a quota of their own: what is too much goes, and the rows of its chunk
// stay.
#include <filesystem>
#include <set>

#include "store_fixture.h"

namespace hcache::store {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kPartRow = 512;                        // bytes of a part for a token
constexpr std::uint64_t kSnapshotBytes = 2 * 64 * kPartRow;  // 64 KiB, in two parts
const Shape kRows{2, {Encoding::kRows}, 64};                 // 8 KiB per chunk

class StoreSnapshotsTest : public StoreTest {
 protected:
  // A chain with a snapshot behind every `step` chunks.
  static Chain snapshot_chain(std::size_t n, std::uint32_t seed, std::size_t step,
                              std::size_t fork = 0) {
    Chain out(kModel, kSalt, tokens_of(n, seed, fork), kRows);
    for (std::size_t i = step - 1; i < n / kChunkTokens; i += step)
      out.add_snapshot(i, 2, kPartRow);
    return out;
  }
  // Puts it as a model on libllama does: a batch for each of its snapshots.
  PutReport put_in_steps(const Chain& chain, std::size_t step) {
    PutReport all;
    for (std::size_t at = 0; at < chain.chunks().size(); at += step) {
      const auto n = std::min(step, chain.chunks().size() - at);
      const auto report = store_->put(chain.chunks().subspan(at, n));
      EXPECT_OK(report);
      EXPECT_OK(store_->check_integrity());
      EXPECT_LE(store_->stat()->snapshot_bytes, options_.snapshot_quota_bytes);
      all.snapshots_dropped += report->snapshots_dropped;
      all.page_bytes += report->page_bytes;
    }
    return all;
  }
  // The chunks of a match that have a snapshot, both parts of it.
  static std::set<std::size_t> snapshots_of(const Match& match) {
    std::set<std::size_t> out;
    for (std::size_t i = 0; i < match.chunks.size(); ++i) {
      const ChunkInfo& info = match.chunks[i].chunk.info();
      const bool first = info.find_page(0, Encoding::kSnapshot) != nullptr;
      const bool second = info.find_page(1, Encoding::kSnapshot) != nullptr;
      EXPECT_EQ(first, second) << i;
      if (first) out.insert(i);
    }
    return out;
  }
  std::set<std::size_t> snapshots_of(const Chain& chain) {
    const auto match = store_->match(kModel, kSalt, chain.tokens());
    EXPECT_OK(match);
    return match.ok() ? snapshots_of(*match) : std::set<std::size_t>();
  }
};

TEST_F(StoreSnapshotsTest, OlderOnesGoAndTheirRowsStay) {
  options_.snapshot_quota_bytes = 4 * kSnapshotBytes;
  open();
  const Chain chain = snapshot_chain(64 * 32, 1, 4);
  EXPECT_EQ(put_in_steps(chain, 4).snapshots_dropped, 4U);
  EXPECT_EQ(expect_match(chain.tokens()), 64U * 32);
  const std::set<std::size_t> left = snapshots_of(chain);
  EXPECT_EQ(left.size(), 4U);
  EXPECT_TRUE(left.contains(31));
  const auto stat = store_->stat();
  ASSERT_OK(stat);
  EXPECT_EQ(stat->snapshots, 4U);
  EXPECT_EQ(stat->snapshot_bytes, 4 * kSnapshotBytes);
  EXPECT_EQ(stat->snapshots_dropped, 4U);
  EXPECT_EQ(stat->snapshot_quota_bytes, options_.snapshot_quota_bytes);
}

// Each page takes whole blocks at its ends at most: the space of those that are gone is free.
TEST_F(StoreSnapshotsTest, TheirSpaceComesBack) {
  options_.snapshot_quota_bytes = 2 * kSnapshotBytes;
  open();
  for (std::uint32_t seed = 1; seed <= 10; ++seed) {
    put_in_steps(snapshot_chain(64 * 4, seed, 2), 2);
  }
  const auto stat = store_->stat();
  ASSERT_OK(stat);
  EXPECT_EQ(stat->page_bytes, 40 * (8U << 10) + 2 * kSnapshotBytes);
  EXPECT_LE(stat->allocated_bytes, stat->page_bytes + (128U << 10));
}

TEST_F(StoreSnapshotsTest, TheyAreWrittenOnce) {
  options_.snapshot_quota_bytes = 100 * kSnapshotBytes;
  open();
  const Chain chain = snapshot_chain(64 * 8, 1, 2);
  put(chain);
  const std::uint64_t before = store_->stat()->snapshot_bytes;
  EXPECT_EQ(before, 4 * kSnapshotBytes);
  const PutReport again = put(chain);
  EXPECT_EQ(again.page_bytes, 0U);
  EXPECT_EQ(again.chunks_known, 8U);
  // The same of a chunk that is put without its rows, as a saver does when it has these already.
  Chain alone(kModel, kSalt, tokens_of(64 * 8, 1), {0, {}, 0});
  alone.add_snapshot(7, 2, kPartRow);
  EXPECT_EQ(store_->put(alone.chunks().subspan(7))->page_bytes, 0U);
  EXPECT_EQ(store_->stat()->snapshot_bytes, before);
  // And one for a chunk whose rows alone are there.
  alone.add_snapshot(4, 2, kPartRow);
  EXPECT_EQ(store_->put(alone.chunks().subspan(4, 1))->page_bytes, kSnapshotBytes);
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(snapshots_of(chain), (std::set<std::size_t>{1, 3, 4, 5, 7}));
}

// What a restore has matched stays until it has ended, and can be read.
TEST_F(StoreSnapshotsTest, WhatIsPinnedStays) {
  options_.snapshot_quota_bytes = 2 * kSnapshotBytes;
  open();
  const Chain first = snapshot_chain(64 * 4, 1, 2);
  put(first);
  auto match = store_->match(kModel, kSalt, first.tokens());
  ASSERT_OK(match);
  // Another one's is not written then; its rows are.
  const Chain second = snapshot_chain(64 * 2, 2, 2);
  const PutReport report = put(second);
  EXPECT_EQ(report.snapshots_dropped, 1U);
  EXPECT_EQ(report.chunks_new, 2U);
  EXPECT_EQ(expect_match(second.tokens()), 128U);
  EXPECT_TRUE(snapshots_of(second).empty());
  EXPECT_EQ(snapshots_of(*match), (std::set<std::size_t>{1, 3}));
  EXPECT_TRUE(read_back(*store_, *match).failed.empty());
  match = Match{};
  // When it comes again there is room.
  EXPECT_EQ(put(second).chunks_extended, 1U);
  EXPECT_EQ(snapshots_of(second), std::set<std::size_t>{1});
  EXPECT_EQ(store_->stat()->snapshots, 2U);
}

TEST_F(StoreSnapshotsTest, TheSmallestQuotaLeavesRows) {
  options_.snapshot_quota_bytes = kSnapshotBytes - 1;
  open();
  const Chain chain = snapshot_chain(64 * 8, 1, 2);
  const PutReport report = put(chain);
  EXPECT_EQ(report.snapshots_dropped, 4U);
  EXPECT_EQ(report.chunks_new, 8U);
  EXPECT_EQ(store_->stat()->snapshot_bytes, 0U);
  EXPECT_EQ(expect_match(chain.tokens()), 64U * 8);
  EXPECT_EQ(put(chain).chunks_known, 8U);  // nothing is left to write
}

// The end of a turn is in a short chunk that the next turn's chunk makes needless, but for its
// snapshot: without it, it goes as a whole.
TEST_F(StoreSnapshotsTest, ATailThatWasPassedGoesAsAWhole) {
  options_.snapshot_quota_bytes = 3 * kSnapshotBytes;
  open();
  Chain turn(kModel, kSalt, tokens_of(64 * 4 + 16, 1), kRows);
  turn.add_snapshot(3, 2, kPartRow);
  turn.add_snapshot(4, 2, 4 * kPartRow);  // as many bytes, of 16 tokens
  put(turn);
  EXPECT_EQ(store_->stat()->snapshots, 2U);
  Chain next(kModel, kSalt, tokens_of(64 * 8 + 16, 1), kRows);
  next.add_snapshot(7, 2, kPartRow);
  EXPECT_EQ(put(next).tails_superseded, 0U);
  EXPECT_EQ(store_->stat()->chunks, 10U);
  next.add_snapshot(8, 2, 4 * kPartRow);
  EXPECT_EQ(put(next).snapshots_dropped, 1U);
  EXPECT_EQ(snapshots_of(next), (std::set<std::size_t>{3, 7, 8}));
  put(next);
  EXPECT_EQ(store_->stat()->chunks, 9U);
  EXPECT_EQ(expect_match(next.tokens()), 64U * 8 + 16);
}

TEST_F(StoreSnapshotsTest, TheNextProcessCountsThem) {
  open();
  const Chain chain = snapshot_chain(64 * 16, 1, 2);
  put(chain);
  EXPECT_EQ(store_->stat()->snapshots, 8U);
  options_.snapshot_quota_bytes = 3 * kSnapshotBytes;
  open();
  EXPECT_OK(store_->check_integrity());
  // As other quotas, with the next that is put.
  EXPECT_EQ(put(Chain(kModel, kSalt, tokens_of(64, 2), kRows)).snapshots_dropped, 5U);
  EXPECT_EQ(store_->stat()->snapshots, 3U);
  EXPECT_TRUE(snapshots_of(chain).contains(15));
  EXPECT_EQ(expect_match(chain.tokens()), 64U * 16);
}

TEST_F(StoreSnapshotsTest, ARebuiltCatalogCountsThem) {
  options_.snapshot_quota_bytes = 4 * kSnapshotBytes;
  open();
  const Chain chain = snapshot_chain(64 * 16, 1, 2);
  put_in_steps(chain, 2);
  const std::set<std::size_t> left = snapshots_of(chain);
  ASSERT_OK(store_->close());
  store_.reset();
  for (const char* name : {"catalog.db", "catalog.db-wal", "catalog.db-shm"}) {
    std::filesystem::remove(options_.dirs[0] + "/" + name);
  }
  open();
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(store_->stat()->snapshot_bytes, 4 * kSnapshotBytes);
  EXPECT_EQ(snapshots_of(chain), left);
  EXPECT_EQ(expect_match(chain.tokens()), 64U * 16);
  put_in_steps(snapshot_chain(64 * 4, 2, 2), 2);
}

// Of one that the disks have in part the rest goes as well.
TEST_F(StoreSnapshotsTest, ARebuiltCatalogHasNoHalfOnes) {
  open();
  const Chain chain = snapshot_chain(64 * 4, 1, 2);
  put(Chain(kModel, kSalt, chain.tokens(), kRows));
  put(chain);
  ASSERT_OK(store_->close());
  store_.reset();
  const std::string segment = options_.dirs[0] + "/segment-00000001.hcs";
  std::filesystem::resize_file(segment, std::filesystem::file_size(segment) - 1000);
  std::filesystem::remove(options_.dirs[0] + "/catalog.db");
  open();
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(snapshots_of(chain).size(), 1U);  // which counts parts
  EXPECT_EQ(store_->stat()->snapshot_bytes, kSnapshotBytes);
  EXPECT_EQ(expect_match(chain.tokens()), 64U * 4);
}

// One that comes back between others, and a fork: the order of a chain's snapshots is known.
TEST_F(StoreSnapshotsTest, TheyMayComeInAnyOrder) {
  options_.snapshot_quota_bytes = 100 * kSnapshotBytes;
  open();
  const std::vector<std::int32_t> tokens = tokens_of(64 * 12, 1, 64 * 7);
  Chain rows(kModel, kSalt, tokens, kRows);
  put(rows);
  Chain snapshots(kModel, kSalt, tokens, {0, {}, 0});
  put(snapshot_chain(64 * 12, 2, 3, 64 * 7));
  for (const std::size_t i : {11, 3, 7, 5, 1, 9}) {
    snapshots.add_snapshot(i, 2, kPartRow);
    ASSERT_OK(store_->put(snapshots.chunks().subspan(i, 1)));
    ASSERT_OK(store_->check_integrity());  // that each follows the right one
  }
  EXPECT_EQ(snapshots_of(rows), (std::set<std::size_t>{1, 2, 3, 5, 7, 9, 11}));
}

// A part is of no use without the others.
TEST_F(StoreSnapshotsTest, ADamagedPartTakesTheOthersAlong) {
  options_.snapshot_quota_bytes = 100 * kSnapshotBytes;
  open();
  const Chain chain = snapshot_chain(64 * 4, 1, 2);
  put(chain);
  ASSERT_OK(store_->quarantine(chain.chunks()[1].id, 1, Encoding::kSnapshot));
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(snapshots_of(chain), std::set<std::size_t>{3});
  EXPECT_EQ(expect_match(chain.tokens()), 64U * 4);
  EXPECT_OK(store_->quarantine(chain.chunks()[1].id, 0, Encoding::kSnapshot));  // is gone already
}

// Chunks that leave take theirs along.
TEST_F(StoreSnapshotsTest, RemovedChunksCountNoMore) {
  options_.snapshot_quota_bytes = 100 * kSnapshotBytes;
  options_.quota_bytes = 1 << 20;
  open();
  for (std::uint32_t seed = 1; seed < 12; ++seed) put(snapshot_chain(64 * 4, seed, 2));
  const std::uint64_t bytes = store_->stat()->snapshot_bytes;
  EXPECT_GT(bytes, 0U);
  EXPECT_LT(bytes, 22 * kSnapshotBytes);
  EXPECT_EQ(store_->stat()->snapshots_dropped, 0U);
  ASSERT_OK(store_->remove({}));
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(store_->stat()->snapshot_bytes, 0U);
}

TEST_F(StoreSnapshotsTest, HostMemoryKeepsNoneThatIsGone) {
  options_.snapshot_quota_bytes = 2 * kSnapshotBytes;
  options_.dram_bytes = 4 << 20;
  open();
  const Chain chain = snapshot_chain(64 * 16, 1, 2);
  put_in_steps(chain, 2);
  EXPECT_EQ(store_->stat()->dram_bytes, 16 * (8U << 10) + 2 * kSnapshotBytes);
  EXPECT_EQ(expect_match(chain.tokens()), 64U * 16);
}

}  // namespace
}  // namespace hcache::store
