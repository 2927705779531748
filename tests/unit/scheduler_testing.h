// A FakeExecutor with a virtual clock, and a bench to run the scheduler on it.
//
// The fake's model is a hash of salt and chain: its logits show exactly which tokens a sequence
// holds, so any mix-up of chains, forks or salts changes what a request is answered. It counts
// every cell and fails the test on any breach of the Executor's contract.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "patience.h"
#include "scheduler/drafter.h"
#include "scheduler/scheduler.h"

namespace hcache::scheduler::testing {

using Tokens = std::vector<int32_t>;

inline uint64_t mix(uint64_t h, uint64_t value) {
  h ^= value + 0x9e3779b97f4a7c15 + (h << 6) + (h >> 2);
  h *= 0xff51afd7ed558ccd;
  return h ^ (h >> 33);
}

inline uint64_t chain_hash(const Salt& salt, std::span<const int32_t> tokens) {
  uint64_t h = 1;
  for (const uint8_t c : salt.id.bytes) h = mix(h, c);
  for (int32_t token : tokens) h = mix(h, static_cast<uint64_t>(token));
  return h;
}

constexpr int32_t kVocab = 1000;

// With a memory the next token depends on so many rows alone, and is one of a few: such answers
// repeat themselves. The rest of the hash is of all rows, as ever.
inline uint64_t answer_hash(const Salt& salt, std::span<const int32_t> rows, size_t memory) {
  constexpr uint64_t kFew = 6;
  const uint64_t h = chain_hash(salt, rows);
  if (memory == 0) return h;
  const auto last = rows.last(std::min(memory, rows.size()));
  return h - h % kVocab + chain_hash(salt, last) % kFew;
}

// Rows [from, to) leave. Those behind them depend on all that they have seen, as a model's rows do.
inline void cut_rows(Tokens& rows, int64_t from, int64_t to) {
  const uint64_t seen = chain_hash({}, rows);
  rows.erase(rows.begin() + from, rows.begin() + to);
  for (size_t i = static_cast<size_t>(from); i < rows.size(); ++i) {
    rows[i] = static_cast<int32_t>(mix(seen, static_cast<uint64_t>(rows[i])) % 0x7fffffff);
  }
}

// Greedy sampling from the fake's logits. About one answer in stop_every tokens ends.
inline NextToken next_token(uint64_t hash, uint64_t stop_every) {
  NextToken next;
  next.token = static_cast<int32_t>(hash % kVocab);
  next.stop = stop_every > 0 && (hash >> 32) % stop_every == 0;
  if (next.stop) next.finish_reason = "stop";
  return next;
}

// The rows that a sequence holds of a chain with these cuts, its end not yet cut.
inline Tokens rows_of(std::span<const int32_t> chain, std::span<const policy::HeldRows> cuts) {
  Tokens rows;
  policy::HeldRows held;
  auto next = cuts.begin();
  for (size_t i = 0; i < chain.size(); ++i) {
    if (next != cuts.end() && static_cast<int64_t>(i) == next->cut_at) {
      cut_rows(rows, next->kept, next->kept + next->dropped() - held.dropped());
      held = *next++;
    }
    rows.push_back(chain[i]);
  }
  return rows;
}

// What a request must be answered, whatever happens to it.
inline Tokens expected_answer(const Salt& salt, Tokens chain, int64_t max_new, uint64_t stop_every,
                              const policy::TruncationLimits& limits = {},
                              const policy::NextMessage& next_message = {}, size_t memory = 0) {
  Tokens answer;
  while (static_cast<int64_t>(answer.size()) < max_new) {
    const Tokens rows = rows_of(chain, policy::cuts_of(chain, limits, next_message));
    const NextToken next = next_token(answer_hash(salt, rows, memory), stop_every);
    answer.push_back(next.token);
    if (next.stop) break;
    chain.push_back(next.token);
  }
  return answer;
}

inline int64_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  size_t n = 0;
  while (n < a.size() && n < b.size() && a[n] == b[n]) ++n;
  return static_cast<int64_t>(n);
}

