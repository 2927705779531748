// Conversations with a KV budget: restored from the rows that attention falls on, apart from exact
// ones, and from all rows where that is impossible.
#include <gmock/gmock.h>

#include <atomic>
#include <thread>

#include "policy/compression.h"
#include "serving_testing.h"
#include "state/second_reading.h"
#include "state/snapshot_pages.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

using policy::Compression;

constexpr double kBudget = 0.5;
constexpr int64_t kChunk = store::kChunkTokens;

// A layer's share is rounded to whole rows.
MATCHER_P(IsAbout, n, "") { return std::abs(arg - n) <= 1; }

class KeptTest : public ::testing::Test {
 protected:
  KeptTest()
      : model_(make_tiny(dir_, tiny_options("llama", 2, GGML_TYPE_Q8_0))),
        options_(tiny_runtime(model_, dir_.file("state"))) {
    options_.engine.arena_tokens = 4096;
    options_.kv_budget = 1;
    // Loading takes longer than anything but computing all anew.
    options_.save = policy::SaveMode::kKv;
    options_.profile->read_bytes_per_s = 3e8;
  }

  static How with(double budget) { return {.kv_budget = budget}; }

  // Computes and saves it. Returns what follows it as well: the answer.
  Said begin(const std::vector<int32_t>& tokens, const How& how, int n_answer = 10) {
    const auto serving = open(options_);
    const Said said = say(*serving, tokens, n_answer, how);
    EXPECT_TRUE(serving->finish_chores().ok());  // rows are chosen
    EXPECT_TRUE(serving->close().ok());
    return said;
  }

  // Where the chain of these tokens has snapshots.
  static std::vector<int64_t> snapshots(Serving& serving, const std::vector<int32_t>& tokens,
                                        double budget) {
    state::Runtime& runtime = serving.runtime();
    const SaltId salt = state::budgeted(own_salt(""), budget).id;
    const auto match = runtime.store()->match(runtime.fingerprint(), salt, tokens);
    std::vector<int64_t> ends;
    for (const store::MatchedChunk& matched : match->chunks) {
      const store::ChunkInfo& chunk = matched.chunk.info();
      if (state::snapshot_parts(chunk) == 0) continue;
      ends.push_back(static_cast<int64_t>(chunk.first_position + chunk.tokens.size()));
    }
    return ends;
  }

  // What the engine makes of the tokens behind the first n, of which layers keep what the policy
  // chooses when there are `held`.
  std::vector<float> computed(Serving& serving, const std::vector<int32_t>& tokens, int64_t n,
                              size_t held, double budget) const {
    std::vector<float> logits;
    const Status status = serving.on_engine([&](state::Runtime& runtime) -> Status {
      engine::Engine& engine = runtime.engine();
      HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine.create_sequence());
      const std::span<const int32_t> all = tokens;
      const auto text = all.first(static_cast<size_t>(n));
      HCACHE_RETURN_IF_ERROR(engine.prefill(seq, all.first(held)));
      policy::RowScores scores;
      if (options_.kv_policy == Compression::kSelf) {
        state::SecondReading reading;
        while (reading.unread(n) > 0) HCACHE_RETURN_IF_ERROR(reading.read_part(engine, seq, text));
        scores = reading.scores();
      } else {
        HCACHE_ASSIGN_OR_RETURN(scores, state::score_by_last_rows(engine, seq, text));
      }
      HCACHE_RETURN_IF_ERROR(engine.trim_sequence(seq, n));
      const std::vector<double> shares = served_budgets(options_.kv_policy, scores, budget);
      for (int layer = 0; layer < engine.n_layer(); ++layer) {
        HCACHE_RETURN_IF_ERROR(engine.keep_rows(
            seq, layer,
            policy::choose_rows(options_.kv_policy, scores, layer, shares.at(layer), 0)));
      }
      const engine::BatchItem rest{.seq = seq, .tokens = all.subspan(static_cast<size_t>(n))};
      HCACHE_ASSIGN_OR_RETURN(const engine::Logits out, engine.decode({&rest, 1}));
      logits.assign(out.rows.back().begin(), out.rows.back().end());
      return engine.release_sequence(seq);
    });
    EXPECT_TRUE(status.ok()) << status.to_string();
    return logits;
  }

  TempDir dir_;
  std::string model_;
  RuntimeOptions options_;
};

