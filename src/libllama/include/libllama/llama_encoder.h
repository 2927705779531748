// Vectors and ranks of texts, on libllama: models that read a text as a whole (BERT's kind), and
// those that write text, by the rows behind their last layer. Nothing is kept from one text to
// the next.
//
// Threading: one thread; it is the one that loaded it (OpenMP keeps a team for each).
#pragma once

#include <ggml-backend.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "libllama/llama_engine.h"
#include "model/pooling.h"

namespace hcache::libllama {

struct EncoderOptions {
  // LlamaOptions' of the same names.
  std::vector<ggml_backend_dev_t> devices;
  int gpu_layers = -1;
  std::vector<float> device_parts;
  int n_threads = 0;
  std::function<bool(float)> progress;

  std::optional<model::Pooling> pooling;  // absent: as the model's file says, or the mean
  // Most tokens of a text, at most as many as the model was trained for; 0: as many.
  int64_t max_text_tokens = 0;
  // Most tokens of several texts that are computed at once. Attention is computed between all of
  // them, so that more are not always faster.
  int64_t max_batch_tokens = 512;
  int32_t max_batch_texts = 64;
};

// One row; with Pooling::kNone one for each token. With kRank a row has the head's scores.
using EncodedText = std::vector<std::vector<float>>;

class LlamaEncoder {
 public:
  // kNotFound, kDataLoss (unreadable, with what libllama says), kFailedPrecondition (ranks of a
  // model that has no head for it), kResourceExhausted, kCancelled.
  static Result<std::unique_ptr<LlamaEncoder>> load(const std::string& path,
                                                    const EncoderOptions& options);
  LlamaEncoder() = default;
  LlamaEncoder(const LlamaEncoder&) = delete;
  LlamaEncoder& operator=(const LlamaEncoder&) = delete;
  virtual ~LlamaEncoder() = default;

  [[nodiscard]] virtual const LlamaModelInfo& info() const = 0;
  // With what is decided: no limit is 0, the pooling is there.
  [[nodiscard]] virtual const EncoderOptions& options() const = 0;
  // Numbers of a row.
  [[nodiscard]] virtual int32_t width() const = 0;

  // What each text becomes, in their order, in as few batches as the limits allow.
  // kInvalidArgument: a text has no tokens, or one that the vocabulary has not. kOutOfRange: it has
  // more than max_text_tokens.
  virtual Result<std::vector<EncodedText>> encode(std::span<const std::vector<int32_t>> texts) = 0;
};

}  // namespace hcache::libllama
