// Steps on the CPU: what a sequence answers is a function of its tokens alone, however they were
// cut into steps, layers and batches, and whatever happens around it in the arena.
#include <ostream>

#include "engine_testing.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

// --- Invariance ------------------------------------------------------------------------------

// Models whose products don't depend on the number of rows: weights that consume Q8_0 or Q8_1.
struct ModelCase {
  std::string arch;  // "smollm2" or the architecture of a tiny model
  int n_head_kv = 2;
  ggml_type type = GGML_TYPE_Q8_0;

  [[nodiscard]] const model::Model& get() const {
    return arch == "smollm2" ? smollm2() : tiny_model(arch, n_head_kv, type);
  }
  [[nodiscard]] int n_tokens() const { return arch == "smollm2" ? 40 : 150; }
  [[nodiscard]] std::string name() const {
    return arch == "smollm2" ? arch : arch + std::to_string(n_head_kv) + ggml_type_name(type);
  }
  friend void PrintTo(const ModelCase& c, std::ostream* os) { *os << c.name(); }
};

std::string case_name(const ::testing::TestParamInfo<ModelCase>& info) { return info.param.name(); }

class InvarianceTest : public ::testing::TestWithParam<ModelCase> {};

TEST_P(InvarianceTest, DecodeAndAnyChunkingEqualOnePrefill) {
  const model::Model& model = GetParam().get();
  const std::unique_ptr<Engine> engine = make_engine(model, small_arena(1024, 256));
  ASSERT_TRUE(engine->uses_own_attention(0));
  const int n = GetParam().n_tokens();
  const Tokens tokens = random_tokens(model, n, 1);

  const SeqId whole = new_sequence(*engine);
  const std::vector<Row> expected = append(*engine, whole, tokens, n);
  ASSERT_EQ(expected.size(), tokens.size());
  const std::vector<Bytes> expected_kv = read_kv(*engine, whole);
  for (const int chunk : {1, 7, 64}) {
    const SeqId seq = new_sequence(*engine);
    EXPECT_TRUE(same_rows(append(*engine, seq, tokens, chunk), expected)) << "chunks of " << chunk;
    EXPECT_TRUE(same_kv(read_kv(*engine, seq), expected_kv)) << "chunks of " << chunk;
    HCACHE_EXPECT_OK(engine->release_sequence(seq));
  }
}

TEST_P(InvarianceTest, ASequenceAnswersTheSameAloneAndBesideSevenOthers) {
  const model::Model& model = GetParam().get();
  const std::unique_ptr<Engine> engine = make_engine(model, small_arena(2048, 256));
  constexpr int kDecoded = 6;
  const Tokens prompt = random_tokens(model, GetParam().n_tokens() / 2, 2);
  const Tokens more = random_tokens(model, kDecoded, 3);

  const SeqId alone = new_sequence(*engine);
  std::vector<Row> expected = append(*engine, alone, prompt, 256, Output::kLast);
  for (Row& row : append(*engine, alone, more, 1)) expected.push_back(std::move(row));
  const std::vector<Bytes> expected_kv = read_kv(*engine, alone);

  // The others are at other depths, and in every step some prefill while others decode.
  std::vector<SeqId> others;
  std::vector<Tokens> streams;
  for (unsigned i = 0; i < 7; ++i) {
    others.push_back(new_sequence(*engine));
    streams.push_back(random_tokens(model, 256, 10 + i));
    append(*engine, others[i], std::span(streams[i]).first(1 + 3 * i), 256, Output::kNone);
  }
  const SeqId seq = new_sequence(*engine);
  std::vector<Row> rows;
  for (int step = 0; step <= kDecoded; ++step) {
    std::vector<BatchItem> items;
    for (int i = 0; i < 7; ++i) {
      if (i == 3) {  // ours stands in the middle of the batch
        const std::span<const int32_t> tokens =
            step == 0 ? std::span<const int32_t>(prompt) : std::span(more).subspan(step - 1, 1);
        items.push_back({.seq = seq, .tokens = tokens});
      }
      const int n = (i + step) % 3 == 0 ? 5 + i : 1;
      const int64_t at = engine->length(others[i]);
      items.push_back({.seq = others[i],
                       .tokens = std::span(streams[i]).subspan(at, n),
                       .output = i % 2 == 0 ? Output::kNone : Output::kAll});
    }
    Result<Logits> logits = engine->decode(items);
    ASSERT_TRUE(logits.ok()) << logits.status().to_string();
    // Before ours in the batch: item 1 with all of its rows.
    const size_t index = items[1].tokens.size();
    rows.push_back(copy(*logits).at(index));
  }
  EXPECT_TRUE(same_rows(rows, expected));
  EXPECT_TRUE(same_kv(read_kv(*engine, seq), expected_kv));
}

