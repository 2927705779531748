// Weights that are streamed from disk or host memory: the bits of the resident run, whatever order
// layers are wanted in, and errors where the file is not what it was.
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "base/fault_env.h"
#include "base/throttled_env.h"
#include "engine/weight_stream.h"
#include "engine_restore_testing.h"
#include "late_compute_queue.h"
#include "late_copy_queue.h"
#include "products.h"
#include "rpc_server.h"
#include "split_model.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using model::LayerPart;
using model::WeightPlace;

// A random model with more layers than slots.
std::string deep_model_path(const std::string& arch, int n_head_kv, ggml_type type, int n_layer) {
  static const TempDir dir;
  const std::filesystem::path path =
      dir.path() /
      (arch + std::to_string(n_head_kv) + ggml_type_name(type) + std::to_string(n_layer) + ".gguf");
  if (!std::filesystem::exists(path)) {
    model::SynthOptions options;
    options.shape = model::tiny_shape(*model::find_decoder_spec(arch), n_head_kv);
    options.shape.n_layer = n_layer;
    options.type = type;
    options.n_threads = 1;
    const Status status = model::synthesise_model(options, path.string());
    if (!status.ok()) die(status.to_string());
  }
  return path.string();
}

std::unique_ptr<LoadedModel> load(const std::string& path, const model::LoadOptions& options) {
  auto loaded = std::make_unique<LoadedModel>();
  loaded->devices = {open_device("cpu", 1)};
  auto model = model::Model::load(path, *loaded->devices[0], options);
  EXPECT_TRUE(model.ok()) << model.status().to_string();
  if (model.ok()) loaded->model = std::move(*model);
  return loaded;
}

model::LoadOptions plain() { return {.use_extra_buffers = false}; }

model::LoadOptions from_disk(Env& env = Env::real()) {
  return {.weights = WeightPlace::kDisk, .env = &env};
}

// So much device memory that `n` leading layers stay there.
model::LoadOptions keeping(const std::string& path, int n) {
  const auto all = load(path, from_disk());
  const model::StreamedWeights& w = *all->model->streamed();
  uint64_t resident = 0;
  for (int i = 0; i < n; ++i) resident += w.units[i].n_bytes;
  uint64_t shared = all->model->n_bytes() - w.n_bytes();
  model::LoadOptions options = from_disk();
  options.device_memory = shared + resident + 2 * std::max(w.slot_bytes[0], w.slot_bytes[1]);
  return options;
}

// So little that layers come by halves.
model::LoadOptions halved(const std::string& path, WeightPlace place = WeightPlace::kDisk,
                          model::Device* device = nullptr) {
  const std::shared_ptr<model::Device> cpu = open_device("cpu", 1);
  const auto all =
      model::Model::load(path, device != nullptr ? *device : *cpu, {.weights = place}).value();
  model::LoadOptions options;
  options.weights = place;
  options.device_memory = memory_for_halves(*all);
  return options;
}

// Layers 0 and 1 from tokens, the others half from hidden states and half from K and V, with steps
// of another sequence in between: layers are wanted in any order.
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
    if (layer % 2 == 0) append(e, other, tokens.first(1), 64, Output::kNone);
    restore_kv(e, ring, saved, seq, layer, n / 2, n - n / 2);
  }
  HCACHE_EXPECT_OK(e.release_sequence(other));
}

Outcome run(const model::Model& model, const MakeQueues& queues = nullptr) {
  Outcome out;
  const auto e = make_engine(model, {.arena_tokens = 400, .max_batch_rows = 64}, queues);
  const Tokens tokens = random_tokens(model, 50, 1);
  const Tokens more = random_tokens(model, 5, 2);
  RecordingSink sink;
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden | kTapKv)));
  const SeqId seq = new_sequence(*e);
  out.logits = append(*e, seq, std::span(tokens).first(40), 64);
  for (const Row& row : append(*e, seq, std::span(tokens).subspan(40), 1)) {
    out.logits.push_back(row);
  }
  HCACHE_EXPECT_OK(e->synchronize());
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  out.kv = read_kv(*e, seq);
  out.saved = sink.saved[seq];

  const SeqId again = new_sequence(*e);
  restore_each_way(*e, out.saved, tokens, sink.hidden_type, again);
  out.restored_kv = read_kv(*e, again);
  out.restored_logits = append(*e, again, more, 2);
  return out;
}

