#include "endpoints.h"

#include <fmt/format.h>

#include <utility>

#include "api/answers.h"
#include "api/prompt_tokens.h"
#include "api/request.h"
#include "batch_endpoints.h"
#include "conversation_endpoints.h"
#include "earlier_messages.h"
#include "embedding_endpoints.h"
#include "generation.h"
#include "ollama_endpoints.h"
#include "page/page.h"
#include "session_endpoints.h"
#include "slot_endpoints.h"

namespace hcache::server {
namespace {

using api::Json;
using http::Request;
using http::Responder;
using http::RouteOptions;

// Threads for what waits for clients, disks and slots, so that nothing else has to.
constexpr int kTransferThreads = 4;

using Parse = Result<api::GenerationRequest> (*)(const Json&, const api::Defaults&);

class EndpointTable final : public Endpoints {
 public:
  explicit EndpointTable(Service& service) : service_(service) {}

  void add_to(http::Router* router);
  void stop() override {
    slots_.stop();
    transfers_.reset();
  }

 private:
  http::Handler quick(Answer answer) { return answer_on(service_.intake(), std::move(answer)); }
  http::Handler slow(Answer answer) { return answer_on(service_.keeper(), std::move(answer)); }
  http::Handler generate(Parse parse);

  void add_generation(http::Router* router);
  void add_model(http::Router* router);
  void add_operation(http::Router* router);

  Result<api::GenerationRequest> infill(const Json& body) const;
  Result<int64_t> count_tokens(const model::ChatInput& chat) const;
  Result<Json> input_tokens(const Call& call, Parse parse) const;
  Result<Json> tokenize(const Call& call) const;
  Result<Json> detokenize(const Call& call) const;
  Result<Json> apply_template(const Call& call) const;
  Result<Json> model(const Call& call) const;
  [[nodiscard]] Json props() const;
  void health(Responder& responder) const;

  Result<Json> store_stat(const Call& call) const;
  Result<Json> store_verify() const;
  Result<Json> store_gc() const;

  Service& service_;
  std::unique_ptr<WorkQueue> transfers_ = std::make_unique<WorkQueue>(kTransferThreads);
  SessionEndpoints sessions_{service_, *transfers_};
  ConversationEndpoints conversations_{service_};
  SlotEndpoints slots_{service_, *transfers_};
  BatchEndpoints batches_{service_, *transfers_};
  OllamaEndpoints ollama_{service_};
  EmbeddingEndpoints embeddings_{service_};
};

http::Handler EndpointTable::generate(Parse parse) {
  return generate_by(service_, [this, parse](const Json& body) {
    return parse(body, service_.options().sampling);
  });
}

Result<api::GenerationRequest> EndpointTable::infill(const Json& body) const {
  HCACHE_ASSIGN_OR_RETURN(api::InfillRequest infill,
                          api::parse_infill(body, service_.options().sampling));
  return fill_gap(service_, std::move(infill));
}

// ---- Without generation -------------------------------------------------------------------------

Result<int64_t> EndpointTable::count_tokens(const model::ChatInput& chat) const {
  HCACHE_ASSIGN_OR_RETURN(const model::ChatPrompt prompt, service_.render(chat));
  const model::EncodeOptions options = {
      .add_special = service_.chat_template().add_special(prompt.text), .parse_special = true};
  if (const auto media = Service::media_of(chat); !media.empty()) {
    HCACHE_ASSIGN_OR_RETURN(const libllama::MediaPrompt with,
                            service_.tokenise(prompt.text, media, options.add_special));
    return static_cast<int64_t>(with.tokens.size());
  }
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                          service_.tokenizer().encode(prompt.text, options));
  return static_cast<int64_t>(tokens.size());
}

Result<Json> EndpointTable::input_tokens(const Call& call, Parse parse) const {
  HCACHE_ASSIGN_OR_RETURN(api::GenerationRequest request, parse(call.body, {}));
  HCACHE_ASSIGN_OR_RETURN(const Salt salt, service_.salt_of(call.request, request));
  HCACHE_RETURN_IF_ERROR(add_earlier_messages(service_.conversations(), salt.id, &request));
  HCACHE_ASSIGN_OR_RETURN(const int64_t tokens, count_tokens(*request.chat));
  return api::input_tokens_answer(tokens);
}

Result<Json> EndpointTable::tokenize(const Call& call) const {
  HCACHE_ASSIGN_OR_RETURN(const api::TokenizeRequest request, api::parse_tokenize(call.body));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                          api::prompt_tokens(service_.tokenizer(), request));
  return api::tokenize_answer(request, service_.tokenizer(), tokens);
}