struct FakeOptions {
  ExecutorLimits limits{
      .arena_cells = 1024, .context = 512, .max_step_rows = 64, .max_sequences = 16};
  double step_s = 1e-3;  // of a step, and of each of its rows
  double row_s = 1e-4;
  bool tells_pace = false;  // of its steps; else all take the same
  int64_t slice_rows = 32;
  double restore_row_s = 2e-5;
  double stalled_share = 0;  // of the restores' time: the machine runs something else
  double io_start_s = 2e-3;
  double io_row_s = 1e-5;
  // Of the new tokens, that are computed while a restore waits; one that is alone is followed by as
  // many as a step holds.
  int64_t follow_rows = 0;
  size_t memory = 0;  // see answer_hash()
  // A model that drafts: its logits are one for each token, and one in so many is wrong.
  bool drafts = false;
  uint64_t wrong_every = 0;  // 0: none is
  int64_t window = 0;        // sequences can't be cut back by more rows than that; 0: they can
  double flush_s = 1e-3;
  bool saving = true;
  bool flush_hangs = false;
  int chore_parts = 0;  // of a chore that a sequence has when it is flushed
  // Probabilities of failures.
  double fail_step = 0;  // kUnavailable
  double fail_begin_restore = 0;
  double fail_advance = 0;
  double short_restore = 0;
  double fail_copy = 0;  // fork and trim
  double fail_lookup = 0;
  double fail_saving = 0;  // of a flush: the sequence is saved no further
  int32_t in_flight = 1;   // steps
  uint32_t seed = 1;
};

// A step with this token in it always fails (kInternal).
constexpr int32_t kPoison = 6666;

class FakeExecutor final : public Executor {
 public:
  struct Sequence {
    Salt salt;
    bool save = true;
    Tokens tokens = {};  // its rows
    Tokens chain = {};   // what they are of
    std::vector<policy::HeldRows> cuts = {};
    int64_t durable = 0;  // of the chain
    bool saving = true;
    int64_t flush_due_ns = -1;
    int64_t flush_rows = 0;
    // A restore in flight.
    Tokens restore = {};
    int64_t restored = 0;
    int64_t restore_begin_ns = 0;
    double io_start_s = 0;
    bool advanced = false;
    int64_t restore_end = 0;  // rows that it will find usable
    int64_t upto = 0;         // tokens of the chain that it will find usable
    bool shorter = false;     // than was asked for
    Tokens wanted = {};       // the whole chain
    std::vector<policy::HeldRows> wanted_cuts = {};
    Tokens ahead = {};     // what could follow, up to the next cut
    int64_t followed = 0;  // of that
    int64_t stepping = 0;  // rows of its step in flight
    [[nodiscard]] int64_t dropped() const { return cuts.empty() ? 0 : cuts.back().dropped(); }
  };

  explicit FakeExecutor(const FakeOptions& options) : options_(options), random_(options.seed) {}

  FakeOptions& options() { return options_; }
  [[nodiscard]] const FakeOptions& options() const { return options_; }
  [[nodiscard]] const std::map<SeqId, Sequence>& sequences() const { return sequences_; }
  [[nodiscard]] int64_t used_cells() const {
    int64_t used = 0;
    for (const auto& [id, seq] : sequences_) {
      used += static_cast<int64_t>(seq.tokens.size() + seq.restore.size()) + seq.stepping;
    }
    return used;
  }
  void pass(double seconds) { now_ns_ += static_cast<int64_t>(seconds * 1e9); }
  void save(const Salt& salt, const Tokens& tokens) { saved_[salt.id].push_back({tokens, {}}); }

  // What the last run_once() did; the bench resets it.
  struct Trace {
    std::vector<std::vector<int64_t>> steps;  // rows of each item
    double step_s = 0;
    double slices_s = 0;
    double longest_slice_s = 0;
  };
  Trace trace;
  std::vector<std::string> calls;           // "create", "fork 12", …
  std::vector<double> compute_shares;       // of the restores that began
  std::vector<bool> planned_alone;          // whether they were to have the device to themselves
  int64_t lookups = 0;                      // of saved prefixes
  std::optional<Status> next_step_status;   // of the next step that ends alone
  std::optional<Status> next_begin_status;  // of the next step that begins alone
  uint64_t injected_step_failures = 0;
  std::map<uint64_t, std::span<const int32_t>> waiting;  // in the queue, by ticket
  std::set<uint64_t> admitted_from;                      // tickets of those that run

  // ---- Executor

  [[nodiscard]] const ExecutorLimits& limits() const override { return options_.limits; }
  [[nodiscard]] int64_t now_ns() const override { return now_ns_; }
  [[nodiscard]] int64_t free_cells() const override {
    return options_.limits.arena_cells - used_cells();
  }

