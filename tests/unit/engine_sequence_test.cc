// Sequences in the arena: forked, trimmed, released, with rows cut out of the middle; and what the
// engine refuses.
#include <array>

#include "engine_testing.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(Sequences, AForkSharesItsPastAndGoesItsOwnWay) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(300));
  const Tokens prompt = random_tokens(llama_tiny(), 40, 1);
  const Tokens left = random_tokens(llama_tiny(), 10, 2);
  const Tokens right = random_tokens(llama_tiny(), 10, 3);
  const SeqId a = new_sequence(*engine);
  append(*engine, a, prompt, 64, Output::kNone);
  const SeqId b = engine->fork_sequence(a, 40).value();
  const SeqId c = engine->fork_sequence(a, 25).value();
  EXPECT_EQ(engine->length(b), 40);
  EXPECT_EQ(engine->length(c), 25);
  EXPECT_TRUE(same_kv(read_kv(*engine, a), read_kv(*engine, b)));

  const std::vector<Row> rows_b = append(*engine, b, right, 3);
  const std::vector<Row> rows_a = append(*engine, a, left, 64);
  append(*engine, c, std::span(prompt).subspan(25), 64, Output::kNone);
  const std::vector<Row> rows_c = append(*engine, c, right, 64);
  EXPECT_TRUE(same_rows(rows_b, rows_c));
  const SeqId fresh = new_sequence(*engine);
  append(*engine, fresh, prompt, 64, Output::kNone);
  EXPECT_TRUE(same_rows(append(*engine, fresh, left, 64), rows_a));
  HCACHE_EXPECT_OK(engine->release_sequence(a));
  EXPECT_EQ(engine->fork_sequence(a, 1).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(engine->fork_sequence(b, 51).status().code(), Code::kOutOfRange);
  EXPECT_EQ(engine->fork_sequence(b, -1).status().code(), Code::kOutOfRange);
}

TEST(Sequences, AForkThatDoesNotFitLeavesNothingBehind) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(60));
  const SeqId a = new_sequence(*engine);
  append(*engine, a, random_tokens(llama_tiny(), 40, 1), 64, Output::kNone);
  EXPECT_EQ(engine->fork_sequence(a, 40).status().code(), Code::kResourceExhausted);
  EXPECT_EQ(engine->arena_free_cells(), 20);
  EXPECT_TRUE(engine->fork_sequence(a, 20).ok());
}

TEST(Sequences, TrimmedRowsCanBeWrittenAnew) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(300));
  const Tokens prompt = random_tokens(llama_tiny(), 50, 1);
  const Tokens other = random_tokens(llama_tiny(), 20, 2);
  const SeqId a = new_sequence(*engine);
  append(*engine, a, prompt, 64, Output::kNone);
  HCACHE_EXPECT_OK(engine->trim_sequence(a, 30));
  EXPECT_EQ(engine->length(a), 30);
  EXPECT_EQ(engine->arena_free_cells(), 270);
  const std::vector<Row> rows = append(*engine, a, other, 64);

  const SeqId b = new_sequence(*engine);
  append(*engine, b, std::span(prompt).first(30), 64, Output::kNone);
  EXPECT_TRUE(same_rows(append(*engine, b, other, 64), rows));
  EXPECT_TRUE(same_kv(read_kv(*engine, a), read_kv(*engine, b)));
  EXPECT_EQ(engine->trim_sequence(a, 51).code(), Code::kOutOfRange);
  EXPECT_EQ(engine->trim_sequence(a, -1).code(), Code::kOutOfRange);
  EXPECT_EQ(engine->trim_sequence(99, 0).code(), Code::kInvalidArgument);
}

TEST(Sequences, ReleasedOnesAreGone) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(300));
  const SeqId a = new_sequence(*engine);
  append(*engine, a, random_tokens(llama_tiny(), 50, 1), 64, Output::kNone);
  HCACHE_EXPECT_OK(engine->release_sequence(a));
  EXPECT_EQ(engine->arena_free_cells(), 300);
  EXPECT_EQ(engine->length(a), -1);
  EXPECT_EQ(engine->release_sequence(a).code(), Code::kInvalidArgument);
  EXPECT_NE(new_sequence(*engine), a) << "ids are not used again";
}

