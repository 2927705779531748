// Damage that is no crash: flipped bits everywhere, mutilated files, full disks, short transfers,
// failing reads, a directory that vanishes. Whatever happens, no wrong byte and no wrong token is
// ever offered as good.
#include <gtest/gtest.h>

#include <random>

#include "../unit/store_testing.h"
#include "base/fault_env.h"
#include "base/log.h"
#include "store_env_vfs.h"

namespace hcache::store {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

const Fingerprint kModel = fingerprint_of("model");
const SaltId kSalt = salt_id("");
const Shape kShape{2, {Encoding::kHiddenQ8_1, Encoding::kKv}, 40};

class DamageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    log::set_level(log::Level::kOff);
    fresh();
  }

  // A closed store with three chains and a session.
  void build() {
    fresh();
    ASSERT_OK(open());
    for (std::uint32_t seed = 1; seed <= 3; ++seed) ASSERT_OK(put(seed));
    Session session;
    session.name = "talk";
    session.fingerprint = kModel;
    session.salt = kSalt;
    session.tokens = tokens_of(150, 1);
    ASSERT_OK(store_->put_session(session));
    ASSERT_OK(store_->close());
    store_.reset();
  }
  void fresh() {
    store_.reset();
    vfs_.reset();
    env_ = std::make_unique<FaultEnv>(7);
    vfs_ = std::make_unique<EnvVfs>(*env_);
    options_.dirs = {"/disk"};
    options_.segment_bytes = 256 << 10;
    options_.catalog_vfs = vfs_->name();
  }
  Status open() {
    store_.reset();
    auto opened = Store::open(*env_, options_);
    if (opened.ok()) store_ = std::move(*opened);
    return opened.status();
  }
  Status put(std::uint32_t seed) {
    const Chain chain(kModel, kSalt, tokens_of(150, seed), kShape);
    return store_->put(chain.chunks()).status();
  }

  struct Seen {
    bool opened = false;
    std::uint64_t tokens = 0;
    std::size_t good_pages = 0;
    std::size_t bad_pages = 0;
    bool session = false;
  };
  // Uses the store as a server would. read_back checks every byte that is offered.
  Seen use() {
    Seen seen;
    const Status opened = open();
    if (!opened.ok()) {
      EXPECT_TRUE(opened.code() == Code::kDataLoss || opened.code() == Code::kUnimplemented ||
                  opened.code() == Code::kFailedPrecondition ||
                  opened.code() == Code::kUnavailable || opened.code() == Code::kInternal ||
                  opened.code() == Code::kPermissionDenied)
          << opened.to_string();
      return seen;
    }
    seen.opened = true;
    for (std::uint32_t seed = 1; seed <= 3; ++seed) {
      const auto tokens = tokens_of(150, seed);
      auto match = store_->match(kModel, kSalt, tokens);
      if (!match.ok()) continue;
      expect_prefix(*match, tokens);
      seen.tokens += match->n_tokens;
      const ReadBack back = read_back(*store_, *match);
      seen.good_pages += back.good;
      seen.bad_pages += back.failed.size();
    }
    const auto session = store_->get_session("talk");
    seen.session = session.ok();
    if (session.ok()) {
      EXPECT_EQ(session->tokens, tokens_of(150, 1));
    }
    // Damage must not stop new work, unless the catalog itself is beyond use.
    const Status again = put(4);
    if (again.ok()) {
      auto match = store_->match(kModel, kSalt, tokens_of(150, 4));
      EXPECT_OK(match);
      if (match.ok()) {
        expect_prefix(*match, tokens_of(150, 4));
        read_back(*store_, *match).failed.clear();
      }
    } else {
      EXPECT_NE(again.code(), Code::kInvalidArgument) << again.to_string();
    }
    return seen;
  }

  std::unique_ptr<FaultEnv> env_;
  std::unique_ptr<EnvVfs> vfs_;
  TestOptions options_;
  std::unique_ptr<Store> store_;
};

