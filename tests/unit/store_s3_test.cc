// The remote tier on S3: on a bucket in memory, and on a real server (moto, from PyPI), which
// `make test-clients` installs and names in HCACHE_TEST_MOTO. What one store wrote another one
// reads, erasing takes what it is asked to take and nothing else, and nothing that goes wrong there
// is ever more than a miss.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <future>
#include <set>

#include "child_process.h"
#include "remote_testing.h"
#include "s3/s3_client.h"
#include "s3/s3_format.h"
#include "s3/s3_tier.h"
#include "s3_testing.h"

namespace hcache::store {
namespace {

using hcache::test::come;
using hcache::testing::ChildProcess;
using hcache::testing::free_port;
using testing::Chain;
using testing::chain;
using testing::eventually;
using testing::FakeBucket;
using testing::FakeS3Client;
using testing::kModel;
using testing::kPatienceS;
using testing::kSalt;
using testing::Machine;
using testing::read_back;
using testing::test_seal;
using testing::tokens_of;

TEST(S3Url, SaysWhere) {
  const auto plain = parse_s3_url("s3://bucket");
  ASSERT_OK(plain);
  EXPECT_EQ(plain->bucket, "bucket");
  EXPECT_EQ(plain->prefix, "");
  EXPECT_EQ(plain->region, "us-east-1");
  const auto full = parse_s3_url("s3://b/x/y/?endpoint=http://h:9000/&region=eu-west-3");
  ASSERT_OK(full);
  EXPECT_EQ(full->prefix, "x/y/");
  EXPECT_EQ(full->endpoint, "http://h:9000");
  EXPECT_EQ(full->region, "eu-west-3");
  for (const char* bad : {"", "s3:/b", "s3://", "s3:///x", "s3://b?endpoint=h",
                          "s3://b?region=", "s3://b?x=y", "s3://b/a b", "s3://b/%20"}) {
    EXPECT_EQ(parse_s3_url(bad).code(), Code::kInvalidArgument) << bad;
  }
}

// ---- Objects ------------------------------------------------------------------------------------

ChunkId numbered(std::uint8_t n) {
  ChunkId id;
  id.bytes[0] = n;
  return id;
}

TEST(S3Format, AHeadSaysWhatAnObjectHolds) {
  const std::vector<S3Member> members = {{numbered(1)}, {numbered(2), true}, {numbered(3)}};
  const std::string head = encode_head(members);
  EXPECT_EQ(head.size(), head_bytes(3));
  const auto read = decode_head(head + "pages");
  ASSERT_TRUE(read.has_value());
  ASSERT_EQ(read->size(), 3U);
  EXPECT_EQ((*read)[2].id, numbered(3));
  EXPECT_FALSE((*read)[0].erased);
  EXPECT_TRUE((*read)[1].erased);
  for (std::size_t i = 0; i < head.size(); ++i) {
    std::string damaged = head;
    damaged[i] = static_cast<char>(damaged[i] ^ 4);
    EXPECT_FALSE(decode_head(damaged).has_value()) << i;
    EXPECT_FALSE(decode_head(head.substr(0, i)).has_value()) << i;
  }
  EXPECT_LE(encode_head(std::vector<S3Member>(kMaxObjectChunks)).size(), kMaxHeadBytes);
}

TEST(S3Format, ErasingLeavesTheRestWhereItIs) {
  const std::string head = encode_head(std::vector<S3Member>{{numbered(1)}, {numbered(2)}});
  const std::string object = head + "aaaabbbbAAAABBBB";
  const std::vector<S3Hole> second = {{head.size() + 4, 4}, {head.size() + 12, 4}};
  const auto rest = without_chunks(object, std::vector<ChunkId>{numbered(2)}, second);
  ASSERT_TRUE(rest.has_value());
  EXPECT_EQ(rest->substr(head.size()), std::string("aaaa\0\0\0\0AAAA\0\0\0\0", 16));
  EXPECT_TRUE(decode_head(*rest).value()[1].erased);
  const std::vector<S3Hole> first = {{head.size(), 4}, {head.size() + 8, 4}};
  EXPECT_FALSE(without_chunks(*rest, std::vector<ChunkId>{numbered(1)}, first).has_value());
  // Holes that lie elsewhere do no harm, to the head least of all.
  const std::vector<S3Hole> wild = {{0, 400}, {1ULL << 40, 4}, {object.size() - 2, 4000}};
  const auto kept = without_chunks(object, std::vector<ChunkId>{numbered(9)}, wild);
  ASSERT_TRUE(kept.has_value());
  EXPECT_EQ(kept->substr(0, object.size() - 2), object.substr(0, object.size() - 2));
  EXPECT_EQ(kept->size(), object.size());
  // One from before there were heads is empty when all of it was erased.
  const auto old = without_chunks("aaaabbbb", {}, std::vector<S3Hole>{{4, 4}});
  ASSERT_TRUE(old.has_value());
  EXPECT_EQ(*old, std::string("aaaa\0\0\0\0", 8));
  EXPECT_FALSE(without_chunks(*old, {}, std::vector<S3Hole>{{0, 4}}).has_value());
}

// ---- Erasing, on either kind of bucket ----------------------------------------------------------

// A place where S3 clients lead.
class Bucket {
 public:
  Bucket() = default;
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;
  virtual ~Bucket() = default;
  virtual std::unique_ptr<S3Client> client() = 0;
  // Key and content of all that is in it.
  virtual std::map<std::string, std::string> objects() = 0;
};

class MemoryBucket : public Bucket {
 public:
  std::unique_ptr<S3Client> client() override { return std::make_unique<FakeS3Client>(bucket_); }
  std::map<std::string, std::string> objects() override { return bucket_->objects(); }
  FakeBucket& fake() { return *bucket_; }

