// A cost profile's file: JSON under a name that is made of its key.
#include <fmt/format.h>

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "compute_scale.h"
#include "state/cost_profile.h"

namespace hcache::state {
namespace {

using nlohmann::json;

constexpr int kFormatVersion = 4;

json to_json(const policy::CostCurve& curve) {
  if (curve.points().empty()) {
    return {{"base_s", curve.base_s()}, {"per_row_s", curve.per_row_s()}};
  }
  json points = json::array();
  for (const auto& p : curve.points()) points.push_back({p.rows, p.seconds});
  return {{"points", points}};
}

// Throws json::exception on a wrong shape.
Result<policy::CostCurve> curve_from_json(const json& j) {
  if (!j.contains("points")) {
    const double base_s = j.at("base_s").get<double>();
    const double per_row_s = j.at("per_row_s").get<double>();
    if (!std::isfinite(base_s) || !std::isfinite(per_row_s)) {
      return data_loss("a cost that is no number");
    }
    return policy::CostCurve::affine(base_s, per_row_s);
  }
  std::vector<policy::CostCurve::Point> points;
  for (const json& p : j.at("points")) {
    points.push_back({p.at(0).get<int64_t>(), p.at(1).get<double>()});
  }
  return policy::CostCurve::table(std::move(points));
}

json to_json(const policy::LayerCosts& layer) {
  return {{"project", to_json(layer.project)},  {"load_kv", to_json(layer.load_kv)},
          {"dense", to_json(layer.dense)},      {"attn_per_key", to_json(layer.attn_per_key)},
          {"hidden_bytes", layer.hidden_bytes}, {"kv_bytes", layer.kv_bytes}};
}

// Throws json::exception on a wrong shape.
Result<policy::LayerCosts> layer_from_json(const json& j) {
  policy::LayerCosts layer;
  HCACHE_ASSIGN_OR_RETURN(layer.project, curve_from_json(j.at("project")));
  HCACHE_ASSIGN_OR_RETURN(layer.load_kv, curve_from_json(j.at("load_kv")));
  HCACHE_ASSIGN_OR_RETURN(layer.dense, curve_from_json(j.at("dense")));
  HCACHE_ASSIGN_OR_RETURN(layer.attn_per_key, curve_from_json(j.at("attn_per_key")));
  layer.hidden_bytes = j.at("hidden_bytes").get<int64_t>();
  layer.kv_bytes = j.at("kv_bytes").get<int64_t>();
  if (layer.hidden_bytes < 1 || layer.kv_bytes < 1) return data_loss("no bytes per token");
  return layer;
}

bool is_rate(double value) { return std::isfinite(value) && value >= 0; }

// Throws json::exception on a wrong shape.
Result<StageCosts> stage_from_json(const json& j) {
  StageCosts stage;
  HCACHE_ASSIGN_OR_RETURN(stage.layer, layer_from_json(j));
  stage.n_layers = j.at("layers").get<int>();
  stage.upload_bytes_per_s = j.at("upload_bytes_per_s").get<double>();
  if (stage.n_layers < 1) return data_loss("a stage without layers");
  if (!is_rate(stage.upload_bytes_per_s)) return data_loss("a figure below zero");
  return stage;
}

// Each with its name in the file.
template <typename Packings>
auto packings_of(Packings& packings) {
  return std::array{std::pair("lossless", &packings.lossless), std::pair("q8_0", &packings.q8_0),
                    std::pair("q4_0", &packings.q4_0)};
}

std::string profile_path(const std::string& dir, const std::string& key) {
  struct Tag;
  return join_path(dir, to_hex(Hasher("hcache.profile").add(key).finish<Id128<Tag>>()) + ".json");
}

Result<CostProfile> parse_profile(const std::string& text) {
  try {
    const json j = json::parse(text);
    if (j.at("version").get<int>() != kFormatVersion) return data_loss("another format version");
    CostProfile p;
    p.key = j.at("key").get<std::string>();
    HCACHE_ASSIGN_OR_RETURN(p.layer, layer_from_json(j));
    p.finish_s = j.at("finish_s").get<double>();
    p.compute_scale = j.at("compute_scale").get<double>();
    p.read_bytes_per_s = j.at("read_bytes_per_s").get<double>();
    p.upload_bytes_per_s = j.at("upload_bytes_per_s").get<double>();
    p.gemm_flops_per_s = j.at("gemm_flops_per_s").get<double>();
    for (const double value :
         {p.finish_s, p.read_bytes_per_s, p.upload_bytes_per_s, p.gemm_flops_per_s}) {
      if (!is_rate(value)) return data_loss("a figure below zero");
    }
    for (const auto& [name, packing] : packings_of(p.packings)) {
      const json& from = j.at("packing").at(name);
      packing->ratio = from.at("ratio").get<double>();
      packing->unpack_row_s = from.at("unpack_row_s").get<double>();
      if (!is_rate(packing->ratio) || !is_rate(packing->unpack_row_s)) {
        return data_loss("a figure below zero");
      }
    }
    if (!(p.compute_scale >= 1 / kMaxComputeScale && p.compute_scale <= kMaxComputeScale)) {
      return data_loss("a scale of the costs out of its range");
    }
    if (j.contains("stages")) {
      for (const json& stage : j.at("stages")) {
        HCACHE_ASSIGN_OR_RETURN(p.stages.emplace_back(), stage_from_json(stage));
      }
    }
    return p;
  } catch (const json::exception& e) {
    return data_loss(e.what());
  }
}

}  // namespace

Result<CostProfile> load_cost_profile(Env& env, const std::string& dir, const std::string& key) {
  const std::string path = profile_path(dir, key);
  HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(env, path));
  Result<CostProfile> profile = parse_profile(text);
  if (!profile.ok()) return data_loss(profile.status().message()).with_context(path);
  if (profile->key != key) return data_loss("measured for something else").with_context(path);
  return profile;
}

Status save_cost_profile(Env& env, const std::string& dir, const CostProfile& profile) {
  HCACHE_RETURN_IF_ERROR(env.make_dirs(dir));
  json j = to_json(profile.layer);
  j["version"] = kFormatVersion;
  j["key"] = profile.key;
  j["compute_scale"] = profile.compute_scale;
  j["finish_s"] = profile.finish_s;
  j["read_bytes_per_s"] = profile.read_bytes_per_s;
  j["upload_bytes_per_s"] = profile.upload_bytes_per_s;
  j["gemm_flops_per_s"] = profile.gemm_flops_per_s;
  for (const auto& [name, packing] : packings_of(profile.packings)) {
    j["packing"][name] = {{"ratio", packing->ratio}, {"unpack_row_s", packing->unpack_row_s}};
  }
  for (const StageCosts& stage : profile.stages) {
    json one = to_json(stage.layer);
    one["layers"] = stage.n_layers;
    one["upload_bytes_per_s"] = stage.upload_bytes_per_s;
    j["stages"].push_back(std::move(one));
  }
  return write_whole_file(env, profile_path(dir, profile.key), j.dump(2) + "\n");
}

}  // namespace hcache::state
