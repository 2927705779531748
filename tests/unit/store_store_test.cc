// The store through its public interface, on the real file system.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <thread>

#include "base/xxh3.h"
#include "patience.h"
#include "store_fixture.h"

namespace hcache::store {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using hcache::test::Patience;

TEST_F(StoreTest, EveryLengthComesBackWholeAfterReopening) {
  const Shape shape{3, {Encoding::kHiddenQ8_1, Encoding::kKv}, 36};
  open();
  for (const std::size_t n : {1, 2, 63, 64, 65, 127, 128, 129, 200, 640}) {
    SCOPED_TRACE(n);
    const Chain chain(kModel, kSalt, tokens_of(n, static_cast<std::uint32_t>(n)), shape);
    const PutReport report = put(chain);
    EXPECT_EQ(report.chunks_new, (n + 63) / 64);
    EXPECT_EQ(expect_match(chain.tokens()), n);
  }
  open();
  for (const std::size_t n : {1, 2, 63, 64, 65, 127, 128, 129, 200, 640}) {
    EXPECT_EQ(expect_match(tokens_of(n, static_cast<std::uint32_t>(n))), n);
  }
  EXPECT_OK(store_->check_integrity());
}

TEST_F(StoreTest, PagesOfAllSizesComeBack) {
  open();
  std::uint32_t seed = 0;
  for (const std::size_t row : {1, 2, 63, 64, 65, 500, 4096, 40000}) {
    SCOPED_TRACE(row);
    const Chain chain(kModel, kSalt, tokens_of(100, ++seed), Shape{3, {Encoding::kHiddenF32}, row});
    put(chain);
    auto match = store_->match(kModel, kSalt, chain.tokens());
    ASSERT_OK(match);
    ReaderOptions options;
    options.ring_bytes = 16 << 20;
    EXPECT_TRUE(read_back(*store_, *match, options).failed.empty());
  }
}

TEST_F(StoreTest, MatchesDownToTheToken) {
  open();
  put(Chain(kModel, kSalt, tokens_of(300), {}));
  for (std::size_t n : {1, 40, 64, 65, 100, 128, 250, 299, 300}) {
    EXPECT_EQ(expect_match(tokens_of(n)), n);
  }
  for (std::size_t fork : {1, 17, 64, 65, 130, 256, 299}) {
    EXPECT_EQ(expect_match(tokens_of(400, 9, fork)), fork) << fork;
  }
  EXPECT_EQ(expect_match(tokens_of(400)), 300U);
  EXPECT_EQ(expect_match(tokens_of(400, 9, 0)), 0U);
  EXPECT_EQ(expect_match({}), 0U);
}

TEST_F(StoreTest, PrefixesAreSharedAndForksKept) {
  open();
  put(Chain(kModel, kSalt, tokens_of(200), {}));
  const PutReport report = put(Chain(kModel, kSalt, tokens_of(200, 5, 150), {}));
  EXPECT_EQ(report.chunks_known, 2U);
  EXPECT_EQ(report.chunks_new, 2U);
  EXPECT_EQ(expect_match(tokens_of(200)), 200U);
  EXPECT_EQ(expect_match(tokens_of(200, 5, 150)), 200U);
  EXPECT_EQ(expect_match(tokens_of(200, 6, 160)), 160U);
}

TEST_F(StoreTest, ALongerTailSupersedesAShorterOne) {
  open();
  put(Chain(kModel, kSalt, tokens_of(70), {}));
  EXPECT_EQ(put(Chain(kModel, kSalt, tokens_of(90), {})).tails_superseded, 1U);
  EXPECT_EQ(store_->stat()->chunks, 2U);
  EXPECT_EQ(put(Chain(kModel, kSalt, tokens_of(80), {})).chunks_known, 2U);  // covered
  EXPECT_EQ(put(Chain(kModel, kSalt, tokens_of(128), {})).tails_superseded, 1U);
  EXPECT_EQ(store_->stat()->chunks, 2U);
  EXPECT_EQ(expect_match(tokens_of(128)), 128U);
  // One that is in use goes once it is not.
  put(Chain(kModel, kSalt, tokens_of(130), {}));
  {
    auto match = store_->match(kModel, kSalt, tokens_of(130));
    ASSERT_OK(match);
    EXPECT_EQ(put(Chain(kModel, kSalt, tokens_of(140), {})).tails_superseded, 1U);
    EXPECT_EQ(store_->stat()->chunks, 4U);
    EXPECT_TRUE(read_back(*store_, *match).failed.empty());
  }
  put(Chain(kModel, kSalt, tokens_of(1, 77), {}));
  EXPECT_EQ(store_->stat()->chunks, 4U);
  // A tail that knows more than its extension stays.
  put(Chain(kModel, kSalt, tokens_of(10, 4), {6, {Encoding::kKv}, 16}));
  put(Chain(kModel, kSalt, tokens_of(20, 4), {5, {Encoding::kKv}, 16}));
  EXPECT_EQ(store_->stat()->chunks, 6U);
}

TEST_F(StoreTest, OneBatchMayExtendItsOwnTail) {
  open();
  const Chain shorter(kModel, kSalt, tokens_of(70), {});
  const Chain longer(kModel, kSalt, tokens_of(80), {});
  std::vector<ChunkWrite> batch(shorter.chunks().begin(), shorter.chunks().end());
  batch.push_back(longer.chunks()[1]);
  auto report = store_->put(batch);
  ASSERT_OK(report);
  EXPECT_EQ(report->chunks_new, 2U);
  EXPECT_EQ(report->tails_superseded, 1U);
  EXPECT_EQ(expect_match(tokens_of(80)), 80U);
}

TEST_F(StoreTest, OneBatchMayExtendATailInTwoWays) {
  open();
  put(Chain(kModel, kSalt, tokens_of(70), {}));
  const Chain left(kModel, kSalt, tokens_of(90), {});
  const Chain right(kModel, kSalt, tokens_of(140, 5, 80), {});
  std::vector<ChunkWrite> batch(right.chunks().begin() + 1, right.chunks().end());
  batch.push_back(left.chunks()[1]);
  auto report = store_->put(batch);
  ASSERT_OK(report);
  EXPECT_EQ(report->chunks_new, 3U);
  EXPECT_EQ(report->tails_superseded, 1U);
  EXPECT_OK(store_->check_integrity());
  // Its space was freed once.
  for (std::uint32_t seed = 7; seed < 11; ++seed) {
    put(Chain(kModel, kSalt, tokens_of(6, seed), {}));
    EXPECT_EQ(expect_match(tokens_of(6, seed)), 6U);
  }
  EXPECT_EQ(expect_match(tokens_of(90)), 90U);
  EXPECT_EQ(expect_match(tokens_of(140, 5, 80)), 140U);
}

TEST_F(StoreTest, ATailInUseThatIsExtendedTwiceIsFreedOnce) {
  open();
  put(Chain(kModel, kSalt, tokens_of(70), {}));
  {
    auto match = store_->match(kModel, kSalt, tokens_of(70));
    ASSERT_OK(match);
    put(Chain(kModel, kSalt, tokens_of(90), {}));
    put(Chain(kModel, kSalt, tokens_of(140, 5, 80), {}));
    EXPECT_EQ(store_->stat()->chunks, 5U);
  }
  for (std::uint32_t seed = 7; seed < 11; ++seed) put(Chain(kModel, kSalt, tokens_of(6, seed), {}));
  EXPECT_EQ(store_->stat()->chunks, 8U);
  EXPECT_EQ(expect_match(tokens_of(90)), 90U);
  EXPECT_EQ(expect_match(tokens_of(140, 5, 80)), 140U);
}

TEST_F(StoreTest, ATailThatOneBatchExtendsAndAddsToStays) {
  open();
  put(Chain(kModel, kSalt, tokens_of(10), {4, {Encoding::kKv}, 16}));
  const Chain longer(kModel, kSalt, tokens_of(20), {4, {Encoding::kKv}, 16});
  const Chain more(kModel, kSalt, tokens_of(10), {5, {Encoding::kKv}, 16});
  auto report = store_->put(std::vector{longer.chunks()[0], more.chunks()[0]});
  ASSERT_OK(report);
  EXPECT_EQ(report->chunks_extended, 1U);
  EXPECT_EQ(report->tails_superseded, 0U);
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(store_->stat()->chunks, 2U);
  EXPECT_EQ(expect_match(tokens_of(20)), 20U);
}

TEST_F(StoreTest, MissingEncodingsAreAdded) {
  open();
  put(Chain(kModel, kSalt, tokens_of(100), {4, {Encoding::kHiddenQ8_1}, 36}));
  const PutReport report =
      put(Chain(kModel, kSalt, tokens_of(100), {6, {Encoding::kHiddenQ8_1, Encoding::kKv}, 36}));
  EXPECT_EQ(report.chunks_extended, 2U);
  auto match = store_->match(kModel, kSalt, tokens_of(100));
  ASSERT_OK(match);
  EXPECT_EQ(match->chunks[0].chunk.info().pages.size(), 12U);
  EXPECT_EQ(read_back(*store_, *match).good, 24U);
}

// Packed or not, they are the same K and V.
TEST_F(StoreTest, KeepsOneFormOfKAndV) {
  open();
  const Encoding forms[] = {Encoding::kKv, Encoding::kKvPacked};
  for (const Encoding first : forms) {
    SCOPED_TRACE(encoding_name(first));
    const auto tokens = tokens_of(100, static_cast<std::uint32_t>(first));
    put(Chain(kModel, kSalt, tokens, {2, {first}, 36}));
    for (const Encoding then : forms) {
      const PutReport report = put(Chain(kModel, kSalt, tokens, {2, {then}, 36}));
      EXPECT_EQ(report.chunks_known, 2U);
    }
    // A layer that lacks both may have either.
    EXPECT_EQ(put(Chain(kModel, kSalt, tokens, {3, {Encoding::kKvPacked}, 36})).chunks_extended,
              2U);
    const auto match = store_->match(kModel, kSalt, tokens);
    ASSERT_OK(match);
    const ChunkInfo& info = match->chunks[0].chunk.info();
    ASSERT_EQ(info.pages.size(), 3U);
    EXPECT_EQ(info.pages[0].encoding, first);
    EXPECT_EQ(info.pages[2].encoding, Encoding::kKvPacked);
    EXPECT_EQ(info.find_state(0, Encoding::kKv), &info.pages[0]);
    EXPECT_EQ(info.find_state(0, Encoding::kKvPacked), &info.pages[0]);
    EXPECT_EQ(info.find_state(2, Encoding::kKv), &info.pages[2]);
    EXPECT_EQ(info.find_state(2, Encoding::kHiddenF16), nullptr);
    EXPECT_EQ(read_back(*store_, *match).good, 6U);
  }
}

TEST_F(StoreTest, SaltsAndModelsAreIsolated) {
  open();
  const auto tokens = tokens_of(130);
  put(Chain(kModel, kSalt, tokens, {}));
  EXPECT_EQ(store_->match(kModel, salt_id("tenant"), tokens)->n_tokens, 0U);
  EXPECT_EQ(store_->match(fingerprint_of("other"), kSalt, tokens)->n_tokens, 0U);
  put(Chain(kModel, salt_id("tenant"), tokens, {}));
  EXPECT_EQ(store_->stat()->chunks, 6U);
  EXPECT_EQ(store_->match(kModel, salt_id("tenant"), tokens)->n_tokens, 130U);
}

TEST_F(StoreTest, AChunkWithoutItsParentIsNotWritten) {
  open();
  const Chain chain(kModel, kSalt, tokens_of(200), {});
  auto report = store_->put(chain.chunks().subspan(1));
  ASSERT_OK(report);
  EXPECT_EQ(report->chunks_without_parent, 3U);
  EXPECT_EQ(store_->stat()->chunks, 0U);
}

TEST_F(StoreTest, BadBatchesAreRefusedWhole) {
  open();
  const Chain good(kModel, kSalt, tokens_of(64), {});
  const Chain other(kModel, kSalt, tokens_of(64, 3), {});
  auto refused = [&](ChunkWrite bad) {
    const std::vector<ChunkWrite> batch = {other.chunks()[0], std::move(bad)};
    EXPECT_EQ(store_->put(batch).code(), Code::kInvalidArgument);
    EXPECT_EQ(store_->stat()->chunks, 0U);
  };
  ChunkWrite bad = good.chunks()[0];
  bad.first_position = 0;
  bad.id.bytes[3] ^= 1;
  refused(bad);
  bad = good.chunks()[0];
  bad.pages.push_back(bad.pages[0]);
  refused(bad);
  bad = good.chunks()[0];
  bad.pages[0].bytes = bad.pages[0].bytes.first(63);
  refused(bad);
  bad = good.chunks()[0];
  bad.tokens = {};
  refused(bad);
  refused(other.chunks()[0]);
}

class StripedStoreTest : public StoreTest, public ::testing::WithParamInterface<int> {};

TEST_P(StripedStoreTest, LayersAreSpreadAndReadBack) {
  options_.dirs.clear();
  for (int i = 0; i < GetParam(); ++i) options_.dirs.push_back(dir_ / std::to_string(i));
  open();
  const Chain chain(kModel, kSalt, tokens_of(640), {6, {Encoding::kHiddenQ8_1}, 640});
  put(chain);
  EXPECT_EQ(expect_match(chain.tokens()), 640U);
  const auto stat = store_->stat();
  ASSERT_OK(stat);
  for (const DiskStat& disk : stat->disks) {
    EXPECT_NEAR(static_cast<double>(disk.page_bytes),
                static_cast<double>(chain.bytes()) / GetParam(),
                static_cast<double>(chain.bytes()) / 20);
  }
  // Any order of the directories will do, and one more disk.
  store_.reset();
  std::reverse(options_.dirs.begin(), options_.dirs.end());
  options_.catalog_dir = dir_ / "0";
  options_.dirs.push_back(dir_ / "more");
  open();
  EXPECT_EQ(expect_match(chain.tokens()), 640U);
  put(Chain(kModel, kSalt, tokens_of(640, 2), {6, {Encoding::kHiddenQ8_1}, 640}));
  EXPECT_EQ(expect_match(tokens_of(640, 2)), 640U);
  EXPECT_GT(store_->stat()->disks.back().page_bytes, 0U);
  // But not one less.
  store_.reset();
  options_.dirs.pop_back();
  EXPECT_EQ(Store::open(Env::real(), options_).code(), Code::kFailedPrecondition);
}

INSTANTIATE_TEST_SUITE_P(Disks, StripedStoreTest, ::testing::Values(1, 2, 3));

TEST_F(StoreTest, FreedSpaceGoesBackToTheFileSystemAndIsUsedAgain) {
  options_.segment_bytes = 1 << 20;
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};
  for (std::uint32_t seed = 1; seed <= 8; ++seed)
    put(Chain(kModel, kSalt, tokens_of(300, seed), shape));
  const std::uint64_t full = store_->stat()->allocated_bytes;
  const std::uint64_t segments = store_->stat()->disks[0].segments;
  RemoveFilter half;
  half.chunk = first_chunk(kModel, kSalt, tokens_of(300, 2));
  EXPECT_EQ(*store_->remove(half), 5U);
  EXPECT_LT(store_->stat()->allocated_bytes, full - (100 << 10));
  put(Chain(kModel, kSalt, tokens_of(300, 20), shape));
  EXPECT_LE(store_->stat()->disks[0].segments, segments);
  EXPECT_EQ(*store_->remove({}), 40U);
  EXPECT_OK(store_->check_integrity());
  const auto gc = store_->gc();
  ASSERT_OK(gc);
  EXPECT_GE(gc->segments_removed, segments);
  EXPECT_EQ(store_->stat()->allocated_bytes, 0U);
  put(Chain(kModel, kSalt, tokens_of(300, 1), shape));
  EXPECT_EQ(expect_match(tokens_of(300, 1)), 300U);
}

