// Restores on two devices at once: the state that was computed, whatever the method, the slices and
// the damage; and that both have work at the same time, by the order of what they are given.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine_testing.h"
#include "late_compute_queue.h"
#include "late_copy_queue.h"
#include "patience.h"
#include "state/identity.h"
#include "state/restorer.h"
#include "state/saver.h"
#include "store/store.h"

namespace hcache::state {
namespace {

using namespace engine::testing;  // NOLINT(google-build-using-namespace)
using engine::BatchItem;
using engine::DeviceQueues;
using engine::Engine;
using engine::SeqId;
using policy::Method;
using test::Patience;
using Phase = Restoration::Phase;

constexpr int kLayers = 4;  // two on each device
constexpr int kRows = 400;  // saved: six chunks and a tail
constexpr int kMaxBatchRows = 128;

// What the stages' compute queues were given, in order, and how much of it they have done.
struct Log {
  std::vector<size_t> given;  // the stage of each graph
  std::vector<int> done = {0, 0};

  [[nodiscard]] int n_given(size_t stage) const {
    return static_cast<int>(std::count(given.begin(), given.end(), stage));
  }
  [[nodiscard]] bool busy(size_t stage) const { return n_given(stage) > done[stage]; }
};

class LoggingQueue : public LateComputeQueue {
 public:
  LoggingQueue(model::Device& device, Log& log, size_t stage)
      : LateComputeQueue(device), log_(log), stage_(stage) {}
  ggml_status run(ggml_cgraph* graph) override {
    log_.given.push_back(stage_);
    const ggml_status status = LateComputeQueue::run(graph);
    give([this] { ++log_.done[stage_]; });
    return status;
  }

 private:
  Log& log_;
  const size_t stage_;
};

std::string model_path() {
  static const TempDir dir;
  const std::filesystem::path path = dir.path() / "model.gguf";
  if (!std::filesystem::exists(path)) {
    model::SynthOptions options;
    options.shape = model::tiny_shape(*model::find_decoder_spec("llama"), 2);
    options.shape.n_layer = kLayers;
    options.type = GGML_TYPE_Q8_0;
    options.n_threads = 1;
    HCACHE_EXPECT_OK(model::synthesise_model(options, path.string()));
  }
  return path.string();
}

// A conversation that was computed on one device: its state, saved and as it was.
struct Conversation {
  Tokens tokens;  // kRows of history, and new ones
  std::vector<Bytes> kv;
  std::vector<Row> logits;  // of the last token
  Fingerprint fingerprint;
};

std::unique_ptr<store::Store> open_store(const std::string& dir) {
  store::StoreOptions options;
  options.dirs = {dir};
  return store::Store::open(Env::real(), options).value();
}

Conversation hold_conversation(const std::string& dir, uint8_t tap_mask) {
  const std::unique_ptr<LoadedModel> loaded = load_model(model_path());
  const std::unique_ptr<Engine> engine =
      make_engine(*loaded->model, {.arena_tokens = 600, .max_batch_rows = kMaxBatchRows});
  const std::unique_ptr<store::Store> store = open_store(dir);
  const std::unique_ptr<Saver> saver =
      Saver::create(Env::real(), *store, *loaded->model, engine->options().kv_type, {}).value();
  Conversation conversation;
  conversation.tokens = random_tokens(*loaded->model, kRows + 20, 5);
  conversation.fingerprint =
      state_fingerprint("test", loaded->model->hparams(), engine->options().kv_type);
  HCACHE_EXPECT_OK(engine->set_capture(
      saver.get(), {.layers = std::vector<uint8_t>(kLayers, tap_mask), .hidden_types = {}}));
  const SeqId seq = new_sequence(*engine);
  const auto history = std::span(conversation.tokens).first(kRows);
  saver->begin(seq, conversation.fingerprint, own_salt(""), {}, {});
  saver->set_tokens(seq, 0, history);
  append(*engine, seq, history, kMaxBatchRows, Output::kNone);
  HCACHE_EXPECT_OK(engine->synchronize());
  HCACHE_EXPECT_OK(saver->flush());
  saver->end(seq);
  HCACHE_EXPECT_OK(engine->set_capture(nullptr, {}));
  conversation.kv = read_kv(*engine, seq);
  conversation.logits = append(*engine, seq, std::span(conversation.tokens).subspan(kRows),
                               kMaxBatchRows, Output::kLast);
  return conversation;
}

// Two CPU devices whose queues do nothing before they have to.
class TwoDevices {
 public:
  TwoDevices(const std::string& dir, Conversation& conversation)
      : store(open_store(dir)), conversation_(conversation) {
    loaded = load_model(model_path(), {open_device("cpu"), open_device("cpu")}, {1, 1});
    engine = make_engine(*loaded->model, {.arena_tokens = 1000, .max_batch_rows = kMaxBatchRows},
                         [this](model::Device& device) -> DeviceQueues {
                           auto compute = std::make_unique<LoggingQueue>(device, log, n_stages_++);
                           auto copy = std::make_unique<LateCopyQueue>(
                               static_cast<unsigned>(n_stages_), nullptr, compute.get());
                           return {std::move(compute), std::move(copy)};
                         });
    EXPECT_TRUE(engine->stages_overlap());
    // The first question runs a product to see.
    for (int layer = 0; layer < kLayers; ++layer) {
      EXPECT_TRUE(engine->can_project(engine->native_hidden_type(layer), layer));
    }
    HCACHE_EXPECT_OK(engine->synchronize());
    log = {};
    match = store
                ->match(conversation.fingerprint, own_salt("").id,
                        std::span(conversation.tokens).first(kRows))
                .value();
    EXPECT_EQ(match.n_tokens, static_cast<size_t>(kRows));
  }

