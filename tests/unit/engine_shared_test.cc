// Devices that share every layer (tensor parallelism): answers within the bounds of one device's,
// capture and restoration as exact as there, state that moves between splits, and devices that have
// work at the same time.
#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine_restore_testing.h"
#include "late_compute_queue.h"
#include "late_copy_queue.h"
#include "rpc_server.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int kRows = 64;  // of a step, at most

// A random model whose heads and columns two devices can share in blocks of any weight type.
std::string wide_model_path(const std::string& arch, int n_head_kv, ggml_type type) {
  static const TempDir dir;
  const std::filesystem::path path =
      dir.path() / (arch + std::to_string(n_head_kv) + ggml_type_name(type) + ".gguf");
  if (!std::filesystem::exists(path)) {
    model::SynthOptions options;
    options.shape = model::tiny_shape(*model::find_decoder_spec(arch), n_head_kv);
    options.shape.n_embd = 512;
    options.shape.n_head = 8;
    options.shape.n_ff = 1024;
    options.type = type;
    options.n_threads = 1;
    const Status status = model::synthesise_model(options, path.string());
    if (!status.ok()) die(status.to_string());
  }
  return path.string();
}

std::unique_ptr<LoadedModel> shared_model(const std::string& path,
                                          std::vector<std::shared_ptr<model::Device>> devices,
                                          const std::vector<double>& split = {}) {
  auto loaded = std::make_unique<LoadedModel>();
  loaded->devices = std::move(devices);
  model::LoadOptions options;
  options.placement.share_layers = true;
  options.placement.split = split;
  for (const auto& device : loaded->devices) options.placement.devices.push_back(device.get());
  Result<std::unique_ptr<model::Model>> model =
      model::Model::load(path, *loaded->devices[0], options);
  if (!model.ok()) die(model.status().to_string());
  loaded->model = std::move(model).value();
  return loaded;
}

std::unique_ptr<LoadedModel> on_cpus(const std::string& path, const std::vector<double>& split) {
  std::vector<std::shared_ptr<model::Device>> devices;
  for (size_t i = 0; i < split.size(); ++i) devices.push_back(open_device("cpu", 1));
  return shared_model(path, std::move(devices), split);
}

EngineOptions small(AttentionKind attention = AttentionKind::kAuto,
                    ggml_type kv_type = GGML_TYPE_F16) {
  return {.arena_tokens = 500, .kv_type = kv_type, .max_batch_rows = kRows, .attention = attention};
}

// A prompt and decoded tokens.
struct Answered {
  SeqId seq = -1;
  std::vector<Row> logits;
};
Answered answer(Engine& e, const Tokens& tokens) {
  Answered run{.seq = new_sequence(e), .logits = {}};
  const size_t prompt = tokens.size() - 10;
  run.logits = append(e, run.seq, std::span(tokens).first(prompt), kRows);
  for (Row& row : append(e, run.seq, std::span(tokens).subspan(prompt), 1)) {
    run.logits.push_back(std::move(row));
  }
  return run;
}

// The same with all that is captured.
struct SavedRun {
  std::unique_ptr<Engine> engine;
  RecordingSink sink;
  Answered run;
  [[nodiscard]] const SavedRows& saved() { return sink.saved[run.seq]; }
};
std::unique_ptr<SavedRun> save(const model::Model& model, const Tokens& tokens,
                               const EngineOptions& options = small()) {
  auto out = std::make_unique<SavedRun>();
  out->engine = make_engine(model, options);
  HCACHE_EXPECT_OK(out->engine->set_capture(&out->sink, tap(*out->engine, kTapHidden | kTapKv)));
  out->run = answer(*out->engine, tokens);
  HCACHE_EXPECT_OK(out->engine->set_capture(nullptr, {}));
  return out;
}

