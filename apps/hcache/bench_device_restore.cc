#include "bench_device_restore.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/units.h"
#include "state/identity.h"

namespace hcache::cli {
namespace {

constexpr int64_t kSliceRows = 64;  // of one product of a restore
// Of the state, which the reader's ring holds: what 64 MiB are of 4,096 tokens of a 7B model's,
// F16.
constexpr uint64_t kRingShare = 16;
constexpr uint64_t kLeastRingBytes = 256U << 10;  // that a reader takes
constexpr double kBar = 1.6;  // of all devices at once over one after another, on two

}  // namespace

DeviceRestoreBench::DeviceRestoreBench(const PipelineBenchArgs& args, engine::Engine& engine,
                                       std::atomic<int64_t>& graph_ns)
    : args_(args), engine_(engine), graph_ns_(graph_ns) {
  ways_ = {{.name = "at once", .at_once = true, .seconds = {}, .record = {}},
           {.name = "one after another", .at_once = false, .seconds = {}, .record = {}}};
  const int64_t n = args.history / store::kChunkTokens * store::kChunkTokens;
  const int32_t n_vocab = engine.model().hparams().n_vocab;
  for (int32_t i = 0; i < n; ++i) tokens_.push_back((37 * i + i / 7 + 11) % n_vocab);
}

Result<std::unique_ptr<DeviceRestoreBench>> DeviceRestoreBench::open(
    const PipelineBenchArgs& args, engine::Engine& engine, std::atomic<int64_t>& graph_ns) {
  std::unique_ptr<DeviceRestoreBench> bench(new DeviceRestoreBench(args, engine, graph_ns));
  store::StoreOptions options;
  options.dirs = args.runtime.state.stores;
  HCACHE_ASSIGN_OR_RETURN(bench->store_, store::Store::open(Env::real(), options));
  HCACHE_ASSIGN_OR_RETURN(bench->saver_,
                          state::Saver::create(Env::real(), *bench->store_, engine.model(),
                                               engine.options().kv_type, {}));
  const Status saved = bench->save_conversation();
  engine.set_capture(nullptr, {}).ignore("switching the tap off can't fail");
  HCACHE_RETURN_IF_ERROR(saved);
  HCACHE_RETURN_IF_ERROR(bench->plan());
  return bench;
}

Status DeviceRestoreBench::save_conversation() {
  engine::CaptureOptions tap;
  for (int layer = 0; layer < engine_.n_layer(); ++layer) {
    const bool hidden = engine_.native_hidden_type(layer) != GGML_TYPE_COUNT;
    methods_.push_back(hidden ? policy::Method::kHidden : policy::Method::kKv);
    tap.layers.push_back(hidden ? engine::kTapHidden : engine::kTapKv);
  }
  HCACHE_RETURN_IF_ERROR(engine_.set_capture(saver_.get(), tap));
  graph_ns_ = 0;
  HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine_.create_sequence());
  const Fingerprint fingerprint =
      state::state_fingerprint("bench", engine_.model().hparams(), engine_.options().kv_type);
  saver_->begin(seq, fingerprint, own_salt(""), {}, {});
  const auto n_tokens = static_cast<int64_t>(tokens_.size());
  for (int64_t begin = 0; begin < n_tokens; begin += engine_.options().max_batch_rows) {
    const std::span<const int32_t> rows =
        part(tokens_, begin, std::min<int64_t>(begin + engine_.options().max_batch_rows, n_tokens));
    saver_->set_tokens(seq, begin, rows);
    const engine::BatchItem item{
        .seq = seq, .tokens = rows, .output = engine::BatchItem::Output::kNone};
    HCACHE_RETURN_IF_ERROR(engine_.decode({&item, 1}).status());
  }
  HCACHE_RETURN_IF_ERROR(engine_.synchronize());
  HCACHE_RETURN_IF_ERROR(saver_->flush());
  HCACHE_ASSIGN_OR_RETURN(computed_, engine_.read_kv(seq, static_cast<int64_t>(tokens_.size())));
  ring_bytes_ = std::max(saver_->stats().bytes_written / kRingShare, kLeastRingBytes);
  saver_->end(seq);
  HCACHE_RETURN_IF_ERROR(engine_.release_sequence(seq));
  HCACHE_ASSIGN_OR_RETURN(match_, store_->match(fingerprint, own_salt("").id, tokens_));
  return {};
}

// Every layer by what was saved of it: what is compared is how devices share the work.
Status DeviceRestoreBench::plan() {
  if (match_.n_tokens != tokens_.size()) {
    return internal_error(fmt::format("{} of {} tokens were saved; nothing was timed",
                                      match_.n_tokens, tokens_.size()));
  }
  for (int layer = 0; layer < engine_.n_layer(); ++layer) {
    if (engine_.first_row_needed(layer, static_cast<int64_t>(tokens_.size())) == 0) continue;
    return unimplemented(fmt::format(
        "{} tokens are more than the window that layer {} sees; every layer is restored whole here",
        tokens_.size(), layer));
  }
  plan_.mode = policy::Mode::kHidden;
  plan_.restored_tokens = static_cast<int64_t>(tokens_.size());
  plan_.n_layer = engine_.n_layer();
  plan_.runs = {{.begin = 0, .tokens = plan_.restored_tokens, .layers = methods_}};
  plan_.schedule = policy::schedule_string(methods_);
  return {};
}

