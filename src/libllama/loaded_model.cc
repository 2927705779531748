#include "loaded_model.h"

#include <fmt/format.h>

#include "model/llama_log.h"

namespace hcache::libllama {
namespace {

// The caller's function for progress, as libllama calls it.
struct LoadingReport {
  const std::function<bool(float)>* progress = nullptr;
  bool cancelled = false;

  static bool report(float fraction, void* loading) {
    auto* self = static_cast<LoadingReport*>(loading);
    self->cancelled = *self->progress && !(*self->progress)(fraction);
    return !self->cancelled;
  }
};

}  // namespace

Result<ModelPtr> load_model(const std::string& path, Loading loading) {
  const model::ErrorLog log;
  std::vector<ggml_backend_dev_t> devices = std::move(loading.devices);
  const bool on_cpu = devices.empty();
  devices.push_back(nullptr);  // ends the list
  std::vector<float> parts = loading.device_parts;
  parts.resize(std::max(parts.size(), llama_max_devices()));
  llama_model_params params = llama_model_default_params();
  params.devices = devices.data();
  params.n_gpu_layers = on_cpu ? 0 : loading.gpu_layers;
  if (!loading.device_parts.empty()) params.tensor_split = parts.data();
  LoadingReport report{&loading.progress};
  params.progress_callback = LoadingReport::report;
  params.progress_callback_user_data = &report;
  ModelPtr model(llama_model_load_from_file(path.c_str(), params));
  if (report.cancelled) return cancelled(fmt::format("{}: loading was cancelled", path));
  if (!model) {
    return data_loss(fmt::format("{}: llama.cpp can't load it: {}", path, log.text("no reason")));
  }
  return model;
}

LlamaModelInfo describe(const llama_model& model) {
  LlamaModelInfo info;
  info.description =
      written([&](char* to, size_t size) { return llama_model_desc(&model, to, size); });
  info.architecture = written([&](char* to, size_t size) {
    return llama_model_meta_val_str(&model, "general.architecture", to, size);
  });
  info.n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(&model));
  info.n_layer = llama_model_n_layer(&model);
  info.n_embd = llama_model_n_embd(&model);
  info.n_embd_out = llama_model_n_embd_out(&model);
  info.n_ctx_train = llama_model_n_ctx_train(&model);
  info.n_params = static_cast<int64_t>(llama_model_n_params(&model));
  info.n_bytes = static_cast<int64_t>(llama_model_size(&model));
  return info;
}

}  // namespace hcache::libllama
