#include "state/cost_profile.h"

#include <fmt/format.h>
#include <ggml-backend.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <vector>

#include "compute_scale.h"
#include "packed_kv.h"
#include "state/restorer.h"

namespace hcache::state {
namespace {

using engine::BatchItem;
using engine::Engine;

constexpr double kBudgetS = 5.0;     // of a measurement, all devices together
constexpr double kPointShare = 0.3;  // a size that would take more of the budget is left out
constexpr int kMaxPasses = 7;        // over all sizes; see Samples
constexpr int kMaxAttempts = 4;      // at a sample that can't be true
constexpr double kDearer = 1.2;      // times the cost of a row: that can't be true
constexpr int kMaxLayers = 8;        // layers that one sample runs through
constexpr double kSampleS = 0.03;    // a sample runs through more layers until it takes this
constexpr int64_t kMaxDepth = 4096;  // where attention's share is measured
constexpr int64_t kMaxRows = 512;    // of one step or slice
// 312 TFLOP/s over 32 GB/s: the A100 of HCache table 2 on its PCIe link.
constexpr double kPaperFlopsPerByte = 312e12 / 32e9;
constexpr double kLinkGuess = 1e9;       // bytes/s of disks that were not measured yet
constexpr double kUploadGuess = 1e10;    // bytes/s to a device that was not measured
constexpr double kReadStartS = 1e-3;     // opening a reader until its first request is out
constexpr double kObservedWeight = 0.3;  // of the latest restore in the average
constexpr double kMinObservedS = 0.02;   // of projecting: less says little about its speed
constexpr int64_t kTokenStride = 769;    // between the tokens whose K and V are packed; a prime
constexpr int kPackedLayers = 8;
constexpr int kUnpackings = 5;      // of a page; the fastest counts
constexpr double kMaxSurprise = 2;  // times the prediction: more is counted as this

// Several timings of one thing, in seconds.
class Samples {
 public:
  void add(double seconds) { values_.push_back(seconds); }
  [[nodiscard]] bool empty() const { return values_.empty(); }
  // The lower quartile: noise only ever adds time, and the very smallest may be luck.
  [[nodiscard]] double typical() const {
    std::vector<double> sorted = values_;
    std::sort(sorted.begin(), sorted.end());
    return sorted[(sorted.size() - 1) / 4];
  }

 private:
  std::vector<double> values_;
};

// A run of layers on one device.
struct LayerRange {
  int begin = 0;
  int end = 0;
};

// Runs pieces of steps and restores through layers of one device, on a sequence whose rows are
// reserved and never grow, so that nothing in the arena has to move.
class Measurement {
 public:
  Measurement(Env& env, Engine& engine, const StateTypes& state_types, LayerRange range,
              double budget_s, const ProgressFn& progress)
      : env_(env),
        engine_(engine),
        state_types_(state_types),
        range_(range),
        budget_s_(budget_s),
        progress_(progress) {
    // A layer that is kept as K and V alone is measured with what it would project without loss.
    for (ggml_type& type : state_types_) {
      if (type == GGML_TYPE_COUNT) type = GGML_TYPE_F32;
    }
  }
  ~Measurement() {
    engine_.weights().set_read_ahead(true);
    for (const engine::SeqId seq : {seq_, deep_seq_}) {
      if (seq >= 0) engine_.release_sequence(seq).ignore("it exists");
    }
  }
  Measurement(const Measurement&) = delete;
  Measurement& operator=(const Measurement&) = delete;