// A new sequence with the rows of layers [0, n_recomputed) from tokens, of the next one and every
// second from hidden states, of the others from K and V.
SeqId restore(Engine& e, const SavedRows& saved, ggml_type type, const Tokens& tokens,
              int n_recomputed) {
  UploadRing ring(e);
  const SeqId seq = new_sequence(e);
  const auto n = static_cast<int64_t>(tokens.size());
  HCACHE_EXPECT_OK(e.reserve_rows(seq, n));
  for (int64_t first = 0; n_recomputed > 0 && first < n; first += kRows) {
    const auto rows = static_cast<size_t>(std::min<int64_t>(kRows, n - first));
    const BatchItem item{.seq = seq,
                         .tokens = std::span(tokens).subspan(static_cast<size_t>(first), rows),
                         .first_pos = first,
                         .output = Output::kNone};
    Step step = e.prepare({&item, 1}).value();
    HCACHE_EXPECT_OK(e.run_layers(step, 0, n_recomputed - 1));
    HCACHE_EXPECT_OK(e.finish_with_kv(step, n_recomputed - 1));
  }
  for (int layer = n_recomputed; layer < e.n_layer(); ++layer) {
    if ((layer - n_recomputed) % 2 == 0) {
      restore_hidden(e, ring, saved, type, seq, layer, 0, n, 57);
    } else {
      restore_kv(e, ring, saved, seq, layer, 0, n);
    }
  }
  return seq;
}

// What is written without being asked for makes these differ.
::testing::AssertionResult same_state(Engine& a, SeqId seq_a, Engine& b, SeqId seq_b) {
  return same_kv(read_kv(a, seq_a), read_kv(b, seq_b));
}

const std::vector<std::tuple<const char*, int>>& architectures() {
  static const std::vector<std::tuple<const char*, int>> all = {
      {"llama", 8},     {"llama", 4},   {"qwen2", 4}, {"qwen3", 4},   {"falcon", 8},    {"opt", 8},
      {"command-r", 4}, {"granite", 4}, {"phi3", 8},  {"gptneox", 8}, {"starcoder2", 4}};
  return all;
}

// How far answers may be from one device's, in nats. Sums come in another order, and what a product
// of quantised weights multiplies is rounded anew: to 8 bits with a scale for 32 or for 256 values.
double bound(ggml_type type) {
  return type == GGML_TYPE_F16 ? 1e-6 : type == GGML_TYPE_Q8_0 ? 1e-4 : 1e-3;
}

TEST(SharedLayers, AnswerAsOneDevice) {
  for (const auto& [arch, n_head_kv] : architectures()) {
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K}) {
      SCOPED_TRACE(std::string(arch) + std::to_string(n_head_kv) + " " + ggml_type_name(type));
      const std::string path = wide_model_path(arch, n_head_kv, type);
      const std::unique_ptr<LoadedModel> one = load_model(path);
      const Tokens tokens = random_tokens(*one->model, 40, 1);
      const std::unique_ptr<Engine> whole = make_engine(*one->model, small());
      const Answered expected = answer(*whole, tokens);
      // The bounds tell answers apart.
      std::vector<Row> others = expected.logits;
      std::rotate(others.begin(), others.begin() + 1, others.end());
      EXPECT_GT(mean_kl(expected.logits, others), 100 * bound(type));
      for (const std::vector<double>& split : {std::vector<double>{1, 1}, {3, 1}, {0, 1, 1}}) {
        const std::unique_ptr<LoadedModel> two = on_cpus(path, split);
        ASSERT_EQ(two->model->parts().size(), 2U);
        const std::unique_ptr<Engine> e = make_engine(*two->model, small());
        const Answered run = answer(*e, tokens);
        ASSERT_EQ(run.logits.size(), expected.logits.size());
        EXPECT_LT(mean_kl(expected.logits, run.logits), bound(type));
        // Deterministic, whatever else runs.
        const std::unique_ptr<Engine> again = make_engine(*two->model, small());
        append(*again, new_sequence(*again), std::span(tokens).first(9), 9);
        EXPECT_TRUE(same_rows(answer(*again, tokens).logits, run.logits));
      }
    }
  }
}