 private:
  const std::shared_ptr<FakeBucket> bucket_ = std::make_shared<FakeBucket>();
};

S3Credentials credentials() {
  return {.access_key = "AKIDEXAMPLE", .secret_key = "not a secret", .session_token = "a token"};
}

std::int64_t patience() {
  return Env::real().monotonic_ns() + static_cast<std::int64_t>(kPatienceS * 1e9);
}

Result<std::string> wait_for(S3Client& client, S3Call call) {
  std::promise<Result<std::string>> promise;
  call.deadline_ns = patience();
  call.done = [&](Result<std::string> answer) { promise.set_value(std::move(answer)); };
  client.call(std::move(call));
  return come(promise.get_future(), "the answer to a request");
}

// moto's server.
class ServerBucket : public Bucket {
 public:
  explicit ServerBucket(const std::string& moto)
      : port_(free_port()), server_({moto, "-H", "127.0.0.1", "-p", std::to_string(port_)}) {
    EXPECT_TRUE(server_.answers(port_));
    S3Call make;
    make.method = "PUT";
    make.body = std::make_shared<std::string>();
    EXPECT_OK(wait_for(*open(""), std::move(make)));
  }
  std::unique_ptr<S3Client> client() override { return open("/some/place"); }
  std::map<std::string, std::string> objects() override {
    const auto everything = open("");
    S3Call call;
    call.key = "?list-type=2";
    const auto list = wait_for(*everything, std::move(call));
    EXPECT_OK(list);
    std::map<std::string, std::string> out;
    for (std::size_t at = 0; (at = list->find("<Key>", at)) != std::string::npos; ++at) {
      S3Call get;
      get.key = list->substr(at + 5, list->find("</Key>", at) - at - 5);
      const std::string key = get.key.substr(get.key.find("place/") + 6);
      const auto body = wait_for(*everything, std::move(get));
      EXPECT_OK(body);
      if (body.ok()) out[key] = *body;
    }
    return out;
  }