  Status open() {
    start_ns_ = env_.monotonic_ns();
    // What computing takes is measured with the weights on the device; see with_weights().
    engine_.weights().set_read_ahead(false);
    const int64_t room =
        std::min<int64_t>(engine_.arena_free_cells(), engine_.model().hparams().n_ctx_train);
    max_rows_ = std::min({kMaxRows, room / 4, int64_t{engine_.options().max_batch_rows}});
    depth_ = std::min(kMaxDepth, room - 2 * max_rows_);
    if (max_rows_ < 1) {
      return resource_exhausted(
          fmt::format("measuring needs room in the KV arena, {} tokens are free", room));
    }
    size_t hidden_row = 0;
    size_t hidden_rows = 0;
    for (int layer = range_.begin; layer < range_.end; ++layer) {
      if (!engine_.can_project(state_types_[layer], layer)) {
        return unimplemented(fmt::format("device {} can't project hidden states saved as {}",
                                         engine_.model().device(layer).name(),
                                         ggml_type_name(state_types_[layer])));
      }
      hidden_row = std::max(hidden_row, engine_.hidden_row_bytes(state_types_[layer]));
      hidden_rows += engine_.hidden_row_bytes(state_types_[layer]);
    }
    hidden_bytes_ = static_cast<int64_t>(hidden_rows) / (range_.end - range_.begin);
    HCACHE_ASSIGN_OR_RETURN(seq_, engine_.create_sequence());
    HCACHE_RETURN_IF_ERROR(engine_.reserve_rows(seq_, max_rows_));
    HCACHE_ASSIGN_OR_RETURN(deep_seq_, engine_.create_sequence());
    HCACHE_RETURN_IF_ERROR(engine_.reserve_rows(deep_seq_, depth_));

    const auto n_vocab = static_cast<int32_t>(engine_.model().hparams().n_vocab);
    for (int32_t i = 0; i < max_rows_; ++i) tokens_.push_back(i % n_vocab);
    // Zero rows are valid in every type, and no value makes these kernels faster or slower.
    const size_t row = std::max(hidden_row, 2 * engine_.kv_row_bytes());
    host_.resize(row * static_cast<size_t>(max_rows_));

    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(engine_.model().device(range_.begin).dev(), &props);
    async_ = props.caps.async;
    return {};
  }

  // Passes over all sizes until the budget is spent.
  Status run() {
    HCACHE_RETURN_IF_ERROR(one_row_pass(false));  // pages of weights, activation buffers
    double last_pass_s = 0;
    for (int pass = 0; pass < kMaxPasses; ++pass) {
      const double begun_s = elapsed_s();
      if (pass > 0 && begun_s + last_pass_s > budget_s_) break;
      HCACHE_RETURN_IF_ERROR(one_row_pass(true));
      for (const int64_t rows : {16, 64, 128, 256, 512}) {
        if (rows > max_rows_) break;
        HCACHE_RETURN_IF_ERROR(settle(project_, rows, [&] { return time_projection(rows); }));
        HCACHE_RETURN_IF_ERROR(settle(load_, rows, [&] { return time_load(rows); }));
      }
      // Few rows: what steps of replies are made of.
      for (const int64_t rows : {1, 2, 4, 8, 16, 64, 256, 512}) {
        if (rows > max_rows_ || too_slow(rows)) break;
        HCACHE_RETURN_IF_ERROR(
            settle(shallow_, rows, [&] { return time_layers(rows, 0, &shallow_); }));
        HCACHE_RETURN_IF_ERROR(
            settle(deep_, rows, [&] { return time_layers(rows, depth_, &deep_); }));
      }
      last_pass_s = elapsed_s() - begun_s;
    }
    return {};
  }

  Status result(StageCosts* out) const {
    std::vector<policy::CostCurve::Point> dense;
    std::vector<policy::CostCurve::Point> attention;
    for (const auto& [rows, samples] : shallow_) {
      const double shallow_s = samples.typical();
      const double deep_s = deep_.at(rows).typical();
      const double per_key =
          std::max(0.0, deep_s - shallow_s) / static_cast<double>(std::max<int64_t>(depth_, 1));
      const double own_keys = (static_cast<double>(rows) + 1) / 2;
      dense.push_back({rows, std::max(0.0, shallow_s - per_key * own_keys)});
      attention.push_back({rows, per_key});
    }
    HCACHE_ASSIGN_OR_RETURN(out->layer.dense, policy::CostCurve::table(std::move(dense)));
    HCACHE_ASSIGN_OR_RETURN(out->layer.attn_per_key,
                            policy::CostCurve::table(std::move(attention)));
    HCACHE_ASSIGN_OR_RETURN(out->layer.project, curve(project_));
    const size_t kv_bytes = 2 * engine_.kv_row_bytes();
    if (async_) {
      const auto& [rows, samples] = *load_.rbegin();
      out->upload_bytes_per_s =
          static_cast<double>(kv_bytes) * static_cast<double>(rows) / samples.typical();
    } else {
      HCACHE_ASSIGN_OR_RETURN(out->layer.load_kv, curve(load_));
    }
    out->layer.hidden_bytes = hidden_bytes_;
    out->layer.kv_bytes = static_cast<int64_t>(kv_bytes);
    out->n_layers = range_.end - range_.begin;
    return {};
  }

