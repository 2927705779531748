// Capture and restoration: what the tap delivers is what the arena holds, and from it the arena is
// rebuilt bit for bit. Run on the CPU and on a device whose memory the host can't touch, each with
// the device's own copy queue and with one that completes late and out of order.
#include <deque>
#include <memory>
#include <ostream>
#include <set>
#include <tuple>

#include "engine_testing.h"
#include "late_copy_queue.h"
#include "rpc_server.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

// Saved rows of one sequence: per layer and position.
struct SavedRows {
  struct Layer {
    std::map<int64_t, Bytes> hidden, k, v;
  };
  std::vector<Layer> layers;
};

// A sink with room for a number of blocks that checks the tap's contract and keeps all rows.
class RecordingSink : public CaptureSink {
 public:
  explicit RecordingSink(size_t capacity = 1000) : capacity_(capacity) {}
  ~RecordingSink() override {
    EXPECT_TRUE(reserved_.empty()) << "blocks were never given back";
    for (const Block& b : dropped_) {
      EXPECT_TRUE(std::all_of(b.block->begin(), b.block->end(), [](std::byte x) {
        return x == std::byte{0xD0};
      })) << "written after it was dropped";
    }
  }

  std::byte* reserve(size_t n_bytes) override {
    if (reserved_.size() >= capacity_) {
      ++n_refused;
      return nullptr;
    }
    auto block = std::make_unique<Bytes>(n_bytes + 64, std::byte{0x5C});
    std::byte* data = block->data();
    reserved_[data] = {std::move(block), n_bytes};
    return data;
  }
  void publish(std::byte* data, const StepCapture& capture) override {
    const auto it = reserved_.find(data);
    ASSERT_NE(it, reserved_.end()) << "a block that is not reserved";
    EXPECT_EQ(it->second.n_bytes, capture.n_bytes);
    for (size_t i = it->second.n_bytes; i < it->second.block->size(); ++i) {
      ASSERT_EQ((*it->second.block)[i], std::byte{0x5C}) << "written behind the block";
    }
    check_layout(capture);
    for (const CapturedRows& rows : capture.rows) keep(data, capture, rows);
    reserved_.erase(it);
    ++n_published;
    hidden_type = capture.hidden_type;
  }
  void drop(std::byte* data) override {
    const auto it = reserved_.find(data);
    ASSERT_NE(it, reserved_.end()) << "a block that is not reserved";
    std::fill(it->second.block->begin(), it->second.block->end(), std::byte{0xD0});
    dropped_.push_back(std::move(it->second));
    reserved_.erase(it);
    ++n_dropped;
  }
  [[nodiscard]] size_t n_reserved() const { return reserved_.size(); }

  std::map<SeqId, SavedRows> saved;
  ggml_type hidden_type = GGML_TYPE_COUNT;
  int n_published = 0;
  int n_dropped = 0;
  int n_refused = 0;

 private:
  struct Block {
    std::unique_ptr<Bytes> block;
    size_t n_bytes = 0;
  };

  // Parts are aligned, inside the block, and apart; every row of the step belongs to one sequence.
  static void check_layout(const StepCapture& c) {
    std::map<int64_t, int64_t> parts;
    const auto part = [&](int64_t offset, size_t row_bytes) {
      if (offset < 0) return;
      EXPECT_EQ(offset % 64, 0);
      EXPECT_TRUE(
          parts.emplace(offset, offset + static_cast<int64_t>(row_bytes) * c.n_rows).second);
    };
    for (const CapturedLayer& layer : c.layers) {
      EXPECT_EQ(layer.k_offset < 0, layer.v_offset < 0);
      part(layer.hidden_offset, c.hidden_row_bytes);
      part(layer.k_offset, c.kv_row_bytes);
      part(layer.v_offset, c.kv_row_bytes);
    }
    int64_t end = 0;
    for (const auto& [first, last] : parts) {
      EXPECT_GE(first, end);
      end = last;
    }
    EXPECT_LE(end, static_cast<int64_t>(c.n_bytes));
    int next = 0;
    for (const CapturedRows& rows : c.rows) {
      EXPECT_EQ(rows.first_row, next);
      next += rows.n_rows;
    }
    EXPECT_EQ(next, c.n_rows);
  }
  void keep(const std::byte* data, const StepCapture& c, const CapturedRows& rows) {
    SavedRows& to = saved[rows.seq];
    to.layers.resize(c.layers.size());
    for (size_t i = 0; i < c.layers.size(); ++i) {
      for (int r = 0; r < rows.n_rows; ++r) {
        const auto take = [&](int64_t offset, size_t row_bytes, std::map<int64_t, Bytes>& into) {
          if (offset < 0) return;
          const std::byte* from = data + offset + (rows.first_row + r) * row_bytes;
          into[rows.first_pos + r] = Bytes(from, from + row_bytes);
        };
        take(c.layers[i].hidden_offset, c.hidden_row_bytes, to.layers[i].hidden);
        take(c.layers[i].k_offset, c.kv_row_bytes, to.layers[i].k);
        take(c.layers[i].v_offset, c.kv_row_bytes, to.layers[i].v);
      }
    }
  }