// Rows behind the final norm and logits of one step: each as in a step of its own.
TEST_P(InvarianceTest, FinalNormsComeBesideLogits) {
  const model::Model& model = GetParam().get();
  const std::unique_ptr<Engine> engine = make_engine(model, small_arena(1024, 256));
  const Tokens tokens = random_tokens(model, 30, 4);
  const auto rows_of = [&](std::initializer_list<std::pair<Output, bool>> wanted) {
    std::vector<BatchItem> items;
    for (const auto& [output, hidden] : wanted) {
      items.push_back({.seq = new_sequence(*engine),
                       .tokens = tokens,
                       .first_pos = -1,
                       .output = output,
                       .hidden = hidden});
    }
    const auto made = engine->decode(items);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    std::vector<Row> rows;
    for (const auto& row : made->rows) rows.emplace_back(row.begin(), row.end());
    for (const BatchItem& item : items) HCACHE_EXPECT_OK(engine->release_sequence(item.seq));
    return rows;
  };
  const std::vector<Row> logits = rows_of({{Output::kAll, false}});
  const std::vector<Row> hidden = rows_of({{Output::kAll, true}});
  ASSERT_EQ(hidden.size(), tokens.size());
  EXPECT_EQ(hidden.front().size(), static_cast<size_t>(model.hparams().n_embd));

  const std::vector<Row> mixed = rows_of({{Output::kLast, false},
                                          {Output::kAll, true},
                                          {Output::kNone, true},
                                          {Output::kAll, false},
                                          {Output::kLast, true}});
  std::vector<Row> expected = {logits.back()};
  expected.insert(expected.end(), hidden.begin(), hidden.end());
  expected.insert(expected.end(), logits.begin(), logits.end());
  expected.push_back(hidden.back());
  EXPECT_TRUE(same_rows(mixed, expected));
}

TEST_P(InvarianceTest, LayersMayBeCutAnywhere) {
  const model::Model& model = GetParam().get();
  const std::unique_ptr<Engine> engine = make_engine(model, small_arena(512));
  const Tokens tokens = random_tokens(model, 24, 4);
  const SeqId whole = new_sequence(*engine);
  const std::vector<Row> expected = append(*engine, whole, tokens, 128);
  const std::vector<Bytes> expected_kv = read_kv(*engine, whole);

  const int n_layer = engine->n_layer();
  for (const std::vector<int>& cuts :
       {std::vector<int>{1, n_layer}, std::vector<int>{n_layer - 1, n_layer},
        std::vector<int>{1, 2, 2, n_layer - 1, n_layer}}) {
    const SeqId seq = new_sequence(*engine);
    const BatchItem item{.seq = seq, .tokens = tokens, .output = Output::kAll};
    Step step = engine->prepare({&item, 1}).value();
    EXPECT_EQ(step.n_rows(), 24);
    int begin = 0;
    for (const int end : cuts) {
      HCACHE_EXPECT_OK(engine->run_layers(step, begin, end));
      begin = end;
    }
    EXPECT_EQ(engine->length(seq), 0);
    const Result<Logits> logits = engine->finish(step);
    ASSERT_TRUE(logits.ok()) << logits.status().to_string();
    EXPECT_TRUE(same_rows(copy(*logits), expected));
    EXPECT_TRUE(same_kv(read_kv(*engine, seq), expected_kv));
    HCACHE_EXPECT_OK(engine->release_sequence(seq));
  }
}