  Result<SeqId> create(const Salt& salt, bool save) override {
    calls.emplace_back("create");
    return add({.salt = salt, .save = save});
  }

  Result<SeqId> fork(SeqId src, int64_t n_tokens, bool save) override {
    calls.push_back("fork " + std::to_string(n_tokens));
    if (happens(options_.fail_copy)) return internal_error("injected: fork");
    const Sequence& source = at(src);
    EXPECT_LE(n_tokens, static_cast<int64_t>(source.tokens.size()));
    EXPECT_LE(n_tokens, free_cells()) << "the arena is over-allocated by a fork";
    EXPECT_GE(n_tokens, shortest(src)) << "what was asked for is gone";
    EXPECT_TRUE(source.save || !save) << "the rows before the fork are not saved";
    Sequence copy{.salt = source.salt, .save = save};
    copy.tokens.assign(source.tokens.begin(), source.tokens.begin() + n_tokens);
    copy.chain.assign(source.chain.begin(), source.chain.begin() + n_tokens + source.dropped());
    copy.cuts = source.cuts;
    copy.durable = std::min(n_tokens + source.dropped(), source.durable);
    expect_rows(copy);
    return add(std::move(copy));
  }

  Status trim(SeqId seq, int64_t n_tokens) override {
    calls.push_back("trim " + std::to_string(n_tokens));
    if (happens(options_.fail_copy)) return internal_error("injected: trim");
    Sequence& sequence = at(seq);
    EXPECT_EQ(sequence.stepping, 0) << "trimmed with its step in flight";
    EXPECT_LE(n_tokens, static_cast<int64_t>(sequence.tokens.size()));
    if (n_tokens > 0 && n_tokens < shortest(seq)) return failed_precondition("too short");
    sequence.tokens.resize(static_cast<size_t>(n_tokens));
    sequence.chain.resize(static_cast<size_t>(n_tokens + sequence.dropped()));
    sequence.durable = std::min(sequence.durable, n_tokens + sequence.dropped());
    sequence.flush_due_ns = -1;
    expect_rows(sequence);
    return {};
  }

  Status cut(SeqId seq, std::span<const int32_t> chain, const policy::HeldRows& held) override {
    Sequence& sequence = at(seq);
    // Of a first cut the rows that stay lie in one piece; later ones begin where that one resumed.
    const policy::HeldRows before =
        sequence.cuts.empty() ? policy::HeldRows() : sequence.cuts.back();
    const int64_t from = held.kept;
    const int64_t to = from + held.dropped() - before.dropped();
    calls.push_back("cut " + std::to_string(from) + " " + std::to_string(to));
    EXPECT_EQ(std::vector(chain.begin(), chain.end()), sequence.chain);
    EXPECT_TRUE(in_flight_.empty()) << "cut with a step in flight";
    EXPECT_EQ(held.cut_at, static_cast<int64_t>(sequence.chain.size()));
    if (happens(options_.fail_copy)) return internal_error("injected: cut");
    cut_rows(sequence.tokens, from, to);
    sequence.cuts.push_back(held);
    EXPECT_EQ(held.rows(held.cut_at), static_cast<int64_t>(sequence.tokens.size()));
    return {};
  }

  [[nodiscard]] int64_t shortest(SeqId seq) const override {
    const auto it = sequences_.find(seq);
    if (options_.window == 0 || it == sequences_.end()) return 0;
    return std::max<int64_t>(0, static_cast<int64_t>(it->second.tokens.size()) - options_.window);
  }

  void release(SeqId seq) override {
    calls.emplace_back("release");
    EXPECT_EQ(at(seq).stepping, 0) << "released with its step in flight";
    EXPECT_EQ(sequences_.erase(seq), 1U) << "released twice";
  }