  [[nodiscard]] double finish_s() const { return finish_.typical(); }
  [[nodiscard]] double gemm_flops_per_s() const {
    const model::HParams& hp = engine_.model().hparams();
    const auto& [rows, samples] = *project_.rbegin();
    return 4.0 * hp.n_embd * hp.n_embd_kv() * static_cast<double>(rows) /
           std::max(samples.typical(), 1e-9);
  }

 private:
  using Curve = std::map<int64_t, Samples>;  // by rows, of one layer

  [[nodiscard]] double elapsed_s() const {
    return static_cast<double>(env_.monotonic_ns() - start_ns_) * 1e-9;
  }
  Status report() const {
    if (progress_ && !progress_("measuring this machine", std::min(1.0, elapsed_s() / budget_s_))) {
      return cancelled("the measurement was cancelled");
    }
    return {};
  }

  static Result<policy::CostCurve> curve(const Curve& timings) {
    std::vector<policy::CostCurve::Point> points;
    for (const auto& [rows, samples] : timings) points.push_back({rows, samples.typical()});
    return policy::CostCurve::table(std::move(points));
  }

  // Measures once, and again where a row came out dearer than with fewer rows: no kernel does that,
  // but a machine that had something else to do in that moment. On large models one sample a size
  // is all that the budget allows.
  template <typename F>
  static Status settle(const Curve& timings, int64_t rows, F&& measure) {
    for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
      HCACHE_RETURN_IF_ERROR(measure());
      const auto now = timings.find(rows);
      if (now == timings.begin()) return {};
      const auto& [fewer_rows, fewer] = *std::prev(now);
      if (now->second.typical() / static_cast<double>(rows) <
          kDearer * fewer.typical() / static_cast<double>(fewer_rows)) {
        return {};
      }
    }
    return {};
  }

  // Layers before the last one, which is special: it serves only the rows whose logits are wanted.
  [[nodiscard]] int plain_layers() const {
    const model::StreamedWeights* streamed = engine_.model().streamed();
    const int n = std::max(1, std::min(range_.end, engine_.n_layer() - 1) - range_.begin);
    // Of layers that are streamed two at a time are on the device, or the halves of one.
    if (streamed == nullptr) return n;
    return std::min(n, std::max(streamed->halves ? 1 : 2, streamed->first_layer));
  }
  // Brings the weights of layers [begin, end) to the device.
  Status fetch_weights(int begin, int end) {
    for (int layer = begin; layer < end; ++layer) {
      for (const model::LayerPart half :
           {model::LayerPart::kAttention, model::LayerPart::kFeedForward}) {
        const engine::HeldWeights held(engine_.weights(), layer, half);
        HCACHE_RETURN_IF_ERROR(held.status());
      }
    }
    return {};
  }
  // Through how many layers a sample goes; several, so that caches hold no more than in real use.
  [[nodiscard]] int sample_layers(double layer_s) const {
    const double wanted = layer_s > 0 ? kSampleS / layer_s : kMaxLayers;
    return static_cast<int>(
        std::clamp(wanted, 1.0, static_cast<double>(std::min(plain_layers(), kMaxLayers))));
  }
  static double estimate_s(const Curve& timings, int64_t rows) {
    if (timings.empty()) return 0;
    const auto& [known_rows, samples] = *std::prev(timings.end());
    return samples.typical() * static_cast<double>(rows) / static_cast<double>(known_rows);
  }
  [[nodiscard]] bool too_slow(int64_t rows) const {
    if (shallow_.contains(rows)) return false;
    return estimate_s(shallow_, rows) + estimate_s(deep_, rows) > kPointShare * budget_s_;
  }

