#include <fmt/format.h>

#include <cmath>
#include <iterator>

#include "api/ollama.h"

namespace hcache::api {
namespace {

constexpr int64_t kNsPerSecond = 1'000'000'000;
constexpr size_t kDigestDigits = 64;                    // as many as SHA-256 has
constexpr const char* kNever = "9999-12-31T23:59:59Z";  // the last moment that all clients can read

// "134.5M"
std::string count_text(int64_t n) {
  constexpr double kThousand = 1e3;
  constexpr double kMillion = 1e6;
  constexpr double kBillion = 1e9;
  const auto number = static_cast<double>(n);
  if (number >= kBillion) return fmt::format("{:.1f}B", number / kBillion);
  if (number >= kMillion) return fmt::format("{:.1f}M", number / kMillion);
  if (number >= kThousand) return fmt::format("{:.1f}K", number / kThousand);
  return fmt::to_string(n);
}

Json details_json(const OllamaModel& m) {
  return {{"parent_model", ""},
          {"format", "gguf"},
          {"family", m.architecture},
          {"families", Json::array({m.architecture})},
          {"parameter_size", count_text(m.card.parameters)},
          {"quantization_level", m.weight_types}};
}

// What lists of models begin with.
Json entry_json(const OllamaModel& m) {
  std::string digest = m.digest;
  digest.resize(kDigestDigits, '0');
  return {{"name", m.card.name},
          {"model", m.card.name},
          {"size", m.card.bytes},
          {"digest", std::move(digest)},
          {"details", details_json(m)}};
}

// As a Modelfile has them, a line each.
std::string parameters_text(const OllamaModel& m) {
  std::string text;
  const auto add = [&text](std::string_view name, auto value) {
    fmt::format_to(std::back_inserter(text), "{:<30} {}\n", name, value);
  };
  const model::SamplingOptions& s = m.sampling;
  add("num_ctx", m.card.context);
  add("temperature", s.temperature);
  add("top_k", s.top_k);
  add("top_p", s.top_p);
  add("min_p", s.min_p);
  add("repeat_penalty", s.repeat_penalty);
  add("repeat_last_n", s.penalty_last_n);
  add("presence_penalty", s.presence_penalty);
  add("frequency_penalty", s.frequency_penalty);
  return text;
}

// Whole numbers without a fraction.
Json number_json(double x) { return std::trunc(x) == x ? Json(std::llround(x)) : Json(x); }

}  // namespace

Json ollama_tags_answer(std::span<const OllamaModel> models) {
  Json list = Json::array();
  for (const OllamaModel& model : models) {
    Json& entry = list.emplace_back(entry_json(model));
    entry["modified_at"] = moment_text(model.card.created_s * kNsPerSecond);
  }
  return {{"models", std::move(list)}};
}

Json ollama_ps_answer(std::span<const OllamaModel> models) {
  Json list = Json::array();
  for (const OllamaModel& model : models) {
    Json& entry = list.emplace_back(entry_json(model));
    entry["expires_at"] = model.expires_ns == 0 ? kNever : moment_text(model.expires_ns);
    entry["size_vram"] = model.accelerator_bytes;
    entry["context_length"] = model.card.context;
  }
  return {{"models", std::move(list)}};
}

Json ollama_show_answer(const OllamaModel& model) {
  Json info = {{"general.architecture", model.architecture},
               {"general.parameter_count", model.card.parameters}};
  for (const auto& [key, number] : model.numbers) {
    info[fmt::format("{}.{}", model.architecture, key)] = number_json(number);
  }
  // A template that knows no tools gets them described.
  Json capabilities = {"completion", "tools"};
  if (model.thinks) capabilities.push_back("thinking");
  if (model.fills_gaps) capabilities.push_back("insert");
  if (model.sees) capabilities.push_back("vision");
  return {{"parameters", parameters_text(model)},
          {"template", model.chat_template},
          {"details", details_json(model)},
          {"model_info", std::move(info)},
          {"capabilities", std::move(capabilities)},
          {"modified_at", moment_text(model.card.created_s * kNsPerSecond)}};
}

Json ollama_version_answer(std::string_view own_version) {
  return {{"version", kOllamaVersion}, {"hcache", own_version}};
}

}  // namespace hcache::api
