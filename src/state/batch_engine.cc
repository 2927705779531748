#include "state/batch_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/log.h"

namespace hcache::state {
namespace {

using nlohmann::json;

constexpr int kVersion = 2;
constexpr int kAttempts = 3;
// Contexts that costs are sampled at, as far as a buffer holds them.
constexpr int64_t kSampledContexts[] = {64, 192, 384, 768};

std::string key_of(Env& env, const model::Model& model, const std::string& digest,
                   const BatchEngineOptions& options) {
  const engine::HybridOptions& o = options.engine;
  return fmt::format(
      "batch version={} model={} kernels={} threads={} kv={} attention={} rows={} buffer={}x{} "
      "places={}{}{} weights={} link={}",
      kVersion, digest, model.device().kernel_identity(), model.device().n_threads(),
      ggml_type_name(o.kv_type), static_cast<int>(o.attention), o.max_batch_rows, o.n_buffers,
      o.buffer_tokens, o.device_bytes > 0 ? "device " : "", o.host_bytes > 0 ? "host " : "",
      o.disk_bytes > 0 ? "disk" : "", model.describe_places(), env.nominal_read_bytes_per_s());
}

json to_json(const policy::LinearFit& fit) {
  return {{"slope", fit.slope}, {"intercept", fit.intercept}, {"r2", fit.r2}};
}

json to_json(const std::string& key, const MeasuredBatchCosts& measured) {
  const policy::HybridCosts& c = measured.costs;
  return {{"key", key},
          {"n_layer", c.n_layer},
          {"pass_rows", c.pass_rows},
          {"load_weights_s", c.load_weights_s},
          {"step_s", c.step_s},
          {"kv_gen", to_json(c.kv_gen)},
          {"load_kv", to_json(c.load_kv)},
          {"load_act", to_json(c.load_act)},
          {"forward", to_json(c.forward)},
          {"attend", to_json(c.attend)},
          {"attend_prompt", to_json(c.attend_prompt)},
          {"block_tokens", measured.sizes.block_tokens},
          {"kv_bytes", measured.sizes.kv_bytes},
          {"act_bytes", measured.sizes.act_bytes}};
}

// Reads numbers of a profile; ok() is false once one was missing.
class Numbers {
 public:
  explicit Numbers(const json& from) : from_(from) {}
  [[nodiscard]] bool ok() const { return ok_; }
  double number(const json& from, const char* name) {
    if (!from.is_object() || !from.contains(name) || !from[name].is_number()) {
      ok_ = false;
      return 0;
    }
    return from[name].get<double>();
  }
  double number(const char* name) { return number(from_, name); }
  policy::LinearFit fit(const char* name) {
    const json& of = from_.contains(name) ? from_[name] : json();
    policy::LinearFit fit;
    fit.slope = number(of, "slope");
    fit.intercept = number(of, "intercept");
    fit.r2 = number(of, "r2");
    return fit;
  }

 private:
  const json& from_;
  bool ok_ = true;
};

// kDataLoss: another key, or not what to_json() writes.
Result<MeasuredBatchCosts> parse(const std::string& text, const std::string& key) {
  const json j = json::parse(text, nullptr, false);
  if (!j.is_object() || !j.contains("key") || j["key"] != key) {
    return data_loss("no profile of this batch engine");
  }
  Numbers read(j);
  MeasuredBatchCosts measured;
  policy::HybridCosts& c = measured.costs;
  c.n_layer = static_cast<int32_t>(read.number("n_layer"));
  c.pass_rows = static_cast<int64_t>(read.number("pass_rows"));
  c.load_weights_s = read.number("load_weights_s");
  c.step_s = read.number("step_s");
  c.kv_gen = read.fit("kv_gen");
  c.load_kv = read.fit("load_kv");
  c.load_act = read.fit("load_act");
  c.forward = read.fit("forward");
  c.attend = read.fit("attend");
  c.attend_prompt = read.fit("attend_prompt");
  measured.sizes.block_tokens = static_cast<int64_t>(read.number("block_tokens"));
  measured.sizes.kv_bytes = static_cast<int64_t>(read.number("kv_bytes"));
  measured.sizes.act_bytes = static_cast<int64_t>(read.number("act_bytes"));
  if (!read.ok()) return data_loss("the profile of the batch engine lacks numbers");
  return measured;
}

// Times that fall with size are noise: measured again. Errors of measure_batch_costs().
Result<MeasuredBatchCosts> measure(const model::Model& model, const engine::HybridOptions& options,
                                   const ProgressFn& progress) {
  std::vector<int64_t> sizes;
  const int64_t most = std::min<int64_t>(options.buffer_tokens, model.hparams().n_ctx_train);
  for (const int64_t n : kSampledContexts) {
    if (n + engine::kBlockTokens <= most) sizes.push_back(n);
  }
  if (sizes.size() < 2) {
    return invalid_argument(
        fmt::format("the batch engine's buffers of {} tokens are too small; they take 256 at least",
                    options.buffer_tokens));
  }
  // What is loaded comes from disk, where there is one: the samples' blocks all lie there.
  engine::HybridOptions sampled = options;
  if (sampled.disk_bytes > 0) sampled.device_bytes = sampled.host_bytes = 0;
  Result<MeasuredBatchCosts> measured = internal_error("nothing was measured");
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (progress && !progress("measuring what a batch takes", 0)) return cancelled("interrupted");
    measured = measure_batch_costs(model, sampled, sizes);
    if (measured.ok() || measured.status().code() != Code::kInvalidArgument) break;
  }
  return measured;
}

}  // namespace

Result<OpenBatchEngine> open_batch_engine(Env& env, const model::Model& model,
                                          const std::string& digest,
                                          const BatchEngineOptions& options, const std::string& dir,
                                          const ProgressFn& progress) {
  OpenBatchEngine opened;
  const std::string key = key_of(env, model, digest, options);
  const std::string path = join_path(dir, fmt::format("batch-{}.json", to_hex(salt_id(key))));
  Result<MeasuredBatchCosts> known = data_loss("not measured yet");
  if (const auto text = read_whole_file(env, path); text.ok()) known = parse(*text, key);
  if (options.measured) {
    opened.measured = *options.measured;
  } else if (known.ok()) {
    opened.measured = std::move(*known);
    opened.from_profile = true;
  } else {
    HCACHE_ASSIGN_OR_RETURN(opened.measured, measure(model, options.engine, progress));
    HCACHE_RETURN_IF_ERROR(env.make_dirs(dir));
    HCACHE_RETURN_IF_ERROR(
        write_whole_file(env, path, to_json(key, opened.measured).dump(2) + "\n"));
  }
  HCACHE_ASSIGN_OR_RETURN(opened.engine, engine::HybridEngine::create(model, options.engine));
  return opened;
}

}  // namespace hcache::state