  Result<engine::Step> prepare(int64_t rows, int64_t position) {
    const BatchItem item = {.seq = position == 0 ? seq_ : deep_seq_,
                            .tokens = std::span(tokens_).first(static_cast<size_t>(rows)),
                            .first_pos = position};
    return engine_.prepare(std::span(&item, 1));
  }
  Result<double> time_range(engine::Step& step, int begin, int end) {
    const int64_t begun = env_.monotonic_ns();
    HCACHE_RETURN_IF_ERROR(engine_.run_layers(step, begin, end));
    HCACHE_RETURN_IF_ERROR(engine_.synchronize());
    return static_cast<double>(env_.monotonic_ns() - begun) * 1e-9;
  }

  // One row through the whole model: what the last layer takes beyond the one before it is the
  // final norm and the output matrix.
  Status one_row_pass(bool keep) {
    const int n_layer = engine_.n_layer();
    HCACHE_ASSIGN_OR_RETURN(engine::Step step, prepare(1, depth_));
    double before_s = 0;
    if (n_layer - 2 >= range_.begin) {
      HCACHE_RETURN_IF_ERROR(engine_.run_layers(step, 0, n_layer - 2));
      HCACHE_RETURN_IF_ERROR(fetch_weights(n_layer - 2, n_layer - 1));
      HCACHE_RETURN_IF_ERROR(engine_.synchronize());
      HCACHE_ASSIGN_OR_RETURN(before_s, time_range(step, n_layer - 2, n_layer - 1));
      HCACHE_RETURN_IF_ERROR(fetch_weights(n_layer - 1, n_layer));
      HCACHE_RETURN_IF_ERROR(engine_.synchronize());
    }
    HCACHE_ASSIGN_OR_RETURN(const double last_s, time_range(step, n_layer - 1, n_layer));
    if (keep) finish_.add(std::max(0.0, last_s - before_s));
    return report();
  }

  // Layer by layer, as a restore runs the rows that follow the history; those of other devices that
  // come before are not timed.
  Status time_layers(int64_t rows, int64_t position, Curve* out) {
    const int layers = sample_layers(estimate_s(shallow_, rows));
    HCACHE_RETURN_IF_ERROR(fetch_weights(range_.begin, range_.begin + layers));
    HCACHE_ASSIGN_OR_RETURN(engine::Step step, prepare(rows, position));
    HCACHE_RETURN_IF_ERROR(engine_.run_layers(step, 0, range_.begin));
    HCACHE_RETURN_IF_ERROR(engine_.synchronize());
    double total_s = 0;
    for (int layer = range_.begin; layer < range_.begin + layers; ++layer) {
      HCACHE_ASSIGN_OR_RETURN(const double s, time_range(step, layer, layer + 1));
      total_s += s;
    }
    (*out)[rows].add(total_s / layers);
    return report();
  }

  // Copying into the staging buffer counts where the compute resource does it.
  Status time_projection(int64_t rows) {
    Samples& out = project_[rows];
    const int layers = sample_layers(out.empty() ? 0 : out.typical());
    const int n_rows = static_cast<int>(rows);
    HCACHE_RETURN_IF_ERROR(fetch_weights(range_.begin, range_.begin + layers));
    double total_s = 0;
    for (int layer = range_.begin; layer < range_.begin + layers; ++layer) {
      int64_t begun = env_.monotonic_ns();
      HCACHE_RETURN_IF_ERROR(
          engine_.stage_hidden(seq_, layer, 0, n_rows, state_types_[layer], host_.data()).status());
      if (async_) {
        HCACHE_RETURN_IF_ERROR(engine_.synchronize());
        begun = env_.monotonic_ns();
      }
      HCACHE_RETURN_IF_ERROR(engine_.project_staged(seq_, layer, 0, n_rows, state_types_[layer]));
      HCACHE_RETURN_IF_ERROR(engine_.synchronize());
      total_s += static_cast<double>(env_.monotonic_ns() - begun) * 1e-9;
    }
    out.add(total_s / layers);
    return {};
  }

