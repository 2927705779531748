// The power goes out at every single change that a scripted life of a store makes to its files.
// Afterwards the store must hold the state before or after the step that was under way: nothing
// that was acknowledged is lost, nothing wrong is offered.
#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "../unit/store_testing.h"
#include "base/fault_env.h"
#include "base/log.h"
#include "store_env_vfs.h"

namespace hcache::store {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

const Fingerprint kModel = fingerprint_of("model");
const SaltId kSalt = salt_id("");
const Shape kShape{3, {Encoding::kHiddenQ8_1}, 72};

// What a store must know: the reference, plain and slow.
struct Model {
  std::vector<std::vector<std::int32_t>> chains;
  std::map<std::string, std::vector<std::int32_t>> sessions;

  [[nodiscard]] std::uint64_t match(std::span<const std::int32_t> tokens) const {
    std::size_t best = 0;
    for (const auto& chain : chains) {
      const std::size_t n = std::min(chain.size(), tokens.size());
      const auto end = std::mismatch(chain.begin(), chain.begin() + static_cast<std::ptrdiff_t>(n),
                                     tokens.begin());
      best = std::max(best, static_cast<std::size_t>(end.first - chain.begin()));
    }
    return best;
  }
};

struct World {
  explicit World(std::uint64_t seed) : env(seed), vfs(env) {
    options.dirs = {"/disk0", "/disk1"};
    options.segment_bytes = 64 << 10;
    options.catalog_vfs = vfs.name();
  }
  Status open() {
    store.reset();
    auto opened = Store::open(env, options);
    if (opened.ok()) store = std::move(*opened);
    return opened.status();
  }
  FaultEnv env;
  EnvVfs vfs;
  TestOptions options;
  std::unique_ptr<Store> store;
};

// A step does something to the store and, if it says ok, the same to the model.
struct Step {
  const char* name;
  std::function<Status(World&)> store;
  std::function<void(Model&)> model;
};

Status put_tokens(World& world, const std::vector<std::int32_t>& tokens, std::size_t from_chunk = 0,
                  const Shape& shape = kShape) {
  const Chain chain(kModel, kSalt, tokens, shape);
  return world.store->put(chain.chunks().subspan(from_chunk)).status();
}

Step put_step(const char* name, std::vector<std::int32_t> tokens, std::size_t from_chunk = 0) {
  return {name, [=](World& w) { return put_tokens(w, tokens, from_chunk); },
          [=](Model& m) { m.chains.push_back(tokens); }};
}

Session session_of(const char* name, std::vector<std::int32_t> tokens) {
  Session session;
  session.name = name;
  session.fingerprint = kModel;
  session.salt = kSalt;
  session.tokens = std::move(tokens);
  return session;
}

Step session_step(const char* name, const char* session, std::vector<std::int32_t> tokens) {
  return {name, [=](World& w) { return w.store->put_session(session_of(session, tokens)); },
          [=](Model& m) { m.sessions[session] = tokens; }};
}

Step reopen_step() {
  return {"reopen",
          [](World& w) {
            HCACHE_RETURN_IF_ERROR(w.store->close());
            return w.open();
          },
          [](Model&) {}};
}

std::vector<Step> script() {
  std::vector<Step> steps;
  steps.push_back({"open", [](World& w) { return w.open(); }, [](Model&) {}});
  steps.push_back(put_step("first chain", tokens_of(150, 1)));
  steps.push_back(put_step("its tail grows", tokens_of(170, 1), 2));
  steps.push_back(session_step("session", "one", tokens_of(170, 1)));
  steps.push_back(put_step("a fork", tokens_of(150, 2, 70)));
  steps.push_back(reopen_step());
  steps.push_back(put_step("its tail fills", tokens_of(200, 1), 2));
  steps.push_back(
      {"match marks use",
       [](World& w) { return w.store->match(kModel, kSalt, tokens_of(100, 1)).status(); },
       [](Model&) {}});
  steps.push_back(put_step("another chain", tokens_of(300, 3)));
  steps.push_back(session_step("second session", "two", tokens_of(300, 3)));
  steps.push_back({"drop a page",
                   [](World& w) {
                     return w.store->quarantine(first_chunk(kModel, kSalt, tokens_of(300, 3)), 1,
                                                Encoding::kHiddenQ8_1);
                   },
                   [](Model&) {}});
  steps.push_back(put_step("write it anew", tokens_of(300, 3)));
  steps.push_back({"delete the second session",
                   [](World& w) { return w.store->delete_session("two").status(); },
                   [](Model& m) {
                     m.sessions.erase("two");
                     std::erase(m.chains, tokens_of(300, 3));
                   }});
  steps.push_back(put_step("into the freed space", tokens_of(200, 4)));
  steps.push_back({"gc", [](World& w) { return w.store->gc().status(); }, [](Model&) {}});
  steps.push_back(put_step("after gc", tokens_of(80, 5)));
  steps.push_back({"remove by id",
                   [](World& w) {
                     RemoveFilter filter;
                     filter.chunk = first_chunk(kModel, kSalt, tokens_of(200, 4));
                     return w.store->remove(filter).status();
                   },
                   [](Model& m) { std::erase(m.chains, tokens_of(200, 4)); }});
  steps.push_back(reopen_step());
  steps.push_back(put_step("last", tokens_of(140, 6)));
  return steps;
}

// Tokens whose matches tell all states of the script apart.
std::vector<std::vector<std::int32_t>> probes() {
  std::vector<std::vector<std::int32_t>> out;
  for (std::uint32_t seed = 1; seed <= 6; ++seed) out.push_back(tokens_of(400, seed));
  out.push_back(tokens_of(400, 2, 70));
  return out;
}

// "" if the store is what the model says, else where it differs.
std::string difference(Store& store, const Model& model) {
  for (const auto& probe : probes()) {
    const auto match = store.match(kModel, kSalt, probe);
    if (!match.ok()) return "match: " + match.status().to_string();
    if (match->n_tokens != model.match(probe)) {
      return "matches " + std::to_string(match->n_tokens) + " tokens, not " +
             std::to_string(model.match(probe));
    }
  }
  const auto sessions = store.list_sessions();
  if (!sessions.ok()) return "sessions: " + sessions.status().to_string();
  if (sessions->size() != model.sessions.size()) return "sessions";
  for (const auto& [name, tokens] : model.sessions) {
    const auto session = store.get_session(name);
    if (!session.ok() || session->tokens != tokens) return "session " + name;
  }
  return "";
}

void expect_sound(Store& store) {
  EXPECT_OK(store.check_integrity());
  const auto report = store.verify({});
  ASSERT_OK(report);
  EXPECT_TRUE(report->ok()) << (report->damaged_pages.empty()
                                    ? report->damaged_catalog[0].to_string()
                                    : report->damaged_pages[0].status.to_string());
  for (const auto& probe : probes()) {
    const auto match = store.match(kModel, kSalt, probe);
    ASSERT_OK(match);
    expect_prefix(*match, probe);
    EXPECT_TRUE(read_back(store, *match).failed.empty());
  }
}

class PowerCutTest : public ::testing::TestWithParam<FaultEnv::Survivors> {
 protected:
  void SetUp() override { log::set_level(log::Level::kOff); }
};

TEST_P(PowerCutTest, AtEveryChangeOfTheScript) {
  const std::vector<Step> steps = script();
  std::uint64_t cuts = 0;
  // That everything survives is the mildest case: every third cut will do.
  const std::uint64_t stride = GetParam() == FaultEnv::Survivors::kAll ? 3 : 1;
  for (bool cut = true; cut; cuts += stride) {
    World world(cuts + 1);
    world.env.cut_power_at(cuts + 1);
    Model before;
    Model after;
    const char* under_way = "";
    cut = false;
    for (const Step& step : steps) {
      under_way = step.name;
      before = after;
      step.model(after);
      const Status status = step.store(world);
      if (status.ok()) continue;
      ASSERT_TRUE(world.env.power_is_cut()) << step.name << ": " << status.to_string();
      cut = true;
      break;
    }
    SCOPED_TRACE("cut at change " + std::to_string(cuts + 1) + ", during: " + under_way);
    cut = cut || world.env.power_is_cut();  // the last one may hide in what a step tidies up
    if (!cut) before = after;
    world.store.reset();
    world.env.restart(GetParam());
    ASSERT_OK(world.open());
    const std::string differs_before = difference(*world.store, before);
    const std::string differs_after = difference(*world.store, after);
    ASSERT_TRUE(differs_before.empty() || differs_after.empty())
        << "neither the state before (" << differs_before << ") nor after (" << differs_after
        << ")";
    expect_sound(*world.store);
    // And life goes on.
    ASSERT_OK(put_tokens(world, tokens_of(260, 9)));
    EXPECT_EQ(world.store->match(kModel, kSalt, tokens_of(260, 9))->n_tokens, 260U);
    EXPECT_OK(world.store->check_integrity());
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(cuts, 200U);  // the script is worth something
}

TEST_P(PowerCutTest, DuringEvictionNothingCommittedLastIsLost) {
  const Shape shape{3, {Encoding::kHiddenQ8_1}, 256};  // 115 kB per chain
  for (std::uint64_t cut = 1; cut < 150; cut += 3) {
    SCOPED_TRACE(cut);
    World world(cut);
    world.options.quota_bytes = 900 << 10;
    ASSERT_OK(world.open());
    for (std::uint32_t seed = 1; seed <= 6; ++seed) {
      ASSERT_OK(put_tokens(world, tokens_of(150, seed), 0, shape));
    }
    world.env.cut_power_at(cut);
    std::uint32_t last = 6;
    for (std::uint32_t seed = 7; seed <= 14; ++seed) {
      if (!put_tokens(world, tokens_of(150, seed), 0, shape).ok()) break;
      last = seed;
    }
    world.store.reset();
    world.env.restart(GetParam());
    ASSERT_OK(world.open());
    EXPECT_EQ(world.store->match(kModel, kSalt, tokens_of(150, last))->n_tokens, 150U);
    expect_sound(*world.store);
    if (HasFailure()) return;
  }
}

// Snapshots are dropped to make room for others: each is there as a whole or not at all, and rows
// that were acknowledged stay whatever becomes of them.
TEST_P(PowerCutTest, WhileSnapshotsAreDropped) {
  const Shape rows{2, {Encoding::kRows}, 16};
  constexpr std::size_t kPartRow = 64;
  constexpr std::uint64_t kQuota = 3 * 2 * 64 * kPartRow;  // three of two parts
  const auto turn = [&](std::size_t chunks) {
    Chain chain(kModel, kSalt, tokens_of(64 * chunks + 8, 1), rows);
    chain.add_snapshot(chunks - 1, 2, kPartRow);
    chain.add_snapshot(chunks, 2, 8 * kPartRow);  // of eight tokens
    return chain;
  };
  std::map<std::size_t, int> cuts_behind;  // a turn of so many chunks
  for (std::uint64_t cut = 1; cut < 140; cut += 2) {
    SCOPED_TRACE(cut);
    World world(cut);
    world.options.snapshot_quota_bytes = kQuota;
    ASSERT_OK(world.open());
    ASSERT_OK(world.store->put(turn(2).chunks()));
    world.env.cut_power_at(cut);
    std::size_t last = 2;
    for (std::size_t chunks = 4; chunks <= 12; chunks += 2) {
      if (!world.store->put(turn(chunks).chunks()).ok()) break;
      last = chunks;
    }
    ++cuts_behind[last];
    world.store.reset();
    world.env.restart(GetParam());
    ASSERT_OK(world.open());
    const auto match = world.store->match(kModel, kSalt, turn(last).tokens());
    ASSERT_OK(match);
    EXPECT_EQ(match->n_tokens, 64 * last + 8);
    for (const MatchedChunk& matched : match->chunks) {
      const ChunkInfo& info = matched.chunk.info();
      EXPECT_EQ(info.find_page(0, Encoding::kSnapshot) == nullptr,
                info.find_page(1, Encoding::kSnapshot) == nullptr);
      EXPECT_NE(info.find_page(1, Encoding::kRows), nullptr);
    }
    EXPECT_TRUE(read_back(*world.store, *match).failed.empty());
    EXPECT_LE(world.store->stat()->snapshot_bytes, kQuota);
    EXPECT_OK(world.store->check_integrity());
    const auto report = world.store->verify({});
    ASSERT_OK(report);
    EXPECT_TRUE(report->ok());
    ASSERT_OK(world.store->put(turn(14).chunks()));
    EXPECT_LE(world.store->stat()->snapshot_bytes, kQuota);
    EXPECT_OK(world.store->check_integrity());
    if (HasFailure()) return;
  }
  for (const std::size_t turn : {4, 6, 8}) EXPECT_GT(cuts_behind[turn], 3) << turn;
}

INSTANTIATE_TEST_SUITE_P(Survivors, PowerCutTest,
                         ::testing::Values(FaultEnv::Survivors::kNone, FaultEnv::Survivors::kAll,
                                           FaultEnv::Survivors::kSome));

}  // namespace
}  // namespace hcache::store
