// What the engine's tests share: models, token streams, and ways to read and compare an engine.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "model/logits.h"
#include "model/tools.h"
#include "model_fixtures.h"

namespace hcache::engine::testing {

using Tokens = std::vector<int32_t>;
using Row = std::vector<float>;
using Bytes = std::vector<std::byte>;
using Output = BatchItem::Output;

// Reports a failed status where it happened and goes on with what there is.
#define HCACHE_EXPECT_OK(expr)                        \
  do {                                                \
    const ::hcache::Status status_ = (expr);          \
    EXPECT_TRUE(status_.ok()) << status_.to_string(); \
  } while (false)

// A folder that goes when the program ends.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "hcache-test-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) die("no temporary folder");
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// A device; those on RPC are shared: a server serves one client at a time.
inline std::shared_ptr<model::Device> open_device(const std::string& name, int n_threads = 1) {
  static std::map<std::string, std::shared_ptr<model::Device>> remote;
  if (!name.starts_with("rpc:")) return model::Device::open(name, n_threads).value();
  std::shared_ptr<model::Device>& shared = remote[name];
  if (shared == nullptr) shared = model::Device::open(name, n_threads).value();
  return shared;
}

// A model and its devices.
struct LoadedModel {
  std::vector<std::shared_ptr<model::Device>> devices;
  std::unique_ptr<model::Model> model;
};

inline std::unique_ptr<LoadedModel> load_model(const std::string& path,
                                               const std::string& device = "cpu",
                                               int n_threads = 1) {
  auto loaded = std::make_unique<LoadedModel>();
  loaded->devices = {open_device(device, n_threads)};
  loaded->model = model::Model::load(path, *loaded->devices[0]).value();
  return loaded;
}

// On several devices, which share the layers in these proportions.
inline std::unique_ptr<LoadedModel> load_model(const std::string& path,
                                               std::vector<std::shared_ptr<model::Device>> devices,
                                               const std::vector<double>& split) {
  auto loaded = std::make_unique<LoadedModel>();
  loaded->devices = std::move(devices);
  model::LoadOptions options;
  for (const auto& device : loaded->devices) options.placement.devices.push_back(device.get());
  options.placement.split = split;
  loaded->model = model::Model::load(path, *loaded->devices[0], options).value();
  return loaded;
}

// One thread: ggml's threads spin, and several tests may share few cores.
inline const model::Model& smollm2() {
  static const std::unique_ptr<LoadedModel> loaded = load_model(HCACHE_TEST_MODEL);
  return *loaded->model;
}

// The path of a random model of three layers, width 256, made on first use.
inline std::string tiny_model_path(const std::string& arch, int n_head_kv, ggml_type type) {
  static const TempDir dir;
  const std::filesystem::path path =
      dir.path() / (arch + std::to_string(n_head_kv) + ggml_type_name(type) + ".gguf");
  if (!std::filesystem::exists(path)) {
    const model::SynthOptions options = model::test::tiny_options(arch.c_str(), n_head_kv, type);
    const Status status = model::synthesise_model(options, path.string());
    if (!status.ok()) die(status.to_string());
  }
  return path.string();
}

inline const model::Model& tiny_model(const std::string& arch, int n_head_kv, ggml_type type) {
  static std::map<std::string, std::unique_ptr<LoadedModel>> loaded;
  const std::string path = tiny_model_path(arch, n_head_kv, type);
  std::unique_ptr<LoadedModel>& entry = loaded[path];
  if (entry == nullptr) entry = load_model(path);
  return *entry->model;
}

// For most tests: a Llama whose products don't depend on the number of rows.
inline const model::Model& llama_tiny() { return tiny_model("llama", 2, GGML_TYPE_Q8_0); }

inline EngineOptions small_arena(int64_t tokens, int rows = 128) {
  return {.arena_tokens = tokens, .max_batch_rows = rows};
}

inline Tokens random_tokens(const model::Model& model, int n, unsigned seed) {
  std::mt19937 random(seed);
  const auto limit = static_cast<int32_t>(std::min<int64_t>(model.hparams().n_vocab, 20000));
  std::uniform_int_distribution<int32_t> pick(std::min(100, limit / 3), limit - 1);
  Tokens tokens(n);
  for (int32_t& t : tokens) t = pick(random);
  return tokens;
}

inline std::unique_ptr<Engine> make_engine(const model::Model& model,
                                           const EngineOptions& options = {},
                                           const MakeQueues& make_queues = nullptr) {
  return Engine::create(model, options, make_queues).value();
}

inline SeqId new_sequence(Engine& engine) { return engine.create_sequence().value(); }

inline std::vector<Row> copy(const Logits& logits) {
  std::vector<Row> rows;
  for (const std::span<const float> row : logits.rows) rows.emplace_back(row.begin(), row.end());
  return rows;
}

// Appends tokens in steps of at most n_chunk rows; the logits of the rows that are wanted.
inline std::vector<Row> append(Engine& engine, SeqId seq, std::span<const int32_t> tokens,
                               int n_chunk, Output output = Output::kAll) {
  std::vector<Row> rows;
  for (size_t done = 0; done < tokens.size();) {
    const size_t n = std::min<size_t>(n_chunk, tokens.size() - done);
    const bool last = done + n == tokens.size();
    const BatchItem item{.seq = seq,
                         .tokens = tokens.subspan(done, n),
                         .output = output == Output::kLast && !last ? Output::kNone : output};
    const Result<Logits> logits = engine.decode({&item, 1});
    if (!logits.ok()) {
      ADD_FAILURE() << logits.status().to_string();
      return rows;
    }
    for (Row& row : copy(*logits)) rows.push_back(std::move(row));
    done += n;
  }
  return rows;
}

// K rows, then V rows, as the arena holds them.
inline Bytes read_kv(Engine& engine, SeqId seq, int layer, int64_t first, int64_t n) {
  const size_t half = static_cast<size_t>(n) * engine.kv_row_bytes();
  Bytes bytes(2 * half);
  if (n > 0) {
    HCACHE_EXPECT_OK(
        engine.read_kv(seq, layer, first, static_cast<int>(n), bytes.data(), bytes.data() + half));
  }
  return bytes;
}
// Of all layers.
inline std::vector<Bytes> read_kv(Engine& engine, SeqId seq) {
  std::vector<Bytes> layers;
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    layers.push_back(read_kv(engine, seq, layer, 0, engine.length(seq)));
  }
  return layers;
}