TEST_F(StoreTest, GcMovesPagesOutOfSparseSegmentsAndDropsRedundantOnes) {
  options_.segment_bytes = 1 << 20;
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};
  for (std::uint32_t seed = 1; seed <= 40; ++seed)
    put(Chain(kModel, kSalt, tokens_of(64, seed), shape));
  for (std::uint32_t seed = 1; seed <= 40; ++seed) {
    if (seed % 5 == 0) continue;
    RemoveFilter filter;
    filter.chunk = first_chunk(kModel, kSalt, tokens_of(64, seed));
    ASSERT_OK(store_->remove(filter));
  }
  const std::uint64_t before = store_->stat()->disks[0].segments;
  const auto gc = store_->gc();
  ASSERT_OK(gc);
  EXPECT_GT(gc->pages_moved, 0U);
  EXPECT_OK(store_->check_integrity());
  EXPECT_LT(store_->stat()->disks[0].segments, before);
  for (std::uint32_t seed = 5; seed <= 40; seed += 5) {
    EXPECT_EQ(expect_match(tokens_of(64, seed)), 64U);
  }
  open();
  for (std::uint32_t seed = 5; seed <= 40; seed += 5) {
    EXPECT_EQ(expect_match(tokens_of(64, seed)), 64U);
  }
}

