// A model in libllama's memory, for what computes with it.
//
// Threading: plain functions; a model belongs to one thread while it loads, then nobody changes it.
#pragma once

#include <llama.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "libllama/llama_engine.h"

namespace hcache::libllama {

struct ModelFree {
  void operator()(llama_model* model) const { llama_model_free(model); }
};
struct ContextFree {
  void operator()(llama_context* context) const { llama_free(context); }
};
using ModelPtr = std::unique_ptr<llama_model, ModelFree>;
using ContextPtr = std::unique_ptr<llama_context, ContextFree>;

// LlamaOptions' of the same names.
struct Loading {
  std::vector<ggml_backend_dev_t> devices;
  int gpu_layers = -1;
  std::vector<float> device_parts;
  std::function<bool(float)> progress;
};

// kDataLoss, with what libllama says; kCancelled.
[[nodiscard]] Result<ModelPtr> load_model(const std::string& path, Loading loading);
[[nodiscard]] LlamaModelInfo describe(const llama_model& model);

// What `write`, a function of libllama's, puts into a buffer of so many bytes.
template <typename Write>
std::string written(const Write& write) {
  constexpr size_t kLongest = 256;
  std::string text(kLongest, '\0');
  const int32_t n = write(text.data(), text.size());
  text.resize(static_cast<size_t>(std::clamp<int32_t>(n, 0, kLongest - 1)));
  return text;
}

}  // namespace hcache::libllama
