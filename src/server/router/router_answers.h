// What the router tells of its models, in its clients' protocols. Pure functions.
//
// Threading: any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "api/json.h"
#include "model_pool.h"
#include "router/model_router.h"

namespace hcache::router {

// OpenAI's list, with llama-server's `status`: loaded, loading, unloading or unloaded, and how its
// server ended where that was not asked for. `created_s`: since 1970-01-01 UTC.
[[nodiscard]] api::Json router_models_answer(std::span<const ModelStatus> models,
                                             std::int64_t created_s);
[[nodiscard]] api::Json router_model_answer(const ModelStatus& model, std::int64_t created_s);
// Ollama's list of all models, and of those that are in memory.
[[nodiscard]] api::Json router_tags_answer(std::span<const ModelStatus> models,
                                           std::int64_t created_s);
[[nodiscard]] api::Json router_ps_answer(std::span<const ModelStatus> models,
                                         std::int64_t created_s);
// Ollama's description of a model that is not loaded, from its file.
[[nodiscard]] api::Json router_show_answer(const ModelStatus& model, std::int64_t created_s);
// GET /props of the router itself, as llama-server's, or of its only model while that is unloaded.
[[nodiscard]] api::Json router_props_answer(const ModelRouterOptions& options);
// Prometheus' text.
[[nodiscard]] std::string router_metrics(std::span<const ModelStatus> models);
// A small page with a link to each model's own.
[[nodiscard]] std::string router_page(std::span<const ModelStatus> models);
// OpenAI's error with the code that its clients know; for other protocols see api::error_body.
[[nodiscard]] api::Json unknown_model_body(std::string_view message, std::string_view path);
// The models' document with what the router adds: ?model= wherever a request has no body with a
// model in it, and the endpoints that load and unload.
[[nodiscard]] api::Json router_document(const api::Json& document);

}  // namespace hcache::router