// --- Shifted positions -----------------------------------------------------------------------

// In layer 0 K depends on the token and the position alone: after the shift it must be what a fresh
// computation gives. (In deeper layers it remembers what was erased, by intent.)
void check_erase(const model::Model& model, const EngineOptions& options, double tolerance) {
  const std::unique_ptr<Engine> engine = make_engine(model, options);
  const Tokens tokens = random_tokens(model, 60, 1);
  const SeqId a = new_sequence(*engine);
  append(*engine, a, tokens, 64, Output::kNone);
  const std::vector<Bytes> before = read_kv(*engine, a);
  ASSERT_TRUE(engine->erase_range(a, 10, 27).ok());
  EXPECT_EQ(engine->length(a), 43);
  EXPECT_EQ(engine->arena_free_cells(), options.arena_tokens - 43);
  const std::vector<Bytes> after = read_kv(*engine, a);

  Tokens kept = tokens;
  kept.erase(kept.begin() + 10, kept.begin() + 27);
  const SeqId b = new_sequence(*engine);
  append(*engine, b, kept, 64, Output::kNone);
  const Bytes fresh = read_kv(*engine, b, 0, 0, 43);
  const size_t row = engine->kv_row_bytes();
  const std::span<const std::byte> old0 = after[0];
  const std::span<const std::byte> new0 = fresh;
  EXPECT_LT(max_difference(widen(options.kv_type, old0.first(43 * row)),
                           widen(options.kv_type, new0.first(43 * row))),
            tolerance);
  EXPECT_TRUE(std::equal(old0.begin() + 43 * row, old0.end(), new0.begin() + 43 * row)) << "V";
  for (int layer = 0; layer < engine->n_layer(); ++layer) {
    const std::span<const std::byte> was = before[layer];
    const std::span<const std::byte> is = after[layer];
    // What stands before the gap is untouched, and V moves as it is.
    EXPECT_TRUE(std::equal(is.begin(), is.begin() + 10 * row, was.begin()));
    EXPECT_TRUE(std::equal(is.begin() + 53 * row, is.end(), was.begin() + 87 * row));
  }
  // The conversation goes on.
  EXPECT_EQ(append(*engine, a, tokens, 64).size(), 60U);
}

TEST(EraseRange, RotatesK) {
  for (const char* arch : {"llama", "qwen2", "qwen3", "falcon", "smollm3", "glm4", "olmo2"}) {
    SCOPED_TRACE(arch);
    check_erase(tiny_model(arch, arch == std::string("falcon") ? 1 : 2, GGML_TYPE_Q8_0),
                small_arena(256), 4e-3);
  }
}

TEST(EraseRange, RotatesKOfEveryType) {
  for (const auto& [type, tolerance] : {std::pair{GGML_TYPE_F32, 1e-4},
                                        {GGML_TYPE_F16, 4e-3},
                                        {GGML_TYPE_BF16, 4e-2},
                                        {GGML_TYPE_Q8_0, 6e-2}}) {
    SCOPED_TRACE(ggml_type_name(type));
    EngineOptions options = small_arena(256);
    options.kv_type = type;
    check_erase(llama_tiny(), options, tolerance);
  }
}

TEST(EraseRange, RotatesSmolLM2) { check_erase(smollm2(), small_arena(256), 3e-2); }

TEST(EraseRange, LongTailsGoInBlocks) {
  // More rows behind the gap than a step has, and a gap shorter than a block: the copy overlaps.
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(512, 32));
  const Tokens tokens = random_tokens(llama_tiny(), 200, 1);
  const SeqId a = new_sequence(*engine);
  append(*engine, a, tokens, 32, Output::kNone);
  ASSERT_TRUE(engine->erase_range(a, 5, 6).ok());
  Tokens kept = tokens;
  kept.erase(kept.begin() + 5);
  const SeqId b = new_sequence(*engine);
  append(*engine, b, kept, 32, Output::kNone);
  const Bytes ours = read_kv(*engine, a, 0, 0, 199);
  const Bytes fresh = read_kv(*engine, b, 0, 0, 199);
  EXPECT_LT(max_difference(widen(GGML_TYPE_F16, ours), widen(GGML_TYPE_F16, fresh)), 4e-3);
}

