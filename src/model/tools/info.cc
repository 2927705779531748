#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "gguf_file.h"
#include "hparams.h"
#include "model/tools.h"

namespace hcache::model {
namespace {

std::string type_label(ggml_type type) {
  std::string name = ggml_type_name(type);
  for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

std::string value_text(const GgufFile& file, const std::string& key, const GgufValue& value) {
  if (value.type == GGUF_TYPE_ARRAY) {
    return fmt::format("[{} x {}]", value.count, gguf_type_name(value.item_type));
  }
  if (value.type == GGUF_TYPE_STRING) {
    return printable(file.string(key).value_or(std::nullopt).value_or(""));
  }
  if (value.type == GGUF_TYPE_BOOL) {
    return file.boolean(key).value_or(std::nullopt).value_or(false) ? "true" : "false";
  }
  const auto integer = file.integer(key);
  if (integer.ok()) return fmt::format("{}", (*integer).value_or(0));
  return fmt::format("{}", static_cast<float>(file.number(key).value_or(std::nullopt).value_or(0)));
}

// Architecture and numbers, or why they can't be had.
Status read_model(const GgufFile& file, HParams& out) {
  HCACHE_ASSIGN_OR_RETURN(const DecoderSpec* spec, read_architecture(file));
  HCACHE_ASSIGN_OR_RETURN(out, read_hparams(file, *spec));
  if (const GgufTensor* embedding = file.tensor("token_embd.weight"))
    out.n_vocab = embedding->ne[1];
  return {};
}

}  // namespace

uint64_t ModelInfo::kv_bytes_per_token() const {
  constexpr uint64_t kKandV = 2;
  return kKandV * sizeof(ggml_fp16_t) * static_cast<uint64_t>(hparams.n_layer) *
         static_cast<uint64_t>(hparams.n_embd_kv());
}

Result<ModelInfo> describe_model(const std::string& path) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, GgufFile::open(path));
  ModelInfo info;
  info.path = path;
  const Status status = read_model(*file, info.hparams);
  info.supported = status.ok();
  info.unsupported = status.message();
  std::map<ggml_type, int> types;
  for (const GgufTensor& t : file->tensors()) {
    types[t.type]++;
    info.n_params += static_cast<uint64_t>(t.n_elements());
    info.n_bytes += t.data.size();
    info.tensors.push_back({t.name, type_label(t.type), {t.ne, t.ne + t.n_dims}, t.data.size()});
  }
  std::vector<std::pair<ggml_type, int>> by_count(types.begin(), types.end());
  std::stable_sort(by_count.begin(), by_count.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  for (const auto& [type, count] : by_count) {
    info.types += fmt::format("{}{} ({} tensor{})", info.types.empty() ? "" : ", ",
                              type_label(type), count, count == 1 ? "" : "s");
  }
  for (const auto& [key, value] : file->values()) {
    info.metadata.emplace_back(printable(key), value_text(*file, key, value));
  }
  return info;
}

std::string to_json(const ModelInfo& info, bool with_tensors) {
  nlohmann::ordered_json j;
  j["path"] = info.path;
  j["supported"] = info.supported;
  j["engine"] = info.supported ? "own" : "libllama";
  if (!info.supported) j["unsupported"] = info.unsupported;
  if (info.supported) {
    const HParams& h = info.hparams;
    j["architecture"] = h.arch;
    j["name"] = h.name;
    j["n_vocab"] = h.n_vocab;
    j["n_layer"] = h.n_layer;
    j["n_embd"] = h.n_embd;
    j["n_head"] = h.n_head;
    j["n_head_kv"] = h.n_head_kv;
    j["head_dim"] = h.head_dim;
    j["n_rot"] = h.n_rot;
    j["n_ff"] = h.n_ff;
    j["n_ctx_train"] = h.n_ctx_train;
    j["norm_eps"] = h.norm_eps;
    j["rope_freq_base"] = h.rope_freq_base;
    j["rope_freq_scale"] = h.rope_freq_scale;
    j["kv_f16_bytes_per_token"] = info.kv_bytes_per_token();
  }
  j["types"] = info.types;
  j["n_params"] = info.n_params;
  j["n_bytes"] = info.n_bytes;
  for (const auto& [key, value] : info.metadata) j["metadata"][key] = value;
  if (with_tensors) {
    for (const TensorInfo& t : info.tensors) {
      j["tensors"].push_back(
          {{"name", t.name}, {"type", t.type}, {"shape", t.shape}, {"bytes", t.bytes}});
    }
  }
  constexpr int kIndent = 2;
  return j.dump(kIndent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace hcache::model
