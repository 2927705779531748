#include "api/embeddings.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "base/base64.h"
#include "request_fields.h"

namespace hcache::api {
namespace {

constexpr int kLargestNorm = 100;
constexpr float kLargestInt16 = 32760;  // as llama.cpp has it

void embedded_model_field(Fields& f, EmbeddingRequest* r) {
  f.text("model", &r->model_name, "The model; it must be the one that is served.");
}

void inputs_field(Fields& f, std::string_view name, EmbeddingRequest* r) {
  f.value(name, prompts_schema(), "Text or token ids, one or several.",
          [&](const Json& value, const std::string& path) {
            return read_prompts(value, path, &r->inputs);
          });
}

void normalize_field(Fields& f, EmbeddingRequest* r) {
  f.integer(
      "embd_normalize", &r->normalize, {kNotNormalized, kLargestNorm},
      "How a vector is normalised: -1 not, 0 its largest number becomes 32760, 1 by the sum of "
      "magnitudes, 2 to length 1, more: by that norm.");
}

void dimensions_field(Fields& f, EmbeddingRequest* r) {
  f.integer(
      "dimensions", &r->dimensions, {1, 1 << 20},
      "The first so many numbers of each vector, normalised, for models that were trained for "
      "it; without it all.");
}

void format_field(Fields& f, EmbeddingRequest* r) {
  std::string format = "float";
  f.one_of("encoding_format", &format, {"float", "base64"}, "How the numbers are written.");
  r->base64 = format == "base64";
}

// The bytes of little-endian floats.
std::string base64_of(std::span<const float> values) {
  static_assert(std::endian::native == std::endian::little);
  return base64({reinterpret_cast<const char*>(values.data()), values.size_bytes()});
}

Json numbers_json(const EmbeddingRequest& request, const std::vector<float>& values) {
  return request.base64 ? Json(base64_of(values)) : Json(values);
}

Json open_ai_answer(const EmbeddingRequest& request, std::string_view model_name,
                    std::span<const Embedding> embeddings) {
  Json data = Json::array();
  int64_t tokens = 0;
  for (size_t i = 0; i < embeddings.size(); i++) {
    data.push_back({{"object", "embedding"},
                    {"index", i},
                    {"embedding", numbers_json(request, embeddings[i].rows.front())}});
    tokens += embeddings[i].tokens;
  }
  return {{"object", "list"},
          {"data", std::move(data)},
          {"model", model_name},
          {"usage", {{"prompt_tokens", tokens}, {"total_tokens", tokens}}}};
}

Json llama_answer(std::span<const Embedding> embeddings) {
  Json answer = Json::array();
  for (size_t i = 0; i < embeddings.size(); i++) {
    answer.push_back({{"index", i}, {"embedding", embeddings[i].rows}});
  }
  return answer;
}

Json ollama_answer(std::string_view model_name, std::span<const Embedding> embeddings,
                   int64_t total_ns) {
  Json vectors = Json::array();
  int64_t tokens = 0;
  for (const Embedding& embedding : embeddings) {
    vectors.push_back(embedding.rows.front());
    tokens += embedding.tokens;
  }
  return {{"model", model_name},
          {"embeddings", std::move(vectors)},
          {"total_duration", total_ns},
          {"load_duration", 0},
          {"prompt_eval_count", tokens}};
}

Result<EmbeddingRequest> read_embedding(const Json& body, EmbeddingForm form, int normalize,
                                        void (*declare)(Fields& f, EmbeddingRequest* r)) {
  EmbeddingRequest r;
  r.form = form;
  r.normalize = normalize;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { declare(f, &r); }));
  return r;
}

Status shape_vector(const EmbeddingRequest& request, std::vector<float>* vector) {
  if (request.dimensions > static_cast<int64_t>(vector->size())) {
    return invalid_argument(fmt::format("dimensions: {}, but the model's vectors have {} numbers",
                                        request.dimensions, vector->size()));
  }
  if (request.dimensions > 0) vector->resize(static_cast<size_t>(request.dimensions));
  if (request.normalize == kNotNormalized) return {};
  double norm = 0;
  for (const float value : *vector) {
    const double magnitude = std::abs(static_cast<double>(value));
    if (request.normalize == kMaxNormalized) {
      norm = std::max(norm, magnitude);
    } else {
      norm += std::pow(magnitude, request.normalize);
    }
  }
  norm = request.normalize == kMaxNormalized ? norm / kLargestInt16
                                             : std::pow(norm, 1.0 / request.normalize);
  if (norm == 0) return {};
  for (float& value : *vector) value = static_cast<float>(value / norm);
  return {};
}

}  // namespace

