// Capture and restoration: what the tap delivers is what the arena holds, and from it the arena is
// rebuilt bit for bit. Run on the CPU and on a device whose memory the host can't touch, with the
// device's own queues and with ones that complete late and out of order, in one stage and in
// several; or on HCACHE_TEST_DEVICE alone.
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "engine_restore_testing.h"
#include "late_compute_queue.h"
#include "late_copy_queue.h"
#include "rpc_server.h"
#include "test_device.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

// --- Devices and queues ----------------------------------------------------------------------

struct Setting {
  // Of both: a layer on the CPU. Given: test_device().
  enum Devices { kCpu, kRpc, kCpuAndRpc, kGiven } devices = kCpu;
  enum Queues { kOwn, kLateCopies, kLate } queues = kOwn;
  std::vector<int> stages = {};
  [[nodiscard]] bool rpc() const { return devices == kRpc || devices == kCpuAndRpc; }
  [[nodiscard]] bool late() const { return queues != kOwn; }
  // The RPC server computes on its CPU. Of any other device it is not known whether the product of
  // saved rows is the one that made K and V.
  [[nodiscard]] bool exact() const { return devices != kGiven; }
  [[nodiscard]] std::string name() const {
    constexpr const char* kNames[] = {"Own", "LateCopies", "Late"};
    constexpr const char* kDevices[] = {"Cpu", "Rpc", "CpuAndRpc", "Given"};
    std::string name = std::string(kDevices[devices]) + kNames[queues];
    for (const int n : stages) name += "_" + std::to_string(n);
    return name;
  }
  friend void PrintTo(const Setting& s, std::ostream* os) { *os << s.name(); }
};

class RestoreTest : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    if (GetParam().devices == Setting::kGiven) device_ = hcache::testing::test_device();
    if (GetParam().rpc()) {
      const Result<hcache::testing::RpcServer*> server = hcache::testing::RpcServer::shared();
      ASSERT_TRUE(server.ok()) << server.status().to_string();
      device_ = (*server)->device();
    }
  }
  // Gone before the process ends: a GPU's driver may be gone by then.
  static void TearDownTestSuite() { loaded().clear(); }
  static std::map<std::string, std::unique_ptr<LoadedModel>>& loaded() {
    static std::map<std::string, std::unique_ptr<LoadedModel>> models;
    return models;
  }
  [[nodiscard]] const model::Model& model(const std::string& path) const {
    std::unique_ptr<LoadedModel>& entry = loaded()[std::to_string(GetParam().devices) + " " + path];
    if (entry == nullptr) {
      entry = GetParam().devices == Setting::kCpuAndRpc
                  ? load_model(path, {open_device("cpu"), open_device(device_)}, {1, 2})
                  : load_model(path, device_);
    }
    return *entry->model;
  }
  [[nodiscard]] const model::Model& tiny(ggml_type type = GGML_TYPE_Q8_0,
                                         const std::string& arch = "llama",
                                         int n_head_kv = 2) const {
    return model(tiny_model_path(arch, n_head_kv, type));
  }
  std::unique_ptr<Engine> engine(const model::Model& model,
                                 EngineOptions options = {.arena_tokens = 600,
                                                          .max_batch_rows = 64}) {
    options.stage_layers = GetParam().stages;
    return make_engine(model, options, [this](model::Device& device) {
      DeviceQueues queues = make_device_queues(device);
      if (GetParam().queues == Setting::kLateCopies) {
        queues.copy = std::make_unique<LateCopyQueue>(++seed_, &stats_);
      } else if (GetParam().queues == Setting::kLate) {
        auto compute = std::make_unique<LateComputeQueue>(device, &compute_stats_);
        queues.copy = std::make_unique<LateCopyQueue>(++seed_, &stats_, compute.get());
        queues.compute = std::move(compute);
      }
      return queues;
    });
  }

  // Restored rows and what follows from them against the uninterrupted run's.
  [[nodiscard]] static ::testing::AssertionResult restored_kv(const std::vector<Bytes>& actual,
                                                              const std::vector<Bytes>& expected) {
    if (GetParam().exact()) return same_kv(actual, expected);
    double worst = 0;
    size_t worst_layer = 0;
    for (size_t layer = 0; layer < expected.size(); ++layer) {
      const Row was = widen(GGML_TYPE_F16, expected[layer]);
      double largest = 0;
      for (const float value : was) largest = std::max<double>(largest, std::abs(value));
      const double d = max_difference(widen(GGML_TYPE_F16, actual.at(layer)), was) / largest;
      if (d <= worst || std::isnan(worst)) continue;  // NaN counts, and stays
      worst = d;
      worst_layer = layer;
    }
    if (worst <= 0.02) return ::testing::AssertionSuccess() << worst;
    return ::testing::AssertionFailure()
           << "a value of layer " << worst_layer << " is off by " << worst << " of the largest";
  }
  [[nodiscard]] static ::testing::AssertionResult continued(const std::vector<Row>& actual,
                                                            const std::vector<Row>& expected) {
    if (GetParam().exact()) return same_rows(actual, expected);
    const double kl = mean_kl(expected, actual);
    if (kl < 1e-3) return ::testing::AssertionSuccess() << kl;
    return ::testing::AssertionFailure() << "mean KL " << kl;
  }

  std::string device_ = "cpu";
  unsigned seed_ = 100;
  LateCopyQueue::Stats stats_;
  LateComputeQueue::Stats compute_stats_;
};