// A step that waits between two layers, while others run, goes on where it stood.
TEST_P(InvarianceTest, StepsMayInterleave) {
  const model::Model& model = GetParam().get();
  const std::unique_ptr<Engine> engine = make_engine(model, small_arena(200, 64));
  const Tokens tokens_a = random_tokens(model, 20, 5);
  const Tokens tokens_b = random_tokens(model, 30, 6);
  const SeqId whole_a = new_sequence(*engine);
  const SeqId whole_b = new_sequence(*engine);
  const std::vector<Row> expected_a = append(*engine, whole_a, tokens_a, 64);
  const std::vector<Row> expected_b = append(*engine, whole_b, tokens_b, 64);
  const std::vector<Bytes> expected_kv_a = read_kv(*engine, whole_a);
  const std::vector<Bytes> expected_kv_b = read_kv(*engine, whole_b);
  HCACHE_EXPECT_OK(engine->release_sequence(whole_a));

  const SeqId a = new_sequence(*engine);
  const SeqId b = new_sequence(*engine);
  const int n_layer = engine->n_layer();
  const BatchItem item_a{.seq = a, .tokens = tokens_a, .output = Output::kAll};
  const BatchItem item_b{.seq = b, .tokens = tokens_b, .output = Output::kAll};
  Step step_a = engine->prepare({&item_a, 1}).value();
  Step step_b = engine->prepare({&item_b, 1}).value();
  HCACHE_EXPECT_OK(engine->run_layers(step_a, 0, 1));
  HCACHE_EXPECT_OK(engine->run_layers(step_b, 0, 2));
  // A third sequence grows until the extents of both have moved.
  const SeqId mover = new_sequence(*engine);
  const Tokens filler = random_tokens(model, 110, 7);
  append(*engine, mover, filler, 11, Output::kNone);
  EXPECT_TRUE(engine->can_project(GGML_TYPE_F16, 0));  // runs a graph of its own
  HCACHE_EXPECT_OK(engine->run_layers(step_a, 1, n_layer));
  HCACHE_EXPECT_OK(engine->run_layers(step_b, 2, n_layer));
  std::vector<Row> rows_a = copy(engine->finish(step_a).value());
  std::vector<Row> rows_b = copy(engine->finish(step_b).value());
  EXPECT_TRUE(same_rows(rows_a, expected_a));
  EXPECT_TRUE(same_rows(rows_b, expected_b));
  EXPECT_TRUE(same_kv(read_kv(*engine, a), expected_kv_a));
  EXPECT_TRUE(same_kv(read_kv(*engine, b), expected_kv_b));
}

// The restorer's recomputed prefix: K and V of the first layers, computed from tokens over reserved
// rows, while the step of the new tokens waits.
TEST_P(InvarianceTest, RecomputesALayerPrefixOverReservedRows) {
  const model::Model& model = GetParam().get();
  const std::unique_ptr<Engine> engine = make_engine(model, small_arena(512));
  Tokens history = random_tokens(model, 30, 8);
  // Text repeats itself: of layer 0 a token is computed once and serves all its rows.
  for (size_t i = 5; i < 25; i += 2) history[i] = history[i % 3];
  const Tokens fresh = random_tokens(model, 5, 9);
  const SeqId whole = new_sequence(*engine);
  append(*engine, whole, history, 128, Output::kNone);
  const std::vector<Row> expected = append(*engine, whole, fresh, 128);
  const std::vector<Bytes> expected_kv = read_kv(*engine, whole);

  const int n_layer = engine->n_layer();
  for (int prefix = 1; prefix <= std::min(3, n_layer); ++prefix) {
    const SeqId seq = new_sequence(*engine);
    HCACHE_EXPECT_OK(engine->reserve_rows(seq, 30));
    EXPECT_EQ(engine->length(seq), 30);
    const BatchItem next{.seq = seq, .tokens = fresh, .output = Output::kAll};
    Step waiting = engine->prepare({&next, 1}).value();
    for (int64_t first = 0; first < 30; first += 10) {
      const BatchItem item{.seq = seq,
                           .tokens = std::span(history).subspan(first, 10),
                           .first_pos = first,
                           .output = Output::kNone};
      Step step = engine->prepare({&item, 1}).value();
      HCACHE_EXPECT_OK(engine->run_layers(step, 0, prefix - 1));
      HCACHE_EXPECT_OK(engine->finish_with_kv(step, prefix - 1));
      EXPECT_EQ(engine->finish(step).status().code(), Code::kFailedPrecondition);
      HCACHE_EXPECT_OK(engine->run_layers(waiting, 0, 0));
    }
    EXPECT_EQ(engine->length(seq), 30);
    const size_t half = 30 * engine->kv_row_bytes();
    for (int layer = 0; layer < n_layer; ++layer) {
      Bytes kv;               // until the step has run through the layer
      if (layer >= prefix) {  // the others come from saved state
        kv = read_kv(*engine, whole, layer, 0, 30);
        ASSERT_TRUE(engine->load_kv(seq, layer, 0, 30, kv.data(), kv.data() + half).ok());
      }
      HCACHE_EXPECT_OK(engine->run_layers(waiting, layer, layer + 1));
    }
    EXPECT_TRUE(same_rows(copy(engine->finish(waiting).value()), expected));
    EXPECT_TRUE(same_kv(read_kv(*engine, seq), expected_kv));
    HCACHE_EXPECT_OK(engine->release_sequence(seq));
  }
}