TEST_F(StoreTest, DiskUseIsWhatThePagesNeed) {
  open();
  const Chain chain(kModel, kSalt, tokens_of(2048), {30, {Encoding::kHiddenQ8_1}, 648});
  put(chain);
  put(Chain(kModel, kSalt, tokens_of(2050), {30, {Encoding::kHiddenQ8_1}, 648}));
  ASSERT_OK(store_->close());
  store_.reset();
  std::uint64_t used = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir_.path())) {
    struct stat st {};
    ASSERT_EQ(::stat(entry.path().c_str(), &st), 0);
    if (entry.is_regular_file()) used += static_cast<std::uint64_t>(st.st_blocks) * 512;
    EXPECT_EQ(st.st_mode & 0777, entry.is_directory() ? 0700U : 0600U) << entry.path();
  }
  EXPECT_LT(static_cast<double>(used), static_cast<double>(chain.bytes()) * 1.02);
}

Session session_of(std::string name, std::vector<std::int32_t> tokens) {
  Session session;
  session.name = std::move(name);
  session.fingerprint = kModel;
  session.salt = kSalt;
  session.tokens = std::move(tokens);
  return session;
}

TEST_F(StoreTest, SessionsComeBackAndTakeTheirChunksAlong) {
  open();
  Session one = session_of("one", tokens_of(300));
  one.metadata_json = R"({"title":"a talk"})";
  put(Chain(kModel, kSalt, one.tokens, {}));
  ASSERT_OK(store_->put_session(one));
  Session two = one;
  two.name = "two";
  two.tokens = tokens_of(300, 5, 150);
  put(Chain(kModel, kSalt, two.tokens, {}));
  ASSERT_OK(store_->put_session(two));
  open();
  auto back = store_->get_session("one");
  ASSERT_OK(back);
  EXPECT_EQ(back->tokens, one.tokens);
  EXPECT_EQ(back->metadata_json, one.metadata_json);
  EXPECT_EQ(back->fingerprint, kModel);
  EXPECT_GT(back->created_ns, 0);
  EXPECT_EQ(store_->get_session("three").code(), Code::kNotFound);
  EXPECT_EQ(store_->list_sessions()->size(), 2U);
  const std::int64_t created = back->created_ns;
  ASSERT_OK(store_->put_session(one));
  EXPECT_EQ(store_->get_session("one")->created_ns, created);

  auto removed = store_->delete_session("one");
  ASSERT_OK(removed);
  EXPECT_EQ(*removed, 3U);  // 128…300; the first two chunks are shared
  EXPECT_EQ(expect_match(two.tokens), 300U);
  EXPECT_EQ(expect_match(one.tokens), 150U);
  EXPECT_EQ(*store_->delete_session("two"), 5U);
  EXPECT_EQ(store_->stat()->chunks, 0U);
  EXPECT_EQ(store_->delete_session("two").code(), Code::kNotFound);
  EXPECT_OK(store_->check_integrity());
}