  Status time_load(int64_t rows) {
    const int layers = sample_layers(0);
    const size_t bytes = engine_.kv_row_bytes() * static_cast<size_t>(rows);
    const int64_t begun = env_.monotonic_ns();
    for (int layer = range_.begin; layer < range_.begin + layers; ++layer) {
      HCACHE_RETURN_IF_ERROR(
          engine_
              .load_kv(seq_, layer, 0, static_cast<int>(rows), host_.data(), host_.data() + bytes)
              .status());
    }
    HCACHE_RETURN_IF_ERROR(engine_.synchronize());
    load_[rows].add(static_cast<double>(env_.monotonic_ns() - begun) * 1e-9 / layers);
    return {};
  }

  Env& env_;
  Engine& engine_;
  StateTypes state_types_;
  LayerRange range_;
  double budget_s_ = 0;
  int64_t hidden_bytes_ = 0;  // of a token's row, the layers' mean
  const ProgressFn& progress_;
  int64_t start_ns_ = 0;
  engine::SeqId seq_ = -1;       // of as many rows as are measured
  engine::SeqId deep_seq_ = -1;  // whose rows see depth_ others
  int64_t max_rows_ = 0;
  int64_t depth_ = 0;
  bool async_ = false;  // uploads run beside compute
  std::vector<int32_t> tokens_;
  std::vector<std::byte> host_;

  Curve project_;
  Curve load_;
  Curve shallow_;  // a layer at depth 0
  Curve deep_;     // a layer at depth_
  Samples finish_;
};

// Stages of one device that follow each other cost the same.
std::vector<LayerRange> device_ranges(const Engine& engine) {
  std::vector<LayerRange> ranges;
  for (const auto& [begin, end] : engine.stage_ranges()) {
    const bool same =
        begin > 0 && &engine.model().device(begin) == &engine.model().device(begin - 1);
    if (same) {
      ranges.back().end = end;
    } else {
      ranges.push_back({begin, end});
    }
  }
  return ranges;
}

}  // namespace

bool CostProfile::is_synchronous() const {
  return upload_bytes_per_s == 0 &&
         std::all_of(stages.begin(), stages.end(),
                     [](const StageCosts& stage) { return stage.upload_bytes_per_s == 0; });
}

double CostProfile::longest_project_s(int64_t rows) const {
  double longest = layer.project.at(rows);
  for (const StageCosts& stage : stages) longest = std::max(longest, stage.layer.project.at(rows));
  return longest;
}

double CostProfile::longest_prefill_s(int64_t rows, int64_t history) const {
  double longest = policy::prefill_layer_s(layer, rows, history, rows);
  for (const StageCosts& stage : stages) {
    longest = std::max(longest, policy::prefill_layer_s(stage.layer, rows, history, rows));
  }
  return longest;
}

// Raised when what a profile measures changes, our own kernels included.
constexpr int kProfileVersion = 4;