// A conversation that others push around in the arena, grow around and leave.
TEST_P(InvarianceTest, MovingExtentsChangesNoAnswer) {
  const model::Model& model = GetParam().get();
  const int n = GetParam().n_tokens();
  const Tokens tokens = random_tokens(model, n, 11);
  const Tokens filler = random_tokens(model, 400, 12);
  std::vector<Row> expected;
  {
    const std::unique_ptr<Engine> roomy = make_engine(model, small_arena(1024));
    const SeqId seq = new_sequence(*roomy);
    expected = append(*roomy, seq, tokens, 5);
  }
  const std::unique_ptr<Engine> engine = make_engine(model, small_arena(2 * n));
  const SeqId seq = new_sequence(*engine);
  std::vector<SeqId> others;
  for (int i = 0; i < 3; ++i) others.push_back(new_sequence(*engine));
  std::vector<Row> rows;
  for (int done = 0; done < n; done += 5) {
    const int k = std::min(5, n - done);
    for (Row& row : append(*engine, seq, std::span(tokens).subspan(done, k), 5)) {
      rows.push_back(std::move(row));
    }
    // The others take all that is left by turns, and shrink again.
    const SeqId other = others[static_cast<size_t>(done / 5) % others.size()];
    HCACHE_EXPECT_OK(engine->trim_sequence(other, engine->length(other) / 2));
    const int64_t room = std::min<int64_t>(engine->arena_free_cells() - (n - done - k), 9);
    if (room > 0) append(*engine, other, std::span(filler).first(room), 64, Output::kNone);
  }
  EXPECT_TRUE(same_rows(rows, expected));

  // It grows to the last cell once it is alone.
  for (const SeqId other : others) HCACHE_EXPECT_OK(engine->release_sequence(other));
  const int64_t rest = engine->arena_free_cells();
  EXPECT_EQ(rest, n);
  append(*engine, seq, std::span(filler).first(rest), 64, Output::kNone);
  EXPECT_EQ(engine->arena_free_cells(), 0);
  EXPECT_EQ(engine->length(seq), 2 * n);
  const BatchItem item{.seq = seq, .tokens = std::span(filler).first(1)};
  EXPECT_EQ(engine->decode({&item, 1}).code(), Code::kResourceExhausted);
}

INSTANTIATE_TEST_SUITE_P(SmolLM2, InvarianceTest, ::testing::Values(ModelCase{.arch = "smollm2"}),
                         case_name);
INSTANTIATE_TEST_SUITE_P(
    Tiny, InvarianceTest,
    ::testing::Values(ModelCase{"llama", 2, GGML_TYPE_Q4_0}, ModelCase{"llama", 4, GGML_TYPE_Q8_0},
                      ModelCase{"qwen2", 2, GGML_TYPE_Q5_0}, ModelCase{"qwen3", 2, GGML_TYPE_Q4_1},
                      ModelCase{"falcon", 1, GGML_TYPE_Q8_0},
                      ModelCase{"falcon", 4, GGML_TYPE_Q4_0}, ModelCase{"opt", 4, GGML_TYPE_Q5_1}),
    case_name);

// --- KV types and ggml's attention -----------------------------------------------------------

class KvTypeTest : public ::testing::TestWithParam<ggml_type> {};