void embedding_fields(Fields& f, EmbeddingRequest* r) {
  embedded_model_field(f, r);
  inputs_field(f.required(), "input", r);
  format_field(f, r);
  dimensions_field(f, r);
  normalize_field(f, r);
  std::string user;
  f.text("user", &user, "Who asks.");
}

void llama_embedding_fields(Fields& f, EmbeddingRequest* r) {
  embedded_model_field(f, r);
  inputs_field(f, "content", r);
  EmbeddingRequest unused;
  inputs_field(f, "input", r->inputs.empty() ? r : &unused);
  if (f.reading() && r->inputs.empty()) f.fail("content", "missing, and so is input");
  normalize_field(f, r);
  dimensions_field(f, r);
}

void ollama_embed_fields(Fields& f, EmbeddingRequest* r) {
  f.required();
  embedded_model_field(f, r);
  inputs_field(f.required(), "input", r);
  r->truncate = true;
  f.flag("truncate", &r->truncate, "Whether the beginning counts of what is too long.");
  dimensions_field(f, r);
}

void ollama_embeddings_fields(Fields& f, EmbeddingRequest* r) {
  f.required();
  embedded_model_field(f, r);
  std::string prompt;
  f.required().text("prompt", &prompt, "The text.");
  r->inputs.emplace_back();
  r->inputs.back().parts.emplace_back(std::move(prompt));
  r->truncate = true;
}

Result<EmbeddingRequest> parse_embedding(const Json& body, int normalize) {
  return read_embedding(body, EmbeddingForm::kOpenAi, normalize, embedding_fields);
}

Result<EmbeddingRequest> parse_llama_embedding(const Json& body, int normalize) {
  return read_embedding(body, EmbeddingForm::kLlama, normalize, llama_embedding_fields);
}

Result<EmbeddingRequest> parse_ollama_embed(const Json& body) {
  return read_embedding(body, EmbeddingForm::kOllama, kEuclidean, ollama_embed_fields);
}

// Ollama's older endpoint gives vectors as the model made them.
Result<EmbeddingRequest> parse_ollama_embeddings(const Json& body) {
  return read_embedding(body, EmbeddingForm::kOllamaOne, kNotNormalized, ollama_embeddings_fields);
}

std::vector<EmbeddingRoute> embedding_routes(int normalize) {
  const auto openai = [normalize](const Json& body) { return parse_embedding(body, normalize); };
  const auto llama = [normalize](const Json& body) {
    return parse_llama_embedding(body, normalize);
  };
  return {{.path = "/v1/embeddings", .parse = openai},
          {.path = "/embedding", .parse = llama},
          {.path = "/embeddings", .parse = llama},
          {.path = "/api/embed", .parse = parse_ollama_embed},
          {.path = "/api/embeddings", .parse = parse_ollama_embeddings}};
}

Status check_pooling(const EmbeddingRequest& request, bool pooled) {
  if (pooled || request.form == EmbeddingForm::kLlama) return {};
  return invalid_argument(
      "this answer has one vector for a text, and the server was started with --pooling none, or "
      "the model's file says so; take /embedding, or start it with --pooling mean");
}

Status shape_embedding(const EmbeddingRequest& request, bool pooled, Embedding* embedding) {
  if (!pooled) return {};
  for (std::vector<float>& row : embedding->rows) {
    HCACHE_RETURN_IF_ERROR(shape_vector(request, &row));
  }
  return {};
}

Json embeddings_answer(const EmbeddingRequest& request, std::string_view model_name,
                       std::span<const Embedding> embeddings, int64_t total_ns) {
  switch (request.form) {
    case EmbeddingForm::kOpenAi: break;
    case EmbeddingForm::kLlama: return llama_answer(embeddings);
    case EmbeddingForm::kOllama: return ollama_answer(model_name, embeddings, total_ns);
    case EmbeddingForm::kOllamaOne: return Json{{"embedding", embeddings.front().rows.front()}};
  }
  return open_ai_answer(request, model_name, embeddings);
}

}  // namespace hcache::api
