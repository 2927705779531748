// Several stages give the bits of one, on one device and on several: logits, arena, captured rows,
// restoration.
#include <memory>
#include <string>
#include <vector>

#include "engine_restore_testing.h"
#include "rpc_server.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

std::unique_ptr<Engine> staged(const model::Model& model, const std::vector<int>& stages,
                               AttentionKind attention = AttentionKind::kAuto) {
  return make_engine(
      model,
      {.arena_tokens = 400, .max_batch_rows = 64, .attention = attention, .stage_layers = stages});
}

// A layer from tokens, one from hidden states, the others from K and V; other steps run between.
void restore_each_way(Engine& e, const SavedRows& saved, std::span<const int32_t> tokens,
                      ggml_type type, SeqId seq) {
  UploadRing ring(e);
  const auto n = static_cast<int64_t>(tokens.size());
  HCACHE_EXPECT_OK(e.reserve_rows(seq, n));
  const SeqId other = new_sequence(e);
  const BatchItem item{.seq = seq, .tokens = tokens, .first_pos = 0, .output = Output::kNone};
  Step step = e.prepare({&item, 1}).value();
  HCACHE_EXPECT_OK(e.run_layers(step, 0, 1));
  append(e, other, tokens.first(7), 64, Output::kNone);
  HCACHE_EXPECT_OK(e.finish_with_kv(step, 1));
  for (int layer = 2; layer < e.n_layer(); ++layer) {
    restore_hidden(e, ring, saved, type, seq, layer, 0, n / 2, 9);
    append(e, other, tokens.first(1), 64, Output::kNone);
    restore_kv(e, ring, saved, seq, layer, n / 2, n - n / 2);
  }
  HCACHE_EXPECT_OK(e.release_sequence(other));
}

Outcome run(const model::Model& model, const std::vector<int>& stages,
            AttentionKind attention = AttentionKind::kAuto) {
  Outcome out;
  const std::unique_ptr<Engine> e = staged(model, stages, attention);
  const Tokens tokens = random_tokens(model, 50, 1);
  const Tokens more = random_tokens(model, 5, 2);
  RecordingSink sink;
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden | kTapKv)));
  const SeqId seq = new_sequence(*e);
  out.logits = append(*e, seq, std::span(tokens).first(40), 64);
  for (const Row& row : append(*e, seq, std::span(tokens).subspan(40), 1)) {
    out.logits.push_back(row);
  }
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  out.kv = read_kv(*e, seq);
  out.saved = sink.saved[seq];

  const SeqId again = new_sequence(*e);
  restore_each_way(*e, out.saved, tokens, sink.hidden_type, again);
  out.restored_kv = read_kv(*e, again);
  out.restored_logits = append(*e, again, more, 2);
  return out;
}

TEST(Stages, GiveTheBitsOfOne) {
  for (const auto& [arch, n_head_kv, type] :
       {std::tuple("llama", 2, GGML_TYPE_Q4_1), std::tuple("llama", 4, GGML_TYPE_F16),
        std::tuple("opt", 4, GGML_TYPE_Q8_0), std::tuple("falcon", 1, GGML_TYPE_Q4_K)}) {
    SCOPED_TRACE(std::string(arch) + " " + ggml_type_name(type));
    const model::Model& model = tiny_model(arch, n_head_kv, type);
    const Outcome one = run(model, {});
    if (type != GGML_TYPE_F16 && type != GGML_TYPE_Q4_K) {
      EXPECT_TRUE(same_kv(one.restored_kv, one.kv)) << "recomputation is exact with these weights";
    }
    std::vector<std::vector<int>> cuts;
    if (model.hparams().n_layer == 3) cuts = {{1, 2}, {2, 1}, {1, 1, 1}};
    if (model.hparams().n_layer == 2) cuts = {{1, 1}};
    ASSERT_FALSE(cuts.empty());
    for (const std::vector<int>& stages : cuts) {
      SCOPED_TRACE(std::to_string(stages.size()) + " stages");
      const Outcome several = run(model, stages);
      expect_same(several, one);
    }
  }
}

