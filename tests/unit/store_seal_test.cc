// Encrypted stores: what a disk or a remote tier shows of them, keys that don't fit, and changes
// that somebody made.
#include <gtest/gtest.h>
#include <sqlite3.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <string_view>

#include "seal.h"
#include "store/archive.h"
#include "store_fixture.h"

namespace hcache::store {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr const char* kName = "what nobody may know";
constexpr const char* kMetadata = R"({"title":"the plan for the bank"})";
const SaltId kTenant = salt_id("a tenant");

std::string text_of(const auto& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The files below a folder.
std::map<std::string, std::string> files_of(const std::string& dir) {
  std::map<std::string, std::string> out;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream in(entry.path(), std::ios::binary);
    std::ostringstream content;
    content << in.rdbuf();
    out[entry.path().filename().string()] = content.str();
  }
  return out;
}

class SealTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    options_.key = key_of(3);
  }
  // A conversation with a name, whose chunks another salt's quota counts.
  Chain save() {
    Chain chain(kModel, kTenant, tokens_of(200, 5), {});
    chain.set_owner(kSalt);
    put(chain);
    Session session;
    session.name = kName;
    session.fingerprint = kModel;
    session.salt = kTenant;
    session.tokens = chain.tokens();
    session.metadata_json = kMetadata;
    EXPECT_OK(store_->put_session(session));
    return chain;
  }
  // Everything is there again, and right.
  void expect_whole(const Chain& chain) {
    const auto match = store_->match(kModel, kTenant, chain.tokens());
    ASSERT_OK(match);
    EXPECT_EQ(match->n_tokens, chain.tokens().size());
    EXPECT_TRUE(read_back(*store_, *match).failed.empty());
    const auto session = store_->get_session(kName);
    ASSERT_OK(session);
    EXPECT_EQ(session->tokens, chain.tokens());
    EXPECT_EQ(session->metadata_json, kMetadata);
    EXPECT_EQ(store_->list_sessions()->at(0).name, kName);
    EXPECT_GT(store_->owned_bytes(kSalt), 0U);
  }
  // What stands in which files of what must not be known.
  std::vector<std::string> shown(const Chain& chain) {
    std::map<std::string, std::string> secrets = {
        {"the session's name", kName},
        {"its metadata", kMetadata},
        {"tokens", text_of(std::span(chain.tokens()).first(8))},
        {"the salt", text_of(kTenant.bytes)},
        {"its owner", text_of(kSalt.bytes)},
        {"the model", text_of(kModel.bytes)},
        {"the salt in hex", to_hex(kTenant)},
        {"a chunk's id", text_of(chain.chunks()[1].id.bytes)},
        {"a page", text_of(chain.chunks()[1].pages[0].bytes.subspan(64, 16))},
    };
    std::vector<std::string> out;
    for (const auto& [file, content] : files_of(dir_ / "a")) {
      for (const auto& [what, secret] : secrets) {
        if (content.find(secret) != std::string::npos) out.push_back(what + " in " + file);
      }
    }
    return out;
  }
};

TEST_F(SealTest, NothingIsReadable) {
  open();
  const Chain chain = save();
  EXPECT_EQ(shown(chain), std::vector<std::string>()) << "while the store is open";
  store_.reset();
  EXPECT_EQ(shown(chain), std::vector<std::string>());
  open();
  expect_whole(chain);
  EXPECT_TRUE(store_->verify({})->ok());
}

// The test above can fail: all of it stands in a store without a key.
TEST_F(SealTest, EverythingIsReadableWithoutEncryption) {
  options_.key.reset();
  open();
  const Chain chain = save();
  store_.reset();
  const auto found = shown(chain);
  for (const char* what : {"the session's name", "its metadata", "tokens", "the salt", "its owner",
                           "the model", "the salt in hex", "a chunk's id", "a page"}) {
    EXPECT_TRUE(std::any_of(found.begin(), found.end(), [&](const std::string& line) {
      return line.starts_with(what);
    })) << what;
  }
}

TEST_F(SealTest, AKeyThatDoesNotFitChangesNothing) {
  open();
  const Chain chain = save();
  store_.reset();
  const auto before = files_of(dir_ / "a");
  for (const bool read_only : {true, false}) {
    for (const auto& [key, says] : std::map<std::optional<std::uint8_t>, std::string>{
             {std::nullopt, "give its key (--encrypt-key-file)"}, {4, "another key"}}) {
      StoreOptions options = options_;
      options.read_only = read_only;
      options.key = key ? std::optional(key_of(*key)) : std::nullopt;
      const auto store = Store::open(Env::real(), options);
      EXPECT_EQ(store.code(), Code::kFailedPrecondition);
      EXPECT_NE(store.status().message().find(says), std::string::npos)
          << store.status().to_string();
      EXPECT_EQ(Store::repair(Env::real(), options, true).code(), Code::kFailedPrecondition);
    }
  }
  EXPECT_EQ(files_of(dir_ / "a"), before);
  open();
  expect_whole(chain);
}