// A chain that goes on under other fingerprints, as where its sequence is cut.
ChainFingerprints cut_at(std::initializer_list<std::uint64_t> begins) {
  ChainFingerprints chain(kModel);
  for (const std::uint64_t begin : begins) {
    chain.add(begin, fingerprint_of("cut at " + std::to_string(begin)));
  }
  return chain;
}

TEST_F(StoreTest, AChainMayGoOnUnderAnotherFingerprint) {
  open();
  const ChainFingerprints cut = cut_at({128, 256});
  const auto matched = [&](const ChainFingerprints& chain) {
    return store_->match(chain, kSalt, tokens_of(330))->n_tokens;
  };
  put(Chain(cut, kSalt, tokens_of(330), {}));
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(matched(cut), 330U);
    EXPECT_EQ(matched(cut_at({128})), 256U);
    EXPECT_EQ(matched(cut_at({64, 128, 256})), 64U);
    EXPECT_EQ(matched(kModel), 128U);
    EXPECT_OK(store_->check_integrity());
    open();
  }
  // What comes before is shared.
  const PutReport exact = put(Chain(kModel, kSalt, tokens_of(330), {}));
  EXPECT_EQ(exact.chunks_known, 2U);
  EXPECT_EQ(exact.chunks_new, 4U);
  EXPECT_EQ(matched(kModel), 330U);
  EXPECT_EQ(matched(cut), 330U);
  // So is what is longer.
  EXPECT_EQ(put(Chain(cut, kSalt, tokens_of(340), {})).tails_superseded, 1U);
  EXPECT_EQ(store_->match(cut, kSalt, tokens_of(340))->n_tokens, 340U);
  auto match = store_->match(cut, kSalt, tokens_of(340));
  ASSERT_OK(match);
  EXPECT_TRUE(read_back(*store_, *match).failed.empty());
}