// Projected, loaded and recomputed rows are the uninterrupted run's, and so is what follows.
TEST(SharedLayers, RestoreWhatWasComputed) {
  for (const auto& [arch, n_head_kv] : architectures()) {
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K}) {
      SCOPED_TRACE(std::string(arch) + std::to_string(n_head_kv) + " " + ggml_type_name(type));
      const std::unique_ptr<LoadedModel> two =
          on_cpus(wide_model_path(arch, n_head_kv, type), {1, 1});
      const Tokens tokens = random_tokens(*two->model, 90, 1);
      const Tokens more = random_tokens(*two->model, 5, 2);
      const std::unique_ptr<SavedRun> saved = save(*two->model, tokens);
      Engine& e = *saved->engine;
      const SeqId fork = e.fork_sequence(saved->run.seq, 90).value();
      const std::vector<Row> expected = append(e, fork, more, 2);
      // The products of other rows recompute with other bits where their kernel depends on how
      // many rows there are.
      const int most = type == GGML_TYPE_Q8_0 ? 2 : 0;
      for (int n_recomputed = 0; n_recomputed <= most; ++n_recomputed) {
        SCOPED_TRACE(std::to_string(n_recomputed) + " layers recomputed");
        const SeqId seq = restore(e, saved->saved(), saved->sink.hidden_type, tokens, n_recomputed);
        EXPECT_TRUE(same_state(e, seq, e, saved->run.seq));
        EXPECT_TRUE(same_rows(append(e, seq, more, 2), expected));
      }
    }
  }
}

TEST(SharedLayers, KvOfEveryTypeIsCapturedWhole) {
  const std::unique_ptr<LoadedModel> two =
      on_cpus(wide_model_path("llama", 4, GGML_TYPE_Q8_0), {3, 1});
  const Tokens tokens = random_tokens(*two->model, 30, 1);
  for (const ggml_type kv_type : {GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0}) {
    SCOPED_TRACE(ggml_type_name(kv_type));
    const std::unique_ptr<SavedRun> saved =
        save(*two->model, tokens, small(AttentionKind::kAuto, kv_type));
    Engine& e = *saved->engine;
    for (int layer = 0; layer < e.n_layer(); ++layer) {
      Bytes all;
      for (const auto* half : {&saved->saved().layers[layer].k, &saved->saved().layers[layer].v}) {
        for (const auto& [pos, row] : *half) all.insert(all.end(), row.begin(), row.end());
      }
      EXPECT_TRUE(all == read_kv(e, saved->run.seq, layer, 0, e.length(saved->run.seq)));
    }
  }
}

// What one device saved two restore, and the other way round: the very rows of K and V, and from
// hidden states what the saving device projects.
TEST(SharedLayers, StateMovesBetweenSplits) {
  const std::string path = wide_model_path("llama", 4, GGML_TYPE_Q8_0);
  const std::unique_ptr<LoadedModel> one = load_model(path);
  const std::unique_ptr<LoadedModel> two = on_cpus(path, {1, 1});
  const std::unique_ptr<LoadedModel> uneven = on_cpus(path, {1, 3});
  const Tokens tokens = random_tokens(*one->model, 80, 1);
  const Tokens more = random_tokens(*one->model, 5, 2);
  const std::vector<const model::Model*> models = {one->model.get(), two->model.get(),
                                                   uneven->model.get()};
  for (const model::Model* from : models) {
    const std::unique_ptr<SavedRun> saved = save(*from, tokens);
    const std::vector<Row> expected = append(*saved->engine, saved->run.seq, more, 2);
    HCACHE_EXPECT_OK(saved->engine->trim_sequence(saved->run.seq, 80));
    for (const model::Model* to : models) {
      const std::unique_ptr<Engine> e = make_engine(*to, small());
      const SeqId seq = restore(*e, saved->saved(), saved->sink.hidden_type, tokens, 0);
      EXPECT_TRUE(same_state(*e, seq, *saved->engine, saved->run.seq));
      EXPECT_LT(mean_kl(expected, append(*e, seq, more, 2)), 1e-4);
    }
  }
}

// Rows that are moved, copied and turned are so on every device.
TEST(SharedLayers, SequencesAreChangedOnAllDevices) {
  const std::unique_ptr<LoadedModel> two =
      on_cpus(wide_model_path("llama", 4, GGML_TYPE_Q8_0), {1, 1});
  const Tokens tokens = random_tokens(*two->model, 60, 1);
  const Tokens more = random_tokens(*two->model, 4, 2);
  const std::unique_ptr<Engine> e = make_engine(*two->model, small());
  const SeqId plain = new_sequence(*e);
  append(*e, plain, std::span(tokens).first(20), kRows);
  const SeqId behind = new_sequence(*e);
  append(*e, behind, tokens, kRows);
  append(*e, plain, std::span(tokens).subspan(20), kRows);  // moves one of them
  EXPECT_TRUE(same_state(*e, plain, *e, behind));
  const SeqId fork = e->fork_sequence(behind, 40).value();
  append(*e, fork, std::span(tokens).subspan(40), kRows);
  EXPECT_TRUE(same_state(*e, fork, *e, behind));
  // A shift changes K on both: what follows is near an answer to the shorter text.
  HCACHE_EXPECT_OK(e->erase_range(fork, 0, 30));
  const std::unique_ptr<LoadedModel> one = load_model(wide_model_path("llama", 4, GGML_TYPE_Q8_0));
  const std::unique_ptr<Engine> whole = make_engine(*one->model, small());
  const SeqId reference = new_sequence(*whole);
  append(*whole, reference, tokens, kRows);
  HCACHE_EXPECT_OK(whole->erase_range(reference, 0, 30));
  EXPECT_LT(mean_kl(append(*whole, reference, more, 4), append(*e, fork, more, 4)), 1e-4);
}