 private:
  std::unique_ptr<S3Client> open(const std::string& prefix) const {
    auto url =
        parse_s3_url("s3://state" + prefix + "?endpoint=http://127.0.0.1:" + std::to_string(port_));
    return std::move(*S3Client::open(Env::real(), *url, credentials()));
  }
  int port_;
  ChildProcess server_;
};

std::unique_ptr<Tier> tier_on(std::unique_ptr<S3Client> client) {
  return make_s3_tier(Env::real(), {}, test_seal(), "the bucket", std::move(client));
}

// What the store hands to a tier of a chunk.
TierWrite write_of(const ChunkWrite& chunk) {
  TierWrite write;
  write.info.id = chunk.id;
  write.info.parent = chunk.parent;
  write.info.fingerprint = chunk.fingerprint;
  write.info.salt = chunk.salt;
  write.info.first_position = chunk.first_position;
  write.info.tokens.assign(chunk.tokens.begin(), chunk.tokens.end());
  write.info.k_type = chunk.k_type;
  write.info.v_type = chunk.v_type;
  for (const PageWrite& page : chunk.pages) {
    TierPage out;
    out.info.layer = page.layer;
    out.info.encoding = page.encoding;
    out.info.bytes = static_cast<std::uint32_t>(page.bytes.size());
    auto bytes = std::make_shared<AlignedBuffer>(page.bytes.size());
    std::copy(page.bytes.begin(), page.bytes.end(), bytes->data());
    out.checksum = checksum(page.bytes);
    out.bytes = std::move(bytes);
    write.info.pages.push_back(out.info);
    write.pages.push_back(std::move(out));
  }
  return write;
}

std::vector<ChunkId> ids_of(std::span<const ChunkWrite> chunks) {
  std::vector<ChunkId> out;
  for (const ChunkWrite& chunk : chunks) out.push_back(chunk.id);
  return out;
}

void save(Tier& tier, const Chain& saved) {
  for (const ChunkWrite& chunk : saved.chunks()) ASSERT_TRUE(tier.write(write_of(chunk)));
  ASSERT_OK(tier.flush(patience()));
}

void erase(Tier& tier, std::span<const ChunkWrite> chunks) {
  tier.erase(ids_of(chunks));
  ASSERT_OK(tier.flush(patience()));
}

std::vector<std::optional<ChunkRecord>> find(Tier& tier, std::span<const ChunkWrite> chunks) {
  std::promise<Result<std::vector<std::optional<ChunkRecord>>>> promise;
  tier.find(ids_of(chunks), patience(), [&](auto found) { promise.set_value(std::move(found)); });
  auto found = come(promise.get_future(), "what a tier finds");
  EXPECT_OK(found);
  return std::move(*found);
}

Result<std::shared_ptr<const AlignedBuffer>> read(Tier& tier, const ChunkWrite& chunk,
                                                  const PageWrite& page) {
  std::promise<Result<std::shared_ptr<const AlignedBuffer>>> promise;
  tier.read({chunk.id, page.layer, page.encoding, checksum(page.bytes)}, chunk.salt,
            static_cast<std::uint32_t>(page.bytes.size()), patience(),
            [&](auto bytes) { promise.set_value(std::move(bytes)); });
  return come(promise.get_future(), "a page");
}

// How many of the chunks are there with all of their pages, right to the byte.
std::size_t whole(Tier& tier, std::span<const ChunkWrite> chunks) {
  const auto found = find(tier, chunks);
  std::size_t n = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    if (!found[i] || found[i]->info.pages.size() != chunks[i].pages.size()) continue;
    n += std::all_of(chunks[i].pages.begin(), chunks[i].pages.end(), [&](const PageWrite& page) {
      const auto bytes = read(tier, chunks[i], page);
      return bytes.ok() && std::equal(page.bytes.begin(), page.bytes.end(), (*bytes)->data(),
                                      (*bytes)->data() + (*bytes)->size());
    });
  }
  return n;
}

// Whether any of the chunks' pages lies anywhere in the bucket.
bool anywhere(Bucket& bucket, std::span<const ChunkWrite> chunks) {
  for (const auto& [key, body] : bucket.objects()) {
    for (const ChunkWrite& chunk : chunks) {
      for (const PageWrite& page : chunk.pages) {
        const std::string_view bytes(reinterpret_cast<const char*>(page.bytes.data()),
                                     page.bytes.size());
        if (body.find(bytes) != std::string::npos) return true;
      }
    }
  }
  return false;
}

class S3Erase : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (GetParam() == std::string_view("memory")) {
      bucket_ = std::make_unique<MemoryBucket>();
    } else {
      const char* moto = std::getenv("HCACHE_TEST_MOTO");
      if (moto == nullptr) GTEST_SKIP() << "HCACHE_TEST_MOTO names no server: make test-clients";
      bucket_ = std::make_unique<ServerBucket>(moto);
    }
  }
  std::unique_ptr<Tier> tier() { return tier_on(bucket_->client()); }

  std::unique_ptr<Bucket> bucket_;
};

