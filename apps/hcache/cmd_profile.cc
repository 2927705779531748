// hcache profile: what restoring costs on this machine.

#include <fmt/format.h>

#include <algorithm>

#include "base/units.h"
#include "bench.h"
#include "commands.h"
#include "model/tokenizer.h"
#include "session.h"
#include "state/sample_text.h"
#include "state/sparsity.h"

namespace hcache::cli {
namespace {

struct ProfileArgs : Options {
  bool refresh = flag(&refresh, "--refresh", "measure again");
  bool sparsity = flag(&sparsity, "--sparsity",
                       "how much of the attention counts in each layer, over predefined prompts "
                       "(CaR), instead of what restoring costs",
                       {.excludes = "--refresh"});
  RuntimeArgs runtime{nullptr};
  bool json = flag(&json, "--json", "print JSON instead of text");

  ProfileArgs() {
    offer(runtime,
          {&runtime.model.path, &runtime.model.device, &runtime.model.gpu_layers,
           &runtime.model.tensor_split, &runtime.model.override_tensors, &runtime.model.split_mode,
           &runtime.model.main_gpu, &runtime.model.threads, &runtime.ctx, &runtime.batch,
           &runtime.kv_type, &runtime.attention, &runtime.state.state_dir, &runtime.state.stores,
           &runtime.state_type, &runtime.no_store});
  }
};

std::string seconds(double s) { return format_duration(static_cast<int64_t>(s * 1e9)); }

Json curve_json(const policy::CostCurve& curve) {
  if (curve.points().empty()) return {{"base_s", curve.base_s()}, {"per_row_s", curve.per_row_s()}};
  Json points = Json::array();
  for (const auto& point : curve.points()) {
    points.push_back(Json::array({point.rows, point.seconds}));
  }
  return points;
}

Json packing_json(const policy::KvPacking& packing) {
  return {{"ratio", packing.ratio}, {"unpack_row_s", packing.unpack_row_s}};
}

// What `hcache sim` takes in place of published hardware.
Json costs_json(const policy::RestoreCosts& costs, const state::CostProfile& p) {
  const policy::LayerCosts& layer = costs.layer(0);
  return {{"layers", costs.n_layer},
          {"project", curve_json(layer.project)},
          {"load_kv", curve_json(layer.load_kv)},
          {"dense", curve_json(layer.dense)},
          {"dense_of_last_layer", curve_json(costs.layer(costs.n_layer - 1).dense)},
          {"attn_per_key", curve_json(layer.attn_per_key)},
          {"hidden_bytes", layer.hidden_bytes},
          {"kv_bytes", layer.kv_bytes},
          {"link_bytes_per_s", costs.link.bytes_per_s},
          {"link_start_s", costs.link.start_s},
          {"slice_rows", costs.slice_rows},
          {"batch_rows", costs.batch_rows},
          {"finish_s", costs.finish_s},
          {"step_finish_s", p.finish_s * p.compute_scale}};
}

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

Status profile_sparsity(const ProfileArgs& args) {
  ProgressLine line;
  ThrottledEnv env(Env::real());
  RuntimeArgs options = args.runtime;
  options.no_store = true;
  options.ctx = std::max(options.ctx, state::kSparsityCells);
  HCACHE_ASSIGN_OR_RETURN(const auto runtime, open_runtime(options, env, line));
  const model::Model& model = runtime->model();
  HCACHE_ASSIGN_OR_RETURN(const auto tokenizer, model::Tokenizer::load(model.path()));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                          tokenizer->encode(state::sample_text(), {.add_special = true}));
  HCACHE_ASSIGN_OR_RETURN(const state::SparsityProfile sparsity,
                          state::measure_sparsity(runtime->engine(), tokens));
  line.finish();
  const std::vector<double> density = sparsity.density();
  const auto heads = static_cast<size_t>(sparsity.n_head_kv);
  Json layers = Json::array();
  std::vector<std::vector<std::string>> rows = {
      {"layer", "small weights", "of the heads", "keys that count alike"}};
  for (size_t layer = 0; layer < density.size(); ++layer) {
    Json small = Json::array();
    Json spread = Json::array();
    std::string each;
    double mean_spread = 0;
    for (size_t head = 0; head < heads; ++head) {
      const state::SparsityProfile::Head& of = sparsity.heads[layer * heads + head];
      small.push_back(of.small);
      spread.push_back(of.spread);
      mean_spread += of.spread / static_cast<double>(heads);
      if (head < 8) each += fmt::format("{}{:.0f}", head > 0 ? " " : "", 100 * of.small);
    }
    if (heads > 8) each += " …";
    rows.push_back(
        {fmt::format("{}", layer), percent(1 - density[layer]), each, percent(mean_spread)});
    layers.push_back(
        {{"small", 1 - density[layer]}, {"small_of_heads", small}, {"spread_of_heads", spread}});
  }
  HCACHE_RETURN_IF_ERROR(runtime->close());
  if (args.json) return write_json({{"model", model.path()}, {"layers", layers}}, "");
  fmt::print("model         {} ({} layers, {} heads of K and V)\n", model.path(), density.size(),
             heads);
  fmt::print(
      "small         less than a hundredth of the largest weight of their row (CaR §III-D)\n\n{}",
      format_columns(rows));
  return {};
}

Status profile(const ProfileArgs& args) {
  if (args.runtime.model.device == "list") return list_devices();
  if (args.sparsity) return profile_sparsity(args);
  ProgressLine line;
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const auto runtime, open_runtime(args.runtime, env, line));
  if (args.refresh) HCACHE_RETURN_IF_ERROR(runtime->refresh_profile());
  line.finish();
  const state::CostProfile p = runtime->profile();
  const model::Model& model = runtime->model();
  constexpr int64_t kRows[] = {1, 64, 512, 2048};
  const int64_t batch = args.runtime.batch;
  if (args.json) {
    Json rows = Json::array();
    for (const int64_t n : kRows) {
      rows.push_back({{"rows", n},
                      {"hidden_ms", p.layer.project.at(n) * 1e3},
                      {"load_kv_ms", p.layer.load_kv.at(n) * 1e3},
                      {"recompute_ms", policy::prefill_layer_s(p.layer, n, 0, batch) * 1e3}});
    }
    HCACHE_RETURN_IF_ERROR(write_json({{"model", model.path()},
                                       {"device", describe_devices(model)},
                                       {"threads", model.device().n_threads()},
                                       {"key", p.key},
                                       {"layers", model.hparams().n_layer},
                                       {"hidden_bytes_per_token_and_layer", p.layer.hidden_bytes},
                                       {"kv_bytes_per_token_and_layer", p.layer.kv_bytes},
                                       {"read_bytes_per_s", p.read_bytes_per_s},
                                       {"gemm_flops_per_s", p.gemm_flops_per_s},
                                       {"packing",
                                        {{"lossless", packing_json(p.packings.lossless)},
                                         {"q8_0", packing_json(p.packings.q8_0)},
                                         {"q4_0", packing_json(p.packings.q4_0)}}},
                                       {"compute_scale", p.compute_scale},
                                       {"paper_link_bytes_per_s", state::paper_link_bytes_per_s(p)},
                                       {"finish_ms", p.finish_s * 1e3},
                                       {"layer_costs", rows},
                                       {"costs", costs_json(runtime->costs(), p)}},
                                      ""));
    return runtime->close();
  }
  fmt::print("model         {} ({} layers)\n", model.path(), model.hparams().n_layer);
  fmt::print("device        {}, {} threads\n", describe_devices(model), model.device().n_threads());
  fmt::print("projection    {:.1f} GFLOP/s\n", p.gemm_flops_per_s / 1e9);
  fmt::print("restores      project in {:.2f} times the time measured below\n", p.compute_scale);
  fmt::print("store reads   {}\n",
             p.read_bytes_per_s > 0 ? format_rate(p.read_bytes_per_s) : "not measured yet");
  fmt::print("state         {} bytes of hidden, {} of KV per token and layer\n",
             p.layer.hidden_bytes, p.layer.kv_bytes);
  for (const auto& [name, packing] :
       {std::pair("without loss", p.packings.lossless), std::pair("as q8_0", p.packings.q8_0),
        std::pair("as q4_0", p.packings.q4_0)}) {
    if (packing.ratio == 0) continue;
    const double bytes_per_s = static_cast<double>(p.layer.kv_bytes) / packing.unpack_row_s;
    fmt::print("packing       {}: to {:.1f} % of K and V's bytes, unpacked at {}\n", name,
               100 * packing.ratio, format_rate(bytes_per_s));
  }
  fmt::print("paper's link  {} (--link paper)\n\n", format_rate(state::paper_link_bytes_per_s(p)));
  std::vector<std::vector<std::string>> rows = {{"tokens", "from hidden", "from KV", "recompute"}};
  for (const int64_t n : kRows) {
    rows.push_back({fmt::format("{}", n), seconds(p.layer.project.at(n)),
                    seconds(p.layer.load_kv.at(n)),
                    seconds(policy::prefill_layer_s(p.layer, n, 0, batch))});
  }
  fmt::print("compute per layer (reading comes on top)\n{}", format_columns(rows));
  return runtime->close();
}

}  // namespace

void add_profile(CLI::App& app, Verb* verb) {
  add_verb<ProfileArgs>(app, verb, "profile",
                        "Print what restoring costs on this machine; measured on first use",
                        profile);
}

}  // namespace hcache::cli
