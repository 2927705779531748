// Session files: what comes out of one store goes into another, and damaged files do not.
#include <gmock/gmock.h>

#include "format.h"
#include "store/archive.h"
#include "store_testing.h"

namespace hcache::store {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

constexpr std::size_t kTokens = 150;

class ArchiveTest : public ::testing::Test {
 protected:
  void SetUp() override {
    from_ = open("from");
    to_ = open("to");
    ASSERT_OK(from_->put(chain_.chunks()));
    head_.fingerprint = model_;
    head_.model = "a model";
    head_.name = "a talk";
    head_.tokens = chain_.tokens();
    head_.metadata_json = R"({"user":"me"})";
  }
  std::unique_ptr<Store> open(const std::string& name) {
    TestOptions options;
    options.dirs = {dir_ / name};
    return open_store(Env::real(), options);
  }
  Match match(Store& store, const SaltId& salt) {
    auto match = store.match(model_, salt, head_.tokens);
    EXPECT_OK(match);
    return match.ok() ? std::move(*match) : Match();
  }
  std::string write() {
    std::string file;
    EXPECT_OK(write_archive(*from_, head_, match(*from_, salt_), [&](std::string_view piece) {
      file += piece;
      return Status();
    }));
    return file;
  }

  TempDir dir_;
  const Fingerprint model_ = fingerprint_of("m");
  const SaltId salt_ = salt_id("one");
  const Shape shape_ = {.layers = 3, .encodings = {Encoding::kHiddenQ8_1, Encoding::kKv}};
  const Chain chain_{model_, salt_, tokens_of(kTokens), shape_};
  std::unique_ptr<Store> from_;
  std::unique_ptr<Store> to_;
  ArchiveHead head_;
};

TEST_F(ArchiveTest, GoesFromStoreToStoreUnderAnotherSalt) {
  const std::string file = write();
  const auto archive = read_archive(file);
  ASSERT_OK(archive);
  EXPECT_EQ(archive->head.fingerprint, model_);
  EXPECT_EQ(archive->head.model, head_.model);
  EXPECT_EQ(archive->head.name, head_.name);
  EXPECT_EQ(archive->head.tokens, head_.tokens);
  EXPECT_EQ(archive->head.metadata_json, head_.metadata_json);
  const SaltId other = salt_id("two");
  const auto put = put_archive(*to_, *archive, {other, other});
  ASSERT_OK(put);
  EXPECT_EQ(put->chunks_new, 3U);
  const Match there = match(*to_, other);
  EXPECT_EQ(there.n_tokens, kTokens);
  EXPECT_EQ(match(*to_, salt_).n_tokens, 0U);
  // Every page is what it was. The made-up state depends on the parent's id, so it is compared with
  // the first store's bytes.
  const Match here = match(*from_, salt_);
  const auto wanted = requests_of(here);
  const auto got = requests_of(there);
  ASSERT_EQ(wanted.size(), got.size());
  auto a = from_->new_reader({});
  auto b = to_->new_reader({});
  ASSERT_OK((*a)->submit(wanted));
  ASSERT_OK((*b)->submit(got));
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto x = (*a)->next();
    const auto y = (*b)->next();
    ASSERT_OK(x->status);
    ASSERT_OK(y->status);
    EXPECT_TRUE(std::equal(x->bytes.begin(), x->bytes.end(), y->bytes.begin(), y->bytes.end()));
    (*a)->release(i);
    (*b)->release(i);
  }
  EXPECT_OK(to_->check_integrity());
}

TEST_F(ArchiveTest, HoldsNeitherSaltNorIds) {
  const std::string file = write();
  const auto holds = [&](const auto& id) {
    const std::string_view bytes(reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size());
    return file.find(bytes) != std::string::npos || file.find(to_hex(id)) != std::string::npos;
  };
  EXPECT_TRUE(holds(model_));
  EXPECT_FALSE(holds(salt_));
  for (const ChunkWrite& chunk : chain_.chunks()) EXPECT_FALSE(holds(chunk.id));
}

TEST_F(ArchiveTest, IsRefusedWithAnyByteChanged) {
  const std::string file = write();
  for (std::size_t at = 0; at < file.size(); at += at < 2048 ? 1 : 7) {
    std::string damaged = file;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
    EXPECT_EQ(read_archive(damaged).code(), Code::kInvalidArgument) << at;
  }
}

TEST_F(ArchiveTest, IsRefusedWhenCutShortOrTooLong) {
  const std::string file = write();
  for (std::size_t size = 0; size < file.size(); size += size < 2048 ? 1 : 7) {
    EXPECT_EQ(read_archive(std::string_view(file).substr(0, size)).code(), Code::kInvalidArgument);
  }
  const auto longer = read_archive(file + "x");
  EXPECT_THAT(longer.status().message(), HasSubstr(std::to_string(file.size())));
  EXPECT_THAT(longer.status().message(), HasSubstr(std::to_string(file.size() + 1)));
}

// A liar's file: its checksums are right.
std::string with_checks(std::string file) {
  for (int i = 0; i < 100; ++i) {
    std::size_t at = 0;
    const std::string message = read_archive(file).status().message();
    if (message.find("the checksum does not match") == std::string::npos ||
        std::sscanf(message.c_str(), "the session file is damaged at byte %zu", &at) != 1) {
      return file;
    }
    const std::uint64_t check =
        checksum(std::as_bytes(std::span(std::string_view(file).substr(0, at))));
    for (std::size_t b = 0; b < 8; ++b) file[at + b] = static_cast<char>(check >> (8 * b));
  }
  ADD_FAILURE() << "more checksums than the file has";
  return file;
}