// Rows are forked, moved aside and rotated from and to cells at which no type's rows are aligned.
TEST_P(RestoreTest, RowsAreCopiedAndRotatedFromAnyCell) {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_Q8_0}) {
    SCOPED_TRACE(ggml_type_name(type));
    const std::unique_ptr<Engine> e =
        engine(tiny(), {.arena_tokens = 400, .kv_type = type, .max_batch_rows = 64});
    const Tokens tokens = random_tokens(e->model(), 60, 1);
    std::vector<SeqId> forks = {new_sequence(*e)};
    append(*e, forks[0], tokens, 64, Output::kNone);
    const std::vector<Bytes> whole = read_kv(*e, forks[0]);
    for (const int n : {7, 60, 31, 60, 3}) {
      forks.push_back(e->fork_sequence(forks[0], n).value());
      for (int layer = 0; layer < e->n_layer(); ++layer) {
        EXPECT_EQ(read_kv(*e, forks.back(), layer, 0, n), read_kv(*e, forks[0], layer, 0, n)) << n;
      }
    }
    // Growing moves the neighbours.
    append(*e, forks[1], tokens, 64, Output::kNone);
    append(*e, forks[5], tokens, 64, Output::kNone);
    for (const int same : {0, 2, 4}) EXPECT_TRUE(same_kv(read_kv(*e, forks[same]), whole)) << same;

    ASSERT_TRUE(e->erase_range(forks[4], 10, 27).ok());
    Tokens kept = tokens;
    kept.erase(kept.begin() + 10, kept.begin() + 27);
    HCACHE_EXPECT_OK(e->release_sequence(forks[5]));
    const SeqId fresh = new_sequence(*e);
    append(*e, fresh, kept, 64, Output::kNone);
    EXPECT_LT(max_difference(widen(type, read_kv(*e, forks[4], 0, 0, 43)),
                             widen(type, read_kv(*e, fresh, 0, 0, 43))),
              0.06);
  }
}

// K and V that come from hidden states, too.
TEST_P(RestoreTest, HiddenRowsAreProjectedToAnyCell) {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
    SCOPED_TRACE(ggml_type_name(type));
    RecordingSink sink;
    const std::unique_ptr<Engine> e =
        engine(tiny(), {.arena_tokens = 400, .kv_type = type, .max_batch_rows = 64});
    HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden)));
    const Conversation c = converse(*e, random_tokens(e->model(), 60, 1));
    HCACHE_EXPECT_OK(e->synchronize());
    HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
    for (const int before : {3, 5, 8}) {
      append(*e, new_sequence(*e), random_tokens(e->model(), before, 2), 64, Output::kNone);
      const SeqId seq = new_sequence(*e);
      HCACHE_EXPECT_OK(e->reserve_rows(seq, c.n));
      UploadRing ring(*e);
      for (int layer = 0; layer < e->n_layer(); ++layer) {
        restore_hidden(*e, ring, sink.saved[c.seq], sink.hidden_type, seq, layer, 0, c.n, 13);
        EXPECT_LT(max_difference(widen(type, read_kv(*e, seq, layer, 0, c.n)),
                                 widen(type, read_kv(*e, c.seq, layer, 0, c.n))),
                  0.06);
      }
    }
  }
}

