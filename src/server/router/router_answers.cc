#include "router_answers.h"

#include <fmt/format.h>

#include <iterator>
#include <utility>
#include <vector>

#include "api/answers.h"
#include "api/ollama.h"

namespace hcache::router {
namespace {

using api::Json;

constexpr int kNotFound = 404;

const char* state_name(const ModelStatus& m) {
  switch (m.state) {
    case ModelState::kUnloaded: return m.wanted ? "loading" : "unloaded";
    case ModelState::kLoading: return "loading";
    case ModelState::kLoaded: return "loaded";
    case ModelState::kUnloading: return "unloading";
  }
  return "unloaded";
}

Json status_json(const ModelStatus& m) {
  Json status = {{"value", state_name(m)}};
  if (m.failed && m.state == ModelState::kUnloaded && !m.wanted) {
    // As shells have it: 128 and the signal.
    constexpr int kSignals = 128;
    status["failed"] = true;
    status["exit_code"] = m.failed->signal == 0 ? m.failed->code : kSignals + m.failed->signal;
  }
  return status;
}

api::OllamaModel ollama_model(const ModelStatus& m, std::int64_t created_s) {
  api::OllamaModel out;
  out.card.name = m.file.name;
  out.card.created_s = created_s;
  out.card.parameters = m.facts.parameters;
  out.card.bytes = static_cast<std::int64_t>(m.file.bytes);
  if (m.card.is_object() && m.card.contains("meta")) {
    out.card.context = m.card["meta"].value("n_ctx_train", std::int64_t{0});
  }
  out.digest = m.id;
  out.architecture = m.facts.architecture;
  out.weight_types = m.facts.weight_types;
  out.numbers = m.facts.numbers;
  return out;
}

// What HTML would take for its own.
std::string html_text(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out.push_back(c);
    }
  }
  return out;
}

std::string path_segment(std::string_view name) {
  std::string out;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') ||
                       (byte >= '0' && byte <= '9') || c == '-' || c == '_' || c == '.';
    out += plain ? std::string(1, c) : fmt::format("%{:02X}", byte);
  }
  return out;
}

std::string label_text(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (c == '\\' || c == '"') out.push_back('\\');
    out.push_back(c == '\n' ? ' ' : c);
  }
  return out;
}

// A family of metrics with a line for each model.
template <typename Value>
void add_family(std::string* out, std::string_view name, std::string_view type,
                std::string_view help, std::span<const ModelStatus> models, Value value) {
  fmt::format_to(std::back_inserter(*out), "# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  for (const ModelStatus& m : models) {
    fmt::format_to(std::back_inserter(*out), "{}{{model=\"{}\"}} {}\n", name,
                   label_text(m.file.name), value(m));
  }
}

Json model_body_operation(const char* id, const char* summary) {
  const Json name = {{"type", "object"},
                     {"properties", {{"model", {{"type", "string"}}}}},
                     {"required", Json::array({"model"})}};
  const Json success = {{"type", "object"}, {"properties", {{"success", {{"type", "boolean"}}}}}};
  return {{"post",
           {{"operationId", id},
            {"summary", summary},
            {"tags", Json::array({"Models"})},
            {"requestBody",
             {{"required", true}, {"content", {{"application/json", {{"schema", name}}}}}}},
            {"responses",
             {{"200",
               {{"description", "It is under way; GET /models tells when it is done."},
                {"content", {{"application/json", {{"schema", success}}}}}}},
              {"default", {{"$ref", "#/components/responses/Error"}}}}}}}};
}

}  // namespace

Json router_model_answer(const ModelStatus& m, std::int64_t created_s) {
  Json entry = {{"id", m.file.name},    {"object", "model"},        {"created", created_s},
                {"owned_by", "hcache"}, {"aliases", Json::array()}, {"tags", Json::array()}};
  entry["meta"] = {{"n_params", m.facts.parameters}, {"size", m.file.bytes}};
  if (m.card.is_object()) {
    for (const char* field : {"aliases", "tags", "meta"}) {
      if (m.card.contains(field)) entry[field] = m.card[field];
    }
  }
  entry["status"] = status_json(m);
  return entry;
}

Json router_models_answer(std::span<const ModelStatus> models, std::int64_t created_s) {
  Json data = Json::array();
  for (const ModelStatus& m : models) data.push_back(router_model_answer(m, created_s));
  return {{"object", "list"}, {"data", std::move(data)}};
}