TEST_F(ArchiveTest, IsRefusedWhenItLiesAboutSizes) {
  const std::string file = write();
  ASSERT_OK(read_archive(with_checks(file)));
  constexpr std::size_t kChunks = 12;
  constexpr std::size_t kTokenCount = 40;
  constexpr std::size_t kModelBytes = 48;
  constexpr std::size_t kNameBytes = 52;
  constexpr std::size_t kMetadataBytes = 56;
  const std::size_t first_chunk =
      64 + 4 * kTokens + head_.model.size() + head_.name.size() + head_.metadata_json.size() + 8;
  const std::size_t first_page = first_chunk + 8;
  struct Lie {
    std::size_t at;
    std::vector<std::uint8_t> bytes;
    const char* words;
  };
  const std::vector<Lie> lies = {
      {8, {4}, "format 4"},
      {kChunks, {2}, "its end"},
      {kChunks, {4}, "more chunks"},
      {kChunks, {0xff, 0xff, 0xff, 0xff}, "more chunks"},
      {kTokenCount, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, "sizes"},
      {kTokenCount, {0, 0, 0, 0, 0, 0, 0, 0x40}, "sizes"},
      {kModelBytes, {0xff, 0xff, 0xff, 0xff}, "sizes"},
      {kNameBytes, {0xff, 0xff, 0xff, 0xff}, "sizes"},
      {kMetadataBytes, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, "sizes"},
      {first_chunk, {0, 0}, "a chunk that can't be"},
      {first_chunk, {65, 0}, "a chunk that can't be"},
      {first_chunk, {36, 0}, "a short chunk"},
      {first_chunk + 2, {99}, "a chunk that can't be"},
      {first_chunk + 2, {0}, "without types"},
      {first_chunk + 4, {0xff, 0xff, 0xff, 0xff}, "more pages"},
      {first_page, {9, 0}, "not in order"},
      {first_page + 2, {77}, "an unknown encoding"},
      {first_page + 3, {1}, "an unknown encoding"},
      {first_page + 4, {0, 0, 0, 0}, "a page of 0 bytes"},
      {first_page + 4, {1, 0, 0, 0}, "a page of 1 bytes"},
      {first_page + 4, {0, 0, 0, 3}, "within a page"},
      {first_page + 4, {0, 0, 0, 0xff}, "a page of"},
  };
  for (const Lie& lie : lies) {
    std::string lying = file;
    for (std::size_t i = 0; i < lie.bytes.size(); ++i) {
      lying[lie.at + i] = static_cast<char>(lie.bytes[i]);
    }
    const auto archive = read_archive(with_checks(lying));
    EXPECT_EQ(archive.code(), Code::kInvalidArgument);
    EXPECT_THAT(archive.status().message(), HasSubstr(lie.words)) << lie.at;
  }
}

TEST_F(ArchiveTest, LeavesOutWhatAnotherSessionSaid) {
  // Another conversation has gone on from 140 of the tokens and superseded the tail.
  const Chain other(model_, salt_, tokens_of(192, 5, 140), shape_);
  ASSERT_OK(from_->put(other.chunks()));
  head_.tokens.resize(140);
  ASSERT_EQ(match(*from_, salt_).n_tokens, 140U);
  const std::string file = write();
  const auto archive = read_archive(file);
  ASSERT_OK(archive);
  EXPECT_EQ(archive->chunks.size(), 2U);
  ASSERT_OK(put_archive(*to_, *archive, {salt_, salt_}));
  EXPECT_EQ(match(*to_, salt_).n_tokens, 128U);
}

TEST_F(ArchiveTest, ASessionWithoutStateIsAFileToo) {
  from_ = open("empty");
  const std::string file = write();
  const auto archive = read_archive(file);
  ASSERT_OK(archive);
  EXPECT_TRUE(archive->chunks.empty());
  EXPECT_EQ(archive->head.tokens, head_.tokens);
  EXPECT_OK(put_archive(*to_, *archive, {salt_, salt_}));
}

TEST_F(ArchiveTest, ASinkThatFailsEndsTheWriting) {
  int pieces = 0;
  const Status status = write_archive(*from_, head_, match(*from_, salt_), [&](std::string_view) {
    ++pieces;
    return cancelled("enough");
  });
  EXPECT_EQ(status.code(), Code::kCancelled);
  EXPECT_EQ(pieces, 1);
}

TEST_F(ArchiveTest, ADamagedPageIsDroppedAndTheNextFileIsWhole) {
  // One byte of the segment that holds all pages.
  damage_byte(dir_ / "from/segment-00000001.hcs", 3);
  const auto pages = [&] {
    std::size_t n = 0;
    for (const MatchedChunk& m : match(*from_, salt_).chunks) n += m.chunk.info().pages.size();
    return n;
  };
  const std::size_t before = pages();
  const Status status =
      write_archive(*from_, head_, match(*from_, salt_), [](std::string_view) { return Status(); });
  EXPECT_EQ(status.code(), Code::kDataLoss);
  EXPECT_EQ(pages(), before - 1);
  EXPECT_OK(read_archive(write()));
}

TEST_F(ArchiveTest, AFullStoreTakesNothing) {
  TestOptions options;
  options.dirs = {dir_ / "small"};
  options.quota_bytes = 64 << 10;
  const auto small = open_store(Env::real(), options);
  const std::string file = write();
  const auto archive = read_archive(file);
  ASSERT_OK(archive);
  EXPECT_EQ(put_archive(*small, *archive, {salt_, salt_}).code(), Code::kResourceExhausted);
  EXPECT_EQ(match(*small, salt_).n_tokens, 0U);
}

}  // namespace
}  // namespace hcache::store