TEST_F(StoreTest, ASessionTakesWhatFollowsItsCutsAlong) {
  open();
  const Session one = session_of("one", tokens_of(400));
  ASSERT_OK(store_->put_session(one));
  const Session two = session_of("two", tokens_of(400, 5, 200));
  ASSERT_OK(store_->put_session(two));
  // One conversation under two limits, the other under one of them.
  put(Chain(cut_at({128, 256}), kSalt, one.tokens, {}));
  put(Chain(cut_at({64}), kSalt, one.tokens, {}));
  put(Chain(cut_at({128}), kSalt, two.tokens, {}));
  EXPECT_EQ(store_->stat()->chunks, 2U + 5 + 6 + 4);
  auto removed = store_->delete_session("one");
  ASSERT_OK(removed);
  EXPECT_EQ(*removed, 4U + 4);  // behind 192 tokens: what comes before, the other has as well
  EXPECT_EQ(store_->match(cut_at({128}), kSalt, two.tokens)->n_tokens, 400U);
  EXPECT_EQ(store_->match(cut_at({64}), kSalt, one.tokens)->n_tokens, 192U);
  ASSERT_OK(store_->delete_session("two"));
  EXPECT_EQ(store_->stat()->chunks, 0U);
  EXPECT_OK(store_->check_integrity());
}