TEST_F(SealTest, AStoreWithoutEncryptionTakesNoKey) {
  options_.key.reset();
  open();
  const Chain chain = save();
  store_.reset();
  const auto before = files_of(dir_ / "a");
  options_.key = key_of(3);
  const auto store = Store::open(Env::real(), options_);
  EXPECT_EQ(store.code(), Code::kFailedPrecondition);
  EXPECT_NE(store.status().message().find("not encrypted"), std::string::npos);
  EXPECT_EQ(files_of(dir_ / "a"), before);
}

// Even where the catalog is gone, which is made anew with the right key.
TEST_F(SealTest, AKeyThatDoesNotFitRebuildsNothing) {
  open();
  const Chain chain = save();
  store_.reset();
  ASSERT_TRUE(std::filesystem::remove(dir_ / "a/catalog.db"));
  for (const bool with_disk_file : {true, false}) {
    if (!with_disk_file) std::filesystem::remove(dir_ / "a/hcache-disk");
    options_.key = key_of(4);
    EXPECT_EQ(Store::open(Env::real(), options_).code(), Code::kFailedPrecondition);
    options_.key.reset();
    EXPECT_EQ(Store::open(Env::real(), options_).code(), Code::kFailedPrecondition);
    EXPECT_FALSE(std::filesystem::exists(dir_ / "a/catalog.db"));
  }
  options_.key = key_of(3);
  open();
  expect_whole(chain);
}

TEST_F(SealTest, AChangedPageIsNotUsed) {
  open();
  const Chain chain = save();
  store_.reset();
  const std::string path = dir_ / "a/segment-00000001.hcs";
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(kSegmentHeaderBytes + 10);
    file.put('\x55');
  }
  open();
  const auto match = store_->match(kModel, kTenant, chain.tokens());
  ASSERT_OK(match);
  const ReadBack read = read_back(*store_, *match);
  ASSERT_EQ(read.failed.size(), 1U);
  EXPECT_EQ(read.failed[0].code(), Code::kDataLoss);
}

// Rows of one chunk under the id of another, which have checksums that fit.
TEST_F(SealTest, ExchangedRowsAreNotUsed) {
  open();
  const Chain chain = save();
  store_.reset();
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((dir_ / "a/catalog.db").c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db,
                         "UPDATE chunk SET body = (SELECT body FROM chunk ORDER BY seq LIMIT 1)"
                         " WHERE seq = (SELECT seq FROM chunk ORDER BY seq LIMIT 1 OFFSET 1)",
                         nullptr, nullptr, nullptr),
            SQLITE_OK);
  sqlite3_close(db);
  open();  // the row is made anew from its record
  expect_whole(chain);
}

TEST_F(SealTest, AnExportIsForWhoeverHasTheFile) {
  open();
  const Chain chain = save();
  const auto match = store_->match(kModel, kTenant, chain.tokens());
  ASSERT_OK(match);
  std::string file;
  const ArchiveHead head = {.fingerprint = kModel,
                            .model = "a model",
                            .name = kName,
                            .tokens = chain.tokens(),
                            .metadata_json = kMetadata};
  ASSERT_OK(write_archive(*store_, head, *match, [&](std::string_view piece) {
    file += piece;
    return Status();
  }));
  EXPECT_NE(file.find(kName), std::string::npos);
}

TEST_F(SealTest, SessionsGoAndChange) {
  open();
  const Chain chain = save();
  Session other = *store_->get_session(kName);
  other.metadata_json = "{}";
  ASSERT_OK(store_->put_session(other));
  other.name = "another";
  ASSERT_OK(store_->put_session(other));
  EXPECT_EQ(store_->get_session(kName)->metadata_json, "{}");
  EXPECT_EQ(store_->list_sessions()->size(), 2U);
  ASSERT_OK(store_->delete_session(kName));
  EXPECT_EQ(store_->get_session(kName).code(), Code::kNotFound);
  ASSERT_OK(store_->delete_session("another"));
  EXPECT_OK(store_->check_integrity());
  EXPECT_EQ(store_->stat()->chunks, 0U);
}

TEST(Seal, WithoutAKeyChangesNothing) {
  const Seal none;
  const ChunkId id = chunk_id(kModel, kSalt, {}, std::vector<std::int32_t>{1, 2});
  EXPECT_EQ(none.hide(id), id);
  EXPECT_EQ(none.hide_name("name"), "name");
  EXPECT_EQ(none.hide_first_token(id, 17), 17);
  EXPECT_EQ(none.hide_checksum(17), 17U);
  EXPECT_EQ(none.seal_row("row", "of"), "row");
  EXPECT_OK(none.fits(StoreId(), false, "there"));
}