MakeQueues late_queues(LateComputeQueue::Stats* stats) {
  return [stats](model::Device& device) {
    auto compute = std::make_unique<LateComputeQueue>(device, stats);
    auto copy = std::make_unique<LateCopyQueue>(7, nullptr, compute.get());
    return DeviceQueues{std::move(compute), std::move(copy)};
  };
}

struct Case {
  const char* arch;
  int n_head_kv;
  ggml_type type;
};
constexpr Case kCases[] = {{"llama", 2, GGML_TYPE_Q8_0},    {"llama", 4, GGML_TYPE_F16},
                           {"llama", 2, GGML_TYPE_Q4_1},    {"qwen3", 2, GGML_TYPE_BF16},
                           {"qwen3moe", 2, GGML_TYPE_Q8_0}, {"glm4", 2, GGML_TYPE_Q4_0},
                           {"falcon", 1, GGML_TYPE_Q4_K},   {"opt", 4, GGML_TYPE_Q8_0},
                           {"llama", 2, GGML_TYPE_Q4_0},    {"gpt-oss", 2, GGML_TYPE_Q8_0}};

TEST(StreamedWeights, GiveTheBitsOfResidentOnes) {
  for (const Case& c : kCases) {
    for (const int n_layer : {5, 6}) {
      SCOPED_TRACE(std::string(c.arch) + " " + ggml_type_name(c.type) + " " +
                   std::to_string(n_layer) + " layers");
      const std::string path = deep_model_path(c.arch, c.n_head_kv, c.type, n_layer);
      const Outcome resident = run(*load(path, plain())->model);
      for (const int n_resident : {0, 2}) {
        SCOPED_TRACE(std::to_string(n_resident) + " resident");
        const auto loaded = load(path, keeping(path, n_resident));
        ASSERT_NE(loaded->model->streamed(), nullptr);
        ASSERT_EQ(loaded->model->streamed()->first_layer, n_resident);
        expect_same(run(*loaded->model), resident);
      }
    }
  }
}

// Where a queue is asynchronous layers are uploaded: a slot that is overwritten while a graph still
// has to read it, or a graph that does not wait for its layer, computes something else.
TEST(StreamedWeights, AsynchronousQueuesKeepTheOrderOfSlots) {
  for (const Case& c : {kCases[0], kCases[1], kCases[4]}) {
    for (const int n_layer : {5, 6}) {
      SCOPED_TRACE(std::string(c.arch) + " " + std::to_string(n_layer));
      const std::string path = deep_model_path(c.arch, c.n_head_kv, c.type, n_layer);
      const Outcome resident = run(*load(path, plain())->model);
      LateComputeQueue::Stats stats;
      expect_same(run(*load(path, from_disk())->model, late_queues(&stats)), resident);
      EXPECT_GT(stats.most_waiting, 2U) << "the queue was never late";
    }
  }
}

// Half a layer at a time: an attention block while the feed-forward block before it is computed.
TEST(StreamedWeights, ByHalvesGiveTheBitsOfResidentOnes) {
  for (const Case& c : kCases) {
    if (model::find_decoder_spec(c.arch)->parallel != model::Parallel::kNever) continue;
    for (const int n_layer : {3, 5}) {
      SCOPED_TRACE(std::string(c.arch) + " " + ggml_type_name(c.type) + " " +
                   std::to_string(n_layer) + " layers");
      const std::string path = deep_model_path(c.arch, c.n_head_kv, c.type, n_layer);
      const auto loaded = load(path, halved(path));
      ASSERT_NE(loaded->model->streamed(), nullptr);
      const model::StreamedWeights& w = *loaded->model->streamed();
      ASSERT_TRUE(w.halves);
      EXPECT_EQ(w.n_layers(), n_layer);
      EXPECT_LT(w.slot_bytes[0], w.slot_bytes[1]) << "attention is the smaller half";
      const Outcome resident = run(*load(path, plain())->model);
      expect_same(run(*loaded->model), resident);
      LateComputeQueue::Stats stats;
      expect_same(run(*load(path, halved(path))->model, late_queues(&stats)), resident);
      EXPECT_GT(stats.most_waiting, 2U) << "the queue was never late";
    }
  }
}