TEST_P(RestoreTest, CapturedKvRowsAreTheArenasRows) {
  std::vector<ggml_type> kv_types = {GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_Q8_0};
  // Not every shader compiler knows BF16.
  if (GetParam().devices != Setting::kGiven) kv_types.push_back(GGML_TYPE_BF16);
  for (const ggml_type kv_type : kv_types) {
    SCOPED_TRACE(ggml_type_name(kv_type));
    RecordingSink sink;
    const std::unique_ptr<Engine> e =
        engine(tiny(), {.arena_tokens = 600, .kv_type = kv_type, .max_batch_rows = 64});
    HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapKv)));
    const Conversation c = converse(*e, random_tokens(e->model(), 60, 1));
    HCACHE_EXPECT_OK(e->synchronize());
    EXPECT_EQ(sink.saved.size(), 2U);
    for (const SeqId seq : {c.seq, c.other}) {
      for (int layer = 0; layer < e->n_layer(); ++layer) {
        const SavedRows::Layer& rows = sink.saved[seq].layers.at(layer);
        ASSERT_EQ(static_cast<int64_t>(rows.k.size()), e->length(seq));
        EXPECT_TRUE(rows.hidden.empty());
        Bytes all;
        for (const auto* half : {&rows.k, &rows.v}) {
          for (const auto& [pos, row] : *half) all.insert(all.end(), row.begin(), row.end());
        }
        EXPECT_TRUE(all == read_kv(*e, seq, layer, 0, e->length(seq))) << "layer " << layer;
      }
    }
    HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  }
}

TEST_P(RestoreTest, LoadedKvIsExactAndAnswersGoOn) {
  RecordingSink sink;
  const std::unique_ptr<Engine> e = engine(tiny());
  const Tokens tokens = random_tokens(e->model(), 60, 1);
  const Tokens more = random_tokens(e->model(), 6, 2);
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapKv)));
  const Conversation c = converse(*e, tokens);
  HCACHE_EXPECT_OK(e->synchronize());
  const std::vector<Bytes> expected_kv = read_kv(*e, c.seq);
  const std::vector<Row> expected = append(*e, c.seq, more, 1);
  HCACHE_EXPECT_OK(e->release_sequence(c.seq));

  for (const int piece : {1, 16, 60}) {
    UploadRing ring(*e);
    const SeqId seq = new_sequence(*e);
    HCACHE_EXPECT_OK(e->reserve_rows(seq, c.n));
    for (int layer = 0; layer < e->n_layer(); ++layer) {
      restore_kv(*e, ring, sink.saved[c.seq], seq, layer, 0, c.n, piece);
    }
    EXPECT_TRUE(same_rows(append(*e, seq, more, 1), expected)) << "no wait before the step";
    HCACHE_EXPECT_OK(e->trim_sequence(seq, c.n));
    EXPECT_TRUE(same_kv(read_kv(*e, seq), expected_kv));
  }
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
}

// More copies and marks than a backend should have to remember, each row written by several in
// turn.
TEST_P(RestoreTest, ManyCopiesKeepTheirOrder) {
  RecordingSink sink;
  const std::unique_ptr<Engine> e = engine(tiny());
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapKv)));
  const SeqId first = new_sequence(*e);
  const SeqId second = new_sequence(*e);
  append(*e, first, random_tokens(e->model(), 60, 1), 60, Output::kNone);
  append(*e, second, random_tokens(e->model(), 60, 2), 60, Output::kNone);
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  const SeqId seq = new_sequence(*e);
  HCACHE_EXPECT_OK(e->reserve_rows(seq, 60));
  UploadRing ring(*e);
  for (const SeqId from : {first, second, first, second}) {
    for (int layer = 0; layer < e->n_layer(); ++layer) {
      restore_kv(*e, ring, sink.saved[from], seq, layer, 0, 60, 1);
    }
    // The next ones may not overtake these.
    HCACHE_EXPECT_OK(e->trim_sequence(seq, 60));
  }
  EXPECT_TRUE(same_kv(read_kv(*e, seq), read_kv(*e, second)));
}