TEST(EraseRange, OfTheTailIsATrim) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(256));
  const Tokens tokens = random_tokens(llama_tiny(), 60, 1);
  const SeqId a = new_sequence(*engine);
  append(*engine, a, tokens, 64, Output::kNone);
  const SeqId b = engine->fork_sequence(a, 60).value();
  HCACHE_EXPECT_OK(engine->erase_range(a, 40, 60));
  HCACHE_EXPECT_OK(engine->trim_sequence(b, 40));
  EXPECT_TRUE(same_kv(read_kv(*engine, a), read_kv(*engine, b)));
  HCACHE_EXPECT_OK(engine->erase_range(a, 7, 7));
  EXPECT_TRUE(same_kv(read_kv(*engine, a), read_kv(*engine, b)));
  EXPECT_EQ(engine->erase_range(a, 30, 41).code(), Code::kOutOfRange);
  EXPECT_EQ(engine->erase_range(a, 30, 20).code(), Code::kOutOfRange);
  EXPECT_EQ(engine->erase_range(a, -1, 20).code(), Code::kOutOfRange);
  HCACHE_EXPECT_OK(engine->erase_range(a, 0, 40));
  EXPECT_EQ(engine->length(a), 0);
}

TEST(EraseRange, IsRefusedWithLearnedPositions) {
  const model::Model& model = tiny_model("opt", 4, GGML_TYPE_Q8_0);
  const std::unique_ptr<Engine> engine = make_engine(model, small_arena(256));
  const SeqId a = new_sequence(*engine);
  append(*engine, a, random_tokens(model, 30, 1), 64, Output::kNone);
  const std::vector<Bytes> before = read_kv(*engine, a);
  EXPECT_EQ(engine->erase_range(a, 3, 5).code(), Code::kUnimplemented);
  EXPECT_TRUE(same_kv(read_kv(*engine, a), before));
  HCACHE_EXPECT_OK(engine->erase_range(a, 20, 30));
  EXPECT_EQ(engine->length(a), 20);
}

// Several ranges at once: each row is moved by what goes before it, and rounded once.
TEST(EraseRanges, MovesEachRowOnce) {
  for (const int batch : {16, 64}) {  // what is rotated is more than a block, or less
    const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(512, batch));
    const Tokens tokens = random_tokens(llama_tiny(), 120, 1);
    const SeqId a = new_sequence(*engine);
    append(*engine, a, tokens, batch, Output::kNone);
    // What the rows behind each range are when so many go right before them.
    const auto moved = [&](int64_t from, int64_t to, int64_t by) {
      const SeqId b = engine->fork_sequence(a, 120).value();
      HCACHE_EXPECT_OK(engine->erase_range(b, from - by, from));
      std::vector<Bytes> rows;
      for (int layer = 0; layer < engine->n_layer(); ++layer) {
        rows.push_back(read_kv(*engine, b, layer, from - by, to - from));
      }
      HCACHE_EXPECT_OK(engine->release_sequence(b));
      return rows;
    };
    const auto first = moved(20, 40, 5);
    const auto second = moved(41, 100, 6);
    const auto third = moved(117, 120, 23);
    const std::vector<Bytes> before = read_kv(*engine, a);
    const std::vector<ErasedRows> ranges = {{15, 20}, {40, 41}, {100, 117}};
    HCACHE_EXPECT_OK(engine->erase_ranges(a, ranges));
    EXPECT_EQ(engine->length(a), 97);
    EXPECT_EQ(engine->arena_free_cells(), 512 - 97);
    const size_t row = engine->kv_row_bytes();
    for (int layer = 0; layer < engine->n_layer(); ++layer) {
      const Bytes head = read_kv(*engine, a, layer, 0, 15);
      EXPECT_TRUE(std::equal(head.begin(), head.begin() + 15 * row, before[layer].begin()));
      EXPECT_TRUE(read_kv(*engine, a, layer, 15, 20) == first[layer]);
      EXPECT_TRUE(read_kv(*engine, a, layer, 35, 59) == second[layer]);
      EXPECT_TRUE(read_kv(*engine, a, layer, 94, 3) == third[layer]);
    }
    // The end may go, too.
    const std::vector<Bytes> left = read_kv(*engine, a);
    const std::vector<ErasedRows> with_end = {{10, 12}, {90, 97}};
    HCACHE_EXPECT_OK(engine->erase_ranges(a, with_end));
    EXPECT_EQ(engine->length(a), 88);
    EXPECT_EQ(append(*engine, a, tokens, batch).size(), 120U);
  }
}