  Result<SavedPrefixRef> saved_prefix(const Salt& salt, std::span<const int32_t> tokens,
                                      std::span<const policy::HeldRows> cuts,
                                      const SavedPrefixRef& known) override {
    ++lookups;
    if (happens(options_.fail_lookup)) return data_loss("injected: catalog");
    int64_t longest = 0;
    for (const SavedChain& saved : saved_[salt.id]) {
      int64_t common = common_prefix(saved.tokens, tokens);
      // What is behind a cut that only one of them has, or both at another place, is another state.
      for (size_t i = 0; i < std::max(saved.cuts.size(), cuts.size()); ++i) {
        if (i < saved.cuts.size() && i < cuts.size() && saved.cuts[i] == cuts[i]) continue;
        if (i < saved.cuts.size()) common = std::min(common, saved.cuts[i].cut_at);
        if (i < cuts.size()) common = std::min(common, cuts[i].cut_at);
        break;
      }
      longest = std::max(longest, common);
    }
    SavedPrefixRef prefix = known;
    if (longest > (known ? known->tokens() : 0)) prefix = std::make_shared<SavedPrefix>(longest);
    return prefix;
  }

  void enqueued(const Waiting& request) override {
    EXPECT_TRUE(waiting.emplace(request.ticket, request.tokens).second) << "two with one ticket";
    EXPECT_LT(request.restore, static_cast<int64_t>(request.tokens.size()));
    EXPECT_LE(request.restore, request.prefix ? request.prefix->tokens() : 0);
    if (request.restore > 0) calls.push_back("will restore " + std::to_string(request.restore));
  }

  void dequeued(uint64_t ticket, bool admitted) override {
    EXPECT_EQ(waiting.erase(ticket), 1U);
    if (admitted) {
      EXPECT_TRUE(admitted_from.insert(ticket).second);
    }
  }

  void completed(uint64_t ticket) override { EXPECT_EQ(admitted_from.erase(ticket), 1U); }

  Status begin_restore(SeqId seq, const RestoreJob& job) override {
    const auto& [prefix, tokens, upto, cuts, media, method, compute_share, alone] = job;
    compute_shares.push_back(compute_share);
    planned_alone.push_back(alone);
    calls.push_back("restore " + std::to_string(upto));
    Sequence& sequence = at(seq);
    EXPECT_TRUE(sequence.tokens.empty() && sequence.restore.empty());
    EXPECT_GE(upto, 1);
    EXPECT_LT(upto, static_cast<int64_t>(tokens.size()));
    if (prefix == nullptr) die("a restore without a saved prefix");
    EXPECT_LE(upto, prefix->tokens());
    const int64_t rows = policy::held_at(cuts, upto).rows(upto);
    EXPECT_LE(rows, free_cells()) << "the arena is over-allocated by a restore";
    if (happens(options_.fail_begin_restore)) return unavailable("injected: begin_restore");
    sequence.restore.resize(static_cast<size_t>(rows));
    sequence.restored = 0;
    sequence.followed = 0;
    sequence.advanced = false;
    sequence.restore_begin_ns = now_ns_;
    sequence.io_start_s = options_.io_start_s;
    sequence.shorter = happens(options_.short_restore);
    sequence.upto = sequence.shorter ? upto / 2 : upto;
    sequence.restore_end = std::min(rows, sequence.upto);
    sequence.wanted.assign(tokens.begin(), tokens.end());
    sequence.wanted_cuts.assign(cuts.begin(), cuts.end());
    auto end = static_cast<int64_t>(tokens.size());
    for (const policy::HeldRows& cut : cuts) {
      if (cut.cut_at >= upto) end = std::min(end, cut.cut_at);
    }
    sequence.ahead.assign(tokens.begin() + upto, tokens.begin() + end);
    return {};
  }

  Result<RestoreStatus> advance_restore(SeqId seq, const RestoreTurn& turn) override {
    Sequence& sequence = at(seq);
    const bool alone = turn.proceed != nullptr;
    EXPECT_FALSE(sequence.restore.empty());
    EXPECT_GT(turn.budget_s, 0);
    if (!sequence.advanced && !sequence.shorter) follow(sequence, alone);
    sequence.advanced = true;
    if (happens(options_.fail_advance)) {
      sequence.restore.clear();
      return data_loss("injected: advance_restore");
    }
    RestoreStatus status;
    status.phase = RestoreStatus::Phase::kWorking;
    const auto fraction = [&] {
      return static_cast<double>(sequence.restored) / static_cast<double>(sequence.restore.size());
    };
    while (sequence.restored < sequence.restore_end &&
           (alone ? turn.proceed(fraction()) : status.seconds < turn.budget_s)) {
      const int64_t rows = std::min(options_.slice_rows, sequence.restore_end - sequence.restored);
      if (rows_read(sequence) < sequence.restored + rows) {
        status.phase = RestoreStatus::Phase::kWaitingForIo;
        if (!alone) break;
        pass(1e-4);
        continue;
      }
      status.phase = RestoreStatus::Phase::kWorking;
      const double slice_s = static_cast<double>(rows) * options_.restore_row_s;
      pass(slice_s);
      status.seconds += slice_s;
      trace.longest_slice_s = std::max(trace.longest_slice_s, slice_s);
      sequence.restored += rows;
    }
    trace.slices_s += status.seconds;
    status.stalled_s = options_.stalled_share * status.seconds;
    status.reserved = static_cast<int64_t>(sequence.restore.size());
    status.fraction = fraction();
    if (sequence.restored == sequence.restore_end) finish_restore(sequence, status);
    return status;
  }