// Steps that stop between any two layers, as a prefill behind a restoration does, are computed and
// captured as one after the other.
TEST(SharedLayers, StepsInterleaveBetweenAnyLayers) {
  const std::unique_ptr<LoadedModel> two =
      on_cpus(wide_model_path("llama", 4, GGML_TYPE_Q8_0), {1, 1});
  const Tokens tokens = random_tokens(*two->model, 30, 1);
  RecordingSink sink;
  const std::unique_ptr<Engine> e = make_engine(*two->model, small());
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden | kTapKv)));
  const SeqId plain = new_sequence(*e);
  const std::vector<Row> expected = append(*e, plain, tokens, kRows);
  for (int stop_a = 1; stop_a <= e->n_layer(); ++stop_a) {
    for (int stop_b = 1; stop_b <= e->n_layer(); ++stop_b) {
      SCOPED_TRACE(std::to_string(stop_a) + " " + std::to_string(stop_b));
      const std::array<SeqId, 2> seqs = {new_sequence(*e), new_sequence(*e)};
      const BatchItem item_a{.seq = seqs[0], .tokens = tokens, .output = Output::kAll};
      const BatchItem item_b{.seq = seqs[1], .tokens = tokens, .output = Output::kAll};
      Step step_a = e->prepare({&item_a, 1}).value();
      Step step_b = e->prepare({&item_b, 1}).value();
      HCACHE_EXPECT_OK(e->run_layers(step_a, 0, stop_a));
      HCACHE_EXPECT_OK(e->run_layers(step_b, 0, stop_b));
      HCACHE_EXPECT_OK(e->run_layers(step_a, stop_a, e->n_layer()));
      EXPECT_TRUE(same_rows(copy(e->finish(step_a).value()), expected));
      HCACHE_EXPECT_OK(e->run_layers(step_b, stop_b, e->n_layer()));
      EXPECT_TRUE(same_rows(copy(e->finish(step_b).value()), expected));
      HCACHE_EXPECT_OK(e->synchronize());
      for (const SeqId seq : seqs) {
        for (int layer = 0; layer < e->n_layer(); ++layer) {
          EXPECT_EQ(sink.saved[seq].layers[layer].hidden, sink.saved[plain].layers[layer].hidden);
          EXPECT_EQ(sink.saved[seq].layers[layer].k, sink.saved[plain].layers[layer].k);
          EXPECT_EQ(sink.saved[seq].layers[layer].v, sink.saved[plain].layers[layer].v);
        }
        HCACHE_EXPECT_OK(e->release_sequence(seq));
      }
    }
  }
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
}

// A sink that is full, or steps that end early, cost the capture alone.
TEST(SharedLayers, CapturesThatEndEarlyAreGivenUp) {
  const std::unique_ptr<LoadedModel> two =
      on_cpus(wide_model_path("llama", 4, GGML_TYPE_Q8_0), {1, 1});
  const Tokens tokens = random_tokens(*two->model, 20, 1);
  RecordingSink full(0);
  RecordingSink sink;
  const std::unique_ptr<Engine> e = make_engine(*two->model, small());
  HCACHE_EXPECT_OK(e->set_capture(&full, tap(*e, kTapHidden | kTapKv)));
  const SeqId unsaved = new_sequence(*e);
  const std::vector<Row> expected = append(*e, unsaved, tokens, kRows);
  EXPECT_GT(full.n_refused, 0);
  EXPECT_EQ(full.n_published, 0);
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden | kTapKv)));
  const SeqId seq = new_sequence(*e);
  {
    const BatchItem item{.seq = seq, .tokens = tokens, .output = Output::kAll};
    Step step = e->prepare({&item, 1}).value();
    HCACHE_EXPECT_OK(e->run_layers(step, 0, 2));
    append(*e, new_sequence(*e), tokens, kRows);  // takes the devices' blocks: the rows leave
  }
  EXPECT_EQ(sink.n_dropped, 1);
  EXPECT_TRUE(same_rows(append(*e, seq, tokens, kRows), expected));
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
}