Result<Json> EndpointTable::detokenize(const Call& call) const {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, api::parse_detokenize(call.body));
  HCACHE_ASSIGN_OR_RETURN(const std::string text, service_.tokenizer().decode(tokens, true));
  return api::detokenize_answer(text);
}

Result<Json> EndpointTable::apply_template(const Call& call) const {
  HCACHE_ASSIGN_OR_RETURN(const model::ChatInput chat, api::parse_apply_template(call.body));
  HCACHE_ASSIGN_OR_RETURN(const model::ChatPrompt prompt, service_.render(chat));
  return api::apply_template_answer(prompt.text);
}

Result<Json> EndpointTable::model(const Call& call) const {
  const std::string& name = *call.request.param("model");
  if (name != service_.model_name() && !service_.options().aliases.contains(name)) {
    return not_found(
        fmt::format("there is no model '{}'; this server has '{}'", name, service_.model_name()));
  }
  return api::model_answer(model_card(service_));
}

Json EndpointTable::props() const {
  const model::Tokenizer& tokenizer = service_.tokenizer();
  const auto text_of = [&](int32_t token) {
    return token == model::Tokenizer::kNoToken ? std::string() : tokenizer.piece(token, true);
  };
  api::ServerProps props;
  props.defaults = service_.options().sampling;
  if (service_.options().seed) props.seed = *service_.options().seed;
  props.context = service_.context();
  props.slots = service_.options().scheduler.batch.max_sequences;
  props.model_name = service_.model_name();
  props.model_path = service_.options().runtime.model_path;
  props.chat_template = service_.chat_template().source();
  props.bos_text = text_of(tokenizer.bos());
  props.eos_text = text_of(tokenizer.eos());
  props.build = "hcache " HCACHE_VERSION;
  props.weights = service_.runtime().card().places;
  props.engine = service_.runtime().card().engine;
  props.pictures = service_.takes_pictures();
  props.sounds = service_.takes_sounds();
  return api::props_answer(props);
}

// With the number of requests that are not answered yet, those of batches among them.
void EndpointTable::health(Responder& responder) const {
  const scheduler::Snapshot now = service_.scheduler().stats();
  const int64_t requests = now.queued + now.fetching + now.restoring + now.prefill + now.decoding;
  responder.send(
      200, {{"Content-Type", "application/json"}, {"HCache-Requests", fmt::to_string(requests)}},
      R"({"status":"ok"})");
}

// ---- The store ----------------------------------------------------------------------------------