  // Every layer of the history by its method.
  RestoreRun run(const std::vector<Method>& methods) {
    plan_ = {};
    plan_.restored_tokens = kRows;
    plan_.n_layer = kLayers;
    plan_.recompute_layers =
        static_cast<int32_t>(std::count(methods.begin(), methods.end(), Method::kRecompute));
    plan_.runs = {{.begin = 0, .tokens = kRows, .layers = methods}};
    plan_.schedule = policy::schedule_string(methods);
    RestoreRun run;
    run.seq = new_sequence(*engine);
    run.tokens = std::span<const int32_t>(conversation_.tokens).first(kRows);
    run.match = &match;
    run.plan = &plan_;
    return run;
  }
  std::unique_ptr<Restoration> begin(const RestoreRun& run) {
    auto restoration = Restoration::begin(Env::real(), *engine, store.get(), run);
    EXPECT_TRUE(restoration.ok()) << restoration.status().to_string();
    return std::move(restoration).value();
  }
  // To its end, with nothing else on the devices.
  static Phase finish(Restoration& restoration, int64_t slice_rows = kMaxBatchRows) {
    const auto phase =
        restoration.advance({.rows = slice_rows, .proceed = [](double) { return true; }});
    EXPECT_TRUE(phase.ok()) << phase.status().to_string();
    return phase.ok() ? *phase : Phase::kFailed;
  }
  void expect_restored(SeqId seq) {
    EXPECT_EQ(engine->length(seq), kRows);
    EXPECT_TRUE(same_kv(read_kv(*engine, seq), conversation_.kv));
  }

  Log log;
  std::unique_ptr<store::Store> store;
  std::unique_ptr<LoadedModel> loaded;
  std::unique_ptr<Engine> engine;
  store::Match match;

