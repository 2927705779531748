// The remote tier on real Redis servers: what one store wrote another one reads, and nothing that
// goes wrong there is ever more than a miss.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hiredis.h>

#include <functional>
#include <future>

#include "base/fault_env.h"
#include "base/xxh3.h"
#include "redis/redis_client.h"
#include "redis/redis_url.h"
#include "redis_testing.h"
#include "remote_testing.h"
#include "store_env_vfs.h"
#include "tier.h"

namespace hcache::store {
namespace {

using hcache::test::come;
using hcache::testing::ChildProcess;
using hcache::testing::RedisCluster;
using hcache::testing::RedisServer;
using hcache::testing::TempDir;
using testing::Chain;
using testing::chain;
using testing::eventually;
using testing::fingerprint_of;
using testing::kModel;
using testing::kPatienceS;
using testing::kSalt;
using testing::Machine;
using testing::open_store;
using testing::read_back;
using testing::requests_of;
using testing::test_seal;
using testing::TestOptions;
using testing::tokens_of;
using testing::with;

TEST(RedisUrl, SaysWhereAndAsWhom) {
  const auto plain = parse_redis_url("redis://cache");
  ASSERT_OK(plain);
  EXPECT_EQ(plain->seeds, (std::vector<RedisAddress>{{"cache", 6379}}));
  const auto full = parse_redis_url("rediss://me:p%40ss%3A@a:1,[::1]:2,b/3?ca=/etc/ca%20x.pem");
  ASSERT_OK(full);
  EXPECT_TRUE(full->tls);
  EXPECT_EQ(full->user, "me");
  EXPECT_EQ(full->password, "p@ss:");
  EXPECT_EQ(full->seeds, (std::vector<RedisAddress>{{"a", 1}, {"::1", 2}, {"b", 6379}}));
  EXPECT_EQ(full->database, 3);
  EXPECT_EQ(full->ca_file, "/etc/ca x.pem");
  EXPECT_EQ(full->display(), "rediss://me:***@a:1,[::1]:2,b:6379/3");
  EXPECT_EQ(parse_redis_url("redis://:secret@h")->password, "secret");
  for (const char* bad : {"", "redis:/h", "http://h", "redis://", "redis://h:", "redis://h:0",
                          "redis://h:99999", "redis://u@h", "redis://h/x", "redis://a,,b",
                          "redis://[::1", "redis://h?x=1", "redis://h?ca=x", "redis://u:%4@h"}) {
    EXPECT_EQ(parse_redis_url(bad).code(), Code::kInvalidArgument) << bad;
  }
  EXPECT_THAT(parse_redis_url("redis://u:hidden@h:x").status().message(),
              ::testing::Not(::testing::HasSubstr("hidden")));
}

TEST(RedisUrl, SlotsAreThoseOfTheSpecification) {
  EXPECT_EQ(redis_slot("123456789"), 0x31c3);
  EXPECT_EQ(redis_slot("{user1000}.following"), redis_slot("{user1000}.followers"));
  EXPECT_EQ(redis_slot("foo{}{bar}"), redis_slot("foo{}{bar}"));
  EXPECT_NE(redis_slot("foo{}{bar}"), redis_slot("{bar}"));
  EXPECT_EQ(redis_slot("foo{{bar}}zap"), redis_slot("{bar"));
}

TEST(RemoteTier, AnUnknownKindIsRefused) {
  TempDir folder;
  testing::TestOptions options;
  options.dirs = {folder.path()};
  options.remote.url = "carrier-pigeon://roof";
  const auto store = Store::open(Env::real(), options);
  EXPECT_EQ(store.code(), Code::kInvalidArgument);
  EXPECT_THAT(store.status().message(), ::testing::HasSubstr("redis://"));
}

TEST(RemoteTier, WhatOneStoreWroteAnotherOneReads) {
  RedisServer redis;
  Machine a(redis.url());
  Machine b(redis.url());
  const Chain saved = chain(5 * kChunkTokens + 17);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  const std::uint64_t of_seals = a.stat().pages_written * test_seal().value_bytes(0);
  EXPECT_EQ(a.stat().bytes_written, saved.bytes() + of_seals);
  {
    // Nobody has asked yet.
    const auto before = b.store().match(kModel, kSalt, saved.tokens());
    ASSERT_OK(before);
    EXPECT_EQ(before->n_tokens, 0U);
    const Match match = b.look_up(saved.tokens());
    testing::expect_prefix(match, saved.tokens());
    EXPECT_EQ(match.n_tokens, saved.tokens().size());
    const auto read = read_back(b.store(), match);
    EXPECT_EQ(read.good, 6U * 4);
    EXPECT_TRUE(read.failed.empty());
    EXPECT_EQ(b.stat().bytes_read, saved.bytes());
  }
  // The conversation goes on there: what was read is put on its disk, then what is new.
  std::vector<std::int32_t> longer = saved.tokens();
  const auto more = tokens_of(500, 9);
  longer.insert(longer.end(), more.begin(), more.end());
  const Chain whole(kModel, kSalt, longer, {});
  const auto put = b.store().put(whole.chunks().subspan(5));
  ASSERT_OK(put);
  EXPECT_EQ(put->chunks_without_parent, 0U);
  EXPECT_EQ(b.stat().pages_promoted, 6U * 4);
  ASSERT_OK(b.store().check_integrity());
  b.cut_off();
  const Match match = b.look_up(longer);
  EXPECT_EQ(match.n_tokens, longer.size());
  EXPECT_EQ(read_back(b.store(), match).good, whole.chunks().size() * 4);
  // And the first one sees what the second one added.
  EXPECT_EQ(a.look_up(longer).n_tokens, longer.size());
}

// The first calls wait until the client knows its servers, and those given behind them need not.
TEST(RemoteTier, WhatIsAskedForAtOnceIsFoundWithItsPages) {
  RedisServer redis;
  Machine machine(redis.url());
  const Chain saved = chain(kChunkTokens);
  ASSERT_OK(machine.store().put(saved.chunks()));
  ASSERT_TRUE(machine.settled());
  RemoteOptions options;
  options.url = redis.url();
  for (int i = 0; i < 25; ++i) {
    const auto tier = open_tier(Env::real(), options, test_seal());
    ASSERT_OK(tier);
    std::promise<Result<std::vector<std::optional<ChunkRecord>>>> answer;
    const std::vector<ChunkId> ids(3000, saved.chunks()[0].id);
    (*tier)->find(ids, Env::real().monotonic_ns() + static_cast<std::int64_t>(kPatienceS * 1e9),
                  [&](auto found) { answer.set_value(std::move(found)); });
    const auto found = answer.get_future().get();
    ASSERT_OK(found);
    ASSERT_EQ(found->size(), ids.size());
    for (const std::optional<ChunkRecord>& record : *found) {
      ASSERT_TRUE(record.has_value());
      ASSERT_EQ(record->info.pages.size(), 4U);
      ASSERT_EQ(record->places.size(), 4U);
    }
  }
}

TEST(RemoteTier, ATailThatGoesLeavesWhatOthersHaveRead) {
  RedisServer redis;
  Machine a(redis.url());
  Machine b(redis.url());
  const Chain saved = chain(3 * kChunkTokens, 1);
  ASSERT_OK(a.store().put(saved.chunks().first(2)));
  ASSERT_TRUE(a.settled());
  ASSERT_OK(b.store().put(chain(kChunkTokens + 6, 2).chunks()));
  {
    const auto in_use = b.store().match(kModel, kSalt, chain(kChunkTokens + 6, 2).tokens());
    ASSERT_OK(in_use);
    ASSERT_OK(b.store().put(chain(kChunkTokens + 26, 2).chunks()));
  }
  {
    const Match match = b.look_up(saved.tokens());
    EXPECT_EQ(read_back(b.store(), match).good, 2U * 4);
  }
  // The tail of the one conversation goes with the put that needs what was read of the other.
  const auto put = b.store().put(saved.chunks().subspan(2));
  ASSERT_OK(put);
  EXPECT_EQ(put->chunks_without_parent, 0U);
  EXPECT_EQ(b.stat().pages_promoted, 2U * 4);
  EXPECT_EQ(b.store().stat()->chunks, 5U);
}

TEST(RemoteTier, WhatTheQuotaEvictsIsWrittenBack) {
  RedisServer redis;
  Machine a(redis.url(), with(&RemoteOptions::write, RemoteWrite::kBack), 2 << 20);
  const testing::Shape shape{4, {Encoding::kHiddenQ8_1}, 512};
  const std::uint64_t chunk_bytes = 4 * test_seal().value_bytes(kChunkTokens * 512);
  const Chain old(kModel, kSalt, tokens_of(4 * kChunkTokens, 1), shape);
  const Chain fresh(kModel, kSalt, tokens_of(12 * kChunkTokens, 2), shape);
  ASSERT_OK(a.store().put(old.chunks()));
  ASSERT_TRUE(a.settled());
  EXPECT_EQ(a.stat().bytes_written, 0U);
  const auto put = a.store().put(fresh.chunks());
  ASSERT_OK(put);
  EXPECT_GT(put->chunks_evicted, 0U);
  ASSERT_TRUE(a.settled());
  EXPECT_EQ(a.stat().bytes_written, put->chunks_evicted * chunk_bytes);
  EXPECT_LT(a.store().match(kModel, kSalt, old.tokens())->n_tokens, old.tokens().size());
  {
    const Match match = a.look_up(old.tokens());
    EXPECT_EQ(match.n_tokens, old.tokens().size());
    EXPECT_EQ(read_back(a.store(), match).good, 4U * 4);
  }
  // It comes back to the disk with the next put, whose room the others give; what the tier has
  // already is not written again when it goes once more.
  const std::uint64_t before = a.stat().bytes_written;
  const auto again = a.store().put(chain(kChunkTokens, 3).chunks());
  ASSERT_OK(again);
  EXPECT_EQ(a.stat().pages_promoted, put->chunks_evicted * 4U);
  ASSERT_OK(a.store().put(Chain(kModel, kSalt, tokens_of(12 * kChunkTokens, 4), shape).chunks()));
  ASSERT_TRUE(a.settled());
  EXPECT_LE(a.stat().bytes_written - before, fresh.bytes() + chain(kChunkTokens, 3).bytes() +
                                                 (4 - put->chunks_evicted) * chunk_bytes);
  ASSERT_OK(a.store().check_integrity());
}

// The same of snapshots that their own quota drops, whose chunks stay.
TEST(RemoteTier, DroppedSnapshotsAreWrittenBack) {
  RedisServer redis;
  constexpr std::size_t kRow = 512;
  Machine a(redis.url(), with(&RemoteOptions::write, RemoteWrite::kBack), 0,
            2 * kChunkTokens * kRow);
  Chain chain(kModel, kSalt, tokens_of(4 * kChunkTokens, 1), {2, {Encoding::kRows}, 64});
  chain.add_snapshot(1, 2, kRow);
  chain.add_snapshot(3, 2, kRow);
  ASSERT_OK(a.store().put(chain.chunks().first(2)));
  ASSERT_TRUE(a.settled());
  EXPECT_EQ(a.stat().bytes_written, 0U);
  EXPECT_EQ(a.store().put(chain.chunks().subspan(2))->snapshots_dropped, 1U);
  ASSERT_TRUE(a.settled());
  EXPECT_EQ(a.stat().bytes_written, 2 * test_seal().value_bytes(kChunkTokens * kRow));
  {
    const Match match = a.look_up(chain.tokens());
    EXPECT_EQ(match.n_tokens, chain.tokens().size());
    EXPECT_NE(match.chunks[1].chunk.info().find_page(1, Encoding::kSnapshot), nullptr);
    EXPECT_EQ(read_back(a.store(), match).good, 4U * 2 + 2 * 2);
  }
  ASSERT_OK(a.store().put(testing::Chain(kModel, kSalt, tokens_of(64, 2), {}).chunks()));
  EXPECT_EQ(a.store().stat()->snapshots, 1U);  // where it is worth more, on the disks
  ASSERT_OK(a.store().check_integrity());
}

TEST(RemoteTier, OtherTokensSaltsAndModelsFindNothing) {
  RedisServer redis;
  Machine a(redis.url());
  Machine b(redis.url());
  const Chain saved = chain(3 * kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  EXPECT_EQ(b.look_up(saved.tokens(), salt_id("someone else's")).n_tokens, 0U);
  EXPECT_EQ(b.look_up(tokens_of(3 * kChunkTokens, 4)).n_tokens, 0U);
  b.store().look_up(fingerprint_of("another model"), kSalt, saved.tokens());
  EXPECT_EQ(b.store().match(fingerprint_of("another model"), kSalt, saved.tokens())->n_tokens, 0U);
  // The same to the end of the second chunk.
  EXPECT_EQ(b.look_up(tokens_of(200, 4, 2 * kChunkTokens)).n_tokens, 2 * kChunkTokens);
}

TEST(RemoteTier, PagesOfAChunkAddUp) {
  RedisServer redis;
  Machine a(redis.url());
  Machine b(redis.url());
  const auto tokens = tokens_of(2 * kChunkTokens);
  const Chain hidden(kModel, kSalt, tokens, {.encodings = {Encoding::kHiddenQ8_1}});
  const Chain kv(kModel, kSalt, tokens, {.encodings = {Encoding::kKv}});
  ASSERT_OK(a.store().put(hidden.chunks()));
  ASSERT_OK(a.store().put(kv.chunks()));
  ASSERT_TRUE(a.settled());
  ASSERT_OK(b.store().put(kv.chunks().first(1)));
  ASSERT_TRUE(b.settled());
  // One page from its disk, the others from the remote tier, in one read.
  b.store().look_up(kModel, kSalt, tokens);
  const Match match = b.look_up(tokens);
  ASSERT_EQ(match.n_tokens, tokens.size());
  EXPECT_EQ(match.chunks[1].chunk.info().pages.size(), 8U);
  EXPECT_EQ(read_back(b.store(), match).failed.size(), 0U);
}

// Sends one command as anybody could; its reply as an integer.
long long command(const std::string& url, const std::vector<std::string>& args) {
  auto client = RedisClient::open(Env::real(), *parse_redis_url(url));
  std::promise<long long> promise;
  RedisCall call;
  call.key = args.size() > 1 ? args[1] : "";
  call.args = args;
  call.deadline_ns = Env::real().monotonic_ns() + static_cast<std::int64_t>(kPatienceS * 1e9);
  call.done = [&](const Result<const redisReply*>& reply) {
    EXPECT_OK(reply);
    promise.set_value(reply.ok() ? (*reply)->integer : -1);
  };
  (*client)->call(std::move(call));
  return come(promise.get_future(), "the answer to a command");
}

TEST(RemoteTier, WrongBytesAreNeverUsed) {
  RedisServer redis;
  Machine a(redis.url());
  Machine b(redis.url());
  const Chain saved = chain(2 * kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  const Match match = b.look_up(saved.tokens());
  ASSERT_EQ(match.chunks.size(), 2U);
  // Layer 2 of the second chunk, by the name that format.md gives it.
  const ChunkInfo& info = match.chunks[1].chunk.info();
  const PageWrite& page = saved.chunks()[1].pages[2];
  const std::string key = "hcache1:{" + to_hex(test_seal().hide(info.id)) + "}";
  const std::string field =
      fmt::format("p2.{}.{}.{:016x}", static_cast<int>(page.encoding), page.bytes.size(),
                  test_seal().hide_checksum(XXH3_64bits(page.bytes.data(), page.bytes.size())));
  EXPECT_EQ(command(redis.url(), {"HEXISTS", key, field}), 1);
  command(redis.url(), {"HSET", key, field, std::string(page.bytes.size(), 'x')});
  const auto read = read_back(b.store(), match);
  EXPECT_EQ(read.good, 7U);
  ASSERT_EQ(read.failed.size(), 1U);
  EXPECT_EQ(read.failed[0].code(), Code::kUnavailable);
  EXPECT_EQ(b.store().stat()->checksum_failures, 1U);
  // It is not offered again, here or there.
  EXPECT_EQ(b.look_up(saved.tokens()).chunks[1].chunk.info().pages.size(), 3U);
  EXPECT_TRUE(eventually([&] { return command(redis.url(), {"HEXISTS", key, field}) == 0; }));
  // Fields that no page has are no pages.
  for (const char* strange : {"p", "p2", "p-1.16.64.0", "p70000.16.64.0", "p0.7.64.0", "p0.16.0.0",
                              "p0.16.65.0", "p0.16.64.0 ", "p0.16.99999999999.0", "q0.16.64.0"}) {
    command(redis.url(), {"HSET", key, strange, "x"});
  }
  EXPECT_EQ(b.look_up(saved.tokens()).chunks[1].chunk.info().pages.size(), 3U);
  // A record that is not one is as none.
  command(redis.url(), {"HSET", key, "record", "nonsense"});
  Machine c(redis.url());
  EXPECT_EQ(c.look_up(saved.tokens()).n_tokens, kChunkTokens);
}

TEST(RemoteTier, WhatIsGoneWhenItIsReadIsAMiss) {
  RedisServer redis;
  Machine a(redis.url());
  Machine b(redis.url());
  const Chain saved = chain(3 * kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  const Match match = b.look_up(saved.tokens());
  ASSERT_EQ(match.n_tokens, saved.tokens().size());
  command(redis.url(), {"FLUSHALL"});
  const auto read = read_back(b.store(), match);
  EXPECT_EQ(read.good, 0U);
  EXPECT_EQ(read.failed.size(), 12U);
  EXPECT_EQ(b.store().match(kModel, kSalt, saved.tokens())->n_tokens, 0U);
}

TEST(RemoteTier, DeletingASessionDeletesItThereToo) {
  RedisServer redis;
  Machine a(redis.url());
  Machine b(redis.url());
  const Chain saved = chain(3 * kChunkTokens + 5);
  ASSERT_OK(a.store().put(saved.chunks()));
  Session session;
  session.name = "secret";
  session.fingerprint = kModel;
  session.salt = kSalt;
  session.tokens = saved.tokens();
  ASSERT_OK(a.store().put_session(session));
  ASSERT_TRUE(a.settled());
  ASSERT_EQ(b.look_up(saved.tokens()).n_tokens, saved.tokens().size());
  EXPECT_OK(a.store().delete_session("secret"));
  EXPECT_TRUE(eventually([&] { return command(redis.url(), {"DBSIZE"}) == 0; }));
  Machine c(redis.url());
  EXPECT_EQ(c.look_up(saved.tokens()).n_tokens, 0U);
}

TEST(RemoteTier, DeletingASessionLeavesWhatAnotherChainGoesThrough) {
  RedisServer redis;
  Machine a(redis.url());
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
  ASSERT_TRUE(a.settled());
  Machine b(redis.url());
  EXPECT_EQ(b.look_up(other.tokens()).n_tokens, other.tokens().size());
  EXPECT_EQ(b.look_up(mine.tokens()).n_tokens, 2 * kChunkTokens);
}

TEST(RemoteTier, UnusedChunksExpireAndUsedOnesDoNot) {
  RedisServer redis;
  Machine a(redis.url(), with(&RemoteOptions::ttl_s, 1000));
  const Chain saved = chain(kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  const std::string key = "hcache1:{" + to_hex(test_seal().hide(saved.chunks()[0].id)) + "}";
  ASSERT_TRUE(eventually([&] { return command(redis.url(), {"TTL", key}) > 900; }));
  command(redis.url(), {"EXPIRE", key, "500"});
  Machine b(redis.url(), with(&RemoteOptions::ttl_s, 2000));
  EXPECT_EQ(b.look_up(saved.tokens()).n_tokens, kChunkTokens);
  EXPECT_TRUE(eventually([&] { return command(redis.url(), {"TTL", key}) > 1900; }));
}

TEST(RemoteTier, MemoryIsBoundedByLettingPagesGo) {
  RedisServer redis;
  Machine a(redis.url(), with(&RemoteOptions::queue_bytes, 20'000));
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    ASSERT_OK(a.store().put(chain(4 * kChunkTokens, seed).chunks()));
    EXPECT_LE(a.stat().backlog_bytes, 20'000U);
  }
  ASSERT_TRUE(a.settled());
  const RemoteStat stat = a.stat();
  EXPECT_EQ(stat.pages_written + stat.pages_skipped, 20U * 16);
  EXPECT_EQ(stat.failures, 0U);
  // A server without memory refuses, and that is all.
  RedisServer small({"--maxmemory", "1", "--maxmemory-policy", "noeviction"});
  Machine b(small.url());
  ASSERT_OK(b.store().put(chain(kChunkTokens).chunks()));
  ASSERT_TRUE(b.settled());
  EXPECT_TRUE(eventually([&] { return b.stat().failures > 0; }));
  EXPECT_TRUE(b.stat().available);
}

TEST(RemoteTier, NobodyWaitsForAServerThatIsGone) {
  auto redis = std::make_unique<RedisServer>();
  Machine a(redis->url());
  const Chain saved = chain(4 * kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  redis->stop();
  EXPECT_TRUE(eventually([&] {
    a.look_up(tokens_of(300, 5));
    return !a.stat().available;
  }));
  // With minutes of patience: an answer that comes at once was not waited for.
  const std::int64_t begin = Env::real().monotonic_ns();
  for (std::uint32_t seed = 0; seed < 50; ++seed) a.look_up(tokens_of(300, 100 + seed));
  EXPECT_LT(Env::real().monotonic_ns() - begin, static_cast<std::int64_t>(kPatienceS * 1e9));
  EXPECT_EQ(a.look_up(saved.tokens()).n_tokens, saved.tokens().size());  // the disk has it
  ASSERT_OK(a.store().put(chain(2 * kChunkTokens, 7).chunks()));
  EXPECT_GT(a.stat().pages_skipped, 0U);
  redis->start();
  EXPECT_TRUE(eventually([&] { return a.stat().available; }));
  ASSERT_OK(a.store().put(chain(2 * kChunkTokens, 8).chunks()));
  Machine b(redis->url());
  EXPECT_TRUE(eventually(
      [&] { return b.look_up(tokens_of(2 * kChunkTokens, 8)).n_tokens == 2 * kChunkTokens; }));
}

TEST(RemoteTier, AServerThatHangsIsGoneToo) {
  RedisServer redis;
  Machine a(redis.url());
  const Chain saved = chain(2 * kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  Machine b(redis.url(), with(&RemoteOptions::timeout_s, 0.1));
  ASSERT_TRUE(
      eventually([&] { return b.look_up(saved.tokens()).n_tokens == saved.tokens().size(); }));
  const Match match = b.look_up(saved.tokens());
  redis.signal(SIGSTOP);
  // A read ends by its deadline.
  ReaderOptions options;
  options.remote_timeout_s = 0.1;
  const auto read = read_back(b.store(), match, options);
  EXPECT_EQ(read.good + read.failed.size(), 8U);
  EXPECT_GT(read.failed.size(), 0U);
  EXPECT_TRUE(eventually([&] {
    b.look_up(tokens_of(300, 5));
    return !b.stat().available;
  }));
  redis.signal(SIGCONT);
  EXPECT_TRUE(eventually([&] { return b.stat().available; }));
  EXPECT_TRUE(
      eventually([&] { return b.look_up(saved.tokens()).n_tokens == saved.tokens().size(); }));
}

TEST(RemoteTier, ItsTimeDoesNotRunWhileAReaderHasNoRoom) {
  RedisServer redis;
  Machine a(redis.url());
  const Chain saved(kModel, kSalt, tokens_of(4 * kChunkTokens), {5, {Encoding::kKv}, 400});
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  FaultEnv env;  // its time passes when it is told
  const testing::EnvVfs vfs(env);
  TestOptions options;
  options.dirs = {"/store"};
  options.catalog_vfs = vfs.name();
  options.remote.url = redis.url();
  const std::unique_ptr<Store> store = open_store(env, options);
  ASSERT_TRUE(eventually([&] {
    store->look_up(kModel, kSalt, saved.tokens());
    const auto match = store->match(kModel, kSalt, saved.tokens());
    return match.ok() && match->n_tokens == saved.tokens().size();
  }));
  const auto match = store->match(kModel, kSalt, saved.tokens());
  ASSERT_OK(match);
  const auto requests = requests_of(*match);
  constexpr std::size_t kPageBytes = std::size_t{kChunkTokens} * 400;
  constexpr std::size_t kFit = 12;
  const auto reader =
      store->new_reader({.ring_bytes = kFit * kPageBytes + 1, .remote_timeout_s = 1});
  ASSERT_OK(reader);
  ASSERT_OK((*reader)->submit(requests));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (i == kFit) {  // all that fit have come, and are held for an hour
      ASSERT_TRUE(eventually([&] { return store->stat()->remote->backlog_requests == 0; }));
      env.sleep_ns(std::int64_t{3600} * 1'000'000'000);
      for (std::size_t held = 0; held < i; ++held) (*reader)->release(held);
    }
    const auto view = (*reader)->next();
    ASSERT_OK(view);
    EXPECT_OK(view->status);
    EXPECT_EQ(view->origin, PageOrigin::kRemote);
  }
  EXPECT_TRUE(store->stat()->remote->available);
}

TEST(RemoteTier, PasswordsAreSentAndNeeded) {
  RedisServer redis({"--requirepass", "sesame"});
  Machine a("redis://:sesame@" + redis.address());
  const Chain saved = chain(kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  Machine b("redis://default:sesame@" + redis.address() + "/0");
  EXPECT_EQ(b.look_up(saved.tokens()).n_tokens, kChunkTokens);
  EXPECT_EQ(b.stat().name, "redis://default:***@" + redis.address());
  for (const std::string who : {"", ":open@", "nobody:sesame@"}) {
    Machine c("redis://" + who + redis.address());
    EXPECT_EQ(c.look_up(saved.tokens()).n_tokens, 0U) << who;
    EXPECT_TRUE(eventually([&] { return !c.stat().available; })) << who;
  }
}

TEST(RemoteTier, TlsIsVerified) {
  TempDir folder;
  const auto certificate = [&](const std::string& name) {
    return ChildProcess({"openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
                         "-subj", "/CN=" + name, "-addext", "subjectAltName=IP:127.0.0.1",
                         "-keyout", folder / (name + ".key"), "-out", folder / (name + ".pem")})
        .wait();
  };
  ASSERT_EQ(certificate("right"), 0);
  ASSERT_EQ(certificate("wrong"), 0);
  RedisServer redis({"--tls-cert-file", folder / "right.pem", "--tls-key-file",
                     folder / "right.key", "--tls-ca-cert-file", folder / "right.pem",
                     "--tls-auth-clients", "no"});
  const std::string url = "rediss://" + redis.address() + "?ca=" + folder.path();
  Machine a(url + "/right.pem");
  const Chain saved = chain(kChunkTokens);
  ASSERT_OK(a.store().put(saved.chunks()));
  ASSERT_TRUE(a.settled());
  EXPECT_EQ(a.stat().failures, 0U);
  Machine b(url + "/right.pem");
  EXPECT_EQ(b.look_up(saved.tokens()).n_tokens, kChunkTokens);
  Machine c(url + "/wrong.pem");
  EXPECT_EQ(c.look_up(saved.tokens()).n_tokens, 0U);
  // The certificate is for the address, not for this name.
  Machine d("rediss://localhost:" + std::to_string(redis.port()) + "?ca=" + folder.path() +
            "/right.pem");
  EXPECT_EQ(d.look_up(saved.tokens()).n_tokens, 0U);
  TempDir nothing;
  testing::TestOptions options;
  options.dirs = {nothing.path()};
  options.remote.url = url + "/none.pem";
  EXPECT_EQ(Store::open(Env::real(), options).code(), Code::kInvalidArgument);
}

TEST(RemoteTier, AClusterLosesAMasterAndNobodyNotices) {
  RedisCluster cluster;
  Machine a(cluster.url());
  Machine b(cluster.url());
  std::vector<Chain> chains;
  for (std::uint32_t seed = 1; seed <= 8; ++seed) {
    chains.push_back(chain(4 * kChunkTokens + seed, seed));
    ASSERT_OK(a.store().put(chains.back().chunks()));
  }
  ASSERT_TRUE(a.settled());
  EXPECT_EQ(a.stat().failures, 0U);
  for (const Chain& saved : chains) {
    ASSERT_EQ(b.look_up(saved.tokens()).n_tokens, saved.tokens().size());
  }
  // Slots that move to another node are followed.
  EXPECT_EQ(ChildProcess({"redis-cli", "--cluster", "reshard", cluster.server(0).address(),
                          "--cluster-from", cluster.id(0), "--cluster-to", cluster.id(1),
                          "--cluster-slots", "3000", "--cluster-yes"})
                .wait(),
            0);
  for (const Chain& saved : chains) {
    const Match match = b.look_up(saved.tokens());
    ASSERT_EQ(match.n_tokens, saved.tokens().size());
    EXPECT_EQ(read_back(b.store(), match).failed.size(), 0U);
  }
  const Chain spread = chain(40 * kChunkTokens, 77);
  ASSERT_OK(a.store().put(spread.chunks()));
  ASSERT_TRUE(a.settled());
  EXPECT_EQ(a.stat().failures, 0U);
  // Replicas have it too, or it would be lost with the master.
  for (std::size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(ChildProcess({"redis-cli", "-p", std::to_string(cluster.server(i).port()), "WAIT",
                              "1", "10000"})
                    .wait() == 0);
  }
  cluster.server(0).stop();
  // Until another one has taken its place its replica answers what is read.
  Machine c(cluster.url());
  for (const Chain& saved : chains) {
    EXPECT_TRUE(
        eventually([&] { return c.look_up(saved.tokens()).n_tokens == saved.tokens().size(); }));
    const Match match = c.look_up(saved.tokens());
    EXPECT_EQ(read_back(c.store(), match).failed.size(), 0U);
  }
  // Afterwards all of it is written again.
  std::uint32_t seed = 100;
  EXPECT_TRUE(eventually([&] {
    const Chain fresh = chain(16 * kChunkTokens, ++seed);
    EXPECT_OK(b.store().put(fresh.chunks()));
    EXPECT_TRUE(b.settled());
    Machine d(cluster.url());
    return d.look_up(fresh.tokens()).n_tokens == fresh.tokens().size();
  }));
}

}  // namespace
}  // namespace hcache::store