Result<Json> EndpointTable::store_stat(const Call& call) const {
  HCACHE_ASSIGN_OR_RETURN(store::Store * opened, store_of(service_));
  HCACHE_ASSIGN_OR_RETURN(const store::StoreStat stat, opened->stat());
  Json disks = Json::array();
  for (const store::DiskStat& disk : stat.disks) {
    disks.push_back({{"allocated_bytes", disk.allocated_bytes},
                     {"page_bytes", disk.page_bytes},
                     {"free_bytes", disk.free_bytes}});
  }
  const uint64_t looked_up = stat.dram_hits + stat.dram_misses;
  Json remote;
  if (stat.remote.has_value()) {
    const store::RemoteStat& r = *stat.remote;
    remote = {{"name", r.name},
              {"available", r.available},
              {"chunks_found", r.chunks_found},
              {"read_bytes", r.bytes_read},
              {"read_bytes_per_s",
               r.read_busy_s > 0 ? static_cast<double>(r.bytes_read) / r.read_busy_s : 0.0},
              {"written_bytes", r.bytes_written},
              {"backlog_requests", r.backlog_requests},
              {"backlog_bytes", r.backlog_bytes},
              {"skipped_pages", r.pages_skipped},
              {"promoted_pages", r.pages_promoted},
              {"failures", r.failures}};
  }
  return Json{{"chunks", stat.chunks},
              {"tokens", stat.tokens},
              {"sessions", stat.sessions},
              {"page_bytes", stat.page_bytes},
              {"catalog_bytes", stat.catalog_bytes},
              {"quota_bytes", stat.quota_bytes},
              {"snapshots",
               {{"count", stat.snapshots},
                {"used_bytes", stat.snapshot_bytes},
                {"quota_bytes", stat.snapshot_quota_bytes},
                {"dropped", stat.snapshots_dropped}}},
              {"key",
               {{"used_bytes", opened->owned_bytes(salt_of(service_, call.request).owner)},
                {"quota_bytes", service_.options().runtime.key_quota_bytes}}},
              {"tiers",
               {{"dram",
                 {{"capacity_bytes", stat.dram_capacity_bytes},
                  {"used_bytes", stat.dram_bytes},
                  {"hits", stat.dram_hits},
                  {"misses", stat.dram_misses},
                  {"hit_rate", looked_up == 0 ? 0.0
                                              : static_cast<double>(stat.dram_hits) /
                                                    static_cast<double>(looked_up)}}},
                {"disk", {{"used_bytes", stat.allocated_bytes}, {"disks", std::move(disks)}}},
                {"remote", std::move(remote)}}}};
}

Result<Json> EndpointTable::store_verify() const {
  HCACHE_ASSIGN_OR_RETURN(store::Store * opened, store_of(service_));
  HCACHE_ASSIGN_OR_RETURN(const store::VerifyReport report, opened->verify({}));
  Json damage = Json::array();
  for (const store::Damage& d : report.damaged_pages) damage.push_back(d.status.to_string());
  for (const Status& status : report.damaged_catalog) damage.push_back(status.to_string());
  return Json{{"ok", report.ok()},
              {"chunks", report.chunks},
              {"pages", report.pages},
              {"page_bytes", report.page_bytes},
              {"damage", std::move(damage)}};
}

Result<Json> EndpointTable::store_gc() const {
  HCACHE_ASSIGN_OR_RETURN(store::Store * opened, store_of(service_));
  HCACHE_ASSIGN_OR_RETURN(const store::GcReport report, opened->gc());
  return Json{{"bytes_before", report.bytes_before},
              {"bytes_after", report.bytes_after},
              {"segments_removed", report.segments_removed},
              {"pages_moved", report.pages_moved}};
}

void add_page(http::Router* router) {
  router->add("GET", "/",
              [](const Request&, const std::shared_ptr<Responder>& responder) {
                responder->send(200,
                                {{"Content-Type", "text/html; charset=utf-8"},
                                 {"Content-Security-Policy", std::string(page::page_csp())}},
                                std::string(page::page_html()));
              },
              {.is_public = true});
}

// ---- The table ----------------------------------------------------------------------------------

void EndpointTable::add_generation(http::Router* router) {
  for (const char* path : {"/v1/chat/completions", "/chat/completions"}) {
    router->add("POST", path, generate(api::parse_chat_completion));
    router->add("POST", path + std::string("/input_tokens"), quick([this](Call& call) {
                  return input_tokens(call, api::parse_chat_completion);
                }));
  }
  router->add("POST", "/v1/completions", generate(api::parse_completion));
  for (const char* path : {"/v1/responses", "/responses"}) {
    router->add("POST", path, generate(api::parse_response));
    router->add("POST", path + std::string("/input_tokens"),
                quick([this](Call& call) { return input_tokens(call, api::parse_response); }));
  }
  router->add("POST", "/v1/messages", generate(api::parse_messages));
  router->add("POST", "/v1/messages/count_tokens", quick([this](Call& call) -> Result<Json> {
                HCACHE_ASSIGN_OR_RETURN(const model::ChatInput chat,
                                        api::parse_count_tokens(call.body));
                HCACHE_ASSIGN_OR_RETURN(const int64_t tokens, count_tokens(chat));
                return api::count_tokens_answer(tokens);
              }));
  for (const char* path : {"/completion", "/completions"}) {
    router->add("POST", path, generate(api::parse_llama_completion));
  }
  router->add("POST", "/infill",
              generate_by(service_, [this](const Json& body) { return infill(body); }));
}