  void request_flush(SeqId seq) override {
    Sequence& sequence = at(seq);
    sequence.flush_rows = static_cast<int64_t>(sequence.chain.size());
    sequence.flush_due_ns = now_ns_ + static_cast<int64_t>(options_.flush_s * 1e9);
    if (happens(options_.fail_saving)) sequence.saving = false;
    if (options_.chore_parts > 0) chores[seq] = options_.chore_parts;
  }

  int64_t durable_tokens(SeqId seq) override {
    Sequence& sequence = at(seq);
    if (!options_.saving || !sequence.save || !sequence.saving) return kNotSaving;
    if (!options_.flush_hangs && sequence.flush_due_ns >= 0 && now_ns_ >= sequence.flush_due_ns) {
      sequence.durable = std::max(sequence.durable, sequence.flush_rows);
      sequence.flush_due_ns = -1;
      const Tokens chain(sequence.chain.begin(), sequence.chain.begin() + sequence.durable);
      saved_[sequence.salt.id].push_back({chain, sequence.cuts});
    }
    return sequence.durable;
  }

  [[nodiscard]] double step_s(int64_t rows) const override {
    return options_.tells_pace ? cost_s(rows) : 1;
  }
  Result<StepOutput> step(std::span<const StepItem> items) override {
    EXPECT_TRUE(in_flight_.empty()) << "a step beside others in flight";
    HCACHE_RETURN_IF_ERROR(take_rows(items));
    return end_step(items);
  }
  int32_t steps_in_flight(int64_t sequences) const override {
    return static_cast<int32_t>(std::min<int64_t>(options_.in_flight, sequences));
  }
  // A failure shows where a step ends.
  Status begin_step(std::span<const StepItem> items) override {
    EXPECT_LT(in_flight_.size(), static_cast<size_t>(options_.in_flight));
    HCACHE_RETURN_IF_ERROR(take_rows(items));
    in_flight_.emplace_back(items.begin(), items.end());
    most_in_flight = std::max(most_in_flight, in_flight_.size());
    return {};
  }
  Result<StepOutput> finish_step() override {
    if (in_flight_.empty()) die("no step is in flight");
    const std::vector<StepItem> items = std::move(in_flight_.front());
    in_flight_.pop_front();
    return end_step(items);
  }
  size_t most_in_flight = 0;

  // Parts of chores that are left of sequences, and the cells that one takes.
  std::map<SeqId, int> chores;
  int64_t chore_cells = 0;
  bool chores_wait = false;  // for I/O
  bool chores_last = true;
  [[nodiscard]] Chore chore() const override {
    Chore chore{.cells = chore_cells};
    for (const auto& [seq, parts] : chores) {
      if (parts <= 0 || !sequences_.contains(seq)) continue;
      chore.seq = seq;
      chore.left += chores_last ? parts : 0;
    }
    return chore;
  }
  bool work_on(const Chore& chore) override {
    EXPECT_LE(chore.cells, free_cells());
    EXPECT_TRUE(in_flight_.empty());
    EXPECT_TRUE(waiting.empty() && admitted_from.empty()) << "something else is to be done";
    if (chores_wait) return false;
    --chores.at(chore.seq);
    calls.push_back("chore");
    return true;
  }

