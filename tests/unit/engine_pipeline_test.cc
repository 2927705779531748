// Steps in flight on several stages: the bits of the same steps one after another, and devices that
// have work at the same time.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/pipeline.h"
#include "engine_restore_testing.h"
#include "late_compute_queue.h"
#include "late_copy_queue.h"
#include "rpc_server.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

// What the stages' queues were given and what they have done, by stage.
struct Progress {
  std::vector<int> given;
  std::vector<int> done;
  int overlaps = 0;  // graphs given to a stage while another stage had one to do

  [[nodiscard]] bool busy(size_t stage) const { return given[stage] > done[stage]; }
};

// Does a step's graph when somebody waits for it, and notes when.
class NotingQueue : public LateComputeQueue {
 public:
  NotingQueue(model::Device& device, Progress& progress)
      : LateComputeQueue(device), progress_(progress), stage_(progress.given.size()) {
    progress.given.push_back(0);
    progress.done.push_back(0);
  }
  ggml_status run(ggml_cgraph* graph) override {
    for (size_t other = 0; other < progress_.given.size(); ++other) {
      if (other != stage_ && progress_.busy(other)) ++progress_.overlaps;
    }
    ++progress_.given[stage_];
    const ggml_status status = LateComputeQueue::run(graph);
    give([this] { ++progress_.done[stage_]; });
    return status;
  }
  // A download that nobody waits for gives no logits.
  void download(const ggml_tensor* src, void* dst, size_t n_bytes) override {
    std::memset(dst, 0xFF, n_bytes);
    LateComputeQueue::download(src, dst, n_bytes);
  }

 private:
  Progress& progress_;
  const size_t stage_;
};

// A model on as many CPU devices as it has parts.
std::unique_ptr<LoadedModel> on_cpus(const std::string& path, const std::vector<double>& split) {
  std::vector<std::shared_ptr<model::Device>> devices;
  for (size_t i = 0; i < split.size(); ++i) devices.push_back(open_device("cpu", 1));
  return load_model(path, std::move(devices), split);
}

// An engine whose stages' queues do nothing before they have to.
std::unique_ptr<Engine> late_engine(const model::Model& model, Progress& progress) {
  unsigned seed = 0;
  return make_engine(model, {.arena_tokens = 2000, .max_batch_rows = 64},
                     [&progress, seed](model::Device& device) mutable -> DeviceQueues {
                       auto compute = std::make_unique<NotingQueue>(device, progress);
                       auto copy = std::make_unique<LateCopyQueue>(++seed, nullptr, compute.get());
                       return {std::move(compute), std::move(copy)};
                     });
}

struct Answers {
  std::vector<std::vector<Row>> logits;  // per sequence
  std::vector<std::vector<Bytes>> kv;
};

// Each micro-batch has two sequences; `in_flight` of its steps at a time.
class Decoding {
 public:
  Decoding(Engine& engine, int n_batches) : engine_(engine), pipeline_(engine) {
    for (int i = 0; i < 2 * n_batches; ++i) {
      sequences_.push_back(new_sequence(engine));
      tokens_.push_back(random_tokens(engine.model(), 12 + i, static_cast<unsigned>(i)));
      position_.push_back(0);
    }
    answers.logits.resize(sequences_.size());
  }

  void begin(size_t batch) {
    std::vector<BatchItem> items;
    for (size_t i = 2 * batch; i < 2 * batch + 2; ++i) {
      // A prompt of a few rows, then one at a time.
      const size_t n = position_[i] == 0 ? 5 + i : 1;
      items.push_back({.seq = sequences_[i],
                       .tokens = std::span(tokens_[i]).subspan(position_[i], n),
                       .output = Output::kLast});
      position_[i] += n;
    }
    HCACHE_EXPECT_OK(pipeline_.begin(items));
    batches_.push_back(batch);
  }
  Status finish() {
    const size_t batch = batches_.front();
    batches_.pop_front();
    HCACHE_ASSIGN_OR_RETURN(const Logits logits, pipeline_.finish());
    const std::vector<Row> rows = copy(logits);
    EXPECT_EQ(rows.size(), 2U);
    for (size_t i = 0; i < rows.size(); ++i) answers.logits[2 * batch + i].push_back(rows[i]);
    return {};
  }
  [[nodiscard]] bool has_more(size_t batch) const {
    return position_[2 * batch] < tokens_[2 * batch].size();
  }
  void run(int in_flight) {
    const size_t n_batches = sequences_.size() / 2;
    for (size_t batch = 0; has_more(batch); batch = (batch + 1) % n_batches) {
      if (pipeline_.size() == in_flight) HCACHE_EXPECT_OK(finish());
      begin(batch);
    }
    while (pipeline_.size() > 0) HCACHE_EXPECT_OK(finish());
    for (const SeqId seq : sequences_) answers.kv.push_back(read_kv(engine_, seq));
  }
  Pipeline& pipeline() { return pipeline_; }
  [[nodiscard]] SeqId sequence(size_t i) const { return sequences_[i]; }

