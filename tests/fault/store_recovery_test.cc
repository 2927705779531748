// A catalog that is damaged or gone, whole or in places: the store opens all the same, what the
// pages' records say is found again, and nothing that was deleted comes back.
#include <gtest/gtest.h>

#include <functional>

#include "../unit/store_testing.h"
#include "base/fault_env.h"
#include "base/log.h"
#include "store_env_vfs.h"

namespace hcache::store {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

const Fingerprint kModel = fingerprint_of("model");
const SaltId kSalt = salt_id("");
const SaltId kTenant = salt_id("tenant");
const SaltId kTeam = salt_id("team");
const Shape kShape{2, {Encoding::kHiddenQ8_1, Encoding::kKv}, 40};
constexpr const char* kCatalog = "/disk0/catalog.db";

class RecoveryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    log::set_level(log::Level::kOff);
    fresh();
  }
  void fresh() {
    store_.reset();
    vfs_.reset();
    env_ = std::make_unique<FaultEnv>(7);
    vfs_ = std::make_unique<EnvVfs>(*env_);
    options_.dirs = {"/disk0", "/disk1"};
    options_.segment_bytes = 256 << 10;
    options_.catalog_vfs = vfs_->name();
  }
  Status open() {
    store_.reset();
    auto opened = Store::open(*env_, options_);
    if (opened.ok()) store_ = std::move(*opened);
    return opened.status();
  }
  Status put(std::uint32_t seed, const SaltId& salt = kSalt) {
    Chain chain(kModel, salt, tokens_of(150, seed), kShape);
    if (salt == kTenant) chain.set_owner(kTeam);
    return store_->put(chain.chunks()).status();
  }
  Status put_session(const std::string& name, std::uint32_t seed, const SaltId& salt = kSalt) {
    Session session;
    session.name = name;
    session.fingerprint = kModel;
    session.salt = salt;
    session.tokens = tokens_of(150, seed);
    session.metadata_json = R"({"title":")" + name + "\"}";
    return store_->put_session(session);
  }
  // Chains 1 to 3 and a tenant's 4, with the sessions "one" to "four".
  void fill() {
    ASSERT_OK(open());
    const char* names[] = {"one", "two", "three"};
    for (std::uint32_t seed = 1; seed <= 3; ++seed) {
      ASSERT_OK(put(seed));
      ASSERT_OK(put_session(names[seed - 1], seed));
    }
    ASSERT_OK(put(4, kTenant));
    ASSERT_OK(put_session("four", 4, kTenant));
  }
  void close() {
    ASSERT_OK(store_->close());
    store_.reset();
  }
  // The process is killed: what it has written is there, nothing was closed.
  void kill() {
    env_->cut_power_at(1);
    store_.reset();
    env_->restart(FaultEnv::Survivors::kAll);
  }
  std::uint64_t matched(std::uint32_t seed, const SaltId& salt = kSalt) {
    const auto tokens = tokens_of(150, seed);
    const auto match = store_->match(kModel, salt, tokens);
    EXPECT_OK(match);
    if (!match.ok()) return 0;
    expect_prefix(*match, tokens);
    EXPECT_TRUE(read_back(*store_, *match).failed.empty());
    return match->n_tokens;
  }
  // Everything that fill() has put is there, and nothing else is.
  void expect_whole() {
    for (std::uint32_t seed = 1; seed <= 3; ++seed) EXPECT_EQ(matched(seed), 150U) << seed;
    EXPECT_EQ(matched(4, kTenant), 150U);
    EXPECT_EQ(matched(4), 0U);
    EXPECT_EQ(matched(1, kTenant), 0U);
    EXPECT_GT(store_->owned_bytes(kTeam), 0U);
    EXPECT_EQ(store_->owned_bytes(kTenant), 0U);
    for (const char* name : {"one", "two", "three", "four"}) {
      const auto session = store_->get_session(name);
      ASSERT_OK(session);
      EXPECT_EQ(session->tokens.size(), 150U);
      EXPECT_EQ(session->metadata_json, R"({"title":")" + std::string(name) + "\"}");
    }
    expect_sound(12, 4);
  }
  void expect_sound(std::uint64_t chunks, std::uint64_t sessions) {
    EXPECT_OK(store_->check_integrity());
    const auto report = store_->verify({});
    ASSERT_OK(report);
    EXPECT_TRUE(report->ok()) << (report->damaged_catalog.empty()
                                      ? report->damaged_pages[0].status.to_string()
                                      : report->damaged_catalog[0].to_string());
    EXPECT_EQ(store_->stat()->chunks, chunks);
    EXPECT_EQ(store_->stat()->sessions, sessions);
  }
  std::vector<std::byte> read(const std::string& path) {
    const auto text = read_whole_file(*env_, path);
    EXPECT_OK(text);
    const auto* data = reinterpret_cast<const std::byte*>(text->data());
    return {data, data + text->size()};
  }
  void overwrite(const std::string& path, std::uint64_t at, std::span<const std::byte> bytes) {
    OpenOptions options;
    options.write = true;
    auto file = env_->open_file(path, options);
    ASSERT_OK(file);
    ASSERT_OK((*file)->write_at(at, bytes));
  }
  // Flips a bit in every 512 bytes or so of a file, one at a time, and opens the store after each.
  void flip_through(const std::string& path, const std::function<void()>& check) {
    const std::uint64_t size = env_->file_info(path)->size;
    const std::uint64_t stride = std::max<std::uint64_t>(1, size / 150);
    for (std::uint64_t byte = 0; byte < size; byte += stride) {
      SCOPED_TRACE(path + " byte " + std::to_string(byte));
      fresh();
      fill();
      close();
      if (byte >= env_->file_info(path)->size) return;
      env_->flip_bit(path, byte, static_cast<unsigned>((byte / stride) % 8));
      ASSERT_OK(open());
      check();
      if (HasFailure()) return;
    }
  }

  std::unique_ptr<FaultEnv> env_;
  std::unique_ptr<EnvVfs> vfs_;
  TestOptions options_;
  std::unique_ptr<Store> store_;
};

