// The scheduler's Executor over a real engine, store, saver and restorer: restores in slices beside
// other sequences' steps, forks, trims, and what is durable when.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/throttled_env.h"
#include "engine_executor.h"
#include "model/logits.h"
#include "model_fixtures.h"
#include "patience.h"
#include "state/runtime.h"

namespace hcache::serving {
namespace {

using hcache::test::expect_to_end;
using hcache::test::Patience;
using model::test::make_tiny;
using model::test::TempDir;
using model::test::tiny_options;
using scheduler::kNotSaving;
using scheduler::RestoreStatus;
using scheduler::SeqId;

using Tokens = std::vector<int32_t>;

Tokens random_tokens(int n, uint32_t seed) {
  Tokens tokens(n);
  for (int32_t& token : tokens) {
    seed = seed * 1664525U + 1013904223U;
    token = static_cast<int32_t>((seed >> 8) % 200);
  }
  return tokens;
}

Tokens operator+(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Tokens first(const Tokens& tokens, int n) { return {tokens.begin(), tokens.begin() + n}; }

// A process: runtime and executor over one state directory.
class Process {
 public:
  Process(const std::string& model, const std::string& state_dir, policy::Mode mode,
          const EngineExecutorOptions& given = {}, double link_bytes_per_s = 0)
      : env_(Env::real(), link_bytes_per_s), method_{.mode = mode} {
    state::RuntimeOptions options;
    options.model_path = model;
    options.state_dir = state_dir;
    options.n_threads = 1;
    options.engine.arena_tokens = 1024;
    options.engine.max_batch_rows = 96;
    options.saver.ring_bytes = 16U << 20;
    options.save = policy::SaveMode::kAll;
    state::CostProfile profile;
    profile.layer.project = policy::CostCurve::affine(1e-5, 1e-6);
    profile.layer.load_kv = policy::CostCurve::affine(0, 1e-8);
    profile.layer.dense = policy::CostCurve::affine(1e-5, 6e-6);
    profile.layer.attn_per_key = policy::CostCurve::affine(0, 1e-10);
    profile.layer.hidden_bytes = 300;
    profile.layer.kv_bytes = 512;
    profile.read_bytes_per_s = 1e9;
    options.profile = profile;
    options.dram_bytes = given.dram_bytes;
    auto runtime = state::Runtime::open(env_, options);
    EXPECT_TRUE(runtime.ok()) << runtime.status().to_string();
    runtime_ = std::move(*runtime);
    executor_ = std::make_unique<EngineExecutor>(env_, *runtime_, given);
  }
  ~Process() {
    executor_.reset();
    const Status status = runtime_->close();
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  EngineExecutor& operator*() { return *executor_; }
  EngineExecutor* operator->() { return executor_.get(); }

  SeqId create(const std::string& salt = "", bool save = true) {
    auto seq = executor_->create(own_salt(salt), save);
    EXPECT_TRUE(seq.ok()) << seq.status().to_string();
    return *seq;
  }
  // Computes tokens in steps of at most 96; the logits of the last one.
  std::vector<float> append(SeqId seq, const Tokens& tokens) {
    std::vector<float> logits;
    for (size_t at = 0; at < tokens.size(); at += 96) {
      const auto rows = std::span(tokens).subspan(at, std::min<size_t>(96, tokens.size() - at));
      const bool last = at + rows.size() == tokens.size();
      const scheduler::StepItem item = {
          seq, rows, last ? scheduler::LogitsOf::kLast : scheduler::LogitsOf::kNone};
      auto out = executor_->step({&item, 1});
      EXPECT_TRUE(out.ok()) << out.status().to_string();
      if (!out.ok()) return {};
      EXPECT_GT(out->seconds, 0);
      if (last) logits.assign(out->logits[0].begin(), out->logits[0].end());
    }
    return logits;
  }
  Tokens decode(SeqId seq, std::vector<float> logits, int n) {
    Tokens tokens;
    for (int i = 0; i < n; ++i) {
      tokens.push_back(model::argmax(logits));
      logits = append(seq, {tokens.back()});
    }
    return tokens;
  }
  std::vector<std::byte> state(SeqId seq, int n) {
    engine::Engine& engine = runtime_->engine();
    const size_t bytes = engine.kv_row_bytes() * n;
    std::vector<std::byte> state(2 * bytes * engine.n_layer());
    for (int layer = 0; layer < engine.n_layer(); ++layer) {
      std::byte* k = state.data() + 2 * bytes * layer;
      EXPECT_TRUE(engine.read_kv(seq, layer, 0, n, k, k + bytes).ok());
    }
    return state;
  }
  scheduler::SavedPrefixRef prefix(const Tokens& tokens, const std::string& salt = "") {
    auto prefix = executor_->saved_prefix(own_salt(salt), tokens, {}, nullptr);
    EXPECT_TRUE(prefix.ok()) << prefix.status().to_string();
    return prefix.value_or(nullptr);
  }
  // The tokens must outlive the job.
  scheduler::RestoreJob job(const Tokens& tokens, int upto) {
    return {.prefix = prefix(tokens), .tokens = tokens, .upto = upto, .method = method_};
  }
  scheduler::Waiting waiting(uint64_t ticket, const Salt& salt, const Tokens& tokens, int restore) {
    return {.ticket = ticket,
            .salt = salt,
            .tokens = tokens,
            .prefix = prefix(tokens),
            .restore = restore,
            .method = method_};
  }
  // Restores in the smallest slices; `between` runs after each of them.
  RestoreStatus restore(SeqId seq, const Tokens& tokens, int upto,
                        const std::function<void()>& between = {}) {
    const Status begun = executor_->begin_restore(seq, job(tokens, upto));
    EXPECT_TRUE(begun.ok()) << begun.to_string();
    Patience patience("a restore of " + std::to_string(upto) + " tokens");
    while (begun.ok() && patience.lasts()) {
      auto status = executor_->advance_restore(seq, {});
      EXPECT_TRUE(status.ok()) << status.status().to_string();
      if (!status.ok()) break;
      if (status->phase == RestoreStatus::Phase::kDone) return *status;
      EXPECT_GE(status->fraction, 0);
      EXPECT_LE(status->fraction, 1);
      ++slices_;
      if (between) between();
    }
    return {};
  }
  void wait_until_durable(SeqId seq, int64_t n) {
    executor_->request_flush(seq);
    Patience patience(std::to_string(n) + " durable tokens");
    while (executor_->durable_tokens(seq) >= 0 && executor_->durable_tokens(seq) < n &&
           patience.lasts()) {
    }
    EXPECT_GE(executor_->durable_tokens(seq), n);
  }
  [[nodiscard]] int slices() const { return slices_; }
  // Removes what nobody has pinned; how many chunks that was.
  [[nodiscard]] uint64_t remove_saved() {
    const auto removed = runtime_->store()->remove({});
    EXPECT_TRUE(removed.ok()) << removed.status().to_string();
    return removed.value_or(0);
  }
  [[nodiscard]] uint64_t checksum_failures() {
    const auto stat = runtime_->store()->stat();
    EXPECT_TRUE(stat.ok()) << stat.status().to_string();
    return stat.ok() ? stat->checksum_failures : 0;
  }

 private:
  ThrottledEnv env_;
  const scheduler::RestoreMethod method_;
  std::unique_ptr<state::Runtime> runtime_;
  std::unique_ptr<EngineExecutor> executor_;
  int slices_ = 0;
};

class ExecutorTest : public testing::Test {
 protected:
  ExecutorTest() : model_(make_tiny(dir_, tiny_options("llama", 4, GGML_TYPE_Q8_0))) {}
  std::unique_ptr<Process> process(policy::Mode mode = policy::Mode::kPlan) {
    return std::make_unique<Process>(model_, dir_.file("state"), mode);
  }
  int64_t saved(Process& p, const Tokens& tokens, const std::string& salt = "") {
    const scheduler::SavedPrefixRef prefix = p.prefix(tokens, salt);
    return prefix ? prefix->tokens() : 0;
  }
  // The logits of the last token, and K and V of all.
  struct Computed {
    std::vector<float> logits;
    std::vector<std::byte> state;
  };
  // The history, which is durable before the question comes.
  static Computed compute(Process& p, const Tokens& history, const Tokens& question) {
    const SeqId seq = p.create();
    p.append(seq, history);
    p.wait_until_durable(seq, static_cast<int64_t>(history.size()));
    Computed computed;
    computed.logits = p.append(seq, question);
    computed.state = p.state(seq, static_cast<int>((history + question).size()));
    p->release(seq);
    return computed;
  }
  // In a new process: all of the chain is saved, and its rows are those.
  void expect_comes_back(const Tokens& chain, const std::vector<std::byte>& state) {
    auto p = process();
    const int n = static_cast<int>(chain.size());
    EXPECT_EQ(saved(*p, chain), n);
    const SeqId seq = p->create();
    EXPECT_EQ(p->restore(seq, chain + Tokens{1}, n).tokens, n);
    EXPECT_EQ(p->state(seq, n), state);
  }

  TempDir dir_;
  std::string model_;
};

TEST_F(ExecutorTest, RestoresInSlicesBesideStepsOfOthers) {
  const Tokens history = random_tokens(300, 1);
  const Tokens question = random_tokens(20, 2);
  std::vector<std::byte> state;
  Tokens answer;
  Tokens others;  // what another sequence answers when nothing else runs
  {
    auto p = process();
    const SeqId seq = p->create();
    p->append(seq, history);
    state = p->state(seq, 300);
    answer = p->decode(seq, p->append(seq, question), 12);
    const SeqId other = p->create("", false);
    others = p->decode(other, p->append(other, random_tokens(40, 3)), 30);
  }
  for (const policy::Mode mode : {policy::Mode::kPlan, policy::Mode::kHidden, policy::Mode::kKv}) {
    auto p = process(mode);
    const SeqId other = p->create("", false);
    std::vector<float> logits = p->append(other, random_tokens(40, 3));
    Tokens heard;
    const SeqId seq = p->create();
    const RestoreStatus done = p->restore(seq, history + question, 300, [&] {
      if (heard.size() == others.size()) return;
      heard.push_back(model::argmax(logits));
      logits = p->append(other, {heard.back()});
    });
    EXPECT_EQ(done.tokens, 300);
    EXPECT_EQ(done.record.hidden_tokens + done.record.kv_tokens, 300);
    EXPECT_GT(done.record.read.disk, 0U);
    const policy::TierBytes& hidden = done.record.hidden_pages;
    const policy::TierBytes& kv = done.record.kv_pages;
    EXPECT_GT(hidden.disk + kv.disk, 0U);
    EXPECT_GE(done.record.read.disk, hidden.disk + kv.disk);
    EXPECT_EQ(hidden.dram + kv.dram, 0U);
    if (mode == policy::Mode::kHidden) {
      EXPECT_EQ(kv.disk, 0U);
    }
    if (mode == policy::Mode::kKv) {
      EXPECT_EQ(hidden.disk, 0U);
    }
    EXPECT_GT(done.record.predicted_restore_s, 0);
    EXPECT_FALSE(done.record.schedule.empty());
    EXPECT_GT(p->slices(), 4);
    EXPECT_EQ(heard, first(others, static_cast<int>(heard.size())));
    EXPECT_EQ(p->state(seq, 300), state);
    EXPECT_EQ(p->decode(seq, p->append(seq, question), 12), answer);
  }
}

TEST_F(ExecutorTest, RestoresNoMoreThanAskedAndLeavesTheLastToken) {
  const Tokens history = random_tokens(200, 1);
  {
    auto p = process();
    p->append(p->create(), history);
  }
  auto p = process();
  EXPECT_EQ(saved(*p, history), 200);
  const SeqId whole = p->create();
  EXPECT_EQ(p->restore(whole, history, 200).tokens, 199);
  const SeqId part = p->create();
  EXPECT_EQ(p->restore(part, history, 128).tokens, 128);
  EXPECT_EQ(p->prefix(random_tokens(100, 9)), nullptr);
  const SeqId unknown = p->create();
  EXPECT_EQ((*p)->begin_restore(unknown, p->job(history, 0)).code(), Code::kOutOfRange);
  EXPECT_EQ((*p)->begin_restore(unknown, p->job(history, 201)).code(), Code::kOutOfRange);
}

TEST_F(ExecutorTest, ForksAreSavedFromWhereTheyPart) {
  const Tokens trunk = random_tokens(200, 1);
  const Tokens left = random_tokens(30, 2);
  const Tokens right = random_tokens(90, 3);
  std::vector<std::byte> state;
  {
    auto p = process();
    const SeqId seq = p->create();
    p->append(seq, trunk);
    auto fork = (*p)->fork(seq, 150, true);  // inside a chunk that is complete
    ASSERT_TRUE(fork.ok()) << fork.status().to_string();
    p->append(seq, left);
    p->append(*fork, right);
    state = p->state(*fork, 240);
    p->wait_until_durable(*fork, 240);
  }
  EXPECT_EQ(saved(*process(), trunk + left), 230);
  expect_comes_back(first(trunk, 150) + right, state);
}

TEST_F(ExecutorTest, ATrimmedSequenceIsSavedWithWhatFollows) {
  const Tokens begun = random_tokens(250, 1);
  for (const int kept : {30, 64, 130, 245}) {
    const Tokens rest = random_tokens(100, static_cast<uint32_t>(kept));
    std::vector<std::byte> state;
    const Tokens chain = first(begun, kept) + rest;
    const int n = kept + 100;
    {
      auto p = process();
      const SeqId seq = p->create();
      p->append(seq, begun);
      p->wait_until_durable(seq, 250);
      ASSERT_TRUE((*p)->trim(seq, kept).ok());
      p->append(seq, rest);
      state = p->state(seq, n);
      p->wait_until_durable(seq, n);
    }
    SCOPED_TRACE(kept);
    expect_comes_back(chain, state);
  }
}

TEST_F(ExecutorTest, DurableIsWhatACrashWouldLeave) {
  const Tokens tokens = random_tokens(100, 1);
  auto p = process();
  const SeqId seq = p->create();
  EXPECT_EQ((*p)->durable_tokens(seq), 0);
  p->append(seq, tokens);
  p->wait_until_durable(seq, 100);
  EXPECT_EQ(saved(*p, tokens), 100);
  const SeqId unsaved = p->create("", false);
  p->append(unsaved, tokens);
  EXPECT_EQ((*p)->durable_tokens(unsaved), kNotSaving);
}

TEST_F(ExecutorTest, SequencesWithTheSameTokensAreBothSaved) {
  const Tokens trunk = random_tokens(150, 1);
  const Tokens left = random_tokens(30, 2);
  const Tokens right = random_tokens(70, 3);
  std::vector<std::byte> state;
  {
    auto p = process();
    const SeqId a = p->create();
    const SeqId b = p->create();
    p->append(a, trunk);
    p->append(b, trunk);
    p->wait_until_durable(a, 150);
    p->wait_until_durable(b, 150);
    p->append(a, left);
    p->append(b, right);
    p->wait_until_durable(a, 180);
    p->wait_until_durable(b, 220);
    state = p->state(b, 220);
  }
  EXPECT_EQ(saved(*process(), trunk + left), 180);
  expect_comes_back(trunk + right, state);
}

TEST_F(ExecutorTest, SaltsSeeNothingOfEachOther) {
  const Tokens tokens = random_tokens(150, 1);
  auto p = process();
  const SeqId seq = p->create("a");
  p->append(seq, tokens);
  p->wait_until_durable(seq, 150);
  EXPECT_EQ(saved(*p, tokens, "a"), 150);
  EXPECT_EQ(saved(*p, tokens, "b"), 0);
}

TEST_F(ExecutorTest, DamagedStateIsLeftToThePrefill) {
  const Tokens history = random_tokens(300, 1);
  std::vector<std::byte> state;
  {
    auto p = process();
    const SeqId seq = p->create();
    p->append(seq, history);
    state = p->state(seq, 300);
  }
  int damaged = 0;
  for (const auto& file : std::filesystem::recursive_directory_iterator(dir_.file("state/store"))) {
    const std::string name = file.path().filename().string();
    if (!file.is_regular_file() || name.find("catalog") != std::string::npos) continue;
    std::fstream bytes(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    const auto size = static_cast<std::streamoff>(file.file_size());
    for (std::streamoff at = 2000; at < size; at += 40'000) {
      bytes.seekg(at);
      const int byte = bytes.get();
      bytes.seekp(at);
      bytes.put(static_cast<char>(byte ^ 0x10));
      ++damaged;
    }
  }
  ASSERT_GT(damaged, 1);
  auto p = process(policy::Mode::kKv);
  const SeqId seq = p->create();
  const RestoreStatus done = p->restore(seq, history + Tokens{1}, 300);
  EXPECT_LE(done.tokens, 300);  // what remains may still cover the chain
  EXPECT_GT(p->checksum_failures(), 0U);
  p->append(seq, {history.begin() + done.tokens, history.end()});
  EXPECT_EQ(p->state(seq, 300), state);
}

// Two requests wait; the memory holds the state of one. Reading goes on though nothing is computed;
// on demand not even steps bring it about.
TEST_F(ExecutorTest, StateOfWhatWaitsIsReadAheadAsFarAsMemoryHoldsIt) {
  const Tokens one = random_tokens(300, 1);
  const Tokens two = random_tokens(300, 2);
  {
    auto p = process();
    p->append(p->create(), one);
    p->append(p->create(), two);
  }
  for (const auto policy : {policy::FetchPolicy::kOnDemand, policy::FetchPolicy::kSchedulerAware}) {
    const bool ahead = policy == policy::FetchPolicy::kSchedulerAware;
    Process p(model_, dir_.file("state"), policy::Mode::kKv,
              {.fetch = policy, .dram_bytes = 1'000'000});
    const Salt salt = own_salt("");
    const Tokens first = one + Tokens{7};
    const Tokens second = two + Tokens{7};
    p->enqueued(p.waiting(5, salt, first, 300));
    p->enqueued(p.waiting(9, salt, second, 300));
    const SeqId other = p.create("", false);
    Patience patience("anything to be read ahead");
    for (int i = 0; ahead ? p->bytes_read_ahead() == 0 && patience.lasts() : i < 300; ++i) {
      if (!ahead) p.append(other, {i});
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(p->bytes_read_ahead() > 0, ahead);
    const SeqId seq = p.create();
    const RestoreStatus done = p.restore(seq, first, 300);
    p->dequeued(5, true);
    EXPECT_EQ(done.tokens, 300);
    // On demand only the tail may be in memory: the saver reads it, too, to go on from it.
    const policy::TierBytes& pages = done.record.kv_pages;
    EXPECT_EQ(pages.disk == 0, ahead);
    EXPECT_EQ(pages.dram > pages.disk, ahead);
    p->dequeued(9, false);  // before all of it was read, maybe
    const RestoreStatus later = p.restore(p.create(), second, 300);
    EXPECT_EQ(later.tokens, 300);
  }
}

// Over a link that takes an hour for it: whoever leaves the queue does not wait, its pages are let
// go, and the end does not wait for what is being read.
TEST_F(ExecutorTest, ReadingAheadStopsForWhatDoesNotWaitAnyMore) {
  const Tokens one = random_tokens(300, 1);
  const Tokens two = random_tokens(300, 2);
  const Tokens three = random_tokens(300, 3);
  {
    auto p = process();
    for (const Tokens& tokens : {one, two, three}) p->append(p->create(), tokens);
  }
  const Salt salt = own_salt("");
  for (const bool all_leave : {false, true}) {
    auto p = std::make_unique<Process>(
        model_, dir_.file("state"), policy::Mode::kKv,
        EngineExecutorOptions{.fetch = policy::FetchPolicy::kSchedulerAware,
                              .dram_bytes = 10'000'000},
        100);
    EngineExecutor& executor = **p;
    executor.enqueued(p->waiting(1, salt, one, 300));
    executor.enqueued(p->waiting(2, salt, two, 300));
    executor.enqueued(p->waiting(3, salt, three, 300));
    expect_to_end("leaving the queue before its turn", [&] { executor.dequeued(2, false); });
    expect_to_end("leaving the queue while it is read", [&] { executor.dequeued(1, false); });
    if (all_leave) {
      expect_to_end("leaving the queue as the last", [&] { executor.dequeued(3, false); });
      // While a reader has pages to read they are pinned.
      uint64_t removed = p->remove_saved();
      Patience patience("the pages of those who left the queue");
      while (removed < 3 * 5 && patience.lasts()) removed += p->remove_saved();
      EXPECT_EQ(removed, 3U * 5);
    }
    expect_to_end("a process that reads ahead", [&] { p.reset(); });
  }
}

// While the link is slow, new tokens run through the layers that are there, and what they compute
// is saved: nothing differs from computing them afterwards.
TEST_F(ExecutorTest, NewTokensFollowARestoreThatWaitsForItsPages) {
  const Tokens history = random_tokens(300, 1);
  const Tokens question = random_tokens(120, 2);
  const Tokens chain = history + question;
  std::vector<std::byte> state;
  Tokens answer;
  {
    auto p = process();
    const SeqId seq = p->create();
    p->append(seq, history);
    p->wait_until_durable(seq, 300);
    answer = p->decode(seq, p->append(seq, question), 6);
    state = p->state(seq, 420);
    (*p)->release(seq);
  }
  for (const policy::Mode mode : {policy::Mode::kKv, policy::Mode::kHidden}) {
    // Its pages take about half a second; a layer of the new tokens some milliseconds.
    auto slow =
        std::make_unique<Process>(model_, dir_.file("state"), mode, EngineExecutorOptions{}, 1e6);
    Process& p = *slow;
    const int64_t free_cells = p->free_cells();
    const SeqId other = p.create("", false);
    Tokens others = {7};
    std::vector<float> logits = p.append(other, others);
    const SeqId cancelled = p.create();
    ASSERT_TRUE(p->begin_restore(cancelled, p.job(chain, 300)).ok());
    for (int i = 0; i < 200; ++i)
      ASSERT_TRUE(
          p->advance_restore(cancelled, {.budget_s = 1, .whole_budget_s = 1, .proceed = {}}).ok());
    p->release(cancelled);
    const SeqId back = p.create();
    const Status begun = p->begin_restore(back, p.job(chain, 300));
    ASSERT_TRUE(begun.ok()) << begun.to_string();
    RestoreStatus done;
    Patience patience("a restore over a slow link");
    while (done.phase != RestoreStatus::Phase::kDone && patience.lasts()) {
      auto status = p->advance_restore(back, {.budget_s = 1, .whole_budget_s = 1, .proceed = {}});
      ASSERT_TRUE(status.ok()) << status.status().to_string();
      done = *status;
      if (others.size() > 20) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      others.push_back(model::argmax(logits));
      logits = p.append(other, {others.back()});  // steps of others come between
    }
    EXPECT_EQ(done.tokens, 300 + 96);  // as many as a step may have
    EXPECT_EQ(done.record.kv_tokens + done.record.hidden_tokens, 300);
    p.wait_until_durable(back, 396);
    const Tokens rest(chain.begin() + 396, chain.end());
    EXPECT_EQ(p.decode(back, p.append(back, rest), 6), answer);
    EXPECT_EQ(p.state(back, 420), state);
    p.wait_until_durable(back, 420);
    p->release(back);
    p->release(other);
    EXPECT_EQ(p->free_cells(), free_cells);
    slow.reset();
    // What was saved behind the restore is what a plain prefill saves.
    Process later(model_, dir_.file("state"), mode);
    const SeqId again = later.create();
    EXPECT_EQ(later.restore(again, chain + Tokens{1}, 420).tokens, 420);
    EXPECT_EQ(later.state(again, 420), state);
  }
}

// What was found stays until its restore has ended, whatever is removed or evicted meanwhile.
TEST_F(ExecutorTest, ASavedPrefixIsPinned) {
  const Tokens history = random_tokens(300, 1);
  auto p = process();
  const SeqId first = p->create();
  p->append(first, history);
  p->wait_until_durable(first, 300);
  const std::vector<std::byte> state = p->state(first, 299);
  (*p)->release(first);
  {
    scheduler::RestoreJob job = p->job(history, 299);
    EXPECT_EQ(p->remove_saved(), 0U);
    const SeqId seq = p->create("", false);
    ASSERT_TRUE((*p)->begin_restore(seq, job).ok());
    job.prefix = nullptr;
    EXPECT_EQ(p->remove_saved(), 0U);
    Patience patience("a restore of a pinned prefix");
    RestoreStatus done;
    while (done.phase != RestoreStatus::Phase::kDone && patience.lasts()) {
      auto status = (*p)->advance_restore(seq, {});
      ASSERT_TRUE(status.ok()) << status.status().to_string();
      done = *status;
    }
    EXPECT_EQ(done.tokens, 299);
    EXPECT_EQ(p->state(seq, 299), state);
  }
  EXPECT_EQ(p->remove_saved(), 5U);
}

// A restore that has the device to itself gives the logits of the last token, its whole prefill
// done behind it, and the same bits.
TEST_F(ExecutorTest, ALoneRestoreBringsThePrefillToItsEnd) {
  const Tokens history = random_tokens(300, 1);
  const Tokens question = random_tokens(90, 2);
  const auto [logits, state] = compute(*process(), history, question);
  const Tokens chain = history + question;
  for (const policy::Mode mode : {policy::Mode::kPlan, policy::Mode::kHidden, policy::Mode::kKv}) {
    for (const int stops : {0, 1, 7}) {
      auto p = process(mode);
      const SeqId seq = p->create("", false);
      scheduler::RestoreJob job = p->job(chain, 300);
      job.alone = true;
      ASSERT_TRUE((*p)->begin_restore(seq, job).ok());
      int asked = 0;
      RestoreStatus done;
      std::vector<float> last;
      while (done.phase != RestoreStatus::Phase::kDone) {
        auto status = (*p)->advance_restore(
            seq, {.budget_s = 1, .proceed = [&](double) { return stops == 0 || ++asked % stops; }});
        ASSERT_TRUE(status.ok()) << status.status().to_string();
        done = *status;
        last.assign(status->logits.begin(), status->logits.end());
      }
      EXPECT_EQ(done.tokens, 390);
      EXPECT_EQ(done.record.prefilled_tokens, 90);
      EXPECT_EQ(last, logits);
      EXPECT_EQ(p->state(seq, 390), state);
    }
  }
}

// What began alone and is too much for turns beside others is given up, and computed and saved as
// if it had never begun.
TEST_F(ExecutorTest, WhatBeganAloneIsGivenUpBesideOthersAndSavedOnce) {
  const Tokens history = random_tokens(300, 1);
  const Tokens question = random_tokens(90, 2);
  const Tokens chain = history + question;
  Computed computed;
  {
    auto p = process();
    computed = compute(*p, history, question);
    EXPECT_GT(p->remove_saved(), 0U);
    const SeqId again = p->create();
    p->append(again, history);
    p->wait_until_durable(again, 300);
    (*p)->release(again);
  }
  {
    auto p = process(policy::Mode::kKv);
    const SeqId seq = p->create();
    scheduler::RestoreJob job = p->job(chain, 300);
    job.alone = true;
    ASSERT_TRUE((*p)->begin_restore(seq, job).ok());
    const int64_t free_cells = (*p)->free_cells();
    auto status = (*p)->advance_restore(
        seq,
        {.budget_s = 1, .whole_budget_s = 1, .proceed = [](double done) { return done == 0; }});
    ASSERT_TRUE(status.ok()) << status.status().to_string();
    EXPECT_EQ(status->reserved, 390);
    Patience patience("the rest of a restore");
    while (status.ok() && status->phase != RestoreStatus::Phase::kDone && patience.lasts()) {
      status = (*p)->advance_restore(seq, {.budget_s = 1, .whole_budget_s = 1e-9, .proceed = {}});
    }
    ASSERT_TRUE(status.ok()) << status.status().to_string();
    EXPECT_EQ(status->tokens, 300);
    EXPECT_TRUE(status->logits.empty());
    EXPECT_EQ((*p)->free_cells(), free_cells);
    EXPECT_EQ(p->append(seq, question), computed.logits);
    EXPECT_EQ(p->state(seq, 390), computed.state);
    p->wait_until_durable(seq, 390);
    (*p)->release(seq);
  }
  auto p = process(policy::Mode::kKv);
  const SeqId seq = p->create();
  EXPECT_EQ(p->restore(seq, chain + Tokens{1}, 390).tokens, 390);
  EXPECT_EQ(p->state(seq, 390), computed.state);
}

// Two restores take turns in the smallest slices, in the middle of projections.
TEST_F(ExecutorTest, RestoresInFlightDoNotMixTheirRows) {
  const Tokens one = random_tokens(300, 1);
  const Tokens two = random_tokens(280, 2);
  std::vector<std::byte> state_one;
  std::vector<std::byte> state_two;
  {
    auto p = process();
    const SeqId a = p->create();
    const SeqId b = p->create();
    p->append(a, one);
    p->append(b, two);
    state_one = p->state(a, 299);
    state_two = p->state(b, 279);
  }
  for (const policy::Mode mode : {policy::Mode::kHidden, policy::Mode::kKv}) {
    auto p = process(mode);
    const SeqId a = p->create();
    const SeqId b = p->create();
    ASSERT_TRUE((*p)->begin_restore(a, p->job(one, 299)).ok());
    ASSERT_TRUE((*p)->begin_restore(b, p->job(two, 279)).ok());
    bool a_done = false;
    bool b_done = false;
    while (!a_done || !b_done) {
      for (auto [seq, done] : {std::pair(a, &a_done), std::pair(b, &b_done)}) {
        if (*done) continue;
        auto status = (*p)->advance_restore(seq, {});
        ASSERT_TRUE(status.ok()) << status.status().to_string();
        *done = status->phase == RestoreStatus::Phase::kDone;
      }
    }
    EXPECT_EQ(p->state(a, 299), state_one);
    EXPECT_EQ(p->state(b, 279), state_two);
  }
}

TEST_F(ExecutorTest, AReleasedRestoreLeavesNothing) {
  const Tokens history = random_tokens(300, 1);
  {
    auto p = process();
    p->append(p->create(), history);
  }
  auto p = process();
  const int64_t free_cells = (*p)->free_cells();
  const SeqId seq = p->create();
  ASSERT_TRUE((*p)->begin_restore(seq, p->job(history, 299)).ok());
  EXPECT_EQ((*p)->free_cells(), free_cells - 299);
  ASSERT_TRUE((*p)->advance_restore(seq, {}).ok());
  (*p)->release(seq);
  EXPECT_EQ((*p)->free_cells(), free_cells);
  EXPECT_EQ((*p)->advance_restore(seq, {}).status().code(), Code::kNotFound);
}

}  // namespace
}  // namespace hcache::serving