Json router_tags_answer(std::span<const ModelStatus> models, std::int64_t created_s) {
  std::vector<api::OllamaModel> all;
  for (const ModelStatus& m : models) all.push_back(ollama_model(m, created_s));
  return api::ollama_tags_answer(all);
}

Json router_ps_answer(std::span<const ModelStatus> models, std::int64_t created_s) {
  std::vector<api::OllamaModel> loaded;
  for (const ModelStatus& m : models) {
    if (m.state == ModelState::kLoaded) loaded.push_back(ollama_model(m, created_s));
  }
  return api::ollama_ps_answer(loaded);
}

Json router_show_answer(const ModelStatus& model, std::int64_t created_s) {
  return api::ollama_show_answer(ollama_model(model, created_s));
}

Json router_props_answer(const ModelRouterOptions& options) {
  Json props = {{"role", "router"},
                {"max_instances", options.max_loaded},
                {"models_autoload", options.autoload},
                {"model_alias", "hcache"},
                {"model_path", "none"},
                {"default_generation_settings", {{"params", Json::object()}, {"n_ctx", 0}}},
                {"build_info", "hcache " + options.version}};
  if (options.only) {
    props["role"] = "model";
    props["model_alias"] = options.only->name;
    props["model_path"] = options.only->path;
    props["is_sleeping"] = true;
  }
  return props;
}

std::string router_metrics(std::span<const ModelStatus> models) {
  std::string out;
  add_family(&out, "hcache_model_loaded", "gauge", "Whether the model is in memory.", models,
             [](const ModelStatus& m) { return m.state == ModelState::kLoaded ? 1 : 0; });
  add_family(&out, "hcache_model_requests_running", "gauge", "Requests that it is answering.",
             models, [](const ModelStatus& m) { return m.running; });
  add_family(&out, "hcache_model_requests_waiting", "gauge", "Requests that wait for it.", models,
             [](const ModelStatus& m) { return m.waiting; });
  add_family(&out, "hcache_model_requests_total", "counter", "Requests passed on to it.", models,
             [](const ModelStatus& m) { return m.requests; });
  add_family(&out, "hcache_model_loads_total", "counter", "Times that it was loaded.", models,
             [](const ModelStatus& m) { return m.loads; });
  add_family(&out, "hcache_model_load_seconds_total", "counter",
             "What these took, from the start of its server until it was ready.", models,
             [](const ModelStatus& m) { return m.load_seconds; });
  add_family(&out, "hcache_model_unloads_total", "counter", "Times that it was unloaded.", models,
             [](const ModelStatus& m) { return m.unloads; });
  add_family(&out, "hcache_model_failures_total", "counter",
             "Times that its server ended without being told to, or could not be started.", models,
             [](const ModelStatus& m) { return m.failures; });
  return out;
}

std::string router_page(std::span<const ModelStatus> models) {
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>HCache</title>\n"
      "<h1>Models</h1>\n<ul>\n";
  for (const ModelStatus& m : models) {
    fmt::format_to(std::back_inserter(out), "<li><a href=\"upstream/{}/\">{}</a>, {}</li>\n",
                   path_segment(m.file.name), html_text(m.file.name), state_name(m));
  }
  return out + "</ul>\n</html>\n";
}

Json unknown_model_body(std::string_view message, std::string_view path) {
  const api::ErrorStyle style = api::error_style(path);
  Json body = api::error_body(kNotFound, message, style);
  if (style == api::ErrorStyle::kOpenAi) {
    body["error"]["param"] = "model";
    body["error"]["code"] = "model_not_found";
  }
  return body;
}

Json router_document(const Json& document) {
  Json out = document;
  const Json parameter = {{"name", "model"},
                          {"in", "query"},
                          {"description", "Which model, where there are several."},
                          {"schema", {{"type", "string"}}}};
  for (auto& path : out["paths"].items()) {
    for (auto& operation : path.value().items()) {
      Json& parameters = operation.value()["parameters"];
      if (parameters.is_null()) parameters = Json::array();
      if (path.key().find("{model}") == std::string::npos) parameters.push_back(parameter);
    }
  }
  out["paths"]["/models/load"] = model_body_operation("loadModel", "Load a model.");
  out["paths"]["/models/unload"] = model_body_operation(
      "unloadModel", "Unload a model once it answers nothing, with all conversations saved.");
  return out;
}

}  // namespace hcache::router
