#include "state/llama_runtime.h"

#include <fmt/format.h>

#include <bit>
#include <charconv>

namespace hcache::state {
namespace {

// "3,1": of --tensor-split.
Result<std::vector<float>> parse_parts(const std::string& text) {
  std::vector<float> parts;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    float part = 0;
    const auto [rest, error] = std::from_chars(text.data() + at, text.data() + end, part);
    if (error != std::errc() || rest != text.data() + end || part < 0) {
      return invalid_argument(
          fmt::format("--tensor-split {}: expected proportions with commas between them", text));
    }
    parts.push_back(part);
    at = end + 1;
  }
  return parts;
}

}  // namespace

Result<EngineChoice> parse_engine_choice(const std::string& name) {
  if (name == "auto") return EngineChoice::kAuto;
  if (name == "own") return EngineChoice::kOwn;
  if (name == "llama") return EngineChoice::kLlama;
  return invalid_argument(fmt::format("there is no engine '{}'; there are auto, own, llama", name));
}

ModelCard model_card(const model::Model& model) {
  const model::HParams& h = model.hparams();
  ModelCard card;
  card.path = model.path();
  card.architecture = h.arch;
  card.engine = "own";
  card.places = model.describe_places();
  card.weight_types = model.type_name();
  card.streamed = model.streamed() != nullptr;
  card.n_vocab = static_cast<int32_t>(h.n_vocab);
  card.n_layer = h.n_layer;
  card.n_embd = h.n_embd;
  card.n_ctx_train = h.n_ctx_train;
  card.n_params = static_cast<int64_t>(model.n_params());
  card.n_bytes = static_cast<int64_t>(model.n_bytes());
  return card;
}

ModelCard model_card(const std::string& path, const libllama::LlamaEngine& engine) {
  const libllama::LlamaModelInfo& info = engine.info();
  ModelCard card;
  card.path = path;
  card.architecture = info.architecture;
  card.engine = "libllama: " + engine.layout().description;
  card.places = engine.options().devices.empty() ? "cpu" : "as libllama chooses";
  // "qwen3next 80B Q4_K - Medium": behind the kind and the size.
  const std::string& text = info.description;
  const size_t size = text.find(' ');
  const size_t types = size == std::string::npos ? size : text.find(' ', size + 1);
  card.weight_types = types == std::string::npos ? text : text.substr(types + 1);
  card.n_vocab = info.n_vocab;
  card.n_layer = info.n_layer;
  card.n_embd = info.n_embd;
  card.n_ctx_train = info.n_ctx_train;
  card.n_params = info.n_params;
  card.n_bytes = info.n_bytes;
  return card;
}

Result<libllama::LlamaOptions> llama_placement(const model::OpenDevices& devices,
                                               const model::Offload& offload) {
  if (!offload.override_tensors.empty() || offload.share_layers) {
    return unimplemented(
        "--override-tensor and --split-mode tensor need our own engine, which does not run this "
        "model; leave them out");
  }
  libllama::LlamaOptions options;
  for (const auto& device : devices.devices) {
    if (!device->is_cpu()) options.devices.push_back(device->dev());
  }
  options.n_threads = devices.devices.front()->n_threads();
  options.gpu_layers = offload.n_layers;
  if (options.devices.size() > 1 && !offload.tensor_split.empty()) {
    HCACHE_ASSIGN_OR_RETURN(options.device_parts, parse_parts(offload.tensor_split));
  }
  if (offload.one_device && !options.devices.empty()) {
    const auto main = static_cast<size_t>(offload.main_device);
    options.devices = {options.devices[std::min(main, options.devices.size() - 1)]};
  }
  return options;
}

Fingerprint llama_fingerprint(const std::string& digest, const libllama::LlamaEngine& engine) {
  Hasher hasher("hcache libllama state");
  hasher.add(digest).add(libllama::libllama_identity()).add(engine.layout().description);
  hasher.add_u64(static_cast<uint64_t>(engine.options().kv_type));
  for (const size_t bytes : engine.layout().row_bytes) hasher.add_u64(bytes);
  if (const model::RopeOverride& rope = engine.options().rope; rope.any()) {
    hasher.add_u64(static_cast<uint64_t>(rope.scaling));
    hasher.add_u64(static_cast<uint64_t>(rope.orig_ctx));
    for (const float value : {rope.freq_base, rope.freq_scale, rope.ext_factor, rope.attn_factor,
                              rope.beta_fast, rope.beta_slow}) {
      hasher.add_u64(std::bit_cast<uint32_t>(value));
    }
  }
  return hasher.finish<Fingerprint>();
}

}  // namespace hcache::state
