// Layers that see a window of the last rows: they hold no more than it takes, what is gone changes
// no bit of what follows, and what can't be done without it is refused.
#include "engine/engine.h"
#include "engine_restore_testing.h"
#include "windows.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int kTokens = 1500;
constexpr int64_t kArena = 4000;

// Two layers with a window of 40 rows, and one without.
const model::Model& windowed(ggml_type type = GGML_TYPE_Q8_0) {
  return tiny_model("gemma3", 2, type);
}
int64_t window() { return windowed().hparams().n_window; }

EngineOptions options(int rows = 128, int sequences = 3) {
  EngineOptions o = small_arena(kArena, rows);
  o.window_sequences = sequences;
  return o;
}

// What read_kv() gave, to rows from `first` on.
void load(Engine& engine, SeqId seq, int layer, int64_t first, const Bytes& kv) {
  const size_t half = kv.size() / 2;
  const auto rows = static_cast<int>(half / engine.kv_row_bytes());
  const auto ticket = engine.load_kv(seq, layer, first, rows, kv.data(), kv.data() + half);
  ASSERT_TRUE(ticket.ok()) << ticket.status().to_string();
  HCACHE_EXPECT_OK(engine.wait(*ticket));
}

void expect_refused(const Status& status, const char* said) {
  EXPECT_EQ(status.code(), Code::kFailedPrecondition) << status.to_string();
  EXPECT_NE(status.message().find(said), std::string::npos) << status.to_string();
}

TEST(Windows, WhatIsAttendedIsHeldAndWhatIsNeededToo) {
  for (const int64_t window : {1, 40, 512, 1024, 4096}) {
    for (int64_t n = 1; n < 12000; n += 7) {
      EXPECT_LE(held_from(window, n), attended_from(window, n));
      EXPECT_LE(held_from(window, n), needed_from(window, n));
      EXPECT_LE(attended_from(window, n), std::max<int64_t>(0, n + 1 - window));
      EXPECT_LE(n - held_from(window, n), most_cells(window));
      EXPECT_EQ(held_from(window, n) % kAttentionPartition, 0);
    }
  }
}

// Three long sequences need no more than the windows of three, and the arena has no more.
TEST(Windows, TakeTheCellsOfTheirWindow) {
  const auto all = make_engine(windowed(), options(128, 0));
  const auto engine = make_engine(windowed(), options());
  EXPECT_LT(engine->device_bytes(), all->device_bytes());
  EXPECT_LT(estimate_device_bytes(windowed().hparams(), options()),
            estimate_device_bytes(windowed().hparams(), options(128, 0)));
  std::vector<SeqId> sequences;
  for (unsigned i = 0; i < 2; ++i) {
    sequences.push_back(new_sequence(*engine));
    HCACHE_EXPECT_OK(engine->prefill(sequences.back(), random_tokens(windowed(), kTokens, i)));
  }
  HCACHE_EXPECT_OK(engine->reserve_rows(new_sequence(*engine), kArena - 2 * kTokens));
  EXPECT_EQ(engine->arena_free_cells(), 0);
  for (const SeqId seq : sequences) HCACHE_EXPECT_OK(engine->release_sequence(seq));
  EXPECT_EQ(engine->arena_free_cells(), 2 * kTokens);
}

// However the prompt was cut into steps, and so whatever was dropped in between; beside other
// sequences, whose rows come to lie where dropped ones were.
TEST(Windows, DroppedRowsChangeNoBit) {
  for (const auto& [type, attention] : {std::pair{GGML_TYPE_Q8_0, AttentionKind::kAuto},
                                        {GGML_TYPE_F16, AttentionKind::kAuto},
                                        {GGML_TYPE_Q8_0, AttentionKind::kGgml}}) {
    const model::Model& model = windowed(type);
    const Tokens tokens = random_tokens(model, kTokens, 1);
    const Tokens more = random_tokens(model, 60, 2);
    std::vector<Row> expected;
    for (const int rows : {1600, 128, 37}) {
      EngineOptions o = options(rows);
      o.attention = attention;
      const auto engine = make_engine(model, o);
      // F16 products have a kernel of their own for one row, and so has ggml's attention.
      const bool one = rows == 37 && type == GGML_TYPE_Q8_0 && attention == AttentionKind::kAuto;
      const SeqId other = new_sequence(*engine);
      const SeqId seq = new_sequence(*engine);
      for (int half = 0; half < 2; ++half) {
        append(*engine, seq, std::span(tokens).subspan(half * 750, 750), rows, Output::kNone);
        append(*engine, other, random_tokens(model, 700, 3), rows, Output::kNone);
      }
      const std::vector<Row> logits = append(*engine, seq, more, one ? 1 : 20);
      if (expected.empty()) expected = logits;
      EXPECT_TRUE(same_rows(logits, expected)) << rows << " rows a step";
    }
  }
}