std::string profile_key(const Engine& engine, const std::string& content_digest,
                        const StateTypes& state_types) {
  const model::Model& model = engine.model();
  // One device says all; of several, each with its layers.
  const bool several = model.devices().size() > 1;
  std::string names;
  std::string kernels;
  std::string threads;
  std::string attention;
  for (const auto& [begin, end] : engine.stage_ranges()) {
    const model::Device& device = model.device(begin);
    const char* plus = names.empty() ? "" : "+";
    names += several ? fmt::format("{}{}[{},{})", plus, device.name(), begin, end) : device.name();
    kernels += plus + device.kernel_identity();
    threads += fmt::format("{}{}", plus, device.n_threads());
    attention += fmt::format("{}{}", plus, engine.uses_own_attention(begin) ? "own" : "ggml");
    if (!several) break;
  }
  // Those that share every layer, each with its heads and columns.
  for (size_t i = 0; i < model.parts().size(); ++i) {
    const model::Model& part = *model.parts()[i];
    const char* plus = i == 0 ? "" : "+";
    if (i == 0) names = kernels = threads = "";
    names += fmt::format("{}{}[{} heads,{} columns]", plus, part.device().name(),
                         part.hparams().n_head, part.hparams().n_ff);
    kernels += plus + part.device().kernel_identity();
    threads += fmt::format("{}{}", plus, part.device().n_threads());
  }
  return fmt::format(
      "version={} model={} device={} kernels={} threads={} kv={} state={} attention={} batch={}{}",
      kProfileVersion, content_digest, names, kernels, threads,
      ggml_type_name(engine.options().kv_type), describe(state_types), attention,
      engine.options().max_batch_rows,
      // Other kernels: nothing is repacked.
      model.streamed() == nullptr ? "" : " weights=plain");
}

namespace {

// Of a few layers' pages, packed and unpacked.
Result<policy::KvPacking> pack_sample(Env& env, ggml_type type, policy::PackMode mode,
                                      std::span<const std::vector<std::byte>> pages,
                                      int64_t n_rows) {
  KvPacker packer;
  size_t n_packed = 0;
  size_t n_bytes = 0;
  double fastest_s = std::numeric_limits<double>::infinity();
  std::vector<std::byte> page;
  for (const std::vector<std::byte>& plain : pages) {
    const std::vector<std::byte> packed =
        packer.pack(plain, type, mode, static_cast<size_t>(n_rows));
    n_bytes += plain.size();
    n_packed += packed.empty() ? plain.size() : packed.size();
    page.resize(plain.size());
    for (int i = 0; !packed.empty() && i < kUnpackings; ++i) {
      const int64_t begin_ns = env.monotonic_ns();
      HCACHE_RETURN_IF_ERROR(packer.unpack(packed, page));
      fastest_s = std::min(fastest_s, static_cast<double>(env.monotonic_ns() - begin_ns) * 1e-9);
    }
  }
  if (n_packed == n_bytes) return policy::KvPacking{};
  return policy::KvPacking{.ratio = static_cast<double>(n_packed) / static_cast<double>(n_bytes),
                           .unpack_row_s = fastest_s / static_cast<double>(n_rows)};
}

// Pages of tokens from all over the vocabulary, of a few layers.
Result<std::vector<std::vector<std::byte>>> sample_pages(Engine& engine, engine::SeqId seq,
                                                         int64_t n_rows) {
  std::vector<int32_t> tokens;
  const int32_t n_vocab = engine.model().hparams().n_vocab;
  for (int64_t i = 0; i < n_rows; ++i) {
    tokens.push_back(static_cast<int32_t>((i * kTokenStride) % n_vocab));
  }
  const BatchItem item{.seq = seq, .tokens = tokens};
  HCACHE_RETURN_IF_ERROR(engine.decode({&item, 1}).status());
  const size_t half = engine.kv_row_bytes() * static_cast<size_t>(n_rows);
  std::vector<std::vector<std::byte>> pages;
  const int stride = std::max(1, engine.n_layer() / kPackedLayers);
  for (int layer = 0; layer < engine.n_layer(); layer += stride) {
    std::vector<std::byte>& page = pages.emplace_back(2 * half);
    HCACHE_RETURN_IF_ERROR(
        engine.read_kv(seq, layer, 0, static_cast<int>(n_rows), page.data(), page.data() + half));
  }
  return pages;
}

Result<policy::KvPackings> measure_packing(Env& env, Engine& engine) {
  const ggml_type type = engine.options().kv_type;
  const int64_t n_rows = std::min({int64_t{store::kChunkTokens}, engine.arena_free_cells(),
                                   int64_t{engine.options().max_batch_rows}});
  policy::KvPackings packings;
  if (packable_bytes(type) == 0 || n_rows < 1) return packings;
  HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine.create_sequence());
  const auto pages = sample_pages(engine, seq, n_rows);
  HCACHE_RETURN_IF_ERROR(engine.release_sequence(seq));
  HCACHE_RETURN_IF_ERROR(pages.status());
  for (const auto& [mode, packing] : {std::pair(policy::PackMode::kOn, &packings.lossless),
                                      std::pair(policy::PackMode::kQ8_0, &packings.q8_0),
                                      std::pair(policy::PackMode::kQ4_0, &packings.q4_0)}) {
    HCACHE_ASSIGN_OR_RETURN(*packing, pack_sample(env, type, mode, *pages, n_rows));
  }
  return packings;
}

}  // namespace