 private:
  Conversation& conversation_;
  size_t n_stages_ = 0;
  policy::Plan plan_;
};

class DevicesAtOnce : public ::testing::Test {
 protected:
  void hold(uint8_t tap_mask) {
    store_dir_ = (dir_.path() / ("store" + std::to_string(n_stores_++))).string();
    conversation_ = hold_conversation(store_dir_, tap_mask);
    devices_.reset();
    devices_ = std::make_unique<TwoDevices>(store_dir_, conversation_);
  }
  // Flips a bit of a page's file and opens the store anew.
  void damage(size_t chunk, uint16_t layer, bool hidden) {
    const store::ChunkRef ref = devices_->match.chunks.at(chunk).chunk;
    Bytes page;
    for (const store::PageInfo& info : ref.info().pages) {
      if (info.layer != layer || store::is_hidden(info.encoding) != hidden) continue;
      const auto reader = devices_->store->new_reader({}).value();
      const store::PageRequest request{ref, info.layer, info.encoding};
      HCACHE_EXPECT_OK(reader->submit({&request, 1}));
      const store::PageView view = reader->next().value();
      page.assign(view.bytes.begin(), view.bytes.end());
      reader->release(view.index);
    }
    ASSERT_FALSE(page.empty());
    int found = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(store_dir_)) {
      if (!entry.is_regular_file()) continue;
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      std::vector<char> bytes(std::filesystem::file_size(entry.path()));
      file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
      const char* wanted = reinterpret_cast<const char*>(page.data());
      const auto at = std::search(bytes.begin(), bytes.end(), wanted, wanted + page.size());
      if (at == bytes.end()) continue;
      ++found;
      file.clear();
      file.seekp(at - bytes.begin());
      file.put(static_cast<char>(*at ^ 0x10));
    }
    ASSERT_EQ(found, 1);
  }