TEST_F(DamageTest, AnUntouchedStoreIsWhole) {
  build();
  const Seen seen = use();
  EXPECT_EQ(seen.tokens, 450U);
  EXPECT_EQ(seen.good_pages, 36U);
  EXPECT_EQ(seen.bad_pages, 0U);
  EXPECT_TRUE(seen.session);
}

TEST_F(DamageTest, EveryFlippedBitOfAPageIsDetected) {
  build();
  // Every page of three chains, one byte in 97: all of them are live.
  const std::string path = "/disk/segment-00000001.hcs";
  const std::uint64_t size = env_->file_info(path)->size;
  std::size_t detected = 0;
  std::size_t flips = 0;
  for (std::uint64_t byte = 4096; byte < size; byte += 97, ++flips) {
    env_->flip_bit(path, byte, static_cast<unsigned>(byte % 8));
    ASSERT_OK(open());
    const auto report = store_->verify({});
    ASSERT_OK(report);
    detected += report->damaged_pages.empty() ? 0 : 1;
    ASSERT_LE(report->damaged_pages.size(), 1U);
    if (!report->damaged_pages.empty()) {
      EXPECT_EQ(report->damaged_pages[0].status.code(), Code::kDataLoss);
    }
    store_.reset();
    env_->flip_bit(path, byte, static_cast<unsigned>(byte % 8));
  }
  // What is not detected lay in the padding between pages (under 64 bytes each) or at a run's end.
  EXPECT_GE(static_cast<double>(detected), 0.93 * static_cast<double>(flips));
}

TEST_F(DamageTest, NoFlippedBitOfAnyFileLeadsToAWrongAnswer) {
  build();
  const std::vector<std::string> files = env_->files();
  ASSERT_GE(files.size(), 3U);
  for (const std::string& path : files) {
    const std::uint64_t size = env_->file_info(path)->size;
    // All of a small file, every region of a large one.
    const std::uint64_t stride = std::max<std::uint64_t>(1, size / 150);
    for (std::uint64_t byte = 0; byte < size; byte += stride) {
      SCOPED_TRACE(path + " byte " + std::to_string(byte));
      build();
      if (byte >= env_->file_info(path)->size) break;
      env_->flip_bit(path, byte, static_cast<unsigned>((byte / stride) % 8));
      const Seen seen = use();
      EXPECT_TRUE(seen.opened);
      EXPECT_EQ(seen.tokens, 450U);
      EXPECT_TRUE(seen.session);
      EXPECT_LE(seen.bad_pages, path.find("segment") == std::string::npos ? 0U : 1U);
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
}

TEST_F(DamageTest, NoMutilatedFileLeadsToACrashOrAWrongAnswer) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 400; ++round) {
    SCOPED_TRACE(round);
    build();
    const std::vector<std::string> files = env_->files();
    const std::size_t wounds = 1 + random() % 4;
    for (std::size_t w = 0; w < wounds; ++w) {
      const std::string& path = files[random() % files.size()];
      OpenOptions options;
      options.write = true;
      auto file = env_->open_file(path, options);
      if (!file.ok()) continue;  // removed by an earlier wound
      const std::uint64_t size = *(*file)->size();
      if (size == 0) continue;
      std::vector<std::byte> junk(16 + random() % 5000);
      for (std::byte& b : junk) b = static_cast<std::byte>(random());
      switch (random() % 5) {
        case 0: ASSERT_OK((*file)->truncate(random() % size)); break;
        case 1:
          ASSERT_OK((*file)->write_at(random() % size, std::span(junk).first(1 + random() % 16)));
          break;
        case 2: ASSERT_OK((*file)->write_at(random() % size, junk)); break;
        case 3: {  // a piece of another file
          auto other = env_->open_file(files[random() % files.size()], {});
          if (!other.ok()) break;
          const std::uint64_t from = random() % std::max<std::uint64_t>(1, *(*other)->size());
          const auto got = (*other)->read_at(from, junk);
          ASSERT_OK(got);
          ASSERT_OK((*file)->write_at(random() % size, std::span(junk).first(*got)));
          break;
        }
        default:
          if (random() % 4 == 0) ASSERT_OK(env_->remove_path(path));
          break;
      }
    }
    use();
    if (store_ != nullptr && random() % 4 == 0) {
      store_->verify({}).status().ignore("it must not crash");
      store_->gc().status().ignore("it must not crash");
      store_->check_integrity().ignore("it must not crash");
    }
    store_.reset();
    // Whatever is left can be cleared away and begun anew.
    ASSERT_OK(Store::destroy(*env_, options_));
    ASSERT_OK(open());
    ASSERT_OK(put(1));
    EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 1))->n_tokens, 150U);
    if (HasNonfatalFailure()) return;
  }
}