// Rows that were prefilled, decoded one by one and computed beside others; any slice size.
// (Elsewhere than on the CPU hidden is Q8_0 for all quantised weights: exact for those that consume
// Q8_0.)
TEST_P(RestoreTest, HiddenRowsRebuildTheArena) {
  const bool cpu = GetParam().devices == Setting::kCpu;
  std::vector<ggml_type> types = {GGML_TYPE_Q8_0};
  if (GetParam().exact()) types.push_back(cpu ? GGML_TYPE_Q4_1 : GGML_TYPE_Q4_0);
  for (const ggml_type type : types) {
    SCOPED_TRACE(ggml_type_name(type));
    RecordingSink sink;
    const std::unique_ptr<Engine> e = engine(tiny(type));
    const Tokens tokens = random_tokens(e->model(), 60, 1);
    const Tokens more = random_tokens(e->model(), 6, 2);
    HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden)));
    const Conversation c = converse(*e, tokens);
    HCACHE_EXPECT_OK(e->synchronize());
    EXPECT_EQ(sink.hidden_type, e->native_hidden_type(0));
    EXPECT_TRUE(sink.saved[c.seq].layers[0].k.empty());
    const std::vector<Bytes> expected_kv = read_kv(*e, c.seq);
    const std::vector<Row> expected = append(*e, c.seq, more, 1);

    for (const int slice : {1, 7, 64}) {
      UploadRing ring(*e);
      const SeqId seq = new_sequence(*e);
      HCACHE_EXPECT_OK(e->reserve_rows(seq, c.n));
      for (int layer = 0; layer < e->n_layer(); ++layer) {
        restore_hidden(*e, ring, sink.saved[c.seq], sink.hidden_type, seq, layer, 0, c.n, slice);
      }
      const std::vector<Row> rows = append(*e, seq, more, 1);
      HCACHE_EXPECT_OK(e->trim_sequence(seq, c.n));
      EXPECT_TRUE(restored_kv(read_kv(*e, seq), expected_kv)) << "slices of " << slice;
      EXPECT_TRUE(continued(rows, expected)) << "slices of " << slice;
      HCACHE_EXPECT_OK(e->release_sequence(seq));
    }
    HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  }
}

// Slices of any size, a single row too, come from the kernels that computed the rows: K-quants take
// another one for less than eight rows, float weights for one. Layer 0 needs no saved state: its
// hidden states are the tokens' embeddings.
TEST_P(RestoreTest, SlicesOfAnySizeRebuildEveryWeightType) {
  if (GetParam().devices != Setting::kCpu) GTEST_SKIP() << "exact on the CPU";
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                               GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K}) {
    SCOPED_TRACE(ggml_type_name(type));
    RecordingSink sink;
    const std::unique_ptr<Engine> e = engine(tiny(type));
    const Tokens tokens = random_tokens(e->model(), 60, 1);
    CaptureOptions options = tap(*e, kTapHidden);
    options.layers[0] = 0;
    HCACHE_EXPECT_OK(e->set_capture(&sink, options));
    const Conversation c = converse(*e, tokens);
    HCACHE_EXPECT_OK(e->synchronize());
    EXPECT_TRUE(sink.saved[c.seq].layers[0].hidden.empty());
    const std::vector<Bytes> expected = read_kv(*e, c.seq);
    HCACHE_EXPECT_OK(e->release_sequence(c.seq));
    for (const int slice : {1, 7, 59, 64}) {
      UploadRing ring(*e);
      const SeqId seq = new_sequence(*e);
      HCACHE_EXPECT_OK(e->reserve_rows(seq, c.n));
      for (int64_t done = 0; done < c.n; done += slice) {
        const auto rows = static_cast<size_t>(std::min<int64_t>(slice, c.n - done));
        const BatchItem item{.seq = seq,
                             .tokens = std::span(tokens).subspan(static_cast<size_t>(done), rows),
                             .first_pos = done,
                             .output = Output::kNone};
        Step step = e->prepare({&item, 1}).value();
        HCACHE_EXPECT_OK(e->finish_with_kv(step, 0));
      }
      for (int layer = 1; layer < e->n_layer(); ++layer) {
        restore_hidden(*e, ring, sink.saved[c.seq], sink.hidden_type, seq, layer, 0, c.n, slice);
      }
      EXPECT_TRUE(same_kv(read_kv(*e, seq), expected)) << "slices of " << slice;
      HCACHE_EXPECT_OK(e->release_sequence(seq));
    }
    HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  }
}