TEST_F(StoreTest, DeletingTakesOnlyWhatIsDeletedOutOfHostMemory) {
  const Chain kept(kModel, kSalt, tokens_of(256, 1), {});
  const Session session = session_of("gone", tokens_of(128, 2));
  const Chain gone(kModel, kSalt, session.tokens, {});
  const SaltId stranger = salt_id("another tenant");
  const Chain other(kModel, stranger, tokens_of(192, 3), {});
  options_.dram_bytes = 2 * (kept.bytes() + gone.bytes() + other.bytes());
  open();
  for (const Chain* chain : {&kept, &gone, &other}) put(*chain);
  ASSERT_OK(store_->put_session(session));
  EXPECT_EQ(store_->stat()->dram_bytes, kept.bytes() + gone.bytes() + other.bytes());
  EXPECT_EQ(*store_->delete_session("gone"), 2U);
  EXPECT_EQ(store_->stat()->dram_bytes, kept.bytes() + other.bytes());
  RemoveFilter filter;
  filter.salt = stranger;  // as keeping by time of use does it
  EXPECT_EQ(*store_->remove(filter), 3U);
  EXPECT_EQ(store_->stat()->dram_bytes, kept.bytes());
}

TEST_F(StoreTest, ASessionThatEndsInsideAChunkKeepsIt) {
  open();
  const Session longer = session_of("longer", tokens_of(100));
  const Session shorter = session_of("shorter", tokens_of(80));
  put(Chain(kModel, kSalt, longer.tokens, {}));
  ASSERT_OK(store_->put_session(longer));
  ASSERT_OK(store_->put_session(shorter));
  EXPECT_EQ(*store_->delete_session("longer"), 0U);
  EXPECT_EQ(expect_match(shorter.tokens), 80U);
}