TEST_F(DamageTest, ADamagedHeaderIsMendedByTheWriter) {
  build();
  env_->flip_bit("/disk/segment-00000001.hcs", 20, 3);
  const Seen seen = use();
  EXPECT_EQ(seen.tokens, 450U);
  EXPECT_EQ(seen.bad_pages, 0U);
  EXPECT_TRUE(store_->verify({})->ok());
}

TEST_F(DamageTest, ADamagedDiskFileIsMendedByTheWriter) {
  build();
  env_->flip_bit("/disk/hcache-disk", 40, 1);
  EXPECT_EQ(use().tokens, 450U);
  store_.reset();
  EXPECT_EQ(use().tokens, 450U);
}

TEST_F(DamageTest, DamagedRowsAreRestored) {
  if (options_.key) GTEST_SKIP() << "an encrypted store shows no tokens to find a row by";
  build();
  // The bodies of chunks hold tokens; find one in the files and change it.
  std::string needle;
  for (const std::int32_t token : {tokens_of(150, 2)[10], tokens_of(150, 2)[11]}) {
    for (int b = 0; b < 4; ++b) {
      needle.push_back(static_cast<char>((static_cast<std::uint32_t>(token) >> (8 * b)) & 0xff));
    }
  }
  const auto damage = [&](const std::string& path) {
    const std::string text = *read_whole_file(*env_, path);
    const std::size_t at = text.find(needle);
    ASSERT_NE(at, std::string::npos);
    env_->flip_bit(path, at, 0);
  };
  damage("/disk/catalog.db");
  ASSERT_OK(open());
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 2))->n_tokens, 150U);
  EXPECT_TRUE(store_->verify({})->ok());
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(store_->stat()->chunks, 9U);
  ASSERT_OK(store_->close());
  // Of a chunk whose record is damaged as well nothing is left, nor of what follows it.
  damage("/disk/catalog.db");
  damage("/disk/records-00000001.hcr");
  ASSERT_OK(open());
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 2))->n_tokens, 0U);
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 1))->n_tokens, 150U);
  EXPECT_TRUE(store_->verify({})->ok());
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(store_->stat()->chunks, 6U);
  ASSERT_OK(put(2));
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 2))->n_tokens, 150U);
}

TEST_F(DamageTest, AFullDiskRefusesTheBatchAndKeepsTheRest) {
  ASSERT_OK(open());
  ASSERT_OK(put(1));
  const SpaceInfo space = *env_->space("/disk");
  const std::uint64_t used = space.total_bytes - space.free_bytes;
  std::uint32_t seed = 2;
  // From no room at all to room for a while: the failure strikes at every stage of a put.
  for (std::uint64_t room = 0; room < (200 << 10); room += 4096) {
    env_->set_capacity(used + room);
    const Status status = put(seed);
    if (status.ok()) {
      EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, seed))->n_tokens, 150U);
      ++seed;
    } else {
      EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.to_string();
      EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, seed))->n_tokens, 0U);
    }
    ASSERT_OK(store_->check_integrity());
    EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 1))->n_tokens, 150U);
  }
  EXPECT_GT(seed, 2U);
  env_->set_capacity(std::uint64_t{1} << 30);
  ASSERT_OK(put(50));
  ASSERT_OK(open());
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 50))->n_tokens, 150U);
  EXPECT_TRUE(store_->verify({})->ok());
}