// Of what was saved of a layer with a window, the rows that it needs are enough.
TEST(Windows, RestoresTakeWhatIsNeeded) {
  const model::Model& model = windowed();
  const auto engine = make_engine(model, options());
  const Tokens tokens = random_tokens(model, kTokens, 1);
  const Tokens more = random_tokens(model, 40, 2);
  RecordingSink sink;
  HCACHE_EXPECT_OK(engine->set_capture(&sink, tap(*engine, kTapHidden | kTapKv)));
  const SeqId seq = new_sequence(*engine);
  append(*engine, seq, tokens, 128, Output::kNone);
  HCACHE_EXPECT_OK(engine->synchronize());
  HCACHE_EXPECT_OK(engine->set_capture(nullptr, {}));
  const std::vector<Row> expected = append(*engine, seq, more, 7);
  HCACHE_EXPECT_OK(engine->release_sequence(seq));

  UploadRing ring(*engine);
  for (const bool hidden : {true, false}) {
    const SeqId again = new_sequence(*engine);
    HCACHE_EXPECT_OK(engine->reserve_rows(again, kTokens));
    for (int layer = 0; layer < engine->n_layer(); ++layer) {
      const int64_t first = engine->first_row_needed(layer, kTokens);
      const bool sees_all = model.hparams().window_of(layer) == 0;
      EXPECT_EQ(first, sees_all ? 0 : kTokens - window() - kWindowSlack);
      if (hidden) {
        restore_hidden(*engine, ring, sink.saved[seq], sink.hidden_type, again, layer, first,
                       kTokens - first, 100);
      } else {
        restore_kv(*engine, ring, sink.saved[seq], again, layer, first, kTokens - first);
      }
    }
    EXPECT_TRUE(same_rows(append(*engine, again, more, 7), expected));
    HCACHE_EXPECT_OK(engine->release_sequence(again));
  }
}

// As far as the rows that are there reach.
TEST(Windows, SequencesAreTrimmedAndForkedWithinTheSlack) {
  const model::Model& model = windowed();
  const auto engine = make_engine(model, options(128, 4));
  const Tokens tokens = random_tokens(model, kTokens, 1);
  const Tokens more = random_tokens(model, 30, 2);
  const SeqId seq = new_sequence(*engine);
  append(*engine, seq, tokens, 128, Output::kNone);
  const int64_t shortest = engine->shortest(seq);
  EXPECT_GT(shortest, 0);
  EXPECT_LE(shortest, kTokens - kWindowSlack);

  for (const int64_t length : {shortest, shortest + 300, int64_t{kTokens}}) {
    const SeqId fresh = new_sequence(*engine);
    append(*engine, fresh, std::span(tokens).first(static_cast<size_t>(length)), 128,
           Output::kNone);
    const std::vector<Row> expected = append(*engine, fresh, more, 8);
    HCACHE_EXPECT_OK(engine->release_sequence(fresh));
    const SeqId fork = engine->fork_sequence(seq, length).value();
    EXPECT_TRUE(same_rows(append(*engine, fork, more, 8), expected)) << "forked at " << length;
    HCACHE_EXPECT_OK(engine->release_sequence(fork));
    const SeqId trimmed = engine->fork_sequence(seq, kTokens).value();
    HCACHE_EXPECT_OK(engine->trim_sequence(trimmed, length));
    EXPECT_TRUE(same_rows(append(*engine, trimmed, more, 8), expected)) << "trimmed to " << length;
    HCACHE_EXPECT_OK(engine->release_sequence(trimmed));
  }
  expect_refused(engine->fork_sequence(seq, shortest - 1).status(), "can't be kept");
  expect_refused(engine->trim_sequence(seq, shortest - 1), "can't be kept");
  EXPECT_EQ(engine->length(seq), kTokens);
  HCACHE_EXPECT_OK(engine->trim_sequence(seq, 0));
  EXPECT_EQ(engine->shortest(seq), 0);
  EXPECT_TRUE(
      same_rows(append(*engine, seq, more, 8), append(*engine, new_sequence(*engine), more, 8)));
}