Result<engine::SeqId> DeviceRestoreBench::restore(Way& way, double* seconds) {
  graph_ns_ = static_cast<int64_t>(args_.row_ms * 1e6);
  HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine_.create_sequence());
  state::RestoreRun run;
  run.seq = seq;
  run.tokens = tokens_;
  run.match = &match_;
  run.plan = &plan_;
  run.devices_at_once = way.at_once;
  run.ring_bytes = ring_bytes_;
  const double begin_s = now_s();
  HCACHE_ASSIGN_OR_RETURN(const auto restoration,
                          state::Restoration::begin(Env::real(), engine_, store_.get(), run));
  HCACHE_ASSIGN_OR_RETURN(
      const auto phase,
      restoration->advance({.rows = kSliceRows, .proceed = [](double) { return !interrupted(); }}));
  if (phase == state::Restoration::Phase::kFailed) {
    return internal_error("what was saved a moment ago is damaged; nothing was timed");
  }
  if (phase != state::Restoration::Phase::kDone) return cancelled("interrupted");
  HCACHE_RETURN_IF_ERROR(engine_.synchronize());
  *seconds = now_s() - begin_s;
  graph_ns_ = 0;
  way.record = restoration->record();
  return seq;
}

Status DeviceRestoreBench::run(ProgressLine& line) {
  double seconds = 0;
  std::vector<std::byte> restored;
  for (Way& way : ways_) {
    if (!line.update(fmt::format("restoring {}: comparing state", way.name), 0)) {
      return cancelled("interrupted");
    }
    HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, restore(way, &seconds));
    HCACHE_ASSIGN_OR_RETURN(const std::vector<std::byte> kv,
                            engine_.read_kv(seq, static_cast<int64_t>(tokens_.size())));
    if (&way == &ways_.front()) {
      kv_identical_ = kv == computed_;
      restored = kv;
    } else if (kv != restored) {
      return internal_error(fmt::format("restoring {} gave other state than {}; nothing was timed",
                                        way.name, ways_.front().name));
    }
    HCACHE_RETURN_IF_ERROR(engine_.release_sequence(seq));
  }
  for (int64_t rep = 0; rep < args_.reps; ++rep) {
    wait_for_turn(args_);
    for (size_t i = 0; i < ways_.size(); ++i) {
      // Every other time in the reverse order.
      Way& way = ways_[rep % 2 == 0 ? i : ways_.size() - 1 - i];
      if (!line.update(fmt::format("restoring {}: run {} of {}", way.name, rep + 1, args_.reps),
                       static_cast<double>(rep) / static_cast<double>(args_.reps))) {
        return cancelled("interrupted");
      }
      HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, restore(way, &seconds));
      HCACHE_RETURN_IF_ERROR(engine_.release_sequence(seq));
      way.seconds.push_back(seconds);
    }
  }
  return {};
}

std::vector<double> DeviceRestoreBench::gains() const {
  std::vector<double> gains;
  for (size_t i = 0; i < ways_[0].seconds.size(); ++i) {
    gains.push_back(ways_[1].seconds[i] / ways_[0].seconds[i]);
  }
  return gains;
}

Json DeviceRestoreBench::results() const {
  Json rows = Json::array();
  for (const Way& way : ways_) {
    rows.push_back({{"way", way.name},
                    {"restore_ms", spread(way.seconds, 1e3)},
                    {"samples_s", way.seconds},
                    {"devices", devices_json(way.record)}});
  }
  return {{"tokens", tokens_.size()},
          {"schedule", plan_.schedule},
          {"ring_bytes", ring_bytes_},
          {"slow_product_ms", args_.row_ms},
          {"kv_identical", kv_identical_},
          {"gain", spread(gains(), 1)},
          {"gain_samples", gains()},
          {"bar", {{"least_gain", kBar}, {"met", median(gains()) >= kBar}}},
          {"rows", std::move(rows)}};
}

std::vector<std::vector<std::string>> DeviceRestoreBench::table() const {
  std::vector<std::vector<std::string>> table = {
      {"restoring", "schedule", "ms", "min", "max", "bytes by device", "KV", "gain of at once"}};
  for (const Way& way : ways_) {
    const auto [least, most] = std::minmax_element(way.seconds.begin(), way.seconds.end());
    std::string bytes;
    for (const policy::RestoredDevice& device : way.record.devices) {
      bytes += fmt::format("{}{}", bytes.empty() ? "" : " + ", format_bytes(device.pages.total()));
    }
    table.push_back({way.name, plan_.schedule, fmt::format("{:.1f}", median(way.seconds) * 1e3),
                     fmt::format("{:.1f}", *least * 1e3), fmt::format("{:.1f}", *most * 1e3), bytes,
                     kv_identical_ ? "identical" : "differs",
                     way.at_once ? "1.00" : fmt::format("{:.2f}", median(gains()))});
  }
  return table;
}

}  // namespace hcache::cli