// --- Devices that work at once ----------------------------------------------------------------

// What the devices' queues were given and what they have done.
struct Progress {
  std::vector<int> given;
  std::vector<int> done;
  int alone = 0;  // graphs of the last device that were given while another had nothing to do
};

class NotingQueue : public LateComputeQueue {
 public:
  NotingQueue(model::Device& device, Progress& progress)
      : LateComputeQueue(device), progress_(progress), index_(progress.given.size()) {
    progress.given.push_back(0);
    progress.done.push_back(0);
  }
  ggml_status run(ggml_cgraph* graph) override {
    ++progress_.given[index_];
    if (index_ + 1 == progress_.given.size()) {
      for (size_t i = 0; i < index_; ++i)
        progress_.alone += progress_.given[i] > progress_.done[i] ? 0 : 1;
    }
    const ggml_status status = LateComputeQueue::run(graph);
    give([this] { ++progress_.done[index_]; });
    return status;
  }

 private:
  Progress& progress_;
  const size_t index_;
};

std::unique_ptr<Engine> late_engine(const model::Model& model, Progress& progress) {
  unsigned seed = 0;
  return make_engine(model, small(), [&progress, seed](model::Device& device) mutable {
    auto compute = std::make_unique<NotingQueue>(device, progress);
    auto copy = std::make_unique<LateCopyQueue>(++seed, nullptr, compute.get());
    return DeviceQueues{std::move(compute), std::move(copy)};
  });
}

TEST(SharedLayers, EveryDeviceHasWorkBeforeOneIsWaitedFor) {
  const std::string path = wide_model_path("llama", 4, GGML_TYPE_Q8_0);
  const std::unique_ptr<LoadedModel> two = on_cpus(path, {1, 1});
  const Tokens tokens = random_tokens(*two->model, 40, 1);
  const std::unique_ptr<Engine> plain = make_engine(*two->model, small());
  const Answered expected = answer(*plain, tokens);
  Progress progress;
  const std::unique_ptr<Engine> e = late_engine(*two->model, progress);
  const Answered run = answer(*e, tokens);
  EXPECT_TRUE(same_rows(run.logits, expected.logits));
  EXPECT_EQ(progress.alone, 0);
  // The logits are the first device's alone: its last graph of a step.
  const int n_steps = static_cast<int>(1 + 10);
  EXPECT_EQ(progress.given[1], n_steps * 2 * e->n_layer());
  EXPECT_EQ(progress.given[0], progress.given[1] + n_steps);
}

TEST(SharedLayers, LateQueuesGiveTheSameBits) {
  const std::unique_ptr<LoadedModel> two =
      on_cpus(wide_model_path("qwen2", 4, GGML_TYPE_Q4_K), {1, 1});
  const Tokens tokens = random_tokens(*two->model, 90, 1);
  const std::unique_ptr<SavedRun> expected = save(*two->model, tokens);
  Progress progress;
  const std::unique_ptr<Engine> e = late_engine(*two->model, progress);
  RecordingSink sink;
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden | kTapKv)));
  const Answered run = answer(*e, tokens);
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  EXPECT_TRUE(same_rows(run.logits, expected->run.logits));
  for (int layer = 0; layer < e->n_layer(); ++layer) {
    EXPECT_EQ(sink.saved[run.seq].layers[layer].hidden, expected->saved().layers[layer].hidden);
    EXPECT_EQ(sink.saved[run.seq].layers[layer].k, expected->saved().layers[layer].k);
    EXPECT_EQ(sink.saved[run.seq].layers[layer].v, expected->saved().layers[layer].v);
  }
  const SeqId seq = restore(*e, sink.saved[run.seq], sink.hidden_type, tokens, 0);
  EXPECT_TRUE(same_state(*e, seq, *e, run.seq));
}