// Parts end within layers.
TEST(StreamedWeights, OfSeveralFilesGiveTheBitsOfResidentOnes) {
  const TempDir dir;
  const std::string whole = deep_model_path("llama", 2, GGML_TYPE_Q8_0, 5);
  const Outcome resident = run(*load(whole, plain())->model);
  for (const int n_parts : {2, 4}) {
    const std::string name = (dir.path() / std::to_string(n_parts)).string();
    const std::string path = model::test::split_model(whole, name, n_parts).front();
    expect_same(run(*load(path, plain())->model), resident);
    const auto loaded = load(path, from_disk());
    ASSERT_EQ(loaded->model->streamed()->files.size(), static_cast<size_t>(n_parts));
    expect_same(run(*loaded->model), resident);
    const auto halves = load(path, halved(path));
    ASSERT_TRUE(halves->model->streamed()->halves);
    expect_same(run(*halves->model), resident);
  }
  const Result<hcache::testing::RpcServer*> server = hcache::testing::RpcServer::shared();
  ASSERT_TRUE(server.ok()) << server.status().to_string();
  const std::shared_ptr<model::Device> device = model::Device::open((*server)->device(), 1).value();
  model::LoadOptions in_host_memory;
  in_host_memory.weights = WeightPlace::kHost;
  const std::string path = model::test::part_path((dir.path() / "4").string(), 0, 4);
  expect_same(run(*model::Model::load(path, *device, in_host_memory).value()),
              run(*model::Model::load(whole, *device, plain()).value()));
}

TEST(StreamedWeights, ParallelBlocksAreNotHalved) {
  const std::string path = deep_model_path("falcon", 1, GGML_TYPE_Q4_K, 5);
  const auto device = model::Device::open("cpu", 1).value();
  EXPECT_EQ(model::Model::load(path, *device, halved(path)).status().code(),
            Code::kResourceExhausted);
}

TEST(StreamedWeights, AreRefusedInHostMemoryOfTheDeviceItself) {
  const std::string path = deep_model_path("llama", 2, GGML_TYPE_Q8_0, 5);
  const auto device = model::Device::open("cpu", 1).value();
  EXPECT_EQ(model::Model::load(path, *device, {.weights = WeightPlace::kHost}).status().code(),
            Code::kInvalidArgument);
}

// A device with memory of its own gets its layers by uploads, from host memory or from disk.
TEST(StreamedWeights, AreUploadedToDevicesWithTheirOwnMemory) {
  const Result<hcache::testing::RpcServer*> server = hcache::testing::RpcServer::shared();
  ASSERT_TRUE(server.ok()) << server.status().to_string();
  const std::shared_ptr<model::Device> device = model::Device::open((*server)->device(), 1).value();
  for (const int n_layer : {5, 6}) {
    const std::string path = deep_model_path("llama", 2, GGML_TYPE_F16, n_layer);
    const Outcome resident = run(*model::Model::load(path, *device, plain()).value());
    for (const WeightPlace place : {WeightPlace::kHost, WeightPlace::kDisk}) {
      for (const bool late : {false, true}) {
        SCOPED_TRACE(std::string(model::weight_place_name(place)) + (late ? " late" : ""));
        model::LoadOptions options;
        options.weights = place;
        const auto model = model::Model::load(path, *device, options).value();
        ASSERT_NE(model->streamed(), nullptr);
        EXPECT_EQ(model->streamed()->slots[0], nullptr);
        const MakeQueues late_copies = [](model::Device& d) {
          DeviceQueues queues = make_device_queues(d);
          queues.copy = std::make_unique<LateCopyQueue>(11);
          return queues;
        };
        expect_same(run(*model, late ? late_copies : nullptr), resident);
        const auto halves =
            model::Model::load(path, *device, halved(path, place, device.get())).value();
        ASSERT_TRUE(halves->streamed()->halves);
        expect_same(run(*halves, late ? late_copies : nullptr), resident);
      }
    }
  }
}

// Layers that are all resident may be repacked. That changes nothing for float weights and where
// the products are ours; what it does to the others is no more than rounding.
TEST(StreamedWeights, AreCloseToRepackedOnes) {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_1,
                               GGML_TYPE_Q4_0, GGML_TYPE_Q4_K}) {
    SCOPED_TRACE(ggml_type_name(type));
    const std::string path = deep_model_path("llama", 2, type, 5);
    const Outcome repacked = run(*load(path, {})->model);
    const Outcome streamed = run(*load(path, from_disk())->model);
    if (type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || model::has_own_product(type)) {
      EXPECT_TRUE(same_rows(repacked.logits, streamed.logits));
    }
    EXPECT_LT(mean_kl(repacked.logits, streamed.logits), 1e-4);
  }
}

// ---- The stream alone