 private:
  Status take_rows(std::span<const StepItem> items) {
    int64_t rows = 0;
    std::set<SeqId> seen;
    for (const StepItem& item : items) {
      const Sequence& sequence = at(item.seq);
      EXPECT_TRUE(seen.insert(item.seq).second) << "a sequence twice in a step";
      EXPECT_TRUE(sequence.restore.empty()) << "a step of a sequence that is being restored";
      EXPECT_EQ(sequence.stepping, 0) << "a sequence in two steps";
      EXPECT_FALSE(item.tokens.empty());
      rows += static_cast<int64_t>(item.tokens.size());
      EXPECT_LE(static_cast<int64_t>(sequence.tokens.size() + item.tokens.size()),
                options_.limits.context);
    }
    EXPECT_GE(rows, 1);
    EXPECT_LE(rows, options_.limits.max_step_rows);
    EXPECT_LE(rows, free_cells()) << "the arena is over-allocated by a step";
    if (next_begin_status.has_value()) return *std::exchange(next_begin_status, std::nullopt);
    for (const StepItem& item : items) {
      at(item.seq).stepping = static_cast<int64_t>(item.tokens.size());
    }
    return {};
  }

  Result<StepOutput> end_step(std::span<const StepItem> items) {
    int64_t rows = 0;
    bool poisoned = false;
    for (const StepItem& item : items) {
      at(item.seq).stepping = 0;
      rows += static_cast<int64_t>(item.tokens.size());
      poisoned = poisoned || std::count(item.tokens.begin(), item.tokens.end(), kPoison) > 0;
    }
    if (next_step_status.has_value()) return *std::exchange(next_step_status, std::nullopt);
    if (poisoned) return internal_error("injected: poison");
    if (happens(options_.fail_step)) {
      ++injected_step_failures;
      return unavailable("injected: step");
    }
    return run(items, rows);
  }

  [[nodiscard]] double cost_s(int64_t rows) const {
    return options_.step_s + options_.row_s * static_cast<double>(rows);
  }

  bool happens(double probability) {
    return probability > 0 && std::uniform_real_distribution<double>()(random_) < probability;
  }

  static void expect_rows(const Sequence& sequence) {
    EXPECT_EQ(sequence.tokens, rows_of(sequence.chain, sequence.cuts))
        << "rows that computing the chain would not give";
  }

  SeqId add(Sequence sequence) {
    EXPECT_LT(sequences_.size(), static_cast<size_t>(options_.limits.max_sequences));
    sequences_.emplace(++last_seq_, std::move(sequence));
    return last_seq_;
  }

  Sequence& at(SeqId seq) {
    const auto found = sequences_.find(seq);
    if (found == sequences_.end()) die("sequence " + std::to_string(seq) + " does not exist");
    return found->second;
  }

  [[nodiscard]] int64_t rows_read(const Sequence& sequence) const {
    const double reading_s =
        static_cast<double>(now_ns_ - sequence.restore_begin_ns) * 1e-9 - sequence.io_start_s;
    return static_cast<int64_t>(reading_s / options_.io_row_s);
  }

  void follow(Sequence& sequence, bool alone) {
    const auto ahead = static_cast<int64_t>(sequence.ahead.size());
    const int64_t rows =
        alone ? std::min({static_cast<int64_t>(options_.limits.max_step_rows), free_cells(), ahead})
              : std::min({options_.follow_rows, free_cells(), ahead - 1});
    if (rows <= 0) return;
    sequence.followed = rows;
    sequence.restore.insert(sequence.restore.end(), sequence.ahead.begin(),
                            sequence.ahead.begin() + rows);
    sequence.restore_end += rows;
  }

  void finish_restore(Sequence& sequence, RestoreStatus& status) {
    status.phase = RestoreStatus::Phase::kDone;
    status.tokens = sequence.upto + sequence.followed;
    const auto end = static_cast<size_t>(status.tokens);
    status.held = policy::held_at(sequence.wanted_cuts, sequence.upto);
    sequence.chain.assign(sequence.wanted.begin(), sequence.wanted.begin() + status.tokens);
    sequence.cuts.clear();
    for (const policy::HeldRows& cut : sequence.wanted_cuts) {
      if (cut.cut_at <= status.held.cut_at) sequence.cuts.push_back(cut);
    }
    const int64_t restored = status.held.rows(sequence.upto);
    status.record.restored_tokens = restored;
    status.record.hidden_tokens = restored / 2;
    status.record.kv_tokens = restored - restored / 2;
    status.record.read.disk = static_cast<uint64_t>(restored) * 100;
    status.record.hidden_pages = {.dram = 7, .disk = 8};
    status.record.kv_pages = {.dram = 0, .disk = 9};
    status.record.restore_s = static_cast<double>(now_ns_ - sequence.restore_begin_ns) * 1e-9;
    status.record.predicted_restore_s = 0.25;
    status.record.overlap = 0.5;
    status.record.schedule = "H:1 KV:1";
    sequence.tokens = rows_of(sequence.chain, sequence.cuts);
    sequence.durable = sequence.upto;
    sequence.restore.clear();
    if (end == sequence.wanted.size()) {
      logits_.clear();
      status.logits = add_logits(sequence);
    }
  }

