// A projector that is loaded: libmtmd's context, and what it makes of media.
#pragma once

#include <llama.h>

#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "libllama/media.h"

namespace hcache::libllama {

class Projector : public MediaReader {
 public:
  struct Options {
    ProjectorOptions projector;
    ggml_backend_dev_t device = nullptr;  // null: the CPU
    int n_threads = 0;
    int64_t most_whole_rows = 0;  // that a step can compute at once
  };
  // For a model that is loaded and outlives it. kNotFound, kDataLoss (no projector, or another
  // model's), kUnimplemented (a build without libmtmd).
  static Result<std::unique_ptr<Projector>> load(const llama_model& model, const Options& options);

  // The rows of the n-th medium, one after the other; valid until the next call. One thread.
  virtual Result<std::span<const float>> encode(const MediaChunks& chunks, size_t n) = 0;
};

}  // namespace hcache::libllama
