// The types in which hidden states are saved: what restoring from each gives, for every weight type
// and on the real model.
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "engine_restore_testing.h"
#include "rpc_server.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

struct TypeCase {
  std::string arch;
  int n_head_kv = 2;
  ggml_type weights = GGML_TYPE_F16;
  ggml_type hidden = GGML_TYPE_COUNT;  // COUNT: native
  bool rpc = false;
  // Share of K and V values that may differ: of rows prefilled in one step, and of decoded rows.
  double prefilled = 0;
  double decoded = 0;
  // Largest difference relative to the largest value, where values differ.
  double relative = 0.02;

  [[nodiscard]] std::string name() const {
    return (rpc ? "Rpc_" : "") + arch + std::to_string(n_head_kv) + "_" + ggml_type_name(weights) +
           (hidden == GGML_TYPE_COUNT ? "" : std::string("_as_") + ggml_type_name(hidden));
  }
  friend void PrintTo(const TypeCase& c, std::ostream* os) { *os << c.name(); }
};

class HiddenTypeTest : public ::testing::TestWithParam<TypeCase> {};

TEST_P(HiddenTypeTest, RestoresKAndV) {
  const TypeCase& c = GetParam();
  std::string device = "cpu";
  if (c.rpc) {
    const Result<hcache::testing::RpcServer*> server = hcache::testing::RpcServer::shared();
    ASSERT_TRUE(server.ok()) << server.status().to_string();
    device = (*server)->device();
  }
  const std::unique_ptr<LoadedModel> loaded =
      load_model(tiny_model_path(c.arch, c.n_head_kv, c.weights), device);
  RecordingSink sink;
  const std::unique_ptr<Engine> e =
      make_engine(*loaded->model, {.arena_tokens = 300, .max_batch_rows = 64});
  const Tokens tokens = random_tokens(e->model(), 60, 1);
  const SeqId plain = new_sequence(*e);
  append(*e, plain, std::span(tokens).first(40), 64, Output::kNone);
  append(*e, plain, std::span(tokens).subspan(40), 1, Output::kNone);
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden, c.hidden)));
  const SeqId a = new_sequence(*e);
  append(*e, a, std::span(tokens).first(40), 64, Output::kNone);
  append(*e, a, std::span(tokens).subspan(40), 1, Output::kNone);
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  if (c.hidden != GGML_TYPE_COUNT) {
    EXPECT_EQ(sink.hidden_type, c.hidden);
  }

  UploadRing ring(*e);
  const SeqId b = new_sequence(*e);
  HCACHE_EXPECT_OK(e->reserve_rows(b, 60));
  for (int layer = 0; layer < e->n_layer(); ++layer) {
    // Slices that don't match the steps of the capture.
    restore_hidden(*e, ring, sink.saved[a], sink.hidden_type, b, layer, 0, 60, 25);
  }
  double worst = 0;
  double largest = 0;
  size_t n_different[2] = {0, 0};
  for (int layer = 0; layer < e->n_layer(); ++layer) {
    for (const int part : {0, 1}) {
      const int64_t first = part == 0 ? 0 : 40;
      const int64_t n = part == 0 ? 40 : 20;
      const Row was = widen(GGML_TYPE_F16, read_kv(*e, a, layer, first, n));
      const Row is = widen(GGML_TYPE_F16, read_kv(*e, b, layer, first, n));
      for (size_t i = 0; i < was.size(); ++i) {
        if (was[i] != is[i]) ++n_different[part];
        largest = std::max<double>(largest, std::abs(was[i]));
      }
      worst = std::max(worst, max_difference(was, is));
    }
  }
  const double values = 2.0 * e->n_layer() * e->model().hparams().n_embd_kv();
  const double prefilled = static_cast<double>(n_different[0]) / (40 * values);
  const double decoded = static_cast<double>(n_different[1]) / (20 * values);
  RecordProperty("prefilled_different", std::to_string(prefilled));
  RecordProperty("decoded_different", std::to_string(decoded));
  RecordProperty("relative", std::to_string(worst / largest));
  EXPECT_LE(prefilled, c.prefilled);
  EXPECT_LE(decoded, c.decoded);
  EXPECT_LE(worst / largest, c.relative);

  // The tap itself changes nothing where it is lossless.
  if (c.prefilled == 0 && c.decoded == 0) {
    EXPECT_TRUE(same_kv(read_kv(*e, a), read_kv(*e, plain)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Exact, HiddenTypeTest,
    ::testing::Values(TypeCase{"llama", 2, GGML_TYPE_Q4_0}, TypeCase{"llama", 4, GGML_TYPE_Q4_1},
                      TypeCase{"llama", 1, GGML_TYPE_Q8_0}, TypeCase{"qwen2", 2, GGML_TYPE_Q5_1},
                      TypeCase{"qwen3", 2, GGML_TYPE_Q5_0}, TypeCase{"falcon", 1, GGML_TYPE_Q4_0},
                      TypeCase{"falcon", 4, GGML_TYPE_Q8_0}, TypeCase{"opt", 4, GGML_TYPE_Q8_0}),
    [](const auto& info) { return info.param.name(); });
// Weights whose products depend on the number of rows in the step.
INSTANTIATE_TEST_SUITE_P(
    Native, HiddenTypeTest,
    ::testing::Values(TypeCase{"llama", 2, GGML_TYPE_F32, GGML_TYPE_COUNT, false, 0, 0.005, 0.001},
                      TypeCase{"llama", 2, GGML_TYPE_F16, GGML_TYPE_COUNT, false, 0, 0.005, 0.001},
                      TypeCase{"llama", 2, GGML_TYPE_BF16, GGML_TYPE_COUNT, false, 0, 0.005, 0.001},
                      TypeCase{"llama", 2, GGML_TYPE_Q4_K, GGML_TYPE_COUNT, false, 0, 0.005, 0.001},
                      TypeCase{"llama", 2, GGML_TYPE_Q6_K, GGML_TYPE_COUNT, false, 0, 0.005, 0.001},
                      TypeCase{"qwen2", 2, GGML_TYPE_F16, GGML_TYPE_COUNT, false, 0, 0.005, 0.001},
                      TypeCase{"opt", 4, GGML_TYPE_F16, GGML_TYPE_COUNT, false, 0, 0.005, 0.001}),
    [](const auto& info) { return info.param.name(); });
// Types that lose something, on purpose.
INSTANTIATE_TEST_SUITE_P(
    Chosen, HiddenTypeTest,
    ::testing::Values(TypeCase{"llama", 2, GGML_TYPE_Q8_0, GGML_TYPE_F32, false, 0, 0},
                      TypeCase{"llama", 2, GGML_TYPE_Q8_0, GGML_TYPE_F16, false, 1, 1},
                      TypeCase{"llama", 2, GGML_TYPE_Q8_0, GGML_TYPE_BF16, false, 1, 1},
                      TypeCase{"llama", 2, GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, false, 1, 1},
                      TypeCase{"llama", 2, GGML_TYPE_F16, GGML_TYPE_Q8_0, false, 1, 1},
                      TypeCase{"llama", 2, GGML_TYPE_Q8_0, GGML_TYPE_COUNT, true, 0, 0},
                      TypeCase{"llama", 2, GGML_TYPE_Q4_1, GGML_TYPE_COUNT, true, 1, 1},
                      TypeCase{"llama", 2, GGML_TYPE_Q4_K, GGML_TYPE_COUNT, true, 1, 1},
                      TypeCase{"llama", 2, GGML_TYPE_F16, GGML_TYPE_COUNT, true, 0, 0.005, 0.001}),
    [](const auto& info) { return info.param.name(); });

// The real model: thirty layers, Q4_1, hidden as Q8_1.
TEST(SmolLM2, RestoresBitForBitFromHiddenAndFromKv) {
  const model::Model& model = smollm2();
  const std::unique_ptr<Engine> e = make_engine(model, {.arena_tokens = 300, .max_batch_rows = 64});
  EXPECT_EQ(e->native_hidden_type(0), GGML_TYPE_Q8_1);
  RecordingSink sink;
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden | kTapKv)));
  const Tokens tokens = random_tokens(model, 44, 1);
  const Tokens more = random_tokens(model, 3, 2);
  const Conversation c = converse(*e, tokens);
  HCACHE_EXPECT_OK(e->synchronize());
  const std::vector<Bytes> expected_kv = read_kv(*e, c.seq);
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  const std::vector<Row> expected = append(*e, c.seq, more, 1);
  for (const int slice : {64, 17}) {
    UploadRing ring(*e);
    const SeqId seq = new_sequence(*e);
    HCACHE_EXPECT_OK(e->reserve_rows(seq, c.n));
    for (int layer = 0; layer < e->n_layer(); ++layer) {
      if (slice == 17 && layer % 3 == 2) {
        restore_kv(*e, ring, sink.saved[c.seq], seq, layer, 0, c.n);
      } else {
        restore_hidden(*e, ring, sink.saved[c.seq], GGML_TYPE_Q8_1, seq, layer, 0, c.n, slice);
      }
    }
    EXPECT_TRUE(same_kv(read_kv(*e, seq), expected_kv)) << "slices of " << slice;
    EXPECT_TRUE(same_rows(append(*e, seq, more, 1), expected)) << "slices of " << slice;
    HCACHE_EXPECT_OK(e->release_sequence(seq));
  }
}