std::vector<int32_t> joined(std::vector<int32_t> tokens, const std::vector<int32_t>& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

class KeptByPolicy : public KeptTest, public ::testing::WithParamInterface<Compression> {
 protected:
  KeptByPolicy() { options_.kv_policy = GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Policies, KeptByPolicy,
                         ::testing::Values(Compression::kSelf, Compression::kSnap),
                         [](const auto& of) {
                           return std::string(policy::compression_info(of.param).name);
                         });

TEST_P(KeptByPolicy, RestoresWhatTheBudgetKeeps) {
  const std::vector<int32_t> prompt = random_tokens(600, 1);
  const Said begun = begin(prompt, with(kBudget));
  const std::vector<int32_t> asked = joined(joined(prompt, begun.answer), random_tokens(20, 2));
  const auto serving = open(options_);
  const Said said = say(*serving, asked, 8, {.save = false, .kv_budget = kBudget});
  const policy::RestoreRecord record = said.record();
  constexpr int64_t kRestored = 610 / kChunk * kChunk;
  EXPECT_EQ(record.restored_tokens, kRestored);
  EXPECT_THAT(record.kept_rows, IsAbout(kRestored / 2));
  const engine::Engine& engine = serving->runtime().engine();
  const auto row_bytes = static_cast<int64_t>(2 * engine.kv_row_bytes()) * engine.n_layer();
  const auto bytes = static_cast<int64_t>(record.kv_pages.total());
  EXPECT_GE(bytes, (kRestored / 2 - 1) * row_bytes);
  // A header, scores, and zeros behind all.
  const bool scored = GetParam() == Compression::kSelf;
  const int64_t heads = engine.model().hparams().n_head_kv * int64_t{engine.n_layer()};
  const int64_t more = 1024 + (scored ? 2 * heads * kRestored : 0);
  EXPECT_LE(bytes, (kRestored / 2 + 1) * row_bytes + more);
  EXPECT_EQ(record.hidden_pages.total(), 0U);
  EXPECT_EQ(said.logits, computed(*serving, asked, kRestored, 610, kBudget));

  // Whoever wants all rows gets them.
  const Said whole =
      say(*serving, asked, 8,
          {.mode = policy::Mode::kKv, .cache = CacheUse::kSaved, .kv_budget = kBudget});
  EXPECT_EQ(whole.record().kept_rows, 0);
  EXPECT_NE(whole.logits, said.logits) << "half of the rows made no difference";
  const Said exact = say(*serving, asked, 8);
  EXPECT_EQ(exact.outcome.new_tokens, static_cast<int64_t>(asked.size())) << "it has no budget";
  EXPECT_EQ(whole.logits, exact.logits);
  ASSERT_TRUE(serving->close().ok());
}

TEST_F(KeptTest, BudgetsAreKeptApart) {
  const std::vector<int32_t> prompt = random_tokens(400, 1);
  const auto serving = open(options_);
  const Said exact = say(*serving, prompt, 8);
  for (const double budget : {0.5, 0.25}) {
    const Said said = say(*serving, prompt, 8, with(budget));
    EXPECT_EQ(said.outcome.new_tokens, 400) << budget;
    EXPECT_EQ(said.answer, exact.answer) << "nothing was left out yet";
  }
  ASSERT_TRUE(serving->finish_chores().ok());
  EXPECT_THAT(snapshots(*serving, prompt, 1), ::testing::IsEmpty());
  EXPECT_THAT(snapshots(*serving, prompt, 0.5), ::testing::ElementsAre(384));
  EXPECT_THAT(snapshots(*serving, prompt, 0.25), ::testing::ElementsAre(384));
  ASSERT_TRUE(serving->close().ok());
}

// Turn by turn, each in a process of its own: as if the conversation had stayed with the rows that
// its first restore had.
TEST_F(KeptTest, GoesOnFromWhatItKept) {
  std::vector<int32_t> chain = random_tokens(1000, 1);
  chain = joined(chain, begin(chain, with(kBudget)).answer);
  const std::vector<int32_t> second = joined(chain, random_tokens(90, 2));
  std::vector<int32_t> third;
  Said expected;
  {
    // Nothing of it is saved, so that the store is as it was.
    const auto serving = open(options_);
    const How how = {.save = false, .kv_budget = kBudget};
    const Said said = say(*serving, second, 70, how);
    EXPECT_THAT(said.record().kept_rows, IsAbout(1010 / kChunk * kChunk / 2));
    third = joined(joined(second, said.answer), random_tokens(30, 3));
    expected = say(*serving, third, 8, how);
    EXPECT_EQ(expected.outcome.resident_tokens, 1170);
    ASSERT_TRUE(serving->close().ok());
  }
  const Said said = begin(second, with(kBudget), 70);
  EXPECT_EQ(joined(joined(second, said.answer), random_tokens(30, 3)), third);
  const auto serving = open(options_);
  EXPECT_THAT(snapshots(*serving, third, kBudget), ::testing::ElementsAre(1152))
      << "that of the first turn has gone";
  const Said again = say(*serving, third, 8, with(kBudget));
  EXPECT_EQ(again.record().restored_tokens, 1152);
  EXPECT_THAT(again.record().kept_rows, IsAbout(480 + 1152 - 960)) << "what came since, all of it";
  EXPECT_EQ(again.logits, expected.logits);
  EXPECT_EQ(again.answer, expected.answer);
  ASSERT_TRUE(serving->close().ok());
}

// When most of a conversation came after the choice, it is restored whole and chosen from anew.
TEST_F(KeptTest, ChoosesAnewFromAllRows) {
  std::vector<int32_t> chain = random_tokens(700, 1);
  chain = joined(chain, begin(chain, with(kBudget)).answer);
  chain = joined(chain, random_tokens(1000, 2));
  EXPECT_THAT(begin(chain, with(kBudget), 0).record().kept_rows, IsAbout(352));
  constexpr int64_t kEnd = 1711 / kChunk * kChunk;
  {
    const auto serving = open(options_);
    EXPECT_THAT(snapshots(*serving, chain, kBudget), ::testing::ElementsAre(704))
        << "of the others too few could have been left out";
    chain.push_back(5);
    const Said said = say(*serving, chain, 0, with(kBudget));
    EXPECT_EQ(said.record().kept_rows, 0) << "the rows behind it would all be computed";
    EXPECT_EQ(said.record().restored_tokens, 1710);
    ASSERT_TRUE(serving->finish_chores().ok());
    EXPECT_THAT(snapshots(*serving, chain, kBudget), ::testing::ElementsAre(kEnd));
    ASSERT_TRUE(serving->close().ok());
  }
  const auto serving = open(options_);
  chain.push_back(6);
  EXPECT_THAT(say(*serving, chain, 0, with(kBudget)).record().kept_rows, IsAbout(kEnd / 2));
  ASSERT_TRUE(serving->close().ok());
}

// A sequence without rows can't be taken back; what leaves it early comes from the store.
TEST_F(KeptTest, ABranchIsRestoredFromAllRows) {
  const std::vector<int32_t> prompt = random_tokens(600, 1);
  begin(prompt, with(kBudget));
  const auto serving = open(options_);
  const std::vector<int32_t> asked = joined(prompt, random_tokens(30, 2));
  EXPECT_GT(say(*serving, asked, 8, with(kBudget)).record().kept_rows, 0);
  std::vector<int32_t> branch(prompt.begin(), prompt.begin() + 500);
  branch = joined(branch, random_tokens(20, 3));
  const Said said = say(*serving, branch, 8, with(kBudget));
  EXPECT_EQ(said.outcome.resident_tokens, 0);
  EXPECT_EQ(said.record().kept_rows, 0);
  EXPECT_EQ(said.record().restored_tokens, 500);
  const Said exact = say(*serving, branch, 8, {.cache = CacheUse::kNone});
  EXPECT_EQ(said.logits, exact.logits);
  // The same chain goes on where it is.
  const Said next = say(*serving, joined(asked, {1, 2, 3}), 4, with(kBudget));
  EXPECT_EQ(next.outcome.resident_tokens, 630);
  ASSERT_TRUE(serving->close().ok());
}

TEST_F(KeptTest, DamageCostsNoAnswer) {
  const std::vector<int32_t> prompt = random_tokens(600, 1);
  const std::vector<int32_t> chain = joined(prompt, begin(prompt, with(kBudget)).answer);
  const std::vector<int32_t> asked = joined(chain, random_tokens(28, 2));
  const SaltId salt = state::budgeted(own_salt(""), kBudget).id;
  damage_page(options_, salt, asked, 8, [](const store::PageInfo& page) {
    return page.encoding == store::Encoding::kSnapshot;
  });
  const auto serving = open(options_);
  const Said said = say(*serving, asked, 8, with(kBudget));
  EXPECT_EQ(said.record().damaged_pages, 1U);
  EXPECT_EQ(said.record().kept_rows, 0);
  EXPECT_EQ(said.record().restored_tokens, 610);
  EXPECT_EQ(said.logits, say(*serving, asked, 8, {.cache = CacheUse::kNone}).logits);
  // Its own turn's end has brought a new one.
  ASSERT_TRUE(serving->finish_chores().ok());
  EXPECT_THAT(snapshots(*serving, joined(asked, said.answer), kBudget),
              ::testing::ElementsAre(648 / kChunk * kChunk));
  ASSERT_TRUE(serving->close().ok());
}

// With room for two of them, and two at a time.
TEST_P(KeptByPolicy, ManyConversationsShareASmallArena) {
  options_.engine.arena_tokens = 1200;
  const auto serving = open(options_);
  std::vector<std::vector<int32_t>> chains;
  for (uint32_t i = 0; i < 5; ++i) chains.push_back(random_tokens(450, i + 1));
  std::atomic<int> kept = 0;
  for (uint32_t turn = 0; turn < 3; ++turn) {
    std::vector<std::thread> clients;
    for (uint32_t first = 0; first < 2; ++first) {
      clients.emplace_back([&, first] {
        for (size_t i = first; i < chains.size(); i += 2) {
          const Said said = say(*serving, chains[i], 12, with(i % 2 == 0 ? kBudget : 0.3));
          if (said.record().kept_rows > 0) ++kept;
          chains[i] = joined(joined(chains[i], said.answer),
                             random_tokens(20, 100 * turn + static_cast<uint32_t>(i)));
        }
      });
    }
    for (std::thread& client : clients) client.join();
    ASSERT_TRUE(serving->finish_chores().ok());
  }
  // What is chosen at once is not overtaken by the next that wants its room.
  EXPECT_GT(kept, GetParam() == Compression::kSnap ? 4 : -1);
  // Nothing is left behind of what layers did without.
  for (size_t i = 0; i < chains.size(); ++i) {
    const Said said = say(*serving, random_tokens(1100, 50), 1, {.cache = CacheUse::kNone});
    EXPECT_EQ(said.answer.size(), 1U);
  }
  ASSERT_TRUE(serving->close().ok());
}

// Guessed tokens are taken back, but never what layers do without rows of.
TEST_F(KeptTest, GuessesAreTakenBack) {
  std::vector<int32_t> prompt = random_tokens(80, 1);
  for (int i = 0; i < 3; ++i) prompt = joined(prompt, prompt);
  prompt.resize(500);
  const std::vector<int32_t> chain = joined(prompt, begin(prompt, with(kBudget)).answer);
  const std::vector<int32_t> asked = joined(chain, {prompt.begin(), prompt.begin() + 20});
  std::vector<Said> said;
  for (const int32_t most : {0, 8}) {
    const auto serving = open(options_, Env::real(), {.most = most, .least = most});
    said.push_back(say(*serving, asked, 40, {.save = false, .kv_budget = kBudget}));
    EXPECT_GT(said.back().record().kept_rows, 0);
    ASSERT_TRUE(serving->close().ok());
  }
  EXPECT_EQ(said[0].outcome.drafted_tokens, 0);
  EXPECT_GT(said[1].outcome.drafted_tokens, 0);
  EXPECT_EQ(said[0].answer, said[1].answer);
}

// Reading a conversation once more leaves it as it is, and saves nothing of its own; a turn that
// comes in between ends it, and its text is read from where that was.
TEST_F(KeptTest, ReadingOnceMoreChangesNothing) {
  std::vector<int32_t> chain = random_tokens(500, 1);
  std::vector<int32_t> answers;
  std::vector<int32_t> expected;
  for (const bool reads : {true, false}) {
    options_.state_dir = dir_.file(reads ? "reads" : "reads-not");
    options_.kv_policy = reads ? Compression::kSelf : Compression::kSnap;
    const auto serving = open(options_);
    chain.resize(500);
    for (uint32_t turn = 0; turn < 4; ++turn) {
      const Said said = say(*serving, chain, 30, with(kBudget));
      // The third takes a part of the answer back.
      chain = joined(chain, said.answer);
      if (turn == 2) chain.resize(chain.size() - 20);
      chain = joined(chain, random_tokens(50, turn));
      if (turn % 2 == 0) {
        ASSERT_TRUE(serving->finish_chores().ok());
      }
    }
    (reads ? answers : expected) = chain;
    ASSERT_TRUE(serving->close().ok());
  }
  EXPECT_EQ(answers, expected);
  options_.state_dir = dir_.file("reads");
  options_.kv_policy = Compression::kSelf;
  const auto serving = open(options_);
  const How whole = {.mode = policy::Mode::kKv, .cache = CacheUse::kSaved, .kv_budget = kBudget};
  const Said restored = say(*serving, chain, 8, whole);
  EXPECT_GT(restored.record().restored_tokens, 600);
  EXPECT_EQ(restored.logits, say(*serving, chain, 8, {.cache = CacheUse::kNone}).logits);
  ASSERT_TRUE(serving->close().ok());
}

// What was read once is not read again when the conversation comes back.
TEST_F(KeptTest, ScoresAreSavedWithTheRows) {
  const std::vector<int32_t> prompt = random_tokens(600, 1);
  const std::vector<int32_t> chain = joined(prompt, begin(prompt, with(kBudget)).answer);
  const auto scores = [&](Serving& serving, const std::vector<int32_t>& tokens, int64_t n) {
    std::optional<policy::RowScores> saved;
    const Status status = serving.on_engine([&](state::Runtime& runtime) -> Status {
      const auto match = runtime.match(tokens, state::budgeted(own_salt(""), kBudget).id);
      const store::ChunkRef& chunk = match.chunks.at(static_cast<size_t>(n / kChunk - 1)).chunk;
      saved = state::saved_scores(runtime.engine(), *runtime.store(), chunk, n);
      // Not of another length.
      EXPECT_FALSE(state::saved_scores(runtime.engine(), *runtime.store(), chunk, n - kChunk));
      return {};
    });
    EXPECT_TRUE(status.ok());
    return saved;
  };
  const std::vector<int32_t> second = joined(chain, random_tokens(30, 2));
  std::vector<int32_t> third;
  {
    const auto serving = open(options_);
    const auto first = scores(*serving, chain, 576);
    ASSERT_TRUE(first.has_value());
    EXPECT_EQ(first->n_rows, 576);
    EXPECT_GT(*std::ranges::min_element(first->top), 0);
    EXPECT_LE(*std::ranges::max_element(first->top), 1);
    // They go on with rows that were restored without the others.
    const Said said = say(*serving, second, 10, with(kBudget));
    EXPECT_GT(said.record().kept_rows, 0);
    third = joined(second, said.answer);
    ASSERT_TRUE(serving->flush().ok());
    const auto next = scores(*serving, third, 640);
    ASSERT_TRUE(next.has_value());
    EXPECT_EQ(next->n_rows, 576);
    EXPECT_EQ(next->top, first->top);
    ASSERT_TRUE(serving->close().ok());
  }
  // And with all rows.
  options_.profile->read_bytes_per_s = 1e12;
  third = joined(third, random_tokens(80, 4));
  const auto serving = open(options_);
  const Said all = say(*serving, third, 10, with(kBudget));
  EXPECT_EQ(all.record().kept_rows, 0);
  EXPECT_GT(all.record().restored_tokens, 600);
  ASSERT_TRUE(serving->finish_chores().ok());
  const auto last = scores(*serving, joined(third, all.answer), 704);
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->n_rows, 704);
  ASSERT_TRUE(serving->close().ok());
}

// Taken back to the middle of a chunk, rows are chosen from whole ones.
TEST_F(KeptTest, ABranchIsChosenFromAnew) {
  const std::vector<int32_t> prompt = random_tokens(760, 1);
  const auto serving = open(options_);
  say(*serving, prompt, 4, with(kBudget));
  ASSERT_TRUE(serving->finish_chores().ok());
  std::vector<int32_t> branch(prompt.begin(), prompt.begin() + 600);
  branch = joined(branch, random_tokens(20, 2));
  EXPECT_EQ(say(*serving, branch, 4, with(kBudget)).outcome.resident_tokens, 600);
  ASSERT_TRUE(serving->finish_chores().ok());
  EXPECT_THAT(snapshots(*serving, branch, kBudget), ::testing::ElementsAre(576));
  ASSERT_TRUE(serving->close().ok());
}

// Nobody asks for it: it is done while the server has nothing else to do.
TEST_F(KeptTest, RowsAreChosenWhileNothingRuns) {
  const std::vector<int32_t> prompt = random_tokens(400, 1);
  const auto serving = open(options_);
  say(*serving, prompt, 8, with(kBudget));
  while (snapshots(*serving, prompt, kBudget).empty()) {
    ASSERT_TRUE(serving->on_engine([](state::Runtime& runtime) { return runtime.flush(); }).ok());
  }
  EXPECT_THAT(snapshots(*serving, prompt, kBudget), ::testing::ElementsAre(384));
  ASSERT_TRUE(serving->close().ok());
}

// All rows come back while nothing runs, and the next turn sees them.
TEST_F(KeptTest, TheRestFollowsWhileNothingRuns) {
  std::vector<int32_t> chain = random_tokens(600, 1);
  chain = joined(joined(chain, begin(chain, with(kBudget)).answer), random_tokens(30, 2));
  std::vector<float> logits;
  {
    const auto serving = open(options_);
    const Said said = say(*serving, chain, 20, with(kBudget));
    EXPECT_GT(said.record().kept_rows, 0);
    chain = joined(joined(chain, said.answer), random_tokens(20, 3));
    bool lacks = true;
    while (lacks) {
      const Status asked = serving->on_engine([&](state::Runtime& runtime) -> Status {
        lacks = state::lacks_rows(runtime.engine(), said.outcome.seq);
        EXPECT_EQ(runtime.engine().length(said.outcome.seq), 660);
        return {};
      });
      ASSERT_TRUE(asked.ok());
    }
    const Said next = say(*serving, chain, 8, with(kBudget));
    EXPECT_EQ(next.outcome.resident_tokens, 660);
    logits = next.logits;
    // It can be taken back again, too.
    const std::vector<int32_t> branch(chain.begin(), chain.begin() + 300);
    EXPECT_EQ(say(*serving, branch, 2, with(kBudget)).outcome.resident_tokens, 299);
    // Nothing is left behind: the whole arena can be had.
    EXPECT_EQ(say(*serving, random_tokens(2000, 50), 1, {.cache = CacheUse::kNone}).answer.size(),
              1U);
    ASSERT_TRUE(serving->close().ok());
  }
  const auto serving = open(options_);
  const Said whole = say(
      *serving, chain, 8,
      {.mode = policy::Mode::kKv, .save = false, .cache = CacheUse::kSaved, .kv_budget = kBudget});
  EXPECT_EQ(whole.record().kept_rows, 0);
  EXPECT_GE(whole.record().restored_tokens, 660);
  EXPECT_EQ(whole.logits, logits);
  ASSERT_TRUE(serving->close().ok());
}

// Whatever comes while they do, the conversation goes on.
TEST_F(KeptTest, ATurnMayComeBeforeTheRest) {
  std::vector<std::vector<int32_t>> chains;
  for (uint32_t i = 0; i < 3; ++i) {
    chains.push_back(random_tokens(500, i));
    chains.back() = joined(chains.back(), begin(chains.back(), with(kBudget)).answer);
  }
  options_.engine.arena_tokens = 1500;
  const auto serving = open(options_);
  for (uint32_t turn = 0; turn < 4; ++turn) {
    for (std::vector<int32_t>& chain : chains) {
      chain = joined(chain, random_tokens(10, turn));
      const Said said = say(*serving, chain, 4, with(kBudget));
      EXPECT_TRUE(said.outcome.status.ok());
      chain = joined(chain, said.answer);
      // Some of them are dropped while more of their rows come.
      if (turn == 2) {
        serving->scheduler().forget(state::budgeted(own_salt(""), kBudget).id, chain);
      }
    }
  }
  EXPECT_EQ(say(*serving, random_tokens(1400, 50), 1, {.cache = CacheUse::kNone}).answer.size(),
            1U);
  ASSERT_TRUE(serving->close().ok());
}

// A text that grew between parts has been read as often as one that was there from the start, and
// what went away is forgotten.
TEST_F(KeptTest, ATextIsReadInParts) {
  const std::vector<int32_t> tokens = random_tokens(300, 1);
  const std::span<const int32_t> text = tokens;
  const auto serving = open(options_);
  const Status status = serving->on_engine([&](state::Runtime& runtime) -> Status {
    engine::Engine& engine = runtime.engine();
    HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine.create_sequence());
    HCACHE_RETURN_IF_ERROR(engine.prefill(seq, text));
    state::SecondReading whole;
    int parts = 0;
    for (; whole.unread(300) > 0; ++parts) {
      HCACHE_RETURN_IF_ERROR(whole.read_part(engine, seq, text));
      EXPECT_EQ(engine.length(seq), 300);
    }
    EXPECT_EQ(parts, 5);
    const policy::RowScores& scores = whole.scores();
    EXPECT_EQ(scores.n_rows, 300);
    EXPECT_EQ(scores.top.size(), static_cast<size_t>(300 * scores.n_layer * scores.n_head_kv));
    EXPECT_GT(*std::ranges::min_element(scores.of(scores.top, 0, 0)), 0);
    EXPECT_LE(*std::ranges::max_element(scores.top), 1);

    state::SecondReading grown;
    for (const size_t n : {130, 300}) {
      while (grown.unread(static_cast<int64_t>(n)) > 0) {
        HCACHE_RETURN_IF_ERROR(grown.read_part(engine, seq, text.first(n)));
      }
      EXPECT_EQ(grown.scores().n_rows, static_cast<int64_t>(n));
    }
    for (int layer = 0; layer < scores.n_layer; ++layer) {
      const auto later = [&](const policy::RowScores& of) {
        return of.of(of.top, layer, 0).last(40);
      };
      EXPECT_GT(later(grown.scores())[0], 0) << "what was read later saw them";
    }
    grown.forget_from(130);
    EXPECT_EQ(grown.scores().n_rows, 130);
    EXPECT_EQ(grown.unread(131), 1);
    EXPECT_EQ(grown.unread(130), 0);
    return engine.release_sequence(seq);
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
  ASSERT_TRUE(serving->close().ok());
}

// Rows that are reserved and were never filled must not pass for state.
TEST_F(KeptTest, AnUnfinishedRestoreLeavesNothing) {
  const std::vector<int32_t> prompt = random_tokens(600, 1);
  begin(prompt, with(kBudget));
  const auto serving = open(options_);
  const Status status = serving->on_engine([&](state::Runtime& runtime) -> Status {
    engine::Engine& engine = runtime.engine();
    const store::Match match = runtime.match(prompt, state::budgeted(own_salt(""), kBudget).id);
    HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine.create_sequence());
    HCACHE_RETURN_IF_ERROR(engine.reserve_rows(seq, 576));
    state::RestoreRun run;
    run.seq = seq;
    run.tokens = prompt;
    {
      HCACHE_ASSIGN_OR_RETURN(const auto restore,
                              state::begin_kept_restore(Env::real(), engine, *runtime.store(), run,
                                                        match.chunks.at(8).chunk, 576, {}));
      HCACHE_RETURN_IF_ERROR(restore->advance({.budget_s = 0}).status());
    }
    EXPECT_EQ(engine.length(seq), 0);
    EXPECT_EQ(engine.shortest(seq), 0);
    HCACHE_RETURN_IF_ERROR(engine.reserve_rows(seq, 576));
    {
      HCACHE_ASSIGN_OR_RETURN(const auto restore,
                              state::begin_kept_restore(Env::real(), engine, *runtime.store(), run,
                                                        match.chunks.at(8).chunk, 576, {}));
      HCACHE_ASSIGN_OR_RETURN(const auto phase,
                              restore->advance({.proceed = [](double) { return true; }}));
      EXPECT_EQ(phase, state::Restoration::Phase::kDone);
    }
    EXPECT_EQ(engine.length(seq), 600) << "with the tokens behind";
    return engine.release_sequence(seq);
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
  ASSERT_TRUE(serving->close().ok());
}

// The share follows from what the model loses, which is measured once.
TEST_F(KeptTest, AShareIsChosenByQuality) {
  int samples = 0;
  options_.kv_budget.reset();
  options_.sample = [&samples]() -> Result<std::vector<int32_t>> {
    ++samples;
    return random_tokens(600, 9);
  };
  std::vector<double> shares;
  for (const double quality : {1e-9, 0.02, 10.0}) {
    options_.kv_quality = quality;
    const auto serving = open(options_);
    shares.push_back(serving->runtime().salt().kv_budget);
    ASSERT_TRUE(serving->close().ok());
  }
  EXPECT_EQ(samples, 1);
  EXPECT_EQ(shares.front(), 1) << "no share costs nothing";
  EXPECT_LE(shares[1], shares[0]);
  EXPECT_EQ(shares.back(), 0.1);
  // What another policy loses is its own.
  options_.kv_policy = Compression::kSnap;
  EXPECT_TRUE(open(options_)->close().ok());
  EXPECT_EQ(samples, 2);
  // A file that says nothing is measured anew.
  for (const auto& file : std::filesystem::directory_iterator(dir_.file("state") + "/profiles")) {
    if (file.path().filename().string().starts_with("rows-")) {
      std::ofstream(file.path()) << "[[0.5]]";
    }
  }
  EXPECT_TRUE(open(options_)->close().ok());
  EXPECT_EQ(samples, 3);

  options_.engine.arena_tokens = 700;
  options_.state_dir = dir_.file("small");
  ServingOptions small;
  small.runtime = options_;
  EXPECT_EQ(Serving::open(Env::real(), small).status().code(), Code::kResourceExhausted);
}

TEST_F(KeptTest, ModelsThatCantAreRefused) {
  TempDir dir;
  RuntimeOptions options =
      tiny_runtime(make_tiny(dir, tiny_options("gemma3", 2, GGML_TYPE_Q8_0)), dir.file("state"));
  options.kv_budget = kBudget;
  ServingOptions serving;
  serving.runtime = options;
  const Status status = Serving::open(Env::real(), serving).status();
  EXPECT_EQ(status.code(), Code::kUnimplemented);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("--kv-budget"));
  EXPECT_THAT(status.message(), ::testing::HasSubstr("window"));
}

}  // namespace
}  // namespace hcache::serving