INSTANTIATE_TEST_SUITE_P(Buckets, S3Erase, ::testing::Values("memory", "server"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(S3Erase, TakesOnlyWhatItIsAskedToTake) {
  const auto a = tier();
  const Chain saved = chain(6 * kChunkTokens + 9);
  save(*a, saved);
  // One object has the six whole chunks, another one the tail.
  EXPECT_EQ(bucket_->objects().size(), 2U + 7);
  const auto shared = saved.chunks().first(4);
  const auto own = saved.chunks().subspan(4);
  erase(*a, own);
  EXPECT_EQ(a->stat().failures, 0U);
  // What another conversation may go on from is there, for whoever asks.
  const auto b = tier();
  EXPECT_EQ(whole(*b, shared), 4U);
  EXPECT_EQ(whole(*a, shared), 4U);
  // What was erased is nowhere: no index, no page.
  for (const auto& record : find(*b, own)) EXPECT_FALSE(record.has_value());
  EXPECT_FALSE(anywhere(*bucket_, own));
  EXPECT_EQ(bucket_->objects().size(), 1U + 4);
  // With the last chunk the object goes.
  erase(*b, shared.subspan(1, 2));
  EXPECT_EQ(whole(*a, shared.first(1)) + whole(*a, shared.last(1)), 2U);
  erase(*a, shared);
  EXPECT_EQ(bucket_->objects().size(), 0U);
  EXPECT_EQ(a->stat().failures + b->stat().failures, 0U);
}

TEST_P(S3Erase, WhoHadFoundAnErasedPageMissesIt) {
  const auto a = tier();
  const Chain saved = chain(3 * kChunkTokens);
  save(*a, saved);
  const auto b = tier();
  ASSERT_EQ(find(*b, saved.chunks()).size(), 3U);
  erase(*a, saved.chunks().last(1));
  const ChunkWrite& gone = saved.chunks()[2];
  EXPECT_EQ(read(*b, gone, gone.pages[0]).code(), Code::kNotFound);  // it is not damaged
  EXPECT_EQ(b->stat().failures, 0U);
  EXPECT_EQ(whole(*b, saved.chunks().first(2)), 2U);
}

TEST_P(S3Erase, AChunkThatIsSavedAgainIsThereAgain) {
  const auto a = tier();
  const Chain saved = chain(3 * kChunkTokens);
  save(*a, saved);
  // All of it asked for at once, in this order.
  a->erase(ids_of(saved.chunks()));
  for (const ChunkWrite& chunk : saved.chunks()) ASSERT_TRUE(a->write(write_of(chunk)));
  ASSERT_OK(a->flush(patience()));
  EXPECT_EQ(whole(*tier(), saved.chunks()), 3U);
  erase(*a, saved.chunks());
  EXPECT_EQ(bucket_->objects().size(), 0U);
}

TEST_P(S3Erase, ObjectsFromBeforeThereWereHeadsLoseOnlyTheErasedPages) {
  const auto a = tier();
  const Chain saved = chain(3 * kChunkTokens);
  save(*a, saved);
  // As it was written then: no head, so every page lies that much nearer to the beginning.
  auto client = bucket_->client();
  for (const auto& [key, body] : bucket_->objects()) {
    S3Call put;
    put.method = "PUT";
    put.key = key;
    if (key.starts_with("d/")) {
      put.body = std::make_shared<std::string>(body.substr(head_bytes(3)));
    } else {
      ChunkId id;
      ASSERT_OK(parse_id(key.substr(2), &id));
      auto index = decode_index(test_seal().show(id), body, test_seal());
      ASSERT_OK(index);
      for (S3Entry& entry : index->entries) entry.offset -= head_bytes(3);
      put.body = std::make_shared<std::string>(encode_index(*index, test_seal()));
    }
    ASSERT_OK(wait_for(*client, std::move(put)));
  }
  const auto b = tier();
  ASSERT_EQ(whole(*b, saved.chunks()), 3U);
  erase(*b, saved.chunks().last(1));
  EXPECT_FALSE(anywhere(*bucket_, saved.chunks().last(1)));
  EXPECT_EQ(whole(*tier(), saved.chunks().first(2)), 2U);
  erase(*b, saved.chunks().first(2));
  EXPECT_EQ(bucket_->objects().size(), 0U);
  EXPECT_EQ(b->stat().failures, 0U);
}

TEST(S3EraseInMemory, AWholeConversationIsNotReadToBeErased) {
  MemoryBucket bucket;
  const auto a = tier_on(bucket.client());
  const Chain saved = chain(8 * kChunkTokens + 30);
  save(*a, saved);
  const std::uint64_t before = bucket.fake().bytes_read();
  const int puts = bucket.fake().requests("PUT");
  erase(*a, saved.chunks());
  EXPECT_EQ(bucket.objects().size(), 0U);
  EXPECT_EQ(bucket.fake().requests("PUT"), puts);
  std::uint64_t indexes = 0;
  for (const ChunkWrite& chunk : saved.chunks()) indexes += 400 + 8 * chunk.tokens.size();
  EXPECT_LT(bucket.fake().bytes_read() - before, indexes + kMaxHeadBytes);
}

TEST(S3EraseInMemory, WhatIsBeingUploadedIsErasedToo) {
  MemoryBucket bucket;
  auto client = std::make_unique<FakeS3Client>(
      std::shared_ptr<FakeBucket>(std::shared_ptr<void>(), &bucket.fake()));
  FakeS3Client& hold = *client;
  const auto a = tier_on(std::move(client));
  const Chain saved = chain(2 * kChunkTokens);
  hold.pause();
  for (const ChunkWrite& chunk : saved.chunks()) ASSERT_TRUE(a->write(write_of(chunk)));
  ASSERT_TRUE(hold.holds(1));  // the object is on its way
  a->erase(ids_of(saved.chunks()));
  hold.resume();
  ASSERT_OK(a->flush(patience()));
  EXPECT_EQ(bucket.objects().size(), 0U);
  EXPECT_EQ(a->stat().backlog_bytes, 0U);
}

TEST(S3EraseInMemory, ClosingWaitsForNobody) {
  MemoryBucket bucket;
  auto client = std::make_unique<FakeS3Client>(
      std::shared_ptr<FakeBucket>(std::shared_ptr<void>(), &bucket.fake()));
  FakeS3Client& hold = *client;
  auto a = tier_on(std::move(client));
  const Chain saved = chain(2 * kChunkTokens);
  save(*a, saved);
  hold.pause();
  a->erase(ids_of(saved.chunks().last(1)));
  ASSERT_TRUE(hold.holds(1));
  a.reset();
  EXPECT_EQ(bucket.objects().size(), 1U + 2);
}

// ---- Stores -------------------------------------------------------------------------------------

class S3Test : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* moto = std::getenv("HCACHE_TEST_MOTO");
    if (moto == nullptr) GTEST_SKIP() << "HCACHE_TEST_MOTO names no server: make test-clients";
    moto_ = moto;
    port_ = free_port();
    start();
  }
  void start() {
    server_ = ChildProcess({moto_, "-H", "127.0.0.1", "-p", std::to_string(port_)});
    ASSERT_TRUE(server_.answers(port_));
    ASSERT_OK(request("PUT", "", ""));  // the bucket
  }
  [[nodiscard]] std::string url() const {
    return "s3://state/some/place?endpoint=http://127.0.0.1:" + std::to_string(port_);
  }
  [[nodiscard]] static RemoteOptions remote() {
    RemoteOptions options;
    options.access_key = credentials().access_key;
    options.secret_key = credentials().secret_key;
    return options;
  }
  Machine machine() { return Machine(url(), remote()); }
  // One request as anybody with the credentials could make it; keys are those below the bucket.
  Result<std::string> request(const std::string& method, const std::string& key,
                              const std::string& body) {
    const auto place =
        parse_s3_url("s3://state?endpoint=http://127.0.0.1:" + std::to_string(port_));
    const auto client = S3Client::open(Env::real(), *place, credentials());
    S3Call call;
    call.method = method;
    call.key = key;
    if (method == "PUT") call.body = std::make_shared<std::string>(body);
    return wait_for(**client, std::move(call));
  }
  // Keys of everything in the bucket.
  std::vector<std::string> keys() {
    const auto list = request("GET", "?list-type=2", "");
    EXPECT_OK(list);
    std::vector<std::string> out;
    for (std::size_t at = 0; (at = list->find("<Key>", at)) != std::string::npos; ++at) {
      out.push_back(list->substr(at + 5, list->find("</Key>", at) - at - 5));
    }
    return out;
  }

  std::string moto_;
  int port_ = 0;
  ChildProcess server_;
};