void EndpointTable::add_model(http::Router* router) {
  const RouteOptions is_public = {.is_public = true};
  for (const char* path : {"/v1/models", "/models"}) {
    router->add("GET", path, quick([this](Call&) -> Result<Json> {
                  const api::ModelCard card = model_card(service_);
                  return api::models_answer({&card, 1});
                }),
                is_public);
  }
  router->add("GET", "/v1/models/{model}", quick([this](Call& call) { return model(call); }),
              is_public);
  router->add("GET", "/lora-adapters",
              quick([this](Call&) -> Result<Json> { return service_.adapters().answer(); }));
  router->add("POST", "/lora-adapters", quick([this](Call& call) -> Result<Json> {
                HCACHE_ASSIGN_OR_RETURN(const auto scales, api::parse_adapters(call.body));
                HCACHE_RETURN_IF_ERROR(service_.adapters().set(scales));
                return Json{{"success", true}};
              }));
  router->add("POST", "/tokenize", quick([this](Call& call) { return tokenize(call); }));
  router->add("POST", "/detokenize", quick([this](Call& call) { return detokenize(call); }));
  router->add("POST", "/apply-template",
              quick([this](Call& call) { return apply_template(call); }));
  router->add("GET", "/props", quick([this](Call&) -> Result<Json> { return props(); }));
}

void EndpointTable::add_operation(http::Router* router) {
  const RouteOptions is_public = {.is_public = true};
  for (const char* path : {"/health", "/v1/health"}) {
    router->add(
        "GET", path,
        [this](const Request& request, const std::shared_ptr<Responder>& responder) {
          if (service_.is_draining()) {
            return send_status(request, *responder, unavailable("the server is stopping"));
          }
          health(*responder);
        },
        is_public);
  }
  router->add("GET", "/v1/store", slow([this](Call& call) { return store_stat(call); }));
  router->add("POST", "/v1/store/verify", slow([this](Call&) { return store_verify(); }));
  router->add("POST", "/v1/store/gc", slow([this](Call&) { return store_gc(); }));
  router->add("GET", "/metrics", [this](const Request&, std::shared_ptr<Responder> responder) {
    service_.keeper().post([this, responder = std::move(responder)] {
      responder->send(200,
                      {{"Content-Type", "text/plain; version=0.0.4; charset=utf-8"},
                       {"Process-Start-Time-Unix", fmt::to_string(service_.started_s())}},
                      service_.metrics_text());
    });
  });
  router->add("GET", "/events", [this](const Request&, std::shared_ptr<Responder> responder) {
    service_.events().subscribe(std::move(responder));
  });
  if (service_.options().page) add_page(router);
  router->add(
      "GET", "/openapi.json",
      [document = api::openapi_document()](const Request&,
                                           const std::shared_ptr<Responder>& responder) {
        responder->send(200, {{"Content-Type", "application/json"}}, document);
      },
      is_public);
}

void EndpointTable::add_to(http::Router* router) {
  add_generation(router);
  add_model(router);
  add_operation(router);
  sessions_.add_to(router);
  conversations_.add_to(router);
  slots_.add_to(router);
  batches_.add_to(router);
  ollama_.add_to(router);
  embeddings_.add_to(router);
}

}  // namespace

std::unique_ptr<Endpoints> add_endpoints(Service& service, http::Router* router) {
  auto endpoints = std::make_unique<EndpointTable>(service);
  endpoints->add_to(router);
  return endpoints;
}

}  // namespace hcache::server
