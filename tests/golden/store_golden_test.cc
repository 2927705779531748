// Stores written by older programs must open and read back for ever.
#include "store_golden.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "../unit/store_testing.h"

namespace hcache::store {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class GoldenStoreTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    // A copy: opening a store may write to it.
    std::filesystem::copy(std::string(HCACHE_TEST_DATA) + "/golden/" + GetParam(), copy_ / "store",
                          std::filesystem::copy_options::recursive);
    options_.dirs = {copy_ / "store/disk0", copy_ / "store/disk1"};
    if (encrypted()) options_.key = golden::key();
  }
  [[nodiscard]] static bool encrypted() {
    return GetParam() == "store_v3" || GetParam() == "store_v5" || GetParam() == "store_v7" ||
           GetParam() == "store_v9";
  }
  [[nodiscard]] static golden::Era era() {
    if (GetParam() >= "store_v8") return golden::Era::kCut;
    if (GetParam() >= "store_v6") return golden::Era::kLlama;
    return GetParam() >= "store_v4" ? golden::Era::kPacked : golden::Era::kFirst;
  }

  TempDir copy_;
  StoreOptions options_;
};

TEST_P(GoldenStoreTest, ReadsBackAndGoesOn) {
  for (const bool read_only : {true, false}) {
    SCOPED_TRACE(read_only);
    options_.read_only = read_only;
    const auto store = open_store(Env::real(), options_);
    ASSERT_NE(store, nullptr);
    const std::vector<std::int32_t> tokens = golden::tokens();
    const auto match = store->match(golden::fingerprint(), salt_id(golden::kSaltText), tokens);
    ASSERT_OK(match);
    EXPECT_EQ(match->n_tokens, 100U);
    ASSERT_EQ(match->chunks.size(), 2U);
    expect_prefix(*match, tokens);
    auto reader = store->new_reader({});
    ASSERT_OK(reader);
    for (std::size_t c = 0; c < 2; ++c) {
      const ChunkInfo& info = match->chunks[c].chunk.info();
      EXPECT_EQ(info.first_position, c * 64);
      EXPECT_EQ(info.k_type, ElementType::kQ8_0);
      EXPECT_EQ(info.v_type, ElementType::kF16);
      EXPECT_EQ(info.pages.size(), golden::pages(era()).size());
      for (const auto& [layer, encoding] : golden::pages(era())) {
        const std::vector<PageRequest> request = {{match->chunks[c].chunk, layer, encoding}};
        ASSERT_OK((*reader)->submit(request));
        const auto view = (*reader)->next();
        ASSERT_OK(view);
        ASSERT_OK(view->status);
        const auto expected = golden::page(c, layer, encoding, info.tokens.size());
        EXPECT_TRUE(
            std::equal(expected.begin(), expected.end(), view->bytes.begin(), view->bytes.end()));
        (*reader)->release(view->index);
      }
    }
    const auto session = store->get_session(golden::kSessionName);
    ASSERT_OK(session);
    EXPECT_EQ(session->tokens, tokens);
    EXPECT_EQ(session->metadata_json, golden::kMetadata);
    EXPECT_TRUE(store->verify({})->ok());
    EXPECT_OK(store->check_integrity());
    if (!read_only) {
      const Chain more(golden::fingerprint(), salt_id(golden::kSaltText), tokens_of(200), {});
      ASSERT_OK(store->put(more.chunks()));
      EXPECT_OK(store->check_integrity());
    }
  }
}

// A store of the first format has got its records when a writer has opened it.
TEST_P(GoldenStoreTest, IsFoundAgainWithoutItsCatalog) {
  {
    const auto store = open_store(Env::real(), options_);
    ASSERT_NE(store, nullptr);
    EXPECT_EQ(store->stat()->format_version, encrypted() ? 9U : 8U);
  }
  ASSERT_TRUE(std::filesystem::remove(copy_ / "store/disk0/catalog.db"));
  const auto store = open_store(Env::real(), options_);
  ASSERT_NE(store, nullptr);
  const std::vector<std::int32_t> tokens = golden::tokens();
  const auto match = store->match(golden::fingerprint(), salt_id(golden::kSaltText), tokens);
  ASSERT_OK(match);
  EXPECT_EQ(match->n_tokens, 100U);
  const auto session = store->get_session(golden::kSessionName);
  ASSERT_OK(session);
  EXPECT_EQ(session->tokens, tokens);
  EXPECT_TRUE(store->verify({})->ok());
  EXPECT_OK(store->check_integrity());
}

INSTANTIATE_TEST_SUITE_P(Formats, GoldenStoreTest,
                         ::testing::Values("store_v1", "store_v2", "store_v3", "store_v4",
                                           "store_v5", "store_v6", "store_v7", "store_v8",
                                           "store_v9"));

class GoldenSessionTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenSessionTest, ReadsBack) {
  const auto file =
      read_whole_file(Env::real(), std::string(HCACHE_TEST_DATA) + "/golden/" + GetParam());
  ASSERT_OK(file);
  const auto archive = read_archive(*file);
  ASSERT_OK(archive);
  EXPECT_EQ(archive->head.fingerprint, golden::fingerprint());
  EXPECT_EQ(archive->head.model, golden::archive_head().model);
  EXPECT_EQ(archive->head.name, golden::kSessionName);
  EXPECT_EQ(archive->head.tokens, golden::tokens());
  EXPECT_EQ(archive->head.metadata_json, golden::kMetadata);
  ASSERT_EQ(archive->chunks.size(), 2U);
  for (std::size_t c = 0; c < 2; ++c) {
    const ArchiveChunk& chunk = archive->chunks[c];
    EXPECT_EQ(chunk.n_tokens, c == 0 ? 64U : 36U);
    EXPECT_EQ(chunk.k_type, ElementType::kQ8_0);
    EXPECT_EQ(chunk.v_type, ElementType::kF16);
    const auto pages = golden::pages(GetParam() == "session_v1.hcache"   ? golden::Era::kFirst
                                     : GetParam() == "session_v2.hcache" ? golden::Era::kPacked
                                                                         : golden::Era::kLlama);
    ASSERT_EQ(chunk.pages.size(), pages.size());
    for (std::size_t p = 0; p < pages.size(); ++p) {
      EXPECT_EQ(std::pair(chunk.pages[p].layer, chunk.pages[p].encoding), pages[p]);
      const auto expected = golden::page(c, pages[p].first, pages[p].second, chunk.n_tokens);
      const std::span<const std::byte> bytes = chunk.pages[p].bytes;
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), bytes.begin(), bytes.end()));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, GoldenSessionTest,
                         ::testing::Values("session_v1.hcache", "session_v2.hcache",
                                           "session_v3.hcache"));

TEST(GoldenIds, AreFrozen) {
  EXPECT_EQ(to_hex(salt_id("")), "70a3aaa626ff5abd94a8c2de304d14c0");
  EXPECT_EQ(to_hex(salt_id(golden::kSaltText)), "36b9a287904376c8a6be3ba657c1467c");
  const auto tokens = golden::tokens();
  const auto first = std::span<const std::int32_t>(tokens).first(64);
  const ChunkId id = chunk_id(golden::fingerprint(), golden::kSaltText, {}, first);
  EXPECT_EQ(to_hex(id), "8bdddd9b2937e8efc5528fbbf90f7d51");
  EXPECT_EQ(to_hex(chunk_id(golden::fingerprint(), golden::kSaltText, id,
                            std::span<const std::int32_t>(tokens).subspan(64))),
            "17ccf65498ea970032be93638fa22ea8");
}

}  // namespace
}  // namespace hcache::store