  Answers answers;

 private:
  Engine& engine_;
  Pipeline pipeline_;
  std::vector<SeqId> sequences_;
  std::vector<Tokens> tokens_;
  std::vector<size_t> position_;
  std::deque<size_t> batches_;  // in flight
};

void expect_same(const Answers& a, const Answers& b) {
  ASSERT_EQ(a.logits.size(), b.logits.size());
  for (size_t i = 0; i < a.logits.size(); ++i) {
    EXPECT_TRUE(same_rows(a.logits[i], b.logits[i])) << "sequence " << i;
    EXPECT_TRUE(same_kv(a.kv[i], b.kv[i])) << "sequence " << i;
  }
}

TEST(Pipeline, GivesTheBitsOfStepsOneAfterAnother) {
  const std::string path = tiny_model_path("llama", 2, GGML_TYPE_Q8_0);
  for (const std::vector<double>& split :
       {std::vector<double>{2, 1}, std::vector<double>{1, 1, 1}}) {
    SCOPED_TRACE(std::to_string(split.size()) + " stages");
    const auto n = static_cast<int>(split.size());
    const std::unique_ptr<LoadedModel> loaded = on_cpus(path, split);
    Progress one_progress;
    Progress several_progress;
    const std::unique_ptr<Engine> one = late_engine(*loaded->model, one_progress);
    EXPECT_TRUE(one->stages_overlap());
    Decoding expected(*one, n);
    expected.run(1);
    EXPECT_EQ(one_progress.overlaps, 0);
    const std::unique_ptr<Engine> several = late_engine(*loaded->model, several_progress);
    Decoding decoding(*several, n);
    EXPECT_EQ(decoding.pipeline().capacity(), n);
    decoding.run(n);
    expect_same(decoding.answers, expected.answers);
    // But for the first and the last steps, each graph meets one on every other device.
    EXPECT_EQ(several_progress.given, one_progress.given);
    const int n_graphs = several_progress.given[0] * n;
    EXPECT_GE(several_progress.overlaps, (n - 1) * n_graphs / 2 - n * n);
  }
}

TEST(Pipeline, FinishWaitsForItsOwnStep) {
  const std::unique_ptr<LoadedModel> loaded =
      on_cpus(tiny_model_path("llama", 2, GGML_TYPE_Q8_0), {2, 1});
  Progress progress;
  const std::unique_ptr<Engine> engine = late_engine(*loaded->model, progress);
  Decoding decoding(*engine, 2);
  decoding.begin(0);
  EXPECT_EQ(progress.given, (std::vector<int>{1, 0}));
  decoding.begin(1);
  EXPECT_EQ(progress.given, (std::vector<int>{2, 1}));
  EXPECT_TRUE(progress.busy(0));
  EXPECT_TRUE(progress.busy(1));
  HCACHE_EXPECT_OK(decoding.finish());
  EXPECT_EQ(progress.given, (std::vector<int>{2, 2})) << "the second step has moved on";
  EXPECT_EQ(progress.done, (std::vector<int>{2, 1})) << "and nobody has waited for it";
  decoding.begin(0);
  EXPECT_EQ(progress.done, (std::vector<int>{2, 1}));
  HCACHE_EXPECT_OK(decoding.finish());
  HCACHE_EXPECT_OK(decoding.finish());
  EXPECT_EQ(progress.done, progress.given);
}