// A row that was restored short of its window must not be computed from what the cells hold.
TEST(Windows, RowsBeforeTheWindowAreNotComputedAgain) {
  const auto engine = make_engine(windowed(), options());
  const Tokens tokens = random_tokens(windowed(), kTokens, 1);
  const SeqId seq = new_sequence(*engine);
  HCACHE_EXPECT_OK(engine->reserve_rows(seq, kTokens));
  const BatchItem item{.seq = seq, .tokens = std::span(tokens).first(20), .first_pos = 0};
  Step step = engine->prepare({&item, 1}).value();
  expect_refused(engine->run_layers(step, 0, 1), "sees 40 rows");
  Step tail = engine->prepare({&item, 1}).value();
  HCACHE_EXPECT_OK(engine->finish_with_kv(tail, 0));  // sees no other rows
  EXPECT_EQ(engine
                ->load_kv(seq, 0, 0, 1, Bytes(engine->kv_row_bytes()).data(),
                          Bytes(engine->kv_row_bytes()).data())
                .status()
                .code(),
            Code::kOutOfRange);
}

// Whatever of a sequence is held, the rows behind a cut are those that were there, rotated.
TEST(Windows, CutsMoveTheRowsThatAreHeld) {
  const model::Model& model = windowed();
  for (const auto& [from, to] : {std::pair{20, 700}, {100, 110}, {600, 1300}, {1400, 1460}}) {
    for (const int n : {kTokens, 300}) {
      if (to > n - 39) continue;
      SCOPED_TRACE(std::to_string(from) + " to " + std::to_string(to) + " of " + std::to_string(n));
      const auto engine = make_engine(model, options());
      const Tokens tokens = random_tokens(model, n, 1);
      const SeqId seq = new_sequence(*engine);
      append(*engine, seq, tokens, 128, Output::kNone);
      const int64_t left = n - (to - from);
      const int64_t tail = n - to;
      std::vector<Bytes> before;
      for (int layer = 0; layer < engine->n_layer(); ++layer) {
        before.push_back(read_kv(*engine, seq, layer, n - std::min<int64_t>(tail, 200),
                                 std::min<int64_t>(tail, 200)));
      }
      HCACHE_EXPECT_OK(engine->erase_range(seq, from, to));
      const SeqId expected = new_sequence(*engine);
      HCACHE_EXPECT_OK(engine->reserve_rows(expected, left));
      for (int layer = 0; layer < engine->n_layer(); ++layer) {
        const int64_t rows = std::min<int64_t>(tail, 200);
        load(*engine, expected, layer, left - rows, before[static_cast<size_t>(layer)]);
        HCACHE_EXPECT_OK(engine->move_positions(expected, layer, left - rows, rows, from - to));
        EXPECT_EQ(read_kv(*engine, seq, layer, left - rows, rows),
                  read_kv(*engine, expected, layer, left - rows, rows))
            << "layer " << layer;
      }
      HCACHE_EXPECT_OK(engine->release_sequence(expected));
      append(*engine, seq, random_tokens(model, 500, 4), 128, Output::kNone);
      EXPECT_EQ(engine->length(seq), left + 500);
    }
  }
}

// Two sequences with the same tokens of which different rows are held.
TEST(Windows, CutsDoNotDependOnWhatIsHeld) {
  const model::Model& model = windowed();
  const auto engine = make_engine(model, options());
  const Tokens tokens = random_tokens(model, kTokens, 1);
  const Tokens more = random_tokens(model, 700, 2);
  const SeqId seq = new_sequence(*engine);
  append(*engine, seq, tokens, 128, Output::kNone);
  const SeqId restored = new_sequence(*engine);
  HCACHE_EXPECT_OK(engine->reserve_rows(restored, kTokens));
  for (int layer = 0; layer < engine->n_layer(); ++layer) {
    const int64_t first = engine->first_row_needed(layer, kTokens);
    load(*engine, restored, layer, first, read_kv(*engine, seq, layer, first, kTokens - first));
  }
  HCACHE_EXPECT_OK(engine->erase_range(seq, 20, 900));
  HCACHE_EXPECT_OK(engine->erase_range(restored, 20, 900));
  EXPECT_TRUE(same_rows(append(*engine, seq, more, 64), append(*engine, restored, more, 64)));
}

TEST(Windows, CutsLeaveTheWindow) {
  const auto engine = make_engine(windowed(), options());
  const SeqId seq = new_sequence(*engine);
  append(*engine, seq, random_tokens(windowed(), kTokens, 1), 128, Output::kNone);
  expect_refused(engine->erase_range(seq, 100, kTokens - 20), "layers that see 40");
  EXPECT_EQ(engine->length(seq), kTokens);
  HCACHE_EXPECT_OK(engine->erase_range(seq, 100, kTokens - 39));
}

}  // namespace
}  // namespace hcache::engine