Result<CostProfile> measure_cost_profile(Env& env, Engine& engine, const std::string& key,
                                         const StateTypes& state_types,
                                         const ProgressFn& progress) {
  CostProfile profile;
  profile.key = key;
  const std::vector<LayerRange> ranges = device_ranges(engine);
  const auto n_ranges = static_cast<double>(ranges.size());
  for (const LayerRange& range : ranges) {
    const auto n_done = static_cast<double>(profile.stages.size());
    const ProgressFn of_all = [&](const std::string& what, double fraction) {
      return !progress || progress(what, (n_done + fraction) / n_ranges);
    };
    Measurement measurement(env, engine, state_types, range, kBudgetS / n_ranges, of_all);
    HCACHE_RETURN_IF_ERROR(measurement.open());
    HCACHE_RETURN_IF_ERROR(measurement.run());
    HCACHE_RETURN_IF_ERROR(measurement.result(&profile.stages.emplace_back()));
    if (range.begin == 0) profile.gemm_flops_per_s = measurement.gemm_flops_per_s();
    profile.finish_s = measurement.finish_s();  // the last one's
  }
  HCACHE_ASSIGN_OR_RETURN(profile.packings, measure_packing(env, engine));
  profile.layer = profile.stages.front().layer;
  profile.upload_bytes_per_s = profile.stages.front().upload_bytes_per_s;
  if (profile.stages.size() == 1) profile.stages.clear();
  return profile;
}

void observe_read_speed(CostProfile& profile, double bytes_per_s) {
  if (!std::isfinite(bytes_per_s) || bytes_per_s <= 0) return;
  profile.read_bytes_per_s =
      profile.read_bytes_per_s > 0
          ? (1 - kObservedWeight) * profile.read_bytes_per_s + kObservedWeight * bytes_per_s
          : bytes_per_s;
}

void observe_project_time(CostProfile& profile, double seconds, double predicted_s) {
  if (!std::isfinite(seconds) || !(predicted_s >= kMinObservedS)) return;
  const double surprise = std::clamp(seconds / predicted_s, 1 / kMaxSurprise, kMaxSurprise);
  profile.compute_scale = std::clamp(profile.compute_scale * (1 + kObservedWeight * (surprise - 1)),
                                     1 / kMaxComputeScale, kMaxComputeScale);
}

namespace {

// Bytes/s at which weights come to the device.
double weight_rate(const CostProfile& profile, const Engine& engine, double max_read_bytes_per_s) {
  if (engine.model().streamed()->place == model::WeightPlace::kHost) {
    return profile.upload_bytes_per_s > 0 ? profile.upload_bytes_per_s : kUploadGuess;
  }
  const engine::WeightStats seen = engine.weights().stats();
  double rate = kLinkGuess;
  if (seen.read_s > kMinObservedS) rate = static_cast<double>(seen.bytes) / seen.read_s;
  return max_read_bytes_per_s > 0 ? std::min(rate, max_read_bytes_per_s) : rate;
}

// The curve, but nowhere below `least`.
template <typename F>
policy::CostCurve at_least(const policy::CostCurve& curve, F&& least) {
  std::vector<policy::CostCurve::Point> points;
  for (int64_t rows = 1; rows <= kMaxRows; rows *= 2) {
    points.push_back({rows, std::max(curve.at(rows), least(rows))});
  }
  return policy::CostCurve::table(std::move(points)).value();
}

// A streamed layer takes as long as its weights need to come, if that is longer than computing.
// Every step reads all of them; a restore reads those of K and V once for all its slices, which is
// spread over the rows of a history of middling length.
policy::LayerCosts with_weights(policy::LayerCosts layer, double all_s, double kv_s) {
  constexpr double kHistoryRows = 4096;
  layer.dense = at_least(layer.dense, [&](int64_t) { return all_s; });
  layer.project = at_least(
      layer.project, [&](int64_t rows) { return kv_s * static_cast<double>(rows) / kHistoryRows; });
  return layer;
}

}  // namespace