// A layer's weights as they are in its slot.
Bytes slot_content(const model::StreamedUnit& layer, LayerPart part) {
  Bytes bytes;
  for (const model::StreamedTensor& t : layer.tensors) {
    if (part == LayerPart::kKv && !t.is_kv) continue;
    const auto* data = static_cast<const std::byte*>(t.tensor->data);
    bytes.insert(bytes.end(), data, data + t.n_bytes);
  }
  return bytes;
}

// And as they are in the file.
Bytes file_content(const std::string& path, const model::StreamedUnit& layer, LayerPart part) {
  static std::map<std::string, std::string> files;
  std::string& file = files[path];
  if (file.empty()) file = read_whole_file(Env::real(), path).value();
  Bytes bytes;
  for (const model::StreamedTensor& t : layer.tensors) {
    if (part == LayerPart::kKv && !t.is_kv) continue;
    for (size_t at = 0; at < t.n_bytes;) {
      const size_t wanted = t.image_offset + at;
      const auto piece =
          std::find_if(layer.pieces.begin(), layer.pieces.end(), [&](const model::WeightPiece& p) {
            return p.image_offset <= wanted && wanted < p.image_offset + p.file_bytes;
          });
      if (piece == layer.pieces.end()) die("no piece holds a byte of a tensor");
      const size_t skip = wanted - piece->image_offset;
      const size_t n = std::min(t.n_bytes - at, piece->file_bytes - skip);
      const auto* from =
          reinterpret_cast<const std::byte*>(file.data()) + piece->file_offset + skip;
      bytes.insert(bytes.end(), from, from + n);
      at += n;
    }
  }
  return bytes;
}

struct Stream {
  explicit Stream(const model::Model& model)
      : queue(make_device_copy_queue(model.device())),
        weights(WeightStream::open(model, *queue, false).value()) {}
  std::unique_ptr<CopyQueue> queue;
  std::unique_ptr<WeightStream> weights;
};

// A copy of the model in an Env of its own that breaks on request.
std::string copy_to(Env& env, const std::string& path) {
  const std::string content = read_whole_file(Env::real(), path).value();
  HCACHE_EXPECT_OK(env.make_dirs("/m"));
  HCACHE_EXPECT_OK(write_whole_file(env, "/m/model.gguf", content));
  return "/m/model.gguf";
}

TEST(WeightStream, BringsLayersInAnyOrder) {
  for (const int n_layer : {1, 2, 3, 6, 7}) {
    SCOPED_TRACE(std::to_string(n_layer) + " layers");
    const std::string path = deep_model_path("llama", 2, GGML_TYPE_F16, n_layer);
    const auto loaded = load(path, from_disk());
    const model::StreamedWeights& w = *loaded->model->streamed();
    Stream stream(*loaded->model);
    std::mt19937 random(3);
    for (int i = 0; i < 200; ++i) {
      // Mostly as steps go, now and then elsewhere.
      const int at =
          static_cast<int>((i % 20 < 14 ? static_cast<unsigned>(i) : random()) % n_layer);
      const LayerPart part = random() % 3 == 0 ? LayerPart::kKv : LayerPart::kAll;
      HCACHE_EXPECT_OK(stream.weights->acquire(at, part));
      ASSERT_EQ(slot_content(w.units[at], part), file_content(path, w.units[at], part))
          << "layer " << at << " in round " << i;
      stream.weights->release(at);
    }
    EXPECT_EQ(stream.weights->stats().read_errors, 0U);
  }
}

TEST(WeightStream, BringsHalvesInAnyOrder) {
  const std::string path = deep_model_path("llama", 2, GGML_TYPE_F16, 5);
  const auto loaded = load(path, halved(path));
  const model::StreamedWeights& w = *loaded->model->streamed();
  Stream stream(*loaded->model);
  ASSERT_TRUE(stream.weights->in_halves(0));
  EXPECT_FALSE(stream.weights->acquire(0, LayerPart::kAll).ok()) << "there is no whole layer";
  constexpr LayerPart kParts[] = {LayerPart::kAttention, LayerPart::kFeedForward, LayerPart::kKv};
  std::mt19937 random(3);
  for (unsigned i = 0; i < 300; ++i) {
    const bool in_order = i % 20 < 14;
    const auto layer = static_cast<int>((in_order ? i / 2 : random()) % 5);
    const LayerPart part = kParts[in_order ? i % 2 : random() % 3];
    HCACHE_EXPECT_OK(stream.weights->acquire(layer, part));
    const model::StreamedUnit& unit =
        w.units[2 * static_cast<size_t>(layer) + (part == LayerPart::kFeedForward ? 1 : 0)];
    ASSERT_EQ(slot_content(unit, part), file_content(path, unit, part)) << "in round " << i;
    stream.weights->release(layer);
  }
  EXPECT_EQ(stream.weights->stats().read_errors, 0U);
  EXPECT_EQ(stream.weights->layer_bytes(1, LayerPart::kAll),
            stream.weights->layer_bytes(1, LayerPart::kAttention) +
                stream.weights->layer_bytes(1, LayerPart::kFeedForward));
}