  size_t capacity_;
  std::map<std::byte*, Block> reserved_;
  std::vector<Block> dropped_;
};

// Host memory that the engine may read until its ticket is done; poisoned then, as a ring would
// reuse it.
class UploadRing {
 public:
  explicit UploadRing(Engine& engine) : engine_(engine) {}
  ~UploadRing() {
    if (!held_.empty()) HCACHE_EXPECT_OK(engine_.wait(held_.back().ticket));
  }
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  std::byte* put(const std::map<int64_t, Bytes>& rows, int64_t first, int n) {
    Bytes& bytes = fresh_.emplace_back();
    for (int64_t pos = first; pos < first + n; ++pos) {
      const Bytes& row = rows.at(pos);
      bytes.insert(bytes.end(), row.begin(), row.end());
    }
    return bytes.data();
  }
  void hold(const Result<Engine::Ticket>& ticket) {
    ASSERT_TRUE(ticket.ok()) << ticket.status().to_string();
    for (Bytes& bytes : fresh_) held_.push_back({*ticket, std::move(bytes)});
    fresh_.clear();
    while (!held_.empty() && engine_.done(held_.front().ticket)) {
      std::fill(held_.front().bytes.begin(), held_.front().bytes.end(), std::byte{0xEE});
      held_.pop_front();
    }
  }

 private:
  struct Held {
    Engine::Ticket ticket = 0;
    Bytes bytes;
  };
  Engine& engine_;
  std::deque<Bytes> fresh_;
  std::deque<Held> held_;
};

// Rebuilds rows [first, first + n) of a layer from hidden states, in slices staged in pieces of a
// few rows, as pages come.
void restore_hidden(Engine& engine, UploadRing& ring, const SavedRows& saved, ggml_type type,
                    SeqId seq, int layer, int64_t first, int64_t n, int slice, int piece = 6) {
  for (int64_t done = 0; done < n; done += slice) {
    const int rows = static_cast<int>(std::min<int64_t>(slice, n - done));
    for (int r = 0; r < rows; r += piece) {
      const int k = std::min(piece, rows - r);
      ring.hold(engine.stage_hidden(r, k, type,
                                    ring.put(saved.layers[layer].hidden, first + done + r, k)));
    }
    HCACHE_EXPECT_OK(engine.project_staged(seq, layer, first + done, rows, type));
  }
}

void restore_kv(Engine& engine, UploadRing& ring, const SavedRows& saved, SeqId seq, int layer,
                int64_t first, int64_t n, int piece = 16) {
  for (int64_t done = 0; done < n; done += piece) {
    const int rows = static_cast<int>(std::min<int64_t>(piece, n - done));
    const std::byte* k = ring.put(saved.layers[layer].k, first + done, rows);
    const std::byte* v = ring.put(saved.layers[layer].v, first + done, rows);
    ring.hold(engine.load_kv(seq, layer, first + done, rows, k, v));
  }
}

CaptureOptions tap(const Engine& engine, uint8_t mask, ggml_type type = GGML_TYPE_COUNT) {
  return {.layers = std::vector<uint8_t>(engine.n_layer(), mask), .hidden_type = type};
}

// A conversation of prompts in odd pieces and decoded rows, beside another one in the same steps.
struct Conversation {
  SeqId seq = -1;
  SeqId other = -1;
  int64_t n = 0;
};
Conversation converse(Engine& engine, const Tokens& tokens) {
  Conversation c{.seq = new_sequence(engine), .other = new_sequence(engine)};
  const Tokens stream = random_tokens(engine.model(), 200, 77);
  int turn = 0;
  for (size_t done = 0; done < tokens.size(); ++turn) {
    const size_t left = tokens.size() - done;
    const size_t k = std::min<size_t>(turn == 0 ? 19 : turn == 5 ? 11 : 1, left);
    std::vector<BatchItem> items;
    const BatchItem ours{
        .seq = c.seq, .tokens = std::span(tokens).subspan(done, k), .output = Output::kLast};
    const BatchItem others{.seq = c.other,
                           .tokens = std::span(stream).subspan(turn, turn % 3 + 1),
                           .output = turn % 4 == 0 ? Output::kLast : Output::kNone};
    if (turn % 2 == 0) items.push_back(others);
    items.push_back(ours);
    if (turn % 2 == 1 && turn % 5 != 0) items.push_back(others);
    const Result<Logits> logits = engine.decode(items);
    EXPECT_TRUE(logits.ok()) << logits.status().to_string();
    done += k;
  }
  c.n = static_cast<int64_t>(tokens.size());
  return c;
}

