// Requests for vectors instead of text, in the forms of OpenAI, llama-server and Ollama. Pure
// functions.
#pragma once

#include <cstdint>
#include <functional>
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

// Where vectors are asked for, and in which words; every server that makes some has these.
struct EmbeddingRoute {
  const char* path;
  std::function<Result<EmbeddingRequest>(const Json& body)> parse;
};
// `normalize`: of requests that say nothing.
[[nodiscard]] std::vector<EmbeddingRoute> embedding_routes(int normalize);

// kInvalidArgument: without pooling there is a row for each token, which the answer's form has not.
[[nodiscard]] Status check_pooling(const EmbeddingRequest& request, bool pooled);
// What the request wants of vectors: their first dimensions, normalised; rows of single tokens stay
// as they are, as llama-server gives them. kInvalidArgument: they have not as many.
[[nodiscard]] Status shape_embedding(const EmbeddingRequest& request, bool pooled,
                                     Embedding* embedding);

// Every embedding has one row, but for EmbeddingForm::kLlama.
[[nodiscard]] Json embeddings_answer(const EmbeddingRequest& request, std::string_view model_name,
                                     std::span<const Embedding> embeddings, int64_t total_ns);

}  // namespace hcache::api