// Steps that stop between the layers of different stages keep their rows, whichever runs first.
TEST(Stages, StepsInterleaveBetweenAnyLayers) {
  const model::Model& model = tiny_model("llama", 2, GGML_TYPE_Q8_0);
  const std::unique_ptr<Engine> e = staged(model, {1, 1, 1});
  const Tokens tokens = random_tokens(model, 30, 1);
  const SeqId plain = new_sequence(*e);
  const std::vector<Row> expected = append(*e, plain, tokens, 64);
  for (int stop_a = 1; stop_a <= e->n_layer(); ++stop_a) {
    for (int stop_b = 1; stop_b <= e->n_layer(); ++stop_b) {
      SCOPED_TRACE(std::to_string(stop_a) + " " + std::to_string(stop_b));
      const SeqId a = new_sequence(*e);
      const SeqId b = new_sequence(*e);
      const BatchItem item_a{.seq = a, .tokens = tokens, .output = Output::kAll};
      const BatchItem item_b{.seq = b, .tokens = tokens, .output = Output::kAll};
      Step step_a = e->prepare({&item_a, 1}).value();
      Step step_b = e->prepare({&item_b, 1}).value();
      HCACHE_EXPECT_OK(e->run_layers(step_a, 0, stop_a));
      HCACHE_EXPECT_OK(e->run_layers(step_b, 0, stop_b));
      HCACHE_EXPECT_OK(e->run_layers(step_a, stop_a, e->n_layer()));
      const std::vector<Row> rows_a = copy(e->finish(step_a).value());
      HCACHE_EXPECT_OK(e->run_layers(step_b, stop_b, e->n_layer()));
      const std::vector<Row> rows_b = copy(e->finish(step_b).value());
      EXPECT_TRUE(same_rows(rows_a, expected));
      EXPECT_TRUE(same_rows(rows_b, expected));
      HCACHE_EXPECT_OK(e->release_sequence(a));
      HCACHE_EXPECT_OK(e->release_sequence(b));
    }
  }
}

// Two sequences restored call by call beside each other: each has a slice of its own.
TEST(Stages, RestorationsInterleave) {
  for (const std::vector<int>& stages : {std::vector<int>{}, std::vector<int>{1, 2}}) {
    const model::Model& model = tiny_model("llama", 2, GGML_TYPE_Q8_0);
    const std::unique_ptr<Engine> e = staged(model, stages);
    RecordingSink sink;
    HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden)));
    const Conversation c = converse(*e, random_tokens(model, 40, 1));
    HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
    const SavedRows& first = sink.saved[c.seq];
    const SavedRows& second = sink.saved[c.other];
    const int64_t n = std::min(e->length(c.seq), e->length(c.other));
    UploadRing ring(*e);
    std::vector<SeqId> restored;
    for (int i = 0; i < 4; ++i) {
      restored.push_back(new_sequence(*e));
      HCACHE_EXPECT_OK(e->reserve_rows(restored.back(), n));
    }
    const auto saved_for = [&](size_t i) -> const SavedRows& {
      return i % 2 == 0 ? first : second;
    };
    for (int layer = 0; layer < e->n_layer(); ++layer) {
      for (int64_t row = 0; row < n; ++row) {
        for (size_t i = 0; i < restored.size(); ++i) {
          ring.hold(e->stage_hidden(restored[i], layer, static_cast<int>(row), 1, sink.hidden_type,
                                    ring.put(saved_for(i).layers[layer].hidden, row, 1)));
        }
      }
      for (const SeqId seq : restored) {
        HCACHE_EXPECT_OK(e->project_staged(seq, layer, 0, static_cast<int>(n), sink.hidden_type));
      }
    }
    for (size_t i = 0; i < restored.size(); ++i) {
      for (int layer = 0; layer < e->n_layer(); ++layer) {
        EXPECT_EQ(read_kv(*e, restored[i], layer, 0, n),
                  read_kv(*e, i % 2 == 0 ? c.seq : c.other, layer, 0, n))
            << "sequence " << i << " layer " << layer;
      }
    }
  }
}