// --- What each device is sent -----------------------------------------------------------------

// Counts the bytes that are uploaded to each device.
class CountingCopyQueue : public LateCopyQueue {
 public:
  CountingCopyQueue(unsigned seed, size_t& n_bytes)
      : LateCopyQueue(seed, nullptr), n_bytes_(n_bytes) {}
  Ticket upload(ggml_tensor* dst, size_t offset, const void* src, size_t n_bytes) override {
    n_bytes_ += n_bytes;
    return LateCopyQueue::upload(dst, offset, src, n_bytes);
  }

 private:
  size_t& n_bytes_;
};

TEST(SharedLayers, EachDeviceIsSentItsShareAlone) {
  const std::unique_ptr<LoadedModel> two =
      on_cpus(wide_model_path("llama", 8, GGML_TYPE_Q8_0), {1, 1});
  const Tokens tokens = random_tokens(*two->model, 64, 1);
  const std::unique_ptr<SavedRun> saved = save(*two->model, tokens);
  std::vector<size_t> sent(2);
  size_t index = 0;
  const std::unique_ptr<Engine> e = make_engine(*two->model, small(), [&](model::Device& device) {
    DeviceQueues queues = make_device_queues(device);
    queues.copy = std::make_unique<CountingCopyQueue>(7, sent.at(index++));
    return queues;
  });
  UploadRing ring(*e);
  const SeqId seq = new_sequence(*e);
  HCACHE_EXPECT_OK(e->reserve_rows(seq, 64));
  restore_hidden(*e, ring, saved->saved(), saved->sink.hidden_type, seq, 0, 0, 64, 64);
  const size_t hidden = 64 * e->hidden_row_bytes(saved->sink.hidden_type);
  EXPECT_EQ(sent, (std::vector<size_t>{hidden / 2, hidden / 2}));
  sent = {0, 0};
  restore_kv(*e, ring, saved->saved(), seq, 1, 0, 64);
  const size_t kv = 2 * 64 * e->kv_row_bytes();
  EXPECT_EQ(sent, (std::vector<size_t>{kv / 2, kv / 2}));
  restore_kv(*e, ring, saved->saved(), seq, 2, 0, 64);
  EXPECT_TRUE(same_state(*e, seq, *saved->engine, saved->run.seq));
}

// --- Other devices ----------------------------------------------------------------------------

TEST(SharedLayers, TwoServersShareThem) {
  const auto first = hcache::testing::RpcServer::shared();
  const auto second = hcache::testing::RpcServer::second();
  ASSERT_TRUE(first.ok() && second.ok());
  const std::string path = wide_model_path("llama", 4, GGML_TYPE_Q8_0);
  const auto a = open_device((*first)->device());
  const auto b = open_device((*second)->device());
  const std::unique_ptr<LoadedModel> one = load_model(path, (*first)->device());
  const Tokens tokens = random_tokens(*one->model, 90, 1);
  const std::unique_ptr<SavedRun> whole = save(*one->model, tokens);
  for (const auto& devices : {std::vector<std::shared_ptr<model::Device>>{a, b},
                              std::vector<std::shared_ptr<model::Device>>{open_device("cpu"), a}}) {
    const std::unique_ptr<LoadedModel> two = shared_model(path, devices);
    const std::unique_ptr<SavedRun> saved = save(*two->model, tokens);
    Engine& e = *saved->engine;
    EXPECT_FALSE(e.stages_overlap());
    EXPECT_EQ(e.stage_ranges().size(), 1U);
    EXPECT_LT(mean_kl(whole->run.logits, saved->run.logits), 1e-4);
    const SeqId seq = restore(e, saved->saved(), saved->sink.hidden_type, tokens, 1);
    EXPECT_TRUE(same_state(e, seq, e, saved->run.seq));
  }
}

TEST(SharedLayers, ExcludeStages) {
  const std::unique_ptr<LoadedModel> two =
      on_cpus(wide_model_path("llama", 4, GGML_TYPE_Q8_0), {1, 1});
  EngineOptions options = small();
  options.stage_layers = {1, 2};
  EXPECT_EQ(Engine::create(*two->model, options).status().code(), Code::kUnimplemented);
}

}  // namespace
}  // namespace hcache::engine