TEST_F(StoreTest, ASecondWriterIsRefusedByNameAndProcess) {
  open();
  const auto second = Store::open(Env::real(), options_);
  EXPECT_EQ(second.code(), Code::kFailedPrecondition);
  EXPECT_NE(second.status().message().find(options_.dirs[0]), std::string::npos);
  EXPECT_NE(second.status().message().find(std::to_string(getpid())), std::string::npos);
  EXPECT_EQ(Store::destroy(Env::real(), options_).code(), Code::kFailedPrecondition);
  ASSERT_OK(store_->close());
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(3)).code(), Code::kFailedPrecondition);
  EXPECT_EQ(store_->close().code(), Code::kFailedPrecondition);
  store_.reset();
  open();
}

TEST_F(StoreTest, AReaderInAnotherProcessWorksWhileTheWriterWrites) {
  open();
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 512};
  put(Chain(kModel, kSalt, tokens_of(300, 1), shape));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // A fresh store object; nothing of the parent's is touched.
    StoreOptions options = options_;
    options.read_only = true;
    auto reader = Store::open(Env::real(), options);
    if (!reader.ok()) _exit(2);
    const std::int64_t end = Env::real().monotonic_ns() + 700'000'000;
    int good = 0;
    while (good == 0 || Env::real().monotonic_ns() < end) {
      auto match = (*reader)->match(kModel, kSalt, tokens_of(300, 1));
      if (!match.ok() || match->n_tokens != 300) _exit(3);
      if (!read_back(**reader, *match).failed.empty()) _exit(4);
      ++good;
    }
    if ((*reader)->put({}).code() != Code::kFailedPrecondition) _exit(5);
    _exit(good > 0 && !::testing::Test::HasFailure() ? 0 : 6);
  }
  std::uint32_t seed = 2;
  int status = 0;
  Patience patience("the reader's end");
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (!patience.lasts()) {
      kill(child, SIGKILL);
      FAIL();
    }
    if (seed < 200) put(Chain(kModel, kSalt, tokens_of(200, seed++), shape));
  }
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(StoreTest, AReadOnlyStoreSaysWhenThePageWasEvicted) {
  open();
  const Shape shape{2, {Encoding::kHiddenQ8_1}, 512};
  put(Chain(kModel, kSalt, tokens_of(128, 1), shape));
  StoreOptions read_only = options_;
  read_only.read_only = true;
  auto reader = open_store(Env::real(), read_only);
  ASSERT_NE(reader, nullptr);
  auto match = reader->match(kModel, kSalt, tokens_of(128, 1));
  ASSERT_OK(match);
  ASSERT_OK(store_->remove({}));
  put(Chain(kModel, kSalt, tokens_of(128, 2), shape));
  const ReadBack back = read_back(*reader, *match);
  EXPECT_EQ(back.good, 0U);
  for (const Status& status : back.failed) EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_TRUE(reader->verify({})->ok());
  *match = Match{};
  reader.reset();
  read_only.dirs = {dir_ / "nothing"};
  EXPECT_EQ(Store::open(Env::real(), read_only).code(), Code::kNotFound);
}

TEST_F(StoreTest, DamagedPagesAreReportedQuarantinedAndWrittenAnew) {
  open();
  const Chain chain(kModel, kSalt, tokens_of(64), {4, {Encoding::kHiddenQ8_1}, 512});
  put(chain);
  damage(512 * 64 + 1000);  // in the page of layer 1
  const auto report = store_->verify({});
  ASSERT_OK(report);
  ASSERT_EQ(report->damaged_pages.size(), 1U);
  EXPECT_EQ(report->damaged_pages[0].layer, 1);
  EXPECT_EQ(report->damaged_pages[0].status.code(), Code::kDataLoss);
  EXPECT_NE(report->damaged_pages[0].status.message().find(first_segment()), std::string::npos);
  EXPECT_EQ(expect_match(chain.tokens(), 1), 64U);
  ASSERT_OK(store_->quarantine(chain.chunks()[0].id, 1, Encoding::kHiddenQ8_1));
  ASSERT_OK(store_->quarantine(chain.chunks()[0].id, 1, Encoding::kHiddenQ8_1));
  EXPECT_TRUE(store_->verify({})->ok());
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(put(chain).chunks_extended, 1U);
  EXPECT_EQ(expect_match(chain.tokens(), 0), 64U);
}