TEST(WeightStream, ReadsALayerOnceForAStep) {
  const std::string path = deep_model_path("llama", 2, GGML_TYPE_F16, 6);
  const auto loaded = load(path, from_disk());
  Stream stream(*loaded->model);
  for (int step = 0; step < 4; ++step) {
    for (int layer = 0; layer < 6; ++layer) {
      HCACHE_EXPECT_OK(stream.weights->acquire(layer));
      stream.weights->release(layer);
    }
  }
  // At most the two that are read ahead for the next step come on top.
  const uint64_t a_step = loaded->model->streamed()->n_bytes();
  const uint64_t bytes = stream.weights->stats().bytes;
  EXPECT_LE(bytes, 4 * a_step + 2 * loaded->model->streamed()->image_bytes[0]);
  EXPECT_GE(bytes, 4 * (a_step - kDirectAlignment));  // the file ends within a block
}

TEST(WeightStream, KeyAndValueWeightsAloneAreFewerBytes) {
  const std::string path = deep_model_path("llama", 2, GGML_TYPE_F16, 6);
  const auto loaded = load(path, from_disk());
  Stream stream(*loaded->model);
  uint64_t kv_bytes = 0;
  for (int layer = 0; layer < 6; ++layer) {
    HCACHE_EXPECT_OK(stream.weights->acquire(layer, LayerPart::kKv));
    stream.weights->release(layer);
    kv_bytes += stream.weights->layer_bytes(layer, LayerPart::kKv);
  }
  EXPECT_LE(stream.weights->stats().bytes,
            kv_bytes + stream.weights->layer_bytes(0, LayerPart::kKv));
  EXPECT_LT(2 * kv_bytes, loaded->model->streamed()->n_bytes());
}

TEST(WeightStream, OneAtATimeHasTheSlots) {
  const auto loaded = load(deep_model_path("llama", 2, GGML_TYPE_F16, 6), from_disk());
  auto stream = std::make_unique<Stream>(*loaded->model);
  EXPECT_EQ(Engine::create(*loaded->model, small_arena(100)).status().code(),
            Code::kFailedPrecondition);
  HCACHE_EXPECT_OK(stream->weights->acquire(0));
  EXPECT_EQ(stream->weights->acquire(1).code(), Code::kFailedPrecondition);
  stream.reset();
  EXPECT_TRUE(Engine::create(*loaded->model, small_arena(100)).ok());
}

TEST(WeightStream, ShortReadsAreCompleted) {
  FaultEnv env;
  const std::string real = deep_model_path("llama", 2, GGML_TYPE_F16, 5);
  const std::string path = copy_to(env, real);
  const auto loaded = load(path, from_disk(env));
  env.set_short_transfers(true);
  Stream stream(*loaded->model);
  for (int i = 0; i < 20; ++i) {
    HCACHE_EXPECT_OK(stream.weights->acquire(i % 5));
    const model::StreamedUnit& layer = loaded->model->streamed()->units[i % 5];
    ASSERT_EQ(slot_content(layer, LayerPart::kAll), file_content(real, layer, LayerPart::kAll));
    stream.weights->release(i % 5);
  }
}

TEST(WeightStream, AFailingDiskIsAnErrorAndNoMoreThanThat) {
  FaultEnv env;
  const std::string real = deep_model_path("llama", 2, GGML_TYPE_F16, 5);
  const auto loaded = load(copy_to(env, real), from_disk(env));
  Stream stream(*loaded->model);
  HCACHE_EXPECT_OK(stream.weights->acquire(0));
  stream.weights->release(0);
  env.set_failing_reads("model.gguf");
  EXPECT_EQ(stream.weights->acquire(4).code(), Code::kDataLoss);
  env.set_failing_reads("");
  HCACHE_EXPECT_OK(stream.weights->acquire(4));
  const model::StreamedUnit& layer = loaded->model->streamed()->units[4];
  EXPECT_EQ(slot_content(layer, LayerPart::kAll), file_content(real, layer, LayerPart::kAll));
  stream.weights->release(4);
  EXPECT_GT(stream.weights->stats().read_errors, 0U);
}