  std::span<const float> add_logits(const Sequence& sequence) {
    // The hash in pieces that a float holds exactly.
    const uint64_t hash = answer_hash(sequence.salt, sequence.tokens, options_.memory);
    auto& row = logits_.emplace_back();
    if (options_.drafts) {
      const bool wrong = options_.wrong_every > 0 && (hash >> 20) % options_.wrong_every == 0;
      row.assign(kVocab, 0);
      row[(hash + (wrong ? 1 : 0)) % kVocab] = 10;
      return row;
    }
    for (int shift = 0; shift < 64; shift += 16) {
      row.push_back(static_cast<float>((hash >> shift) & 0xffff));
    }
    return row;
  }

  // A row of another width: the chain's length.
  std::span<const float> add_hidden(const Sequence& sequence) {
    logits_.push_back({static_cast<float>(sequence.tokens.size())});
    return logits_.back();
  }

  StepOutput run(std::span<const StepItem> items, int64_t rows) {
    StepOutput output;
    std::vector<int64_t> shape;
    logits_.clear();
    for (const StepItem& item : items) {
      Sequence& sequence = at(item.seq);
      for (size_t i = 0; i < item.tokens.size(); ++i) {
        sequence.tokens.push_back(item.tokens[i]);
        sequence.chain.push_back(item.tokens[i]);
        const bool last = i + 1 == item.tokens.size();
        if (item.logits == LogitsOf::kAll || (last && item.logits == LogitsOf::kLast)) {
          output.logits.push_back(item.hidden ? add_hidden(sequence) : add_logits(sequence));
        }
      }
      shape.push_back(static_cast<int64_t>(item.tokens.size()));
    }
    output.seconds = cost_s(rows);
    pass(output.seconds);
    trace.steps.push_back(std::move(shape));
    trace.step_s += output.seconds;
    return output;
  }

  FakeOptions options_;
  std::mt19937 random_;
  std::atomic<int64_t> now_ns_{1'000'000'000};
  std::map<SeqId, Sequence> sequences_;
  SeqId last_seq_ = 0;
  struct SavedChain {
    Tokens tokens;
    std::vector<policy::HeldRows> cuts;
  };
  std::map<SaltId, std::vector<SavedChain>> saved_;
  std::deque<std::vector<StepItem>> in_flight_;  // steps, oldest first
  std::deque<std::vector<float>> logits_;        // a deque: spans into it stay valid
};

inline uint64_t hash_of(std::span<const float> logits) {
  uint64_t hash = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    hash |= static_cast<uint64_t>(logits[i]) << (16 * i);
  }
  return hash;
}

// What became of one request.
struct Record {
  RequestId id = 0;
  Tokens prompt;
  Salt salt;
  int64_t max_new = 0;
  policy::TruncationLimits limits = {};
  policy::NextMessage next_message = {};
  Tokens answer;
  std::vector<Phase> phases;  // without repetitions
  Outcome outcome;
  int first = 0;  // calls
  int ended = 0;
};