// --- Devices and queues ----------------------------------------------------------------------

struct Setting {
  bool rpc = false;
  bool late = false;
  [[nodiscard]] std::string name() const {
    return std::string(rpc ? "Rpc" : "Cpu") + (late ? "Late" : "Own");
  }
  friend void PrintTo(const Setting& s, std::ostream* os) { *os << s.name(); }
};

class RestoreTest : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    if (GetParam().rpc) {
      const Result<hcache::testing::RpcServer*> server = hcache::testing::RpcServer::shared();
      ASSERT_TRUE(server.ok()) << server.status().to_string();
      device_ = (*server)->device();
    }
  }
  [[nodiscard]] const model::Model& model(const std::string& path) const {
    static std::map<std::string, std::unique_ptr<LoadedModel>> loaded;
    std::unique_ptr<LoadedModel>& entry = loaded[device_ + " " + path];
    if (entry == nullptr) entry = load_model(path, device_);
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
    return make_engine(
        model, options,
        GetParam().late ? std::make_unique<LateCopyQueue>(++seed_, &stats_) : nullptr);
  }

  std::string device_ = "cpu";
  unsigned seed_ = 100;
  LateCopyQueue::Stats stats_;
};

TEST_P(RestoreTest, CapturedKvRowsAreTheArenasRows) {
  for (const ggml_type kv_type : {GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0}) {
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

// Rows that were prefilled, decoded one by one and computed beside others; any slice size.
// (Elsewhere than on the CPU hidden is Q8_0 for all quantised weights: exact for those that consume
// Q8_0.)
TEST_P(RestoreTest, HiddenRowsRebuildTheArena) {
  for (const ggml_type type : {GGML_TYPE_Q8_0, GetParam().rpc ? GGML_TYPE_Q4_0 : GGML_TYPE_Q4_1}) {
    SCOPED_TRACE(ggml_type_name(type));
    RecordingSink sink;
    const std::unique_ptr<Engine> e = engine(tiny(type));
    const Tokens tokens = random_tokens(e->model(), 60, 1);
    const Tokens more = random_tokens(e->model(), 6, 2);
    HCACHE_EXPECT_OK(e->set_capture(&sink, tap(*e, kTapHidden)));
    const Conversation c = converse(*e, tokens);
    HCACHE_EXPECT_OK(e->synchronize());
    EXPECT_EQ(sink.hidden_type, e->native_hidden_type());
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
      EXPECT_TRUE(same_kv(read_kv(*e, seq), expected_kv)) << "slices of " << slice;
      EXPECT_TRUE(same_rows(rows, expected)) << "slices of " << slice;
      HCACHE_EXPECT_OK(e->release_sequence(seq));
    }
    HCACHE_EXPECT_OK(e->set_capture(nullptr, {}));
  }
}

// Slices of any size, a single row too, come from the kernels that computed the rows: K-quants take
// another one for less than eight rows, float weights for one. Layer 0 needs no saved state: its
// hidden states are the tokens' embeddings.
TEST_P(RestoreTest, SlicesOfAnySizeRebuildEveryWeightType) {
  if (GetParam().rpc) GTEST_SKIP() << "exact on the CPU";
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
    EXPECT_TRUE(same_rows(copy(e->finish(step).value()), expected));
    EXPECT_TRUE(same_kv(read_kv(*e, seq), expected_kv));
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
  if (!GetParam().late) GTEST_SKIP() << "about the late queue";
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

INSTANTIATE_TEST_SUITE_P(All, RestoreTest,
                         ::testing::Values(Setting{false, false}, Setting{false, true},
                                           Setting{true, false}, Setting{true, true}),
                         [](const auto& info) { return info.param.name(); });

// --- Types -----------------------------------------------------------------------------------

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
  EXPECT_EQ(e->native_hidden_type(), GGML_TYPE_Q8_1);
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
