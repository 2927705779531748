// Requests for vectors instead of text, in the forms of OpenAI, llama-server and Ollama. Pure
// functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/json.h"
#include "api/request.h"
#include "base/status.h"

namespace hcache::api {

// llama.cpp's --embd-normalize: a vector's numbers are divided by the largest of them (and take the
// range of 16 bits), by the sum of their magnitudes, by their Euclidean length, by their p-norm.
inline constexpr int kNotNormalized = -1;
inline constexpr int kMaxNormalized = 0;
inline constexpr int kEuclidean = 2;

enum class EmbeddingForm : uint8_t {
  kOpenAi,     // /v1/embeddings
  kLlama,      // /embedding
  kOllama,     // /api/embed
  kOllamaOne,  // /api/embeddings: one text
};

struct EmbeddingRequest {
  EmbeddingForm form = EmbeddingForm::kOpenAi;
  std::string model_name;
  std::vector<Prompt> inputs;
  bool base64 = false;         // the floats as little-endian bytes
  int normalize = kEuclidean;  // of vectors that stand for a whole text
  int64_t dimensions = 0;      // the first so many numbers of a vector; 0: all
  bool truncate = false;       // the beginning of what is too long
};

// `normalize`: of requests that say nothing.
[[nodiscard]] Result<EmbeddingRequest> parse_embedding(const Json& body,
                                                       int normalize = kEuclidean);
// With `input` instead of `content`, too.
[[nodiscard]] Result<EmbeddingRequest> parse_llama_embedding(const Json& body,
                                                             int normalize = kEuclidean);
[[nodiscard]] Result<EmbeddingRequest> parse_ollama_embed(const Json& body);
[[nodiscard]] Result<EmbeddingRequest> parse_ollama_embeddings(const Json& body);

struct Embedding {
  std::vector<std::vector<float>> rows;  // one; without pooling one for each token
  int64_t tokens = 0;                    // of the input
};

// What the request wants of a model's vector: its first dimensions, normalised.
// kInvalidArgument: it has not as many.
Status shape_embedding(const EmbeddingRequest& request, std::vector<float>* vector);

// Every embedding has one row, but for EmbeddingForm::kLlama.
[[nodiscard]] Json embeddings_answer(const EmbeddingRequest& request, std::string_view model_name,
                                     std::span<const Embedding> embeddings, int64_t total_ns);

}  // namespace hcache::api