TEST(WeightStream, AFileThatChangesIsAnError) {
  const std::string real = deep_model_path("llama", 2, GGML_TYPE_F16, 5);
  {
    FaultEnv env;
    const auto loaded = load(copy_to(env, real), from_disk(env));
    Stream stream(*loaded->model);
    HCACHE_EXPECT_OK(stream.weights->acquire(0));
    stream.weights->release(0);
    const auto file = env.open_file("/m/model.gguf", {.write = true}).value();
    const uint64_t size = file->size().value();
    HCACHE_EXPECT_OK(file->truncate(size / 2));
    EXPECT_EQ(stream.weights->acquire(4).code(), Code::kDataLoss) << "truncated";
  }
  {
    FaultEnv env;
    const auto loaded = load(copy_to(env, real), from_disk(env));
    Stream stream(*loaded->model);
    const auto file = env.open_file("/m/model.gguf", {.write = true}).value();
    const std::byte other{7};
    HCACHE_EXPECT_OK(file->write_at(file->size().value() - 1, {&other, 1}));
    EXPECT_EQ(stream.weights->acquire(4).code(), Code::kDataLoss) << "written to";
  }
  {
    FaultEnv env;
    const auto loaded = load(copy_to(env, real), from_disk(env));
    HCACHE_EXPECT_OK(write_whole_file(env, "/m/model.gguf", "another file"));
    const auto queue = make_device_copy_queue(*loaded->devices[0]);
    EXPECT_EQ(WeightStream::open(*loaded->model, *queue, false).status().code(),
              Code::kFailedPrecondition)
        << "replaced before the stream was opened";
  }
  {
    FaultEnv env;
    const auto loaded = load(copy_to(env, real), from_disk(env));
    Stream stream(*loaded->model);
    HCACHE_EXPECT_OK(write_whole_file(env, "/m/model.gguf", "another file"));
    HCACHE_EXPECT_OK(stream.weights->acquire(4));
    const model::StreamedUnit& layer = loaded->model->streamed()->units[4];
    EXPECT_EQ(slot_content(layer, LayerPart::kAll), file_content(real, layer, LayerPart::kAll))
        << "the file that was opened lives on under no name";
  }
}

// A step that can't have its weights fails as a whole, and the sequence is as it was.
TEST(WeightStream, AStepFailsWithItsWeights) {
  FaultEnv env;
  const auto loaded =
      load(copy_to(env, deep_model_path("llama", 2, GGML_TYPE_Q8_0, 5)), from_disk(env));
  const auto e = make_engine(*loaded->model, small_arena(200));
  const Tokens tokens = random_tokens(*loaded->model, 20, 1);
  const SeqId seq = new_sequence(*e);
  const std::vector<Row> first = append(*e, seq, std::span(tokens).first(10), 64);
  env.set_failing_reads("model.gguf");
  const BatchItem item{.seq = seq, .tokens = std::span(tokens).subspan(10)};
  EXPECT_EQ(e->decode({&item, 1}).status().code(), Code::kDataLoss);
  EXPECT_EQ(e->length(seq), 10);
  env.set_failing_reads("");
  const std::vector<Row> again = append(*e, seq, std::span(tokens).subspan(10), 64);
  const SeqId whole = new_sequence(*e);
  const std::vector<Row> expected = append(*e, whole, std::span(tokens).first(10), 64);
  EXPECT_TRUE(same_rows(first, expected));
  EXPECT_TRUE(same_rows(again, append(*e, whole, std::span(tokens).subspan(10), 64)));
}

// Over a slow link the bits are the same, and the waiting is counted.
TEST(WeightStream, ASlowLinkIsWaitedFor) {
  const std::string path = deep_model_path("llama", 2, GGML_TYPE_Q8_0, 5);
  ThrottledEnv env(Env::real());
  const auto loaded = load(path, from_disk(env));
  const uint64_t a_step = loaded->model->streamed()->n_bytes();
  env.set_read_bytes_per_s(static_cast<double>(a_step) * 20);
  const Outcome resident = run(*load(path, plain())->model);
  expect_same(run(*loaded->model), resident);
  Stream stream(*loaded->model);
  for (int layer = 0; layer < 5; ++layer) {
    HCACHE_EXPECT_OK(stream.weights->acquire(layer));
    stream.weights->release(layer);
  }
  EXPECT_GT(stream.weights->stats().wait_s, 0.01);
}

}  // namespace
}  // namespace hcache::engine