// Of a prompt in pieces the last one's logits alone are wanted: the host prepares a piece while the
// one before it is computed, and is never two ahead.
TEST(Step, RunsOnWhileTheNextIsPreparedIfNobodyReadsIt) {
  const std::unique_ptr<LoadedModel> loaded =
      on_cpus(tiny_model_path("llama", 2, GGML_TYPE_Q8_0), {1});
  const Tokens tokens = random_tokens(*loaded->model, 40, 7);
  Row expected;
  SavedRows saved;
  for (const bool reads : {true, false}) {
    for (const bool captures : {false, true}) {
      Progress progress;
      RecordingSink sink;
      const std::unique_ptr<Engine> engine = late_engine(*loaded->model, progress);
      if (captures) HCACHE_EXPECT_OK(engine->set_capture(&sink, tap(*engine, kTapHidden)));
      const SeqId seq = new_sequence(*engine);
      for (size_t first = 0; first < tokens.size(); first += 10) {
        const bool read = reads || first + 10 == tokens.size();
        const std::vector<BatchItem> piece = {{.seq = seq,
                                               .tokens = std::span(tokens).subspan(first, 10),
                                               .output = read ? Output::kLast : Output::kNone}};
        auto step = engine->decode(piece);
        HCACHE_EXPECT_OK(step.status());
        // What is captured of a step is fetched behind it, which this device does at once.
        const int running = progress.given[0] - progress.done[0];
        EXPECT_EQ(running, read || captures ? 0 : 1) << first;
        if (first + 10 < tokens.size()) continue;
        if (expected.empty()) expected = copy(*step).front();
        EXPECT_TRUE(same_bits(copy(*step).front(), expected));
      }
      HCACHE_EXPECT_OK(engine->set_capture(nullptr, {}));
      if (!captures) continue;
      ASSERT_EQ(sink.saved.size(), 1U);
      if (saved.layers.empty()) saved = sink.saved.begin()->second;
      for (size_t layer = 0; layer < saved.layers.size(); ++layer) {
        EXPECT_EQ(saved.layers[layer].hidden.size(), tokens.size());
        EXPECT_EQ(sink.saved.begin()->second.layers[layer].hidden, saved.layers[layer].hidden);
      }
    }
  }
}

TEST(Pipeline, CapturesWhatStepsOneAfterAnotherCapture) {
  const std::unique_ptr<LoadedModel> loaded =
      on_cpus(tiny_model_path("llama", 2, GGML_TYPE_Q8_0), {1, 2});
  std::vector<RecordingSink> sinks(2);
  for (const int in_flight : {1, 2}) {
    Progress progress;
    RecordingSink& sink = sinks[static_cast<size_t>(in_flight - 1)];
    const std::unique_ptr<Engine> engine = late_engine(*loaded->model, progress);
    HCACHE_EXPECT_OK(engine->set_capture(&sink, tap(*engine, kTapHidden | kTapKv)));
    Decoding(*engine, 2).run(in_flight);
    HCACHE_EXPECT_OK(engine->set_capture(nullptr, {}));
  }
  ASSERT_EQ(sinks[0].saved.size(), 4U);
  ASSERT_EQ(sinks[1].saved.size(), 4U);
  for (const auto& [seq, saved] : sinks[0].saved) {
    const SavedRows& other = sinks[1].saved.at(seq);
    ASSERT_EQ(saved.layers.size(), other.layers.size());
    for (size_t i = 0; i < saved.layers.size(); ++i) {
      EXPECT_FALSE(saved.layers[i].hidden.empty());
      EXPECT_EQ(saved.layers[i].hidden, other.layers[i].hidden) << "layer " << i;
      EXPECT_EQ(saved.layers[i].k, other.layers[i].k) << "layer " << i;
      EXPECT_EQ(saved.layers[i].v, other.layers[i].v) << "layer " << i;
    }
  }
}