// Against the F32 cache: what the type itself loses, and no more.
TEST_P(KvTypeTest, AnswersLikeAnF32Cache) {
  const model::Model& model = llama_tiny();
  const Tokens tokens = random_tokens(model, 90, 1);
  const auto run = [&](ggml_type type, int chunk) {
    EngineOptions options = small_arena(256);
    options.kv_type = type;
    options.attention = AttentionKind::kGgml;
    const std::unique_ptr<Engine> engine = make_engine(model, options);
    EXPECT_FALSE(engine->uses_own_attention(0));
    const SeqId seq = new_sequence(*engine);
    return append(*engine, seq, tokens, chunk);
  };
  const std::vector<Row> exact = run(GGML_TYPE_F32, 90);
  const double limit = GetParam() == GGML_TYPE_F32 ? 1e-4 : 2e-3;
  EXPECT_LT(mean_kl(exact, run(GetParam(), 90)), limit);
  EXPECT_LT(mean_kl(exact, run(GetParam(), 7)), limit);
  EXPECT_LT(mean_kl(exact, run(GetParam(), 1)), limit);
}

INSTANTIATE_TEST_SUITE_P(All, KvTypeTest,
                         ::testing::Values(GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16,
                                           GGML_TYPE_Q8_0),
                         [](const auto& info) { return std::string(ggml_type_name(info.param)); });

// With ggml's kernel too, company must not change an answer: the padded tiled kernel for prefill
// rows, the single-row one for decoded rows.
TEST(GgmlAttention, CompanyChangesNoAnswer) {
  const model::Model& model = llama_tiny();
  EngineOptions options = small_arena(1024);
  options.attention = AttentionKind::kGgml;
  const std::unique_ptr<Engine> engine = make_engine(model, options);
  const Tokens prompt = random_tokens(model, 30, 2);
  const Tokens more = random_tokens(model, 4, 3);
  const SeqId alone = new_sequence(*engine);
  std::vector<Row> expected = append(*engine, alone, prompt, 64, Output::kLast);
  for (Row& row : append(*engine, alone, more, 1)) expected.push_back(std::move(row));

  std::vector<SeqId> others;
  for (int i = 0; i < 3; ++i) others.push_back(new_sequence(*engine));
  const SeqId seq = new_sequence(*engine);
  std::vector<Row> rows;
  for (int step = 0; step <= 4; ++step) {
    std::vector<BatchItem> items;
    for (int i = 0; i < 3; ++i) {
      if (i == 1) {
        items.push_back({.seq = seq,
                         .tokens = step == 0 ? std::span<const int32_t>(prompt)
                                             : std::span(more).subspan(step - 1, 1)});
      }
      items.push_back({.seq = others[i],
                       .tokens = std::span(prompt).first((i + step) % 2 == 0 ? 1 : 9 + i),
                       .output = Output::kNone});
    }
    rows.push_back(copy(engine->decode(items).value()).at(0));
  }
  EXPECT_TRUE(same_rows(rows, expected));
}