// A scheduler on a fake. After every iteration it checks that no cell or sequence is lost.
class Bench {
 public:
  explicit Bench(const FakeOptions& fake = {}, const SchedulerOptions& options = {},
                 Drafter* drafter = nullptr)
      : executor(fake), scheduler(Scheduler::create(executor, options, drafter).value()) {}
  ~Bench() {
    scheduler.reset();
    EXPECT_TRUE(executor.sequences().empty()) << "sequences are left over";
    EXPECT_TRUE(executor.waiting.empty()) << "the executor believes that somebody waits";
    EXPECT_TRUE(executor.admitted_from.empty()) << "the executor believes that somebody runs";
    for (const Record& record : records_) EXPECT_EQ(record.ended, 1) << "request " << record.id;
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  using Tweak = std::function<void(Request&)>;

  // Submits; `tweak` may change salt, key, priority and so on, but wraps nothing that is recorded.
  Record& submit(Tokens prompt, int64_t max_new, const Tweak& tweak = {}) {
    records_.emplace_back();
    Record& record = records_.back();
    const Result<RequestId> id = scheduler->submit(request(record, prompt, max_new, tweak));
    EXPECT_TRUE(id.ok()) << id.status().to_string();
    record.id = id.value_or(0);
    return record;
  }

  // The refusal of a request that must be refused.
  Status refusal(Tokens prompt, int64_t max_new, const Tweak& tweak = {},
                 double* retry_after_s = nullptr) {
    Record record;
    Request wanted = request(record, std::move(prompt), max_new, tweak);
    return scheduler->submit(std::move(wanted), retry_after_s).status();
  }

  Activity run_once() {
    executor.trace = {};
    const Activity activity = scheduler->run_once();
    const Snapshot now = scheduler->stats();
    EXPECT_EQ(now.active_cells + now.idle_cells, executor.used_cells());
    EXPECT_EQ(now.resident.size(), executor.sequences().size());
    EXPECT_EQ(now.fetching + now.restoring + now.prefill + now.decoding, scheduler->running());
    EXPECT_EQ(now.queued + scheduler->running(), unfinished());
    if (activity != Activity::kWorked) executor.pass(2e-4);
    return activity;
  }

  // Until nothing is left to do. False if that takes too many iterations.
  bool run_all(int max_iterations = 100'000) {
    for (int i = 0; i < max_iterations; ++i) {
      if (run_once() == Activity::kIdle) return true;
    }
    ADD_FAILURE() << "never idle; " << unfinished() << " requests are left";
    return false;
  }
  bool run_until(const std::function<bool()>& condition, int max_iterations = 100'000) {
    for (int i = 0; i < max_iterations; ++i) {
      if (condition()) return true;
      run_once();
    }
    ADD_FAILURE() << "the condition never holds";
    return false;
  }

  [[nodiscard]] int64_t unfinished() const {
    return std::count_if(records_.begin(), records_.end(),
                         [](const Record& record) { return record.ended == 0; });
  }
  [[nodiscard]] const std::deque<Record>& records() const { return records_; }
  [[nodiscard]] Tokens expected(const Record& record) const {
    return expected_answer(record.salt, record.prompt, record.max_new, stop_every, record.limits,
                           record.next_message, executor.options().memory);
  }

  uint64_t stop_every = 0;  // 0: answers have max_new tokens
  FakeExecutor executor;
  std::unique_ptr<Scheduler> scheduler;

 private:
  Request request(Record& record, Tokens prompt, int64_t max_new, const Tweak& tweak) {
    Request request;
    request.tokens = prompt;
    request.max_new_tokens = max_new;
    request.next = [this, &record](std::span<const float> logits) -> Result<NextToken> {
      NextToken next = next_token(hash_of(logits), stop_every);
      record.answer.push_back(next.token);
      return next;
    };
    request.on_first = [&record](const Outcome& outcome) {
      ++record.first;
      EXPECT_TRUE(record.answer.empty());
      EXPECT_EQ(outcome.dropped_before + outcome.resident_tokens + outcome.hidden_tokens +
                    outcome.kv_tokens + outcome.recomputed_tokens + outcome.new_tokens,
                outcome.prompt_tokens);
    };
    request.on_done = [&record](const Outcome& outcome) {
      ++record.ended;
      record.outcome = outcome;
    };
    request.on_state = [&record](Phase phase, double fraction) {
      EXPECT_GE(fraction, 0);
      EXPECT_LE(fraction, 1);
      if (record.phases.empty() || record.phases.back() != phase) record.phases.push_back(phase);
    };
    if (tweak) tweak(request);
    record.prompt = std::move(prompt);
    record.salt = request.salt;
    record.max_new = max_new;
    if (request.truncation) record.limits = *request.truncation;
    if (!executor.limits().why_no_choice.empty()) record.limits.important = 0;
    record.next_message = request.next_message;
    return request;
  }

  std::deque<Record> records_;
};

// n tokens that no other start shares.
inline Tokens tokens(int64_t n, int32_t start = 1) {
  Tokens result;
  for (int64_t i = 0; i < n; ++i) {
    result.push_back(
        static_cast<int32_t>(mix(static_cast<uint64_t>(start), static_cast<uint64_t>(i)) % kVocab));
  }
  result[0] = start;
  return result;
}

inline Tokens operator+(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace hcache::scheduler::testing