// A sequence that goes ends its own step; the room it had may be another's at once.
TEST(Pipeline, AReleasedSequenceEndsItsStepAlone) {
  const std::unique_ptr<LoadedModel> loaded =
      on_cpus(tiny_model_path("llama", 2, GGML_TYPE_Q8_0), {1, 1, 1});
  Progress progress;
  const std::unique_ptr<Engine> engine = late_engine(*loaded->model, progress);
  Decoding expected(*engine, 3);
  expected.run(1);
  for (size_t gone = 0; gone < 3; ++gone) {
    SCOPED_TRACE("batch " + std::to_string(gone));
    Decoding decoding(*engine, 3);
    for (size_t batch = 0; batch < 3; ++batch) decoding.begin(batch);
    HCACHE_EXPECT_OK(engine->release_sequence(decoding.sequence(2 * gone)));
    const SeqId other = new_sequence(*engine);
    HCACHE_EXPECT_OK(engine->reserve_rows(other, 40));
    for (size_t batch = 0; batch < 3; ++batch) {
      if (batch != gone) {
        HCACHE_EXPECT_OK(decoding.finish());
        EXPECT_TRUE(same_bits(decoding.answers.logits[2 * batch][0],
                              expected.answers.logits[2 * batch][0]));
        continue;
      }
      EXPECT_EQ(decoding.finish().code(), Code::kFailedPrecondition);
      EXPECT_EQ(engine->length(decoding.sequence(2 * gone + 1)), 0);
    }
    HCACHE_EXPECT_OK(engine->release_sequence(other));
  }
}

TEST(Pipeline, ClearLeavesTheSequencesAsTheyWere) {
  const std::unique_ptr<LoadedModel> loaded =
      on_cpus(tiny_model_path("llama", 2, GGML_TYPE_Q8_0), {2, 1});
  Progress progress;
  const std::unique_ptr<Engine> engine = late_engine(*loaded->model, progress);
  const int64_t free = engine->arena_free_cells();
  Decoding decoding(*engine, 2);
  decoding.begin(0);
  decoding.begin(1);
  EXPECT_LT(engine->arena_free_cells(), free);
  const BatchItem item{.seq = decoding.sequence(0), .tokens = {}};
  EXPECT_EQ(decoding.pipeline().begin({&item, 1}).code(), Code::kFailedPrecondition);
  decoding.pipeline().clear();
  EXPECT_EQ(engine->arena_free_cells(), free);
  EXPECT_EQ(engine->length(decoding.sequence(0)), 0);
  EXPECT_EQ(decoding.pipeline().finish().status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(decoding.pipeline().begin({&item, 1}).code(), Code::kInvalidArgument);
  EXPECT_EQ(decoding.pipeline().size(), 0);
}

TEST(Pipeline, TwoServersGiveTheBitsOfStepsOneAfterAnother) {
  const auto first = hcache::testing::RpcServer::shared();
  const auto second = hcache::testing::RpcServer::second();
  ASSERT_TRUE(first.ok() && second.ok());
  const std::unique_ptr<LoadedModel> loaded =
      load_model(tiny_model_path("llama", 2, GGML_TYPE_Q8_0),
                 {open_device((*first)->device()), open_device((*second)->device())}, {2, 1});
  std::vector<Answers> answers;
  for (const int in_flight : {1, 2}) {
    const std::unique_ptr<Engine> engine =
        make_engine(*loaded->model, {.arena_tokens = 400, .max_batch_rows = 64});
    EXPECT_TRUE(engine->stages_overlap());
    Decoding decoding(*engine, 2);
    decoding.run(in_flight);
    answers.push_back(std::move(decoding.answers));
  }
  expect_same(answers[1], answers[0]);
}

TEST(Pipeline, StagesOfOneDeviceOrOfCpusDoNotOverlap) {
  const std::string path = tiny_model_path("llama", 2, GGML_TYPE_Q8_0);
  const std::unique_ptr<LoadedModel> cpus = on_cpus(path, {1, 1});
  EXPECT_FALSE(make_engine(*cpus->model)->stages_overlap());
  EXPECT_FALSE(make_engine(llama_tiny(), {.stage_layers = {1, 2}})->stages_overlap());
  EXPECT_FALSE(make_engine(llama_tiny())->stages_overlap());
}

}  // namespace
}  // namespace hcache::engine