// A step's graph is kept as long as attention has the shape it had: over the end of a padded
// extent, from one sequence to another and back, alone and together.
TEST(GgmlAttention, KeptGraphsFitTheStepsThatFollow) {
  const model::Model& model = llama_tiny();
  constexpr int kPrompt = 245;
  constexpr int kSteps = 24;
  for (const AttentionKind kind : {AttentionKind::kGgml, AttentionKind::kScores}) {
    EngineOptions options = small_arena(1024);
    options.max_batch_rows = kPrompt + kSteps;
    options.attention = kind;
    std::vector<Tokens> tokens;
    std::vector<std::vector<Row>> at_once;
    std::vector<std::vector<Row>> alone;
    for (unsigned i = 0; i < 2; ++i) {
      tokens.push_back(random_tokens(model, kPrompt + kSteps, 7 + i));
      const std::unique_ptr<Engine> engine = make_engine(model, options);
      at_once.push_back(append(*engine, new_sequence(*engine), tokens[i], kPrompt + kSteps));
      const SeqId seq = new_sequence(*engine);
      append(*engine, seq, std::span(tokens[i]).first(kPrompt), kPrompt);
      alone.push_back(append(*engine, seq, std::span(tokens[i]).subspan(kPrompt), 1));
    }
    const std::unique_ptr<Engine> engine = make_engine(model, options);
    std::vector<SeqId> seqs;
    for (const Tokens& each : tokens) {
      seqs.push_back(new_sequence(*engine));
      append(*engine, seqs.back(), std::span(each).first(kPrompt), kPrompt);
    }
    std::vector<std::vector<Row>> rows(2);
    for (int step = 0; rows[0].size() < kSteps || rows[1].size() < kSteps; ++step) {
      std::vector<BatchItem> items;
      std::vector<size_t> which;
      for (size_t i = 0; i < 2; ++i) {
        const bool has_turn = step % 3 == 2 || static_cast<size_t>(step % 3) == i;
        if (!has_turn || rows[i].size() == kSteps) continue;
        items.push_back(
            {.seq = seqs[i], .tokens = std::span(tokens[i]).subspan(kPrompt + rows[i].size(), 1)});
        which.push_back(i);
      }
      const Logits logits = engine->decode(items).value();
      for (size_t j = 0; j < which.size(); ++j) {
        rows[which[j]].emplace_back(logits.rows[j].begin(), logits.rows[j].end());
      }
    }
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(same_rows(rows[i], alone[i])) << "sequence " << i;
      const std::vector<Row> last(at_once[i].end() - kSteps, at_once[i].end());
      EXPECT_LT(mean_kl(last, rows[i]), 5e-4) << "sequence " << i;
    }
  }
}

TEST(GgmlAttention, LayersMayBeCutAndStepsInterleave) {
  const model::Model& model = llama_tiny();
  EngineOptions options = small_arena(512);
  options.attention = AttentionKind::kGgml;
  const std::unique_ptr<Engine> engine = make_engine(model, options);
  const Tokens tokens_a = random_tokens(model, 70, 2);
  const Tokens tokens_b = random_tokens(model, 3, 3);
  const SeqId whole_a = new_sequence(*engine);
  const SeqId whole_b = new_sequence(*engine);
  const std::vector<Row> expected_a = append(*engine, whole_a, tokens_a, 128);
  const std::vector<Row> expected_b = append(*engine, whole_b, tokens_b, 128);
  const SeqId a = new_sequence(*engine);
  const SeqId b = new_sequence(*engine);
  const BatchItem item_a{.seq = a, .tokens = tokens_a, .output = Output::kAll};
  const BatchItem item_b{.seq = b, .tokens = tokens_b, .output = Output::kAll};
  Step step_a = engine->prepare({&item_a, 1}).value();
  Step step_b = engine->prepare({&item_b, 1}).value();
  for (int layer = 0; layer < engine->n_layer(); ++layer) {
    HCACHE_EXPECT_OK(engine->run_layers(step_a, layer, layer + 1));
    HCACHE_EXPECT_OK(engine->run_layers(step_b, layer, layer + 1));
  }
  EXPECT_TRUE(same_rows(copy(engine->finish(step_b).value()), expected_b));
  EXPECT_TRUE(same_rows(copy(engine->finish(step_a).value()), expected_a));
}

// Threads are the point here: how many there are changes no bit of our attention.
TEST(Threads, ChangeNoAnswer) {
  const std::string path = tiny_model_path("llama", 2, GGML_TYPE_Q8_0);
  std::vector<std::vector<Row>> answers;
  for (const int n_threads : {1, 2, 3}) {
    const std::unique_ptr<LoadedModel> loaded = load_model(path, "cpu", n_threads);
    const std::unique_ptr<Engine> engine = make_engine(*loaded->model, small_arena(256));
    const Tokens tokens = random_tokens(*loaded->model, 60, 1);
    const SeqId seq = new_sequence(*engine);
    std::vector<Row> rows = append(*engine, seq, std::span(tokens).first(50), 64);
    for (Row& row : append(*engine, seq, std::span(tokens).subspan(50), 1)) {
      rows.push_back(std::move(row));
    }
    answers.push_back(std::move(rows));
  }
  EXPECT_TRUE(same_rows(answers[1], answers[0]));
  EXPECT_TRUE(same_rows(answers[2], answers[0]));
}

}  // namespace
}  // namespace hcache::engine