policy::RestoreCosts restore_costs(const CostProfile& profile, const Engine& engine,
                                   double max_read_bytes_per_s) {
  policy::RestoreCosts costs;
  costs.n_layer = engine.n_layer();
  // Only the row whose logits are wanted goes through the last layer's feed-forward block; the
  // others need no more than Q, K and V there.
  const model::HParams& hp = engine.model().hparams();
  const auto scaled = [&](policy::LayerCosts layer) {
    layer.project = layer.project.scaled(profile.compute_scale);
    layer.dense = layer.dense.scaled(profile.compute_scale);
    layer.attn_per_key = layer.attn_per_key.scaled(profile.compute_scale);
    return layer;
  };
  for (const StageCosts& stage : profile.stages) {
    policy::LayerCosts layer = scaled(stage.layer);
    layer.upload_bytes_per_s = stage.upload_bytes_per_s;
    costs.layers.insert(costs.layers.end(), static_cast<size_t>(stage.n_layers), layer);
  }
  if (profile.stages.empty()) {
    costs.layers.assign(static_cast<size_t>(costs.n_layer), scaled(profile.layer));
    costs.link.upload_bytes_per_s = profile.upload_bytes_per_s;
  }
  // What one row's feed-forward block takes in the last layer comes with the output.
  const double last_row_s = costs.layers.back().dense.at(1);
  costs.layers.back().dense =
      costs.layers.back().project.scaled(1 + 0.5 * hp.n_embd_q() / std::max(1, hp.n_embd_kv()));
  if (engine.stages_overlap()) {
    for (const auto& [begin, end] : engine.stage_ranges()) {
      costs.device_layers.push_back(end - begin);
    }
  }
  if (engine.model().streamed() != nullptr) {
    const double rate = weight_rate(profile, engine, max_read_bytes_per_s);
    const auto seconds = [&](int l, model::LayerPart part) {
      return static_cast<double>(engine.weights().layer_bytes(l, part)) / rate;
    };
    for (int l = engine.model().streamed()->first_layer; l < costs.n_layer; ++l) {
      policy::LayerCosts& streamed = costs.layers[static_cast<size_t>(l)];
      streamed = with_weights(streamed, seconds(l, model::LayerPart::kAll),
                              seconds(l, model::LayerPart::kKv));
    }
  }
  costs.link.bytes_per_s = profile.read_bytes_per_s > 0 ? profile.read_bytes_per_s : kLinkGuess;
  if (max_read_bytes_per_s > 0) {
    costs.link.bytes_per_s = std::min(costs.link.bytes_per_s, max_read_bytes_per_s);
  }
  costs.link.start_s = kReadStartS;
  costs.slice_rows = std::min<int64_t>(kMaxRows, engine.options().max_batch_rows);
  costs.batch_rows = engine.options().max_batch_rows;
  costs.ring_bytes = static_cast<int64_t>(RestoreRun{}.ring_bytes);
  costs.finish_s = profile.finish_s * profile.compute_scale + last_row_s;
  costs.re_tail_projects = true;
  return costs;
}

double paper_link_bytes_per_s(const CostProfile& profile) {
  return profile.gemm_flops_per_s / kPaperFlopsPerByte;
}

}  // namespace hcache::state
