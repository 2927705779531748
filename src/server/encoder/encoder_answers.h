// What the server of an encoder tells of itself. Pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "api/answers.h"
#include "api/json.h"
#include "api/ollama.h"
#include "encode_queue.h"
#include "encoder/encoder_server.h"
#include "libllama/llama_encoder.h"

namespace hcache::encoder {

// "none", "mean", "cls", "last" or "rank".
[[nodiscard]] std::string pooling_name(model::Pooling pooling);

struct EncoderCard {
  api::ModelCard card;
  api::OllamaModel ollama;
  api::Json props;
};
[[nodiscard]] EncoderCard encoder_card(const EncoderServerOptions& options,
                                       const libllama::LlamaEncoder& encoder,
                                       const std::string& model_name, int64_t created_s);

[[nodiscard]] std::string encoder_metrics(const EncodeCounts& counts);

// Of the document of all endpoints, what this server answers.
[[nodiscard]] api::Json encoder_document(const api::Json& document);

}  // namespace hcache::encoder