// Each layer is computed where its weights are, whatever the device's number of threads.
TEST(Devices, TwoCpusGiveTheBitsOfOne) {
  for (const auto& [arch, n_head_kv, type, n_threads] :
       {std::tuple("llama", 2, GGML_TYPE_Q4_1, 1), std::tuple("llama", 4, GGML_TYPE_F16, 1),
        std::tuple("opt", 4, GGML_TYPE_Q8_0, 2)}) {
    SCOPED_TRACE(std::string(arch) + " " + ggml_type_name(type));
    const Outcome one = run(tiny_model(arch, n_head_kv, type), {});
    const std::unique_ptr<LoadedModel> two =
        load_model(tiny_model_path(arch, n_head_kv, type),
                   {open_device("cpu", 1), open_device("cpu", n_threads)}, {1, 1});
    ASSERT_EQ(two->model->devices().size(), 2U);
    const std::unique_ptr<Engine> e = staged(*two->model, {});
    EXPECT_EQ(e->stage_ranges().size(), 2U);
    expect_same(run(*two->model, {}), one);
  }
}

// With the same kernels on both ends answers don't depend on which layers are where.
TEST(Devices, TwoServersGiveTheBitsOfOne) {
  const auto first = hcache::testing::RpcServer::shared();
  const auto second = hcache::testing::RpcServer::second();
  ASSERT_TRUE(first.ok() && second.ok());
  const std::string path = tiny_model_path("llama", 2, GGML_TYPE_Q8_0);
  const auto a = open_device((*first)->device());
  const auto b = open_device((*second)->device());
  const Outcome one = run(*load_model(path, (*first)->device())->model, {});
  expect_same(run(*load_model(path, {a, b}, {2, 1})->model, {}), one);
  expect_same(run(*load_model(path, {a, b}, {1, 2})->model, {1, 1, 1}), one);
  expect_same(run(*load_model(path, {b, a}, {1, 1})->model, {}), one);
}

// With a type of weights that ggml multiplies on the CPU too, by one kernel for any rows.
TEST(Devices, ACpuAndTwoServersGiveTheBitsOfOneServer) {
  const auto first = hcache::testing::RpcServer::shared();
  const auto second = hcache::testing::RpcServer::second();
  ASSERT_TRUE(first.ok() && second.ok());
  const std::string path = tiny_model_path("llama", 2, GGML_TYPE_NVFP4);
  const auto a = open_device((*first)->device());
  const auto b = open_device((*second)->device());
  const Outcome one = run(*load_model(path, (*first)->device())->model, {});
  // The server has no repacked weights, so the CPU has none either.
  model::LoadOptions options;
  options.use_extra_buffers = false;
  const auto cpu = open_device("cpu");
  options.placement.devices = {cpu.get(), a.get(), b.get()};
  const auto mixed = model::Model::load(path, *cpu, options).value();
  ASSERT_EQ(mixed->devices().size(), 3U);
  expect_same(run(*mixed, {}, AttentionKind::kGgml), one);
}

TEST(Devices, OurAttentionRunsWhereItApplies) {
  const auto server = hcache::testing::RpcServer::shared();
  ASSERT_TRUE(server.ok()) << server.status().to_string();
  const auto mixed = load_model(tiny_model_path("llama", 2, GGML_TYPE_Q8_0),
                                {open_device("cpu"), open_device((*server)->device())}, {2, 1});
  const std::unique_ptr<Engine> e = staged(*mixed->model, {});
  EXPECT_TRUE(e->uses_own_attention(1));
  EXPECT_FALSE(e->uses_own_attention(2));
  EXPECT_EQ(e->stage_ranges(), (std::vector<std::pair<int, int>>{{0, 2}, {2, 3}}));
  const Result<std::unique_ptr<Engine>> forced =
      Engine::create(*mixed->model, {.attention = AttentionKind::kOurs});
  EXPECT_EQ(forced.status().code(), Code::kUnimplemented);
  // Logits stay within what the two attention kernels differ by.
  const Outcome one = run(tiny_model("llama", 2, GGML_TYPE_Q8_0), {});
  const Outcome two = run(*mixed->model, {});
  EXPECT_LT(mean_kl(one.logits, two.logits), 1e-4);
  EXPECT_LT(mean_kl(one.restored_logits, two.restored_logits), 1e-4);
}

TEST(Stages, MustHaveAllLayers) {
  const model::Model& model = tiny_model("llama", 2, GGML_TYPE_Q8_0);
  for (const std::vector<int>& stages : {std::vector<int>{1}, std::vector<int>{2, 2},
                                         std::vector<int>{3, 0}, std::vector<int>{4, -1}}) {
    EXPECT_EQ(Engine::create(model, {.stage_layers = stages}).status().code(),
              Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace hcache::engine