TEST_F(S3Test, WhatOneStoreWroteAnotherOneReads) {
  Machine a = machine();
  Machine b = machine();
  const Chain saved = chain(9 * kChunkTokens + 17);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  EXPECT_EQ(a.stat().bytes_written, saved.bytes());
  EXPECT_EQ(a.stat().failures, 0U);
  // Nine chunks are one object, the tail another; each chunk has its index.
  EXPECT_EQ(keys().size(), 2U + 10);
  {
    const Match match = b.look_up(saved.tokens());
    testing::expect_prefix(match, saved.tokens());
    EXPECT_EQ(match.n_tokens, saved.tokens().size());
    const auto read = read_back(b.store(), match);
    EXPECT_EQ(read.good, 10U * 4);
    EXPECT_TRUE(read.failed.empty());
  }
  std::vector<std::int32_t> longer = saved.tokens();
  const auto more = tokens_of(200, 9);
  longer.insert(longer.end(), more.begin(), more.end());
  const Chain whole(kModel, kSalt, longer, {});
  ASSERT_OK(b.store().put(whole.chunks().subspan(9)));
  ASSERT_TRUE(b.settled());
  EXPECT_EQ(b.stat().pages_promoted, 10U * 4);
  EXPECT_EQ(a.look_up(longer).n_tokens, longer.size());
  b.cut_off();
  const Match match = b.look_up(longer);
  EXPECT_EQ(read_back(b.store(), match).good, whole.chunks().size() * 4);
}