  TempDir dir_;
  int n_stores_ = 0;
  std::string store_dir_;
  Conversation conversation_;
  std::unique_ptr<TwoDevices> devices_;
};

const std::vector<Method> kAllHidden(kLayers, Method::kHidden);
const std::vector<Method> kAllKv(kLayers, Method::kKv);

TEST_F(DevicesAtOnce, RestoreWhatWasComputedByEveryMethod) {
  hold(engine::kTapHidden | engine::kTapKv);
  constexpr Method kH = Method::kHidden;
  constexpr Method kKv = Method::kKv;
  constexpr Method kRe = Method::kRecompute;
  for (const std::vector<Method>& methods :
       {kAllHidden, kAllKv, std::vector<Method>{kH, kKv, kKv, kH},
        std::vector<Method>{kRe, kH, kH, kKv}, std::vector<Method>{kRe, kRe, kH, kKv},
        std::vector<Method>{kRe, kRe, kRe, kH}}) {
    SCOPED_TRACE(policy::schedule_string(methods));
    for (const int64_t slice_rows : {int64_t{kMaxBatchRows}, int64_t{50}}) {
      // A ring of a few pages, and one for all of them.
      for (const uint64_t ring_bytes : {uint64_t{1} << 18, uint64_t{64} << 20}) {
        RestoreRun run = devices_->run(methods);
        run.ring_bytes = ring_bytes;
        const auto restoration = devices_->begin(run);
        EXPECT_EQ(TwoDevices::finish(*restoration, slice_rows), Phase::kDone);
        EXPECT_EQ(restoration->fraction(), 1);
        devices_->expect_restored(run.seq);
        HCACHE_EXPECT_OK(devices_->engine->release_sequence(run.seq));
      }
    }
  }
}

TEST_F(DevicesAtOnce, TakeTurnsAndWaitForNobody) {
  hold(engine::kTapHidden);
  const RestoreRun run = devices_->run(kAllHidden);
  const auto restoration = devices_->begin(run);
  EXPECT_EQ(TwoDevices::finish(*restoration), Phase::kDone);
  const Log& log = devices_->log;
  // 400 rows are four slices of 128.
  ASSERT_EQ(log.given.size(), 16U);
  for (size_t i = 0; i < log.given.size(); ++i) EXPECT_EQ(log.given[i], i % 2) << "graph " << i;
  EXPECT_TRUE(log.busy(0));
  EXPECT_TRUE(log.busy(1));
  devices_->expect_restored(run.seq);
  const policy::RestoreRecord& record = restoration->record();
  ASSERT_EQ(record.devices.size(), 2U);
  EXPECT_GT(record.devices[0].pages.disk, 0U);
  EXPECT_EQ(record.devices[0].pages.disk, record.devices[1].pages.disk);
  EXPECT_EQ(record.devices[0].pages.total() + record.devices[1].pages.total(),
            record.hidden_pages.total());
  EXPECT_EQ(record.devices[0].n_layers, 2);
}

TEST_F(DevicesAtOnce, OneAfterAnotherWhereThatIsWanted) {
  hold(engine::kTapHidden);
  RestoreRun run = devices_->run(kAllHidden);
  run.devices_at_once = false;
  const auto restoration = devices_->begin(run);
  EXPECT_EQ(TwoDevices::finish(*restoration), Phase::kDone);
  EXPECT_TRUE(std::is_sorted(devices_->log.given.begin(), devices_->log.given.end()));
  EXPECT_EQ(devices_->log.given.size(), 16U);
  devices_->expect_restored(run.seq);
}

// Between two batches of what the first device recomputes, pages that have come go to the second.
TEST_F(DevicesAtOnce, OneRecomputesWhileTheOtherProjects) {
  hold(engine::kTapHidden);
  Patience patience("pages that have been read before the history is recomputed");
  for (int64_t ms = 0, zeros_before_one = kRows; zeros_before_one > 3 && patience.lasts(); ++ms) {
    const RestoreRun run =
        devices_->run({Method::kRecompute, Method::kHidden, Method::kHidden, Method::kHidden});
    devices_->log.given.clear();
    const auto restoration = devices_->begin(run);
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    EXPECT_EQ(TwoDevices::finish(*restoration), Phase::kDone);
    const std::vector<size_t>& given = devices_->log.given;
    // Of the four batches: one, a slice of the first device's, another one, a slice of the
    // second's.
    zeros_before_one = std::find(given.begin(), given.end(), size_t{1}) - given.begin();
    devices_->expect_restored(run.seq);
    HCACHE_EXPECT_OK(devices_->engine->release_sequence(run.seq));
  }
}

TEST_F(DevicesAtOnce, NewTokensFollowThroughBoth) {
  hold(engine::kTapHidden | engine::kTapKv);
  for (const std::vector<Method>& methods : {kAllHidden, kAllKv}) {
    RestoreRun run = devices_->run(methods);
    run.tokens = conversation_.tokens;
    const auto restoration = devices_->begin(run);
    EXPECT_EQ(TwoDevices::finish(*restoration), Phase::kDone);
    const std::span<const float> logits = restoration->logits();
    ASSERT_EQ(conversation_.logits.size(), 1U);
    EXPECT_TRUE(same_bits(Row(logits.begin(), logits.end()), conversation_.logits[0]));
    HCACHE_EXPECT_OK(devices_->engine->release_sequence(run.seq));
  }
}

// New tokens that began when nothing else wanted the devices, when others' steps run: they wait,
// and go on afterwards, or in a turn that has room for them, or are the caller's in the end; so
// they are where the first layer takes longer than a turn.
TEST_F(DevicesAtOnce, NewTokensThatBeganAloneWaitForRoomBesideOthers) {
  hold(engine::kTapHidden | engine::kTapKv);
  const Restoration::Slice no_room{.rows = 70, .budget_s = 0, .follow_rows = 16, .keep_rows = 16};
  Restoration::Slice room = no_room;
  room.keep_rows = static_cast<int64_t>(conversation_.tokens.size()) - kRows;
  ASSERT_GT(room.keep_rows, no_room.keep_rows);
  Restoration::Slice too_slow = room;
  too_slow.keep_s = 0;
  Restoration::Slice alone;
  alone.proceed = [](double) { return true; };
  for (const Restoration::Slice& later : {no_room, room, too_slow, alone}) {
    RestoreRun run = devices_->run(kAllHidden);
    run.tokens = conversation_.tokens;
    const auto restoration = devices_->begin(run);
    Restoration::Slice first_units = alone;
    first_units.proceed = [](double fraction) { return fraction == 0; };
    Result<Phase> phase = restoration->advance(first_units);
    ASSERT_TRUE(phase.ok() && *phase == Phase::kWorking);
    EXPECT_EQ(restoration->record().prefilled_tokens, room.keep_rows);
    // Some turns, but not all layers.
    for (int turn = 0; turn < 3; ++turn) phase = restoration->advance(no_room);
    while (phase.ok() && *phase != Phase::kDone) phase = restoration->advance(later);
    ASSERT_TRUE(phase.ok()) << phase.status().to_string();
    const bool gives_up =
        later.proceed == nullptr && (later.keep_rows < room.keep_rows || later.keep_s == 0);
    EXPECT_EQ(restoration->record().prefilled_tokens, gives_up ? 0 : room.keep_rows);
    EXPECT_EQ(devices_->engine->length(run.seq), gives_up ? kRows : kRows + room.keep_rows);
    Row logits(restoration->logits().begin(), restoration->logits().end());
    if (gives_up) {
      EXPECT_TRUE(logits.empty());
      logits = append(*devices_->engine, run.seq, std::span(conversation_.tokens).subspan(kRows),
                      static_cast<int>(room.keep_rows), Output::kLast)
                   .back();
    }
    EXPECT_TRUE(same_bits(logits, conversation_.logits[0]));
    HCACHE_EXPECT_OK(devices_->engine->trim_sequence(run.seq, kRows));
    devices_->expect_restored(run.seq);
    HCACHE_EXPECT_OK(devices_->engine->release_sequence(run.seq));
  }
}

// Between its slices, steps of another sequence run through both devices.
TEST_F(DevicesAtOnce, SlicesRunBetweenOthersSteps) {
  hold(engine::kTapHidden);
  const Tokens other_tokens = random_tokens(devices_->engine->model(), 300, 9);
  const SeqId alone = new_sequence(*devices_->engine);
  const std::vector<Row> expected =
      append(*devices_->engine, alone, std::span(other_tokens).first(40), 1, Output::kAll);
  HCACHE_EXPECT_OK(devices_->engine->release_sequence(alone));
  const RestoreRun run = devices_->run(kAllHidden);
  const auto restoration = devices_->begin(run);
  const SeqId other = new_sequence(*devices_->engine);
  std::vector<Row> rows;
  for (Phase phase = Phase::kWorking; phase != Phase::kDone;) {
    const auto advanced =
        restoration->advance({.rows = 70, .budget_s = 0, .follow_rows = 32, .keep_rows = 32});
    ASSERT_TRUE(advanced.ok()) << advanced.status().to_string();
    phase = *advanced;
    ASSERT_NE(phase, Phase::kFailed);
    if (rows.size() == 40) continue;
    for (Row& row : append(*devices_->engine, other,
                           std::span(other_tokens).subspan(rows.size(), 1), 1, Output::kAll)) {
      rows.push_back(std::move(row));
    }
  }
  rows.resize(std::min<size_t>(rows.size(), 40));
  EXPECT_TRUE(
      same_rows(rows, {expected.begin(), expected.begin() + static_cast<int>(rows.size())}));
  devices_->expect_restored(run.seq);
}

// Its rows go through all layers before it, which are the other device's too: that waits for them.
TEST_F(DevicesAtOnce, ADamagedPageIsComputedOnceTheLayersBeforeAreRestored) {
  for (const bool hidden : {true, false}) {
    hold(hidden ? engine::kTapHidden : engine::kTapKv);
    damage(1, 0, hidden);
    damage(0, 2, hidden);
    damage(3, 3, hidden);
    RestoreRun run = devices_->run(hidden ? kAllHidden : kAllKv);
    int failures = 0;
    std::vector<std::pair<uint16_t, Bytes>> computed;
    run.on_damage = [&](const PageFailure&) { ++failures; };
    run.on_computed = [&](const ComputedPage& page) {
      computed.emplace_back(page.layer, Bytes(page.kv.begin(), page.kv.end()));
    };
    const auto restoration = devices_->begin(run);
    ASSERT_EQ(TwoDevices::finish(*restoration), Phase::kDone);
    devices_->expect_restored(run.seq);
    EXPECT_EQ(failures, 3);
    const policy::RestoreRecord& record = restoration->record();
    EXPECT_EQ(record.damaged_pages, 3U);
    EXPECT_EQ(record.replaced_pages, 0U);
    EXPECT_EQ(record.repaired_layer_rows, 64 * (1 + 3 + 4));
    ASSERT_EQ(computed.size(), 3U);
    EXPECT_EQ(computed[0].first, 0);
    EXPECT_EQ(computed[1].first, 2);
    EXPECT_EQ(computed[2].first, 3);
    EXPECT_EQ(computed[1].second, read_kv(*devices_->engine, run.seq, 2, 0, 64));
    EXPECT_EQ(computed[2].second, read_kv(*devices_->engine, run.seq, 3, 192, 64));
  }
}

TEST_F(DevicesAtOnce, ADamagedPageIsReadInAnotherEncoding) {
  hold(engine::kTapHidden | engine::kTapKv);
  damage(0, 2, true);
  damage(4, 1, true);
  const RestoreRun run = devices_->run(kAllHidden);
  const auto restoration = devices_->begin(run);
  ASSERT_EQ(TwoDevices::finish(*restoration), Phase::kDone);
  devices_->expect_restored(run.seq);
  EXPECT_EQ(restoration->record().replaced_pages, 2U);
  EXPECT_EQ(restoration->record().repaired_layer_rows, 0);
}

// The other device has rows of the tail restored, or staged, by then.
TEST_F(DevicesAtOnce, ADamagedTailIsGivenUpOnBoth) {
  for (const uint16_t layer : {uint16_t{0}, uint16_t{3}}) {
    hold(engine::kTapHidden);
    damage(kRows / 64, layer, true);
    damage(0, 2, true);
    RestoreRun run = devices_->run(kAllHidden);
    int64_t left = -1;
    run.on_shorter = [&](int64_t rows) { left = rows; };
    const auto restoration = devices_->begin(run);
    ASSERT_EQ(TwoDevices::finish(*restoration), Phase::kDone);
    EXPECT_EQ(left, kRows / 64 * 64);
    EXPECT_EQ(restoration->record().restored_tokens, left);
    EXPECT_EQ(restoration->record().prefilled_tokens, kRows - left);
    devices_->expect_restored(run.seq);
  }
}

TEST_F(DevicesAtOnce, TooMuchDamageFailsAndLeavesNothing) {
  hold(engine::kTapHidden);
  for (size_t chunk = 0; chunk < 6; ++chunk) damage(chunk, 3, true);
  const int64_t free = devices_->engine->arena_free_cells();
  const RestoreRun run = devices_->run(kAllHidden);
  const auto restoration = devices_->begin(run);
  EXPECT_EQ(TwoDevices::finish(*restoration), Phase::kFailed);
  EXPECT_EQ(devices_->engine->length(run.seq), 0);
  EXPECT_EQ(devices_->engine->arena_free_cells(), free);
}

// Wherever it stops, with slices open on both devices: the next one is right.
TEST_F(DevicesAtOnce, ACancelledOneLeavesNothing) {
  hold(engine::kTapHidden);
  const int64_t free = devices_->engine->arena_free_cells();
  for (const int units : {0, 1, 3, 8, 20}) {
    SCOPED_TRACE(std::to_string(units) + " units");
    const RestoreRun run = devices_->run(kAllHidden);
    {
      const auto restoration = devices_->begin(run);
      int n = 0;
      const auto phase =
          restoration->advance({.rows = 100, .proceed = [&](double) { return ++n < units; }});
      EXPECT_TRUE(phase.ok()) << phase.status().to_string();
      EXPECT_NE(*phase, Phase::kDone);
    }
    EXPECT_EQ(devices_->engine->length(run.seq), 0);
    EXPECT_EQ(devices_->engine->arena_free_cells(), free);
    const RestoreRun again = devices_->run(kAllHidden);
    const auto restoration = devices_->begin(again);
    EXPECT_EQ(TwoDevices::finish(*restoration), Phase::kDone);
    devices_->expect_restored(again.seq);
    HCACHE_EXPECT_OK(devices_->engine->release_sequence(again.seq));
  }
}

}  // namespace
}  // namespace hcache::state