// The whole plan at once: a recomputed prefix of layers, hidden and KV above it, in two runs of
// rows, and the step of new tokens following layer by layer, while another conversation decodes
// between.
TEST_P(RestoreTest, AMixedPlanRestoresWhileOthersDecode) {
  RecordingSink sink;
  const std::unique_ptr<Engine> e = engine(tiny());
  const Tokens tokens = random_tokens(e->model(), 50, 1);
  const Tokens more = random_tokens(e->model(), 9, 2);
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden | kTapKv)));
  // Prefilled in one piece, so that recomputation is exact.
  const SeqId original = new_sequence(*e);
  append(*e, original, tokens, 64, Output::kNone);
  const SavedRows saved = [&] {
    HCACHE_EXPECT_OK(e->synchronize());
    return sink.saved[original];
  }();
  const std::vector<Row> expected = append(*e, original, more, 64);
  const std::vector<Bytes> expected_kv = read_kv(*e, original);
  HCACHE_EXPECT_OK(e->release_sequence(original));
  const SeqId running = new_sequence(*e);
  const Tokens running_tokens = random_tokens(e->model(), 100, 3);

  const int n_layer = e->n_layer();
  for (int hidden_layers = 0; hidden_layers < n_layer; ++hidden_layers) {
    UploadRing ring(*e);
    const SeqId seq = new_sequence(*e);
    HCACHE_EXPECT_OK(e->reserve_rows(seq, 50));
    {
      const BatchItem item{.seq = seq, .tokens = tokens, .first_pos = 0, .output = Output::kNone};
      Step step = e->prepare({&item, 1}).value();
      HCACHE_EXPECT_OK(e->finish_with_kv(step, 0));
    }
    const BatchItem item{.seq = seq, .tokens = more, .output = Output::kAll};
    Step step = e->prepare({&item, 1}).value();
    for (int layer = 0; layer < n_layer; ++layer) {
      if (layer > 0 && layer <= hidden_layers) {
        restore_hidden(*e, ring, saved, sink.hidden_type, seq, layer, 0, 33, 10);
        restore_kv(*e, ring, saved, seq, layer, 33, 17);
      } else if (layer > 0) {
        restore_kv(*e, ring, saved, seq, layer, 0, 20);
        restore_hidden(*e, ring, saved, sink.hidden_type, seq, layer, 20, 30, 64);
      }
      append(*e, running, std::span(running_tokens).subspan(3 * layer, 2), 1);
      HCACHE_EXPECT_OK(e->run_layers(step, layer, layer + 1));
    }
    EXPECT_TRUE(continued(copy(e->finish(step).value()), expected));
    EXPECT_TRUE(restored_kv(read_kv(*e, seq), expected_kv));
    // What was captured of the interleaved step is what the arena holds.
    HCACHE_EXPECT_OK(e->synchronize());
    for (int layer = 0; layer < n_layer; ++layer) {
      const SavedRows::Layer& rows = sink.saved[seq].layers.at(layer);
      EXPECT_EQ(rows.k.size(), more.size()) << "recomputed rows are not captured again";
      Bytes all;
      for (const auto* half : {&rows.k, &rows.v}) {
        for (const auto& [pos, row] : *half) all.insert(all.end(), row.begin(), row.end());
      }
      EXPECT_TRUE(all == read_kv(*e, seq, layer, 50, 9)) << "layer " << layer;
    }
    HCACHE_EXPECT_OK(e->release_sequence(seq));
  }
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  EXPECT_EQ(sink.n_refused, 0);
}