TEST_F(S3Test, PagesOfAChunkAddUp) {
  Machine a = machine();
  const auto tokens = tokens_of(2 * kChunkTokens);
  const Chain hidden(kModel, kSalt, tokens, {.encodings = {Encoding::kHiddenQ8_1}});
  const Chain kv(kModel, kSalt, tokens, {.encodings = {Encoding::kKv}});
  ASSERT_OK(a.store().put(hidden.chunks()));
  ASSERT_TRUE(a.settled());
  ASSERT_OK(a.store().put(kv.chunks()));
  ASSERT_TRUE(a.settled());
  Machine b = machine();
  const Match match = b.look_up(tokens);
  ASSERT_EQ(match.n_tokens, tokens.size());
  EXPECT_EQ(match.chunks[1].chunk.info().pages.size(), 8U);
  EXPECT_EQ(read_back(b.store(), match).good, 16U);
}

TEST_F(S3Test, WrongBytesAreNeverUsed) {
  Machine a = machine();
  Machine b = machine();
  const Chain saved = chain(2 * kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  const Match match = b.look_up(saved.tokens());
  ASSERT_EQ(match.n_tokens, saved.tokens().size());
  std::string data;
  std::string index;
  for (const std::string& key : keys()) {
    (key.starts_with("some/place/d/") ? data : index) = key;
  }
  ASSERT_OK(request("PUT", data, std::string(saved.bytes(), 'x')));
  const auto read = read_back(b.store(), match);
  EXPECT_EQ(read.good, 0U);
  EXPECT_EQ(read.failed.size(), 8U);
  EXPECT_EQ(b.store().stat()->checksum_failures, 8U);
  // One that is too short, and one that is gone.
  Machine c = machine();
  ASSERT_EQ(c.look_up(saved.tokens()).n_tokens, saved.tokens().size());
  ASSERT_OK(request("PUT", data, "short"));
  EXPECT_EQ(read_back(c.store(), c.look_up(saved.tokens())).good, 0U);
  ASSERT_OK(request("DELETE", data, ""));
  Machine d = machine();
  EXPECT_EQ(read_back(d.store(), d.look_up(saved.tokens())).good, 0U);
  // An index that is none.
  for (const std::string& nonsense : {std::string("nonsense"), std::string(200, '\xff')}) {
    ASSERT_OK(request("PUT", index, nonsense));
    Machine e = machine();
    EXPECT_LE(e.look_up(saved.tokens()).n_tokens, kChunkTokens);
  }
}

TEST_F(S3Test, DeletingASessionDeletesItThereToo) {
  Machine a = machine();
  const Chain saved = chain(3 * kChunkTokens + 5);
  ASSERT_OK(a.store().put(saved.chunks()));
  Session session;
  session.name = "secret";
  session.fingerprint = kModel;
  session.salt = kSalt;
  session.tokens = saved.tokens();
  ASSERT_OK(a.store().put_session(session));
  ASSERT_TRUE(a.settled());
  ASSERT_FALSE(keys().empty());
  EXPECT_OK(a.store().delete_session("secret"));
  EXPECT_TRUE(eventually([&] { return keys().empty(); }));
  EXPECT_EQ(a.stat().failures, 0U);
  // And what was still waiting to be written does not come back.
  Machine b = machine();
  ASSERT_OK(b.store().put(saved.chunks()));
  ASSERT_OK(b.store().put_session(session));
  EXPECT_OK(b.store().delete_session("secret"));
  ASSERT_TRUE(b.settled());
  EXPECT_TRUE(eventually([&] { return keys().empty(); }));
}

TEST_F(S3Test, DeletingASessionLeavesWhatAnotherChainGoesThrough) {
  Machine a = machine();
  // Two conversations behind one prompt of two chunks; only the first one has a session.
  const Chain mine(kModel, kSalt, tokens_of(4 * kChunkTokens, 1, 2 * kChunkTokens), {});
  const Chain other(kModel, kSalt, tokens_of(4 * kChunkTokens, 2, 2 * kChunkTokens), {});
  ASSERT_OK(a.store().put(mine.chunks()));
  ASSERT_OK(a.store().put(other.chunks()));
  Session session;
  session.name = "secret";
  session.fingerprint = kModel;
  session.salt = kSalt;
  session.tokens = mine.tokens();
  ASSERT_OK(a.store().put_session(session));
  ASSERT_TRUE(a.settled());
  EXPECT_OK(a.store().delete_session("secret"));
  EXPECT_TRUE(eventually([&] {
    Machine b = machine();
    return b.look_up(mine.tokens()).n_tokens == 2 * kChunkTokens;
  }));
  Machine c = machine();
  const Match match = c.look_up(other.tokens());
  EXPECT_EQ(match.n_tokens, other.tokens().size());
  EXPECT_EQ(read_back(c.store(), match).failed.size(), 0U);
  EXPECT_EQ(a.stat().failures, 0U);
}

TEST_F(S3Test, NobodyWaitsForAServerThatIsGone) {
  Machine a = machine();
  const Chain saved = chain(4 * kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  server_.stop();
  EXPECT_TRUE(eventually([&] {
    a.look_up(tokens_of(300, 5));
    return !a.stat().available;
  }));
  const std::int64_t begin = Env::real().monotonic_ns();
  for (std::uint32_t seed = 0; seed < 50; ++seed) a.look_up(tokens_of(300, 100 + seed));
  EXPECT_LT(Env::real().monotonic_ns() - begin, static_cast<std::int64_t>(kPatienceS * 1e9));
  EXPECT_EQ(a.look_up(saved.tokens()).n_tokens, saved.tokens().size());
  ASSERT_OK(a.store().put(chain(2 * kChunkTokens, 7).chunks()));
  EXPECT_GT(a.stat().pages_skipped, 0U);
  start();
  EXPECT_TRUE(eventually([&] { return a.stat().available; }));
  ASSERT_OK(a.store().put(chain(2 * kChunkTokens, 8).chunks()));
  ASSERT_TRUE(a.settled());
  Machine b = machine();
  EXPECT_EQ(b.look_up(tokens_of(2 * kChunkTokens, 8)).n_tokens, 2 * kChunkTokens);
}

}  // namespace
}  // namespace hcache::store