// More tokens than the table of layer 0 holds: it begins anew, and every row stays right.
TEST(SmolLM2, TheTokenTableOverflowsWithoutHarm) {
  const model::Model& model = smollm2();
  const EngineOptions options = {.arena_tokens = 1024, .max_batch_rows = 512};
  const std::unique_ptr<Engine> e = make_engine(model, options);
  const std::unique_ptr<Engine> fresh = make_engine(model, options);
  const auto layer_0 = [](Engine& engine, const Tokens& tokens) {
    const SeqId seq = new_sequence(engine);
    HCACHE_EXPECT_OK(engine.reserve_rows(seq, static_cast<int64_t>(tokens.size())));
    const BatchItem item{.seq = seq, .tokens = tokens, .first_pos = 0, .output = Output::kNone};
    Step step = engine.prepare({&item, 1}).value();
    HCACHE_EXPECT_OK(engine.finish_with_kv(step, 0));
    Bytes kv = read_kv(engine, seq, 0, 0, static_cast<int>(tokens.size()));
    HCACHE_EXPECT_OK(engine.release_sequence(seq));
    return kv;
  };
  const int n_vocab = model.hparams().n_vocab;
  for (int first = 0; first < 16 * 1024; first += 512) {
    Tokens tokens(512);
    // Every other one was met before.
    for (int i = 0; i < 512; ++i) {
      tokens[static_cast<size_t>(i)] = (i % 2 == 0 ? first + i : first / 2 + i / 2) % n_vocab;
    }
    const Bytes kv = layer_0(*e, tokens);
    if (first % 4096 != 0) continue;
    fresh->forget_tokens();
    EXPECT_EQ(kv, layer_0(*fresh, tokens)) << "from token " << first;
    EXPECT_EQ(kv, layer_0(*e, tokens)) << "again, from token " << first;
  }
}

}  // namespace
}  // namespace hcache::engine
