// The remote tier on a real S3 server (moto, from PyPI): what one store wrote another one reads,
// and nothing that goes wrong there is ever more than a miss. Run by `make test-clients`, which
// installs the server and names it in HCACHE_TEST_MOTO.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <future>

#include "child_process.h"
#include "remote_testing.h"
#include "s3/s3_client.h"

namespace hcache::store {
namespace {

using hcache::testing::ChildProcess;
using hcache::testing::free_port;
using testing::Chain;
using testing::chain;
using testing::kModel;
using testing::kPatienceS;
using testing::kSalt;
using testing::Machine;
using testing::read_back;
using testing::soon;
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
    options.access_key = "AKIDEXAMPLE";
    options.secret_key = "not a secret";
    return options;
  }
  Machine machine() { return Machine(url(), remote()); }
  // One request as anybody with the credentials could make it; keys are those below the bucket.
  Result<std::string> request(const std::string& method, const std::string& key,
                              const std::string& body) {
    const auto place =
        parse_s3_url("s3://state?endpoint=http://127.0.0.1:" + std::to_string(port_));
    auto client = S3Client::open(Env::real(), *place,
                                 {.access_key = remote().access_key,
                                  .secret_key = remote().secret_key,
                                  .session_token = "a token"});
    std::promise<Result<std::string>> promise;
    S3Call call;
    call.method = method;
    call.key = key;
    if (method == "PUT") call.body = std::make_shared<std::string>(body);
    call.deadline_ns = Env::real().monotonic_ns() + static_cast<std::int64_t>(kPatienceS * 1e9);
    call.done = [&](Result<std::string> answer) { promise.set_value(std::move(answer)); };
    (*client)->call(std::move(call));
    return promise.get_future().get();
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
  EXPECT_TRUE(soon([&] { return keys().empty(); }));
  EXPECT_EQ(a.stat().failures, 0U);
  // And what was still waiting to be written does not come back.
  Machine b = machine();
  ASSERT_OK(b.store().put(saved.chunks()));
  ASSERT_OK(b.store().put_session(session));
  EXPECT_OK(b.store().delete_session("secret"));
  ASSERT_TRUE(b.settled());
  EXPECT_TRUE(soon([&] { return keys().empty(); }));
}

TEST_F(S3Test, NobodyWaitsForAServerThatIsGone) {
  Machine a = machine();
  const Chain saved = chain(4 * kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  server_.stop();
  EXPECT_TRUE(soon([&] {
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
  EXPECT_TRUE(soon([&] { return a.stat().available; }));
  ASSERT_OK(a.store().put(chain(2 * kChunkTokens, 8).chunks()));
  ASSERT_TRUE(a.settled());
  Machine b = machine();
  EXPECT_EQ(b.look_up(tokens_of(2 * kChunkTokens, 8)).n_tokens, 2 * kChunkTokens);
}

}  // namespace
}  // namespace hcache::store
