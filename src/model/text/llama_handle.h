// What Sampler and ChatTemplate need of a loaded Tokenizer.
#pragma once

#include <llama.h>

#include <memory>
#include <string>

#include "model/llama_log.h"
#include "model/tokenizer.h"

namespace hcache::model {

struct LlamaModelDeleter {
  void operator()(llama_model* model) const { llama_model_free(model); }
};
struct LlamaSamplerDeleter {
  void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
};
using LlamaSamplerPtr = std::unique_ptr<llama_sampler, LlamaSamplerDeleter>;

struct Tokenizer::Impl {
  std::unique_ptr<llama_model, LlamaModelDeleter> model;
  const llama_vocab* vocab = nullptr;
  int32_t n_vocab = 0;
  std::string chat_template;
  std::string pair_template;  // with {query} and {document}; empty: there is none
};

}  // namespace hcache::model