// Widens rows of any type that ggml can read.
inline Row widen(ggml_type type, std::span<const std::byte> bytes) {
  const size_t n = bytes.size() / ggml_type_size(type) * ggml_blck_size(type);
  Row values(n);
  if (type == GGML_TYPE_F32) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
  } else {
    ggml_get_type_traits(type)->to_float(bytes.data(), values.data(), static_cast<int64_t>(n));
  }
  return values;
}

inline bool same_bits(const Row& a, const Row& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
inline double max_difference(const Row& a, const Row& b) {
  double worst = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double d = std::abs(static_cast<double>(a[i]) - b[i]);
    worst = d <= worst ? worst : d;  // NaN counts
  }
  return worst;
}
inline ::testing::AssertionResult same_rows(const std::vector<Row>& a, const std::vector<Row>& b) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << a.size() << " rows against " << b.size();
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) {
      return ::testing::AssertionFailure()
             << "row " << i << " of " << a.size() << " differs by " << max_difference(a[i], b[i]);
    }
  }
  return ::testing::AssertionSuccess() << "identical";
}
inline ::testing::AssertionResult same_kv(const std::vector<Bytes>& a,
                                          const std::vector<Bytes>& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "other number of layers";
  for (size_t layer = 0; layer < a.size(); ++layer) {
    if (a[layer].size() != b[layer].size()) {
      return ::testing::AssertionFailure() << "other number of rows in layer " << layer;
    }
    size_t n = 0;
    for (size_t i = 0; i < a[layer].size(); ++i) n += a[layer][i] != b[layer][i] ? 1 : 0;
    if (n > 0) {
      return ::testing::AssertionFailure()
             << n << " of " << a[layer].size() << " bytes of layer " << layer << " differ";
    }
  }
  return ::testing::AssertionSuccess() << "identical";
}

inline double mean_kl(const std::vector<Row>& reference, const std::vector<Row>& other) {
  double sum = reference.size() == other.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(reference.size(), other.size()); ++i) {
    sum += model::kl_divergence(reference[i], other[i]);
  }
  return sum / static_cast<double>(reference.size());
}

// Device memory in which the layers of this model, all of which are streamed, come by halves.
inline uint64_t memory_for_halves(const model::Model& streamed) {
  const model::Weights& w = streamed.weights();
  uint64_t shared = 0;
  for (const ggml_tensor* t : {w.output.w, w.output.b, w.output_norm.w, w.output_norm.b}) {
    if (t != nullptr) shared += ggml_nbytes(t);
  }
  const auto& image = streamed.streamed()->image_bytes;
  return shared + 2 * std::max(image[0], image[1]) - kDirectAlignment;
}

}  // namespace hcache::engine::testing