TEST_F(StoreTest, ListRemoveAndDestroy) {
  open();
  put(Chain(kModel, kSalt, tokens_of(200, 1), {}));
  put(Chain(fingerprint_of("other"), kSalt, tokens_of(200, 1), {}));
  std::size_t seen = 0;
  ASSERT_OK(store_->list([&](const ChunkSummary& chunk) {
    EXPECT_GT(chunk.last_used_ns, 0);
    EXPECT_GT(chunk.page_bytes, 0U);
    return ++seen < 5;
  }));
  EXPECT_EQ(seen, 5U);
  RemoveFilter other;
  other.fingerprint = fingerprint_of("other");
  EXPECT_EQ(*store_->remove(other), 4U);
  RemoveFilter old;
  old.unused_since_ns = 1;
  EXPECT_EQ(*store_->remove(old), 0U);
  {
    auto pin = store_->find(first_chunk(kModel, kSalt, tokens_of(200, 1)));
    ASSERT_OK(pin);
    EXPECT_EQ(*store_->remove({}), 3U);
  }
  EXPECT_EQ(expect_match(tokens_of(200, 1)), 64U);
  store_.reset();
  ASSERT_OK(Store::destroy(Env::real(), options_));
  EXPECT_TRUE(std::filesystem::is_empty(dir_ / "a"));
}

TEST_F(StoreTest, AFormatOfTheFutureIsRefused) {
  open();
  ASSERT_OK(store_->close());
  store_.reset();
  std::string text = *read_whole_file(Env::real(), dir_ / "a/hcache-disk");
  text.replace(text.find("format "), 8, "format 7");
  // With its check: without, it is a damaged file and not one of the future.
  text.resize(text.find("check "));
  text += fmt::format("check {:016x}\n", XXH3_64bits(text.data(), text.size()));
  ASSERT_OK(write_whole_file(Env::real(), dir_ / "a/hcache-disk", text));
  const auto refused = Store::open(Env::real(), options_);
  EXPECT_EQ(refused.code(), Code::kUnimplemented);
  EXPECT_NE(refused.status().message().find("format 7"), std::string::npos);
}

TEST_F(StoreTest, DirectoriesOfAnotherStoreAreRefused) {
  open();
  store_.reset();
  options_.dirs = {dir_ / "b"};
  open();
  store_.reset();
  options_.dirs = {dir_ / "a", dir_ / "b"};
  EXPECT_EQ(Store::open(Env::real(), options_).code(), Code::kFailedPrecondition);
  options_.dirs = {dir_ / "a", dir_ / "a/"};
  EXPECT_EQ(Store::open(Env::real(), options_).code(), Code::kInvalidArgument);
}

TEST_F(StoreTest, ManyThreadsMatchAndReadWhileOneWritesUnderAQuota) {
  options_.quota_bytes = 3 << 20;
  options_.segment_bytes = 1 << 20;
  open();
  const Shape shape{3, {Encoding::kHiddenQ8_1}, 256};
  std::atomic<bool> stop = false;
  std::vector<std::thread> readers;
  for (std::uint32_t r = 0; r < 3; ++r) {
    readers.emplace_back([&, r] {
      std::uint32_t seed = r;
      while (!stop) {
        seed = (seed + 1) % 40;
        const auto tokens = tokens_of(300, seed);
        auto match = store_->match(kModel, kSalt, tokens);
        ASSERT_OK(match);
        expect_prefix(*match, tokens);
        EXPECT_TRUE(read_back(*store_, *match).failed.empty());
      }
    });
  }
  for (std::uint32_t i = 0; i < 60; ++i) {
    auto report = store_->put(Chain(kModel, kSalt, tokens_of(300, i % 40), shape).chunks());
    if (!report.ok()) {
      EXPECT_EQ(report.code(), Code::kResourceExhausted);
    }
    if (i % 20 == 19) EXPECT_OK(store_->gc());
  }
  stop = true;
  for (std::thread& t : readers) t.join();
  EXPECT_OK(store_->check_integrity());
  EXPECT_TRUE(store_->verify({})->ok());
}

TEST(MeasureReadSpeed, IsPositiveAndLeavesNothing) {
  const TempDir dir;
  const auto speed = measure_read_speed(Env::real(), dir.path(), 4 << 20);
  ASSERT_OK(speed);
  EXPECT_GT(*speed, 0);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

}  // namespace
}  // namespace hcache::store