TEST(Seal, HidesIdsAndShowsThemAgain) {
  const Seal seal(key_of(1));
  const Seal other(key_of(2));
  const ChunkId id = chunk_id(kModel, kSalt, {}, std::vector<std::int32_t>{1, 2});
  const ChunkId next = chunk_id(kModel, kSalt, {}, std::vector<std::int32_t>{1, 3});
  EXPECT_NE(seal.hide(id), id);
  EXPECT_NE(seal.hide(id), seal.hide(next));
  EXPECT_NE(seal.hide(id), other.hide(id));
  EXPECT_EQ(seal.hide(id), Seal(key_of(1)).hide(id));
  EXPECT_EQ(seal.show(seal.hide(id)), id);
  EXPECT_TRUE(seal.hide(ChunkId()).is_zero());
  EXPECT_NE(seal.hide_first_token(id, 5), seal.hide_first_token(next, 5));
  EXPECT_NE(seal.hide_first_token(id, 5), seal.hide_first_token(id, 6));
  EXPECT_EQ(seal.hide_first_token(id, 5), seal.hide_first_token(id, 5));
  EXPECT_NE(seal.hide_checksum(5), seal.hide_checksum(6));
  EXPECT_NE(seal.hide_name("a"), seal.hide_name("b"));
}

TEST(Seal, OpensRowsOfTheSameNameAlone) {
  const Seal seal(key_of(1));
  const std::string row = seal.seal_row("the row", "its name");
  EXPECT_EQ(seal.open_row(row, "its name"), "the row");
  EXPECT_NE(seal.seal_row("the row", "its name"), row) << "equal rows look alike";
  EXPECT_EQ(seal.open_row(row, "another"), std::nullopt);
  EXPECT_EQ(Seal(key_of(2)).open_row(row, "its name"), std::nullopt);
  for (std::size_t n = 0; n < row.size(); ++n) {
    EXPECT_EQ(seal.open_row(row.substr(0, n), "its name"), std::nullopt);
    std::string changed = row;
    changed[n] = static_cast<char>(changed[n] ^ 1);
    EXPECT_EQ(seal.open_row(changed, "its name"), std::nullopt);
  }
}

TEST(Seal, OpensPagesOfTheSameChunkAndSaltAlone) {
  const Seal seal(key_of(1));
  const ChunkId id = chunk_id(kModel, kSalt, {}, std::vector<std::int32_t>{1, 2});
  const PageName name{kSalt, id, {3, Encoding::kKv, 16}};
  auto page = std::make_shared<AlignedBuffer>(16);
  std::fill_n(page->data(), 16, std::byte{9});
  const auto value = seal.seal_value(name, page);
  const std::string_view text(reinterpret_cast<const char*>(value->data()), value->size());
  ASSERT_NE(seal.open_value(name, text), nullptr);
  EXPECT_EQ(seal.open_value(name, text)->data()[7], std::byte{9});
  for (const PageName& other :
       {PageName{kTenant, id, {3, Encoding::kKv, 16}}, PageName{kSalt, {}, {3, Encoding::kKv, 16}},
        PageName{kSalt, id, {2, Encoding::kKv, 16}},
        PageName{kSalt, id, {3, Encoding::kHiddenF16, 16}}}) {
    EXPECT_EQ(seal.open_value(other, text), nullptr);
  }
  EXPECT_EQ(seal.open_value(name, text.substr(1)), nullptr);
}

TEST(StoreKeyFile, IsMadeOnceForItsOwnerAlone) {
  const TempDir dir;
  const std::string path = dir / "key";
  ASSERT_OK(make_store_key(Env::real(), path));
  struct stat info = {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  const auto key = read_store_key(Env::real(), path);
  ASSERT_OK(key);
  EXPECT_NE(key->bytes, StoreKey().bytes);
  EXPECT_EQ(make_store_key(Env::real(), path).code(), Code::kAlreadyExists);
  EXPECT_EQ(read_store_key(Env::real(), path)->bytes, key->bytes);
}

TEST(StoreKeyFile, SaysWhatIsWrongWithIt) {
  const TempDir dir;
  EXPECT_EQ(read_store_key(Env::real(), dir / "none").code(), Code::kNotFound);
  const std::string digits(64, 'a');
  for (const std::string& text :
       {std::string(), digits.substr(1), digits + "a", digits + "\n\nx", std::string(64, 'g')}) {
    ASSERT_OK(write_whole_file(Env::real(), dir / "key", text));
    const auto key = read_store_key(Env::real(), dir / "key");
    EXPECT_EQ(key.code(), Code::kInvalidArgument) << text;
    if (!text.empty()) {
      EXPECT_EQ(key.status().message().find(text), std::string::npos) << "it tells the key";
    }
  }
  ASSERT_OK(write_whole_file(Env::real(), dir / "key", digits));
  EXPECT_OK(read_store_key(Env::real(), dir / "key"));
}

}  // namespace
}  // namespace hcache::store