TEST_F(RecoveryTest, ACatalogOfJunkIsSetAsideAndMadeAnew) {
  fill();
  close();
  const std::vector<std::byte> junk(env_->file_info(kCatalog)->size, std::byte{0x5a});
  overwrite(kCatalog, 0, junk);
  ASSERT_OK(open());
  expect_whole();
  EXPECT_EQ(read("/disk0/catalog.db.damaged"), junk);
  // It is a store like any other.
  ASSERT_OK(put(9));
  close();
  ASSERT_OK(open());
  EXPECT_EQ(matched(9), 150U);
  ASSERT_OK(store_->gc());
  EXPECT_FALSE(env_->file_info("/disk0/catalog.db.damaged")->exists);
  expect_sound(15, 4);
}

TEST_F(RecoveryTest, AMissingCatalogIsMadeAnew) {
  fill();
  close();
  ASSERT_OK(env_->remove_path(kCatalog));
  ASSERT_OK(open());
  expect_whole();
}

TEST_F(RecoveryTest, ACatalogCutShortIsMadeAnew) {
  fill();
  close();
  const std::uint64_t size = env_->file_info(kCatalog)->size;
  for (const std::uint64_t left : {size / 2, std::uint64_t{4096}, std::uint64_t{100}}) {
    SCOPED_TRACE(left);
    OpenOptions options;
    options.write = true;
    ASSERT_OK((*env_->open_file(kCatalog, options))->truncate(left));
    ASSERT_OK(open());
    expect_whole();
    close();
  }
}

TEST_F(RecoveryTest, AnyFlippedBitOfTheCatalogCostsNothing) {
  flip_through(kCatalog, [&] { expect_whole(); });
}

TEST_F(RecoveryTest, AnyFlippedBitOfADiskFileCostsNothing) {
  flip_through("/disk0/hcache-disk", [&] { expect_whole(); });
}

TEST_F(RecoveryTest, AnyFlippedBitOfARecordFileCostsNothing) {
  flip_through("/disk1/records-00000001.hcr", [&] {
    for (std::uint32_t seed = 1; seed <= 3; ++seed) EXPECT_EQ(matched(seed), 150U) << seed;
    EXPECT_EQ(store_->stat()->sessions, 4U);
    close();
    const auto repaired = Store::repair(*env_, options_, false);
    ASSERT_OK(repaired);
    EXPECT_EQ(repaired->damage, "");
    ASSERT_OK(open());
    expect_whole();
  });
}

TEST_F(RecoveryTest, AFlippedBitOfASegmentCostsAPageAtMost) {
  flip_through("/disk0/segment-00000001.hcs", [&] {
    std::size_t failed = 0;
    for (std::uint32_t seed = 1; seed <= 4; ++seed) {
      const SaltId& salt = seed == 4 ? kTenant : kSalt;
      const auto match = store_->match(kModel, salt, tokens_of(150, seed));
      ASSERT_OK(match);
      EXPECT_EQ(match->n_tokens, 150U);
      failed += read_back(*store_, *match).failed.size();
    }
    EXPECT_LE(failed, 1U);
  });
}