// Rows that are still on their way must not land where another sequence lives by then.
TEST_P(RestoreTest, UploadsDontOutliveTheirRows) {
  RecordingSink sink;
  const std::unique_ptr<Engine> e = engine(tiny(), {.arena_tokens = 100, .max_batch_rows = 64});
  const Tokens tokens = random_tokens(e->model(), 60, 1);
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapKv)));
  const SeqId original = new_sequence(*e);
  append(*e, original, tokens, 64, Output::kNone);
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  const std::vector<Bytes> expected = read_kv(*e, original);
  const SavedRows& saved = sink.saved[original];
  HCACHE_EXPECT_OK(e->release_sequence(original));

  const size_t row = e->kv_row_bytes();
  const auto v_holds = [&](SeqId seq, int layer, int64_t from, int64_t n) {
    const Bytes kv = read_kv(*e, seq, layer, 0, n);
    return std::equal(kv.begin() + n * row, kv.end(), expected[layer].begin() + (60 + from) * row);
  };
  const auto holds = [&](SeqId seq, int64_t n) {
    for (int layer = 0; layer < e->n_layer(); ++layer) {
      const Bytes k = read_kv(*e, seq, layer, 0, n);
      if (!std::equal(k.begin(), k.begin() + n * row, expected[layer].begin()) ||
          !v_holds(seq, layer, 0, n)) {
        return false;
      }
    }
    return true;
  };

  enum class End { kRelease, kTrim, kMove, kFork, kErase };
  for (const End end : {End::kRelease, End::kTrim, End::kMove, End::kFork, End::kErase}) {
    SCOPED_TRACE(static_cast<int>(end));
    // Nothing that was here before may pass for what should be.
    const SeqId garbage = new_sequence(*e);
    append(*e, garbage, random_tokens(e->model(), 100, 9), 50, Output::kNone);
    HCACHE_EXPECT_OK(e->release_sequence(garbage));

    UploadRing ring(*e);
    const SeqId wall = new_sequence(*e);
    append(*e, wall, std::span(tokens).first(10), 64, Output::kNone);
    const SeqId a = new_sequence(*e);
    HCACHE_EXPECT_OK(e->reserve_rows(a, 30));
    for (int layer = 0; layer < e->n_layer(); ++layer) {
      restore_kv(*e, ring, saved, a, layer, 0, 30, 4);
    }
    SeqId fork = -1;
    switch (end) {
      case End::kRelease: HCACHE_EXPECT_OK(e->release_sequence(a)); break;
      case End::kTrim: HCACHE_EXPECT_OK(e->trim_sequence(a, 5)); break;
      case End::kMove: HCACHE_EXPECT_OK(e->reserve_rows(wall, 65)); break;
      case End::kFork: fork = e->fork_sequence(a, 20).value(); break;
      case End::kErase: HCACHE_EXPECT_OK(e->erase_range(a, 0, 20)); break;
    }
    const SeqId b = new_sequence(*e);
    const int64_t n = std::min<int64_t>(50, e->arena_free_cells());
    HCACHE_EXPECT_OK(e->reserve_rows(b, n));
    for (int layer = 0; layer < e->n_layer(); ++layer) {
      restore_kv(*e, ring, saved, b, layer, 0, n, 4);
    }
    HCACHE_EXPECT_OK(e->synchronize());
    EXPECT_TRUE(holds(b, n));
    EXPECT_TRUE(holds(wall, 10));
    switch (end) {
      case End::kRelease: break;
      case End::kTrim: EXPECT_TRUE(holds(a, 5)); break;
      case End::kMove: EXPECT_TRUE(holds(a, 30)); break;
      case End::kFork: EXPECT_TRUE(holds(a, 30) && holds(fork, 20)); break;
      case End::kErase: EXPECT_TRUE(v_holds(a, e->n_layer() - 1, 20, 10)); break;
    }
    for (const SeqId seq : {a, b, wall, fork}) {
      e->release_sequence(seq).ignore("some are gone already");
    }
  }
}

TEST_P(RestoreTest, AFullRingSkipsStepsAndHurtsNothing) {
  RecordingSink none(0);
  const std::unique_ptr<Engine> e = engine(tiny());
  const Tokens tokens = random_tokens(e->model(), 40, 1);
  const SeqId plain = new_sequence(*e);
  const std::vector<Row> expected = append(*e, plain, tokens, 9);
  HCACHE_EXPECT_OK(e->set_capture(&none, tap(*e, kTapHidden | kTapKv)));
  const SeqId a = new_sequence(*e);
  EXPECT_TRUE(same_rows(append(*e, a, tokens, 9), expected));
  EXPECT_EQ(none.n_refused, 5);
  EXPECT_EQ(none.n_published + none.n_dropped, 0);
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
}

