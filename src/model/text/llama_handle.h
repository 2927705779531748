// What Sampler and ChatTemplate need of a loaded Tokenizer, and the library's log kept quiet.
#pragma once

#include <llama.h>

#include <memory>
#include <string>

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
};

// While one lives, what llama.cpp logs as an error on this thread is collected here instead of
// being printed. Everything else it logs is dropped, always: a library's chatter is not ours.
class ErrorLog {
 public:
  ErrorLog();
  ~ErrorLog();
  ErrorLog(const ErrorLog&) = delete;
  ErrorLog& operator=(const ErrorLog&) = delete;
  // The collected lines in one, or `fallback` when there are none.
  [[nodiscard]] std::string text(const std::string& fallback) const;

 private:
  std::string lines_;
  std::string* outer_;
};

}  // namespace hcache::model