TEST_F(RecoveryTest, AnyFlippedBitOfTheLogOfADeadProcessCostsNothing) {
  const std::string log = std::string(kCatalog) + "-wal";
  fill();
  kill();
  const std::uint64_t size = env_->file_info(log)->size;
  ASSERT_GT(size, 10'000U);
  const std::uint64_t stride = size / 150;
  for (std::uint64_t byte = 0; byte < size; byte += stride) {
    SCOPED_TRACE(byte);
    fresh();
    fill();
    kill();
    env_->flip_bit(log, byte, static_cast<unsigned>((byte / stride) % 8));
    ASSERT_OK(open());
    expect_whole();
    if (HasFailure()) return;
  }
}

TEST_F(RecoveryTest, ALostLogCostsNothing) {
  fill();
  kill();
  ASSERT_OK(env_->remove_path(std::string(kCatalog) + "-wal"));
  ASSERT_OK(open());
  expect_whole();
}

TEST_F(RecoveryTest, LostDiskFilesAreToldFromTheOtherFiles) {
  fill();
  close();
  ASSERT_OK(env_->remove_path("/disk0/hcache-disk"));
  ASSERT_OK(env_->remove_path("/disk1/hcache-disk"));
  ASSERT_OK(env_->remove_path(kCatalog));
  std::swap(options_.dirs[0], options_.dirs[1]);
  options_.catalog_dir = "/disk0";
  ASSERT_OK(open());
  expect_whole();
  EXPECT_TRUE(env_->file_info("/disk1/hcache-disk")->exists);
}

TEST_F(RecoveryTest, ADamagedRecordOfADamagedCatalogCostsItsChunkAndWhatFollows) {
  if (options_.key) GTEST_SKIP() << "an encrypted store shows no tokens to find a record by";
  fill();
  close();
  // The second chunk of chain 2, by its tokens.
  const auto tokens = tokens_of(150, 2);
  std::string needle;
  for (std::size_t i = 70; i < 74; ++i) {
    for (int b = 0; b < 4; ++b) {
      needle.push_back(
          static_cast<char>((static_cast<std::uint32_t>(tokens[i]) >> (8 * b)) & 0xff));
    }
  }
  bool found = false;
  for (const std::string& path : env_->files()) {
    if (path.find("records-") == std::string::npos) continue;
    const std::string text = *read_whole_file(*env_, path);
    // A chunk's record; a session's has all tokens, and the first 64 before these.
    for (std::size_t at = text.find(needle); at != std::string::npos;
         at = text.find(needle, at + 1)) {
      const std::size_t begin = text.rfind("HCRECORD", at);
      if (text[begin + 12] != 1) continue;
      env_->flip_bit(path, at, 3);
      found = true;
    }
  }
  ASSERT_TRUE(found);
  ASSERT_OK(env_->remove_path(kCatalog));
  ASSERT_OK(open());
  EXPECT_EQ(matched(2), 64U);
  EXPECT_EQ(matched(1), 150U);
  EXPECT_EQ(matched(3), 150U);
  EXPECT_EQ(store_->get_session("two")->tokens, tokens);
  expect_sound(10, 4);
  ASSERT_OK(put(2));
  EXPECT_EQ(matched(2), 150U);
}

TEST_F(RecoveryTest, WhatWasDeletedDoesNotComeBack) {
  fill();
  ASSERT_OK(store_->delete_session("two"));
  RemoveFilter filter;
  filter.chunk = first_chunk(kModel, kSalt, tokens_of(150, 3));
  ASSERT_OK(store_->remove(filter));
  // Not even after a power cut that loses all that was not synced.
  env_->cut_power_at(1);
  store_.reset();
  env_->restart(FaultEnv::Survivors::kNone);
  for (const bool lose : {false, true}) {
    SCOPED_TRACE(lose);
    if (lose) ASSERT_OK(env_->remove_path(kCatalog));
    ASSERT_OK(open());
    EXPECT_EQ(matched(1), 150U);
    EXPECT_EQ(matched(2), 0U);
    EXPECT_EQ(matched(3), 0U);
    EXPECT_EQ(store_->get_session("two").code(), Code::kNotFound);
    expect_sound(6, 3);
    close();
  }
  // Neither their tokens nor their names are anywhere in the files.
  for (const std::string& path : env_->files()) {
    if (path.find("records-") == std::string::npos) continue;
    EXPECT_EQ(read_whole_file(*env_, path)->find("\"two\""), std::string::npos) << path;
  }
}

TEST_F(RecoveryTest, EvictedChunksAndGrownTailsDoNotComeBack) {
  options_.quota_bytes = (options_.key ? 800 : 500) << 10;  // rows are longer with their seals
  ASSERT_OK(open());
  for (std::uint32_t seed = 1; seed <= 30; ++seed) ASSERT_OK(put(seed));
  const std::uint64_t chunks = store_->stat()->chunks;
  ASSERT_LT(chunks, 90U);
  const Chain longer(kModel, kSalt, tokens_of(180, 30), kShape);
  ASSERT_OK(store_->put(longer.chunks().subspan(2)));
  close();
  ASSERT_OK(env_->remove_path(kCatalog));
  ASSERT_OK(open());
  EXPECT_EQ(matched(1), 0U);
  EXPECT_EQ(store_->match(kModel, kSalt, tokens_of(180, 30))->n_tokens, 180U);
  expect_sound(chunks, 0);
}

TEST_F(RecoveryTest, ThePowerMayGoAtAnyChangeOfTheRebuild) {
  for (const auto survivors :
       {FaultEnv::Survivors::kNone, FaultEnv::Survivors::kAll, FaultEnv::Survivors::kSome}) {
    bool cut = true;
    for (std::uint64_t at = 1; cut; ++at) {
      SCOPED_TRACE(at);
      fresh();
      fill();
      close();
      overwrite(kCatalog, 0, std::vector<std::byte>(5000, std::byte{0x5a}));
      env_->cut_power_at(at);
      cut = !open().ok() || env_->power_is_cut();
      store_.reset();
      cut = cut || env_->power_is_cut();
      env_->restart(survivors);
      ASSERT_OK(open());
      expect_whole();
      if (HasFailure()) return;
    }
  }
}

TEST_F(RecoveryTest, RepairSaysWhatItDid) {
  fill();
  close();
  auto repaired = Store::repair(*env_, options_, false);
  ASSERT_OK(repaired);
  EXPECT_TRUE(repaired->clean());
  repaired = Store::repair(*env_, options_, true);
  ASSERT_OK(repaired);
  EXPECT_FALSE(repaired->damage.empty());
  EXPECT_EQ(repaired->set_aside, "/disk0/catalog.db.damaged");
  EXPECT_EQ(repaired->chunks_kept, 12U);
  EXPECT_EQ(repaired->sessions_kept, 4U);
  EXPECT_EQ(repaired->chunks_found, 0U);
  ASSERT_OK(env_->remove_path(kCatalog));
  std::string last;
  options_.recovery_progress = [&](std::string_view what, double fraction) {
    last = std::string(what) + (fraction == 1 ? " done" : "");
    return true;
  };
  repaired = Store::repair(*env_, options_, false);
  ASSERT_OK(repaired);
  EXPECT_EQ(repaired->chunks_kept, 0U);
  EXPECT_EQ(repaired->chunks_found, 12U);
  EXPECT_EQ(repaired->sessions_found, 4U);
  EXPECT_NE(last.find("done"), std::string::npos);
  options_.recovery_progress = {};
  ASSERT_OK(open());
  expect_whole();
  close();
  options_.dirs = {"/nowhere"};
  EXPECT_EQ(Store::repair(*env_, options_, false).code(), Code::kNotFound);
}

TEST_F(RecoveryTest, AMissingDiskIsNotTakenForLostChunks) {
  fill();
  close();
  ASSERT_OK(env_->remove_path(kCatalog));
  options_.dirs = {"/disk0"};
  EXPECT_EQ(open().code(), Code::kFailedPrecondition);
  options_.dirs = {"/disk0", "/disk1"};
  ASSERT_OK(open());
  expect_whole();
}

TEST_F(RecoveryTest, VerifyNamesADamagedRecord) {
  fill();
  close();
  env_->flip_bit("/disk0/records-00000001.hcr", 4096 + 100, 2);
  ASSERT_OK(open());
  const auto report = store_->verify({});
  ASSERT_OK(report);
  ASSERT_EQ(report->damaged_catalog.size(), 1U);
  EXPECT_NE(report->damaged_catalog[0].message().find("record of chunk"), std::string::npos);
}

TEST_F(RecoveryTest, FilesThatADeadProcessLeftHalfWrittenAreRemoved) {
  fill();
  close();
  ASSERT_OK(write_whole_file(*env_, "/disk1/hcache-disk.4711.tmp", "half"));
  ASSERT_OK(open());
  EXPECT_FALSE(env_->file_info("/disk1/hcache-disk.4711.tmp")->exists);
  expect_whole();
}

}  // namespace
}  // namespace hcache::store