TEST(EraseRanges, WhatIsNoneChangesNothing) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(256));
  const SeqId a = new_sequence(*engine);
  append(*engine, a, random_tokens(llama_tiny(), 60, 1), 64, Output::kNone);
  const std::vector<Bytes> before = read_kv(*engine, a);
  HCACHE_EXPECT_OK(engine->erase_ranges(a, {}));
  for (const std::vector<ErasedRows>& wrong :
       std::vector<std::vector<ErasedRows>>{{{5, 9}, {8, 12}},
                                            {{20, 30}, {5, 9}},
                                            {{5, 9}, {50, 61}},
                                            {{-1, 4}, {9, 12}},
                                            {{5, 5}, {9, 12}}}) {
    EXPECT_EQ(engine->erase_ranges(a, wrong).code(), Code::kOutOfRange);
  }
  EXPECT_TRUE(same_kv(read_kv(*engine, a), before));
  const model::Model& windows = tiny_model("gemma3", 2, GGML_TYPE_Q8_0);
  const std::unique_ptr<Engine> other = make_engine(windows, small_arena(256));
  const SeqId b = new_sequence(*other);
  append(*other, b, random_tokens(windows, 60, 1), 64, Output::kNone);
  const std::vector<ErasedRows> ranges = {{5, 9}, {12, 14}};
  EXPECT_EQ(other->erase_ranges(b, ranges).code(), Code::kUnimplemented);
  EXPECT_EQ(other->length(b), 60);
}

// --- Limits ----------------------------------------------------------------------------------

TEST(Limits, AFullArenaRefusesAndChangesNothing) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(100));
  const Tokens tokens = random_tokens(llama_tiny(), 100, 1);
  const SeqId a = new_sequence(*engine);
  const SeqId b = new_sequence(*engine);
  append(*engine, a, std::span(tokens).first(50), 64, Output::kNone);
  append(*engine, b, std::span(tokens).first(45), 64, Output::kNone);
  const std::vector<Bytes> before = read_kv(*engine, a);
  const std::array<BatchItem, 2> items = {
      BatchItem{.seq = a, .tokens = std::span(tokens).first(3)},
      BatchItem{.seq = b, .tokens = std::span(tokens).first(3)}};
  EXPECT_EQ(engine->prepare(items).status().code(), Code::kResourceExhausted);
  EXPECT_EQ(engine->reserve_rows(a, 56).code(), Code::kResourceExhausted);
  EXPECT_EQ(engine->length(a), 50);
  EXPECT_EQ(engine->length(b), 45);
  EXPECT_EQ(engine->arena_free_cells(), 5);
  EXPECT_TRUE(same_kv(read_kv(*engine, a), before));
  EXPECT_TRUE(engine->prepare({items.data(), 1}).ok());
  EXPECT_EQ(engine->arena_free_cells(), 5) << "an abandoned step gives its room back";
}

TEST(Limits, BadBatchesAreNamed) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(4096, 64));
  const Tokens tokens = random_tokens(llama_tiny(), 100, 1);
  const std::span<const int32_t> some = std::span(tokens).first(10);
  const SeqId a = new_sequence(*engine);
  append(*engine, a, some, 64, Output::kNone);
  const auto code = [&](const std::vector<BatchItem>& items) {
    return engine->prepare(items).status().code();
  };
  EXPECT_EQ(code({}), Code::kInvalidArgument);
  EXPECT_EQ(code({{.seq = a, .tokens = {}}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{.seq = 77, .tokens = some}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{.seq = a, .tokens = tokens}}), Code::kInvalidArgument) << "65 rows";
  EXPECT_EQ(code({{.seq = a, .tokens = some}, {.seq = a, .tokens = some}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{.seq = a, .tokens = some, .first_pos = 11}}), Code::kInvalidArgument);
  for (const int32_t bad : {-1, static_cast<int32_t>(llama_tiny().hparams().n_vocab)}) {
    const Tokens with_bad = {1, 2, bad};
    EXPECT_EQ(code({{.seq = a, .tokens = with_bad}}), Code::kInvalidArgument) << bad;
  }
  const int64_t limit = llama_tiny().hparams().n_ctx_train;
  HCACHE_EXPECT_OK(engine->reserve_rows(a, limit - 9));
  EXPECT_EQ(code({{.seq = a, .tokens = some}}), Code::kOutOfRange);
  EXPECT_EQ(code({{.seq = a, .tokens = some.first(9)}}), Code::kOk);
  EXPECT_EQ(engine->reserve_rows(a, limit + 1).code(), Code::kOutOfRange);
  EXPECT_EQ(engine->length(a), limit - 9);
}