TEST_P(RestoreTest, BlocksOfStepsThatFailAreDropped) {
  RecordingSink sink;
  const std::unique_ptr<Engine> e = engine(tiny());
  const Tokens tokens = random_tokens(e->model(), 40, 1);
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden | kTapKv)));
  const SeqId a = new_sequence(*e);
  const SeqId b = new_sequence(*e);
  const BatchItem item_a{.seq = a, .tokens = tokens};
  const BatchItem item_b{.seq = b, .tokens = std::span(tokens).first(7)};
  {
    Step step_a = e->prepare({&item_a, 1}).value();
    HCACHE_EXPECT_OK(e->run_layers(step_a, 0, 2));
    Step step_b = e->prepare({&item_b, 1}).value();
    HCACHE_EXPECT_OK(e->run_layers(step_b, 0, e->n_layer()));
    ASSERT_TRUE(e->finish(step_b).ok());
    EXPECT_EQ(sink.n_reserved(), 2U - sink.n_published);
  }
  EXPECT_EQ(sink.n_dropped, 1);
  HCACHE_EXPECT_OK(e->synchronize());
  EXPECT_EQ(sink.n_published, 1);
  EXPECT_EQ(sink.saved.count(a), 0U);

  // Steps that are under way when the tap is switched off go on without it.
  Step step_a = e->prepare({&item_a, 1}).value();
  HCACHE_EXPECT_OK(e->run_layers(step_a, 0, 1));
  const SeqId c = new_sequence(*e);
  append(*e, c, tokens, 64, Output::kNone);
  HCACHE_EXPECT_OK(e->run_layers(step_a, 1, 2));
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  EXPECT_EQ(sink.n_reserved(), 0U);
  EXPECT_EQ(sink.n_dropped, 2);
  HCACHE_EXPECT_OK(e->run_layers(step_a, 2, e->n_layer()));
  EXPECT_TRUE(e->finish(step_a).ok());
  EXPECT_TRUE(same_kv(read_kv(*e, a), read_kv(*e, c)));
  EXPECT_EQ(sink.saved.count(a), 0U);
}

TEST_P(RestoreTest, LayersAreTappedAsTheSavePlanSays) {
  RecordingSink sink;
  const std::unique_ptr<Engine> e = engine(tiny());
  CaptureOptions options;
  options.layers = {kTapKv, 0, kTapHidden};
  ASSERT_EQ(e->n_layer(), 3);
  HCACHE_EXPECT_OK(e->set_capture(&sink, options));
  const SeqId a = new_sequence(*e);
  append(*e, a, random_tokens(e->model(), 20, 1), 8, Output::kNone);
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  const SavedRows& saved = sink.saved[a];
  const auto sizes = [&](int layer) {
    const SavedRows::Layer& l = saved.layers.at(layer);
    return std::tuple(l.hidden.size(), l.k.size(), l.v.size());
  };
  EXPECT_EQ(sizes(0), std::tuple(0U, 20U, 20U));
  EXPECT_EQ(sizes(1), std::tuple(0U, 0U, 0U));
  EXPECT_EQ(sizes(2), std::tuple(20U, 0U, 0U));

  options.layers = {kTapKv, kTapKv};
  EXPECT_EQ(e->set_capture(&sink, options).code(), Code::kInvalidArgument);
  options = tap(*e, kTapHidden, GGML_TYPE_Q4_K);
  EXPECT_EQ(e->set_capture(&sink, options).code(), Code::kUnimplemented);
  append(*e, a, random_tokens(e->model(), 5, 1), 8, Output::kNone);
  EXPECT_EQ(sink.saved[a].layers[0].k.size(), 20U) << "a refused tap stays off";
}

TEST_P(RestoreTest, TheLateQueueIsLate) {
  if (!GetParam().late()) GTEST_SKIP() << "about the late queue";
  RecordingSink sink;
  const std::unique_ptr<Engine> e = engine(tiny());
  HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden)));
  const Conversation c = converse(*e, random_tokens(e->model(), 60, 1));
  HCACHE_EXPECT_OK(e->synchronize());
  UploadRing ring(*e);
  const SeqId seq = new_sequence(*e);
  HCACHE_EXPECT_OK(e->reserve_rows(seq, c.n));
  restore_hidden(*e, ring, sink.saved[c.seq], sink.hidden_type, seq, 0, 0, c.n, 30);
  HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  EXPECT_GT(stats_.out_of_order, 0);
  EXPECT_GT(stats_.early_reads, 0);
  EXPECT_GT(stats_.downloads, 20);
  EXPECT_EQ(stats_.uploads, 10);
}

std::vector<Setting> all_settings() {
  if (!hcache::testing::on_cpu()) return {{.devices = Setting::kGiven}};
  return {{},
          {.queues = Setting::kLateCopies},
          {.queues = Setting::kLate},
          {.stages = {1, 1, 1}},
          {.stages = {2, 1}},
          {.queues = Setting::kLate, .stages = {1, 2}},
          {.devices = Setting::kRpc},
          {.devices = Setting::kRpc, .queues = Setting::kLateCopies},
          {.devices = Setting::kRpc, .stages = {2, 1}}};
}

INSTANTIATE_TEST_SUITE_P(All, RestoreTest, ::testing::ValuesIn(all_settings()),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace hcache::engine
