// What Ollama's API tells of the server and its model. Pure functions.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "api/answers.h"
#include "api/json.h"
#include "api/request.h"
#include "model/sampler.h"

namespace hcache::api {

// The version of Ollama that had all of its API that is here. Clients look at it to know what they
// may ask for.
inline constexpr std::string_view kOllamaVersion = "0.12.11";

struct OllamaModel {
  ModelCard card;
  std::string digest;  // hexadecimal digits, as many as there are
  std::string architecture;
  std::string weight_types;       // "Q4_1"
  int64_t accelerator_bytes = 0;  // of the weights
  int64_t expires_ns = 0;         // when it leaves memory, since 1970-01-01 UTC; 0: never
  // By its keys in the model's file, without the architecture's name before them.
  std::map<std::string, double> numbers;
  std::string chat_template;
  bool thinks = false;
  bool fills_gaps = false;
  bool sees = false;                // pictures
  model::SamplingOptions sampling;  // of requests that name none
};

[[nodiscard]] Json ollama_tags_answer(std::span<const OllamaModel> models);
// The models that are in memory.
[[nodiscard]] Json ollama_ps_answer(std::span<const OllamaModel> models);
[[nodiscard]] Json ollama_show_answer(const OllamaModel& model);
[[nodiscard]] Json ollama_version_answer(std::string_view own_version);
// To a request that only loads the model.
[[nodiscard]] Json ollama_load_answer(const GenerationRequest& request, std::string_view model_name,
                                      int64_t created_s);

}  // namespace hcache::api