TEST(Limits, LayersRunOnceAndInOrder) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(100));
  const Tokens tokens = random_tokens(llama_tiny(), 10, 1);
  const SeqId a = new_sequence(*engine);
  const BatchItem item{.seq = a, .tokens = tokens};
  Step step = engine->prepare({&item, 1}).value();
  const int n = engine->n_layer();
  EXPECT_EQ(engine->finish(step).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(engine->run_layers(step, 1, 2).code(), Code::kFailedPrecondition);
  EXPECT_EQ(engine->run_layers(step, 0, n + 1).code(), Code::kFailedPrecondition);
  EXPECT_EQ(engine->run_layers(step, 0, -1).code(), Code::kFailedPrecondition);
  HCACHE_EXPECT_OK(engine->run_layers(step, 0, 2));
  EXPECT_EQ(engine->run_layers(step, 0, 2).code(), Code::kFailedPrecondition);
  EXPECT_EQ(engine->finish_with_kv(step, 0).code(), Code::kFailedPrecondition);
  EXPECT_EQ(engine->finish_with_kv(step, n).code(), Code::kFailedPrecondition);
  EXPECT_EQ(engine->finish(step).status().code(), Code::kFailedPrecondition);
  HCACHE_EXPECT_OK(engine->run_layers(step, 2, n));
  EXPECT_TRUE(engine->finish(step).ok());
  EXPECT_EQ(engine->finish(step).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(engine->run_layers(step, 0, n).code(), Code::kFailedPrecondition);
}

TEST(Limits, AStepWhoseSequenceIsGoneFails) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(100));
  const Tokens tokens = random_tokens(llama_tiny(), 10, 1);
  const SeqId a = new_sequence(*engine);
  const BatchItem item{.seq = a, .tokens = tokens};
  Step step = engine->prepare({&item, 1}).value();
  HCACHE_EXPECT_OK(engine->run_layers(step, 0, 1));
  HCACHE_EXPECT_OK(engine->release_sequence(a));
  EXPECT_EQ(engine->run_layers(step, 1, engine->n_layer()).code(), Code::kFailedPrecondition);
  const SeqId b = new_sequence(*engine);
  const BatchItem item_b{.seq = b, .tokens = tokens};
  Step step_b = engine->prepare({&item_b, 1}).value();
  HCACHE_EXPECT_OK(engine->run_layers(step_b, 0, engine->n_layer()));
  HCACHE_EXPECT_OK(engine->trim_sequence(b, 0));
  EXPECT_EQ(engine->finish(step_b).status().code(), Code::kFailedPrecondition);
}

TEST(Limits, AnAbandonedStepLeavesNoTrace) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(100));
  const Tokens tokens = random_tokens(llama_tiny(), 30, 1);
  const SeqId a = new_sequence(*engine);
  append(*engine, a, std::span(tokens).first(10), 64, Output::kNone);
  const std::vector<Bytes> before = read_kv(*engine, a);
  for (int layers = 0; layers <= engine->n_layer(); ++layers) {
    const BatchItem item{.seq = a, .tokens = std::span(tokens).subspan(10)};
    Step step = engine->prepare({&item, 1}).value();
    EXPECT_EQ(engine->arena_free_cells(), 70);
    HCACHE_EXPECT_OK(engine->run_layers(step, 0, layers));
  }
  EXPECT_EQ(engine->arena_free_cells(), 90);
  EXPECT_EQ(engine->length(a), 10);
  EXPECT_TRUE(same_kv(read_kv(*engine, a), before));
}