TEST_F(DamageTest, FailingSyncsAreNotBelieved) {
  ASSERT_OK(open());
  ASSERT_OK(put(1));
  env_->set_failing_syncs(true);
  EXPECT_FALSE(put(2).ok());
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 2))->n_tokens, 0U);
  env_->set_failing_syncs(false);
  ASSERT_OK(put(2));
  ASSERT_OK(store_->check_integrity());
  store_.reset();
  env_->restart(FaultEnv::Survivors::kNone);
  ASSERT_OK(open());
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 2))->n_tokens, 150U);
  EXPECT_TRUE(store_->verify({})->ok());
}

TEST_F(DamageTest, ShortTransfersAreContinued) {
  env_->set_short_transfers(true);
  build();
  env_->set_short_transfers(true);
  for (int round = 0; round < 20; ++round) {
    const Seen seen = use();
    EXPECT_EQ(seen.tokens, 450U);
    EXPECT_EQ(seen.bad_pages, 0U);
  }
}

TEST_F(DamageTest, FailingReadsFailPagesAndNothingElse) {
  build();
  ASSERT_OK(open());
  // Opened once, so that the header has been read.
  ASSERT_TRUE(store_->verify({})->ok());
  env_->set_failing_reads("segment");
  auto match = store_->match(kModel, kSalt, tokens_of(150, 1));
  ASSERT_OK(match);
  EXPECT_EQ(match->n_tokens, 150U);
  const ReadBack back = read_back(*store_, *match);
  EXPECT_EQ(back.good, 0U);
  EXPECT_EQ(back.failed.size(), 12U);
  for (const Status& status : back.failed) {
    EXPECT_EQ(status.code(), Code::kDataLoss);
    EXPECT_NE(status.message().find("layer"), std::string::npos);
  }
  env_->set_failing_reads("");
  EXPECT_TRUE(read_back(*store_, *match).failed.empty());
}

TEST_F(DamageTest, ADirectoryThatVanishesIsAnErrorUntilItIsBack) {
  options_.dirs = {"/disk", "/other"};
  ASSERT_OK(open());
  ASSERT_OK(put(1));
  env_->set_vanished("/other", true);
  const Status status = put(2);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 2))->n_tokens, 0U);
  auto match = store_->match(kModel, kSalt, tokens_of(150, 1));
  ASSERT_OK(match);
  const ReadBack back = read_back(*store_, *match);
  EXPECT_GT(back.good, 0U);
  EXPECT_GT(back.failed.size(), 0U);
  store_->stat().status().ignore("either way");
  *match = Match{};
  EXPECT_EQ(open().code(), Code::kFailedPrecondition);
  env_->set_vanished("/other", false);
  ASSERT_OK(open());
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 1))->n_tokens, 150U);
  ASSERT_OK(put(2));
  EXPECT_TRUE(store_->verify({})->ok());
  EXPECT_OK(store_->check_integrity());
}

TEST_F(DamageTest, AStoreWhoseOnlyDirectoryVanishesFailsSoftly) {
  ASSERT_OK(open());
  ASSERT_OK(put(1));
  env_->set_vanished("/disk", true);
  EXPECT_FALSE(put(2).ok());
  store_->match(kModel, kSalt, tokens_of(150, 1)).status().ignore("either way");
  store_.reset();
  env_->set_vanished("/disk", false);
  ASSERT_OK(open());
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(150, 1))->n_tokens, 150U);
  EXPECT_OK(store_->check_integrity());
}

}  // namespace
}  // namespace hcache::store