TEST(Limits, RestorationChecksItsRows) {
  const std::unique_ptr<Engine> engine = make_engine(llama_tiny(), small_arena(400, 32));
  const SeqId a = new_sequence(*engine);
  HCACHE_EXPECT_OK(engine->reserve_rows(a, 100));
  const Bytes bytes(100 * engine->hidden_row_bytes(GGML_TYPE_F32));
  const std::byte* data = bytes.data();
  const int n_layer = engine->n_layer();
  EXPECT_EQ(engine->load_kv(a, n_layer, 0, 1, data, data).status().code(), Code::kOutOfRange);
  EXPECT_EQ(engine->load_kv(a, -1, 0, 1, data, data).status().code(), Code::kOutOfRange);
  EXPECT_EQ(engine->load_kv(a, 0, 99, 2, data, data).status().code(), Code::kOutOfRange);
  EXPECT_EQ(engine->load_kv(a, 0, -1, 2, data, data).status().code(), Code::kOutOfRange);
  EXPECT_EQ(engine->load_kv(a, 0, 0, 0, data, data).status().code(), Code::kOutOfRange);
  EXPECT_EQ(engine->load_kv(7, 0, 0, 1, data, data).status().code(), Code::kInvalidArgument);

  const ggml_type type = engine->native_hidden_type(0);
  EXPECT_EQ(engine->project_staged(a, 0, 0, 8, type).code(), Code::kFailedPrecondition);
  EXPECT_EQ(engine->stage_hidden(a, 0, 0, 33, type, data).status().code(), Code::kOutOfRange);
  EXPECT_EQ(engine->stage_hidden(a, 0, 30, 3, type, data).status().code(), Code::kOutOfRange);
  EXPECT_EQ(engine->stage_hidden(a, 0, -1, 3, type, data).status().code(), Code::kOutOfRange);
  EXPECT_EQ(engine->stage_hidden(a, 0, 0, 0, type, data).status().code(), Code::kOutOfRange);
  EXPECT_EQ(engine->stage_hidden(a, 0, 0, 8, GGML_TYPE_Q4_K, data).status().code(),
            Code::kUnimplemented);
  ASSERT_TRUE(engine->stage_hidden(a, 0, 0, 32, type, data).ok());
  EXPECT_EQ(engine->project_staged(a, 0, 0, 33, type).code(), Code::kOutOfRange);
  EXPECT_EQ(engine->project_staged(a, 0, 90, 32, type).code(), Code::kOutOfRange);
  EXPECT_EQ(engine->project_staged(a, n_layer, 0, 32, type).code(), Code::kOutOfRange);
  EXPECT_EQ(engine->project_staged(a, 0, 0, 32, GGML_TYPE_Q4_K).code(), Code::kUnimplemented);
  HCACHE_EXPECT_OK(engine->project_staged(a, 0, 0, 32, type));
  EXPECT_EQ(engine->project_staged(a, 0, 0, 32, type).code(), Code::kFailedPrecondition);
}

TEST(Limits, OptionsAreChecked) {
  const auto code = [](const model::Model& model, const EngineOptions& options) {
    return Engine::create(model, options).status().code();
  };
  EXPECT_EQ(code(llama_tiny(), {.arena_tokens = 0}), Code::kInvalidArgument);
  EXPECT_EQ(code(llama_tiny(), {.arena_tokens = 100, .max_batch_rows = 0}), Code::kInvalidArgument);
  EXPECT_EQ(code(llama_tiny(), {.arena_tokens = 100, .kv_type = GGML_TYPE_Q4_0}),
            Code::kUnimplemented);
  EXPECT_EQ(
      code(llama_tiny(),
           {.arena_tokens = 100, .kv_type = GGML_TYPE_F32, .attention = AttentionKind::kOurs}),
      Code::kUnimplemented);
  EXPECT_EQ(code(llama_tiny(), {.arena_tokens = int64_t{1} << 50}), Code::kResourceExhausted);
}

}  // namespace
}  // namespace hcache::engine
