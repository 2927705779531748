#include "ollama_endpoints.h"

#include <fmt/format.h>

#include <utility>

#include "api/request.h"
#include "generation.h"

namespace hcache::server {
namespace {

using api::Json;

// Of the weights, what lies on other devices than the CPU, as if all layers were of one size.
int64_t bytes_on_accelerators(const model::Model& model) {
  const int n_layer = model.hparams().n_layer;
  const int resident = model.streamed() == nullptr ? n_layer : model.streamed()->first_layer;
  int64_t there = 0;
  for (int layer = 0; layer < resident; ++layer) there += model.device(layer).is_cpu() ? 0 : 1;
  return static_cast<int64_t>(model.n_bytes()) * there / n_layer;
}

// The numbers that clients look for, by the file's keys. `context`: what a conversation may have.
std::map<std::string, double> numbers_of(const state::ModelCard& card, int64_t context) {
  return {{"block_count", card.n_layer},
          {"context_length", static_cast<double>(context)},
          {"embedding_length", card.n_embd},
          {"vocab_size", card.n_vocab}};
}

// Those of models on our engine.
void add_numbers(const model::HParams& h, std::map<std::string, double>* out) {
  out->insert({{"feed_forward_length", h.n_ff},
               {"attention.head_count", h.n_head},
               {"attention.head_count_kv", h.n_head_kv},
               {"attention.key_length", h.head_dim},
               {"attention.value_length", h.head_dim}});
  if (h.n_expert > 0) {
    out->insert({{"expert_count", h.n_expert}, {"expert_used_count", h.n_expert_used}});
  }
}

bool knows_gaps(const model::Tokenizer& tokenizer) {
  const model::Tokenizer::FillTokens fill = tokenizer.fill_tokens();
  return fill.prefix != model::Tokenizer::kNoToken && fill.suffix != model::Tokenizer::kNoToken &&
         fill.middle != model::Tokenizer::kNoToken;
}

// Ollama's clients put ":latest" behind a name without a tag.
bool is_name_of(const Service& service, std::string_view name) {
  constexpr std::string_view kLatest = ":latest";
  const auto known = [&](std::string_view text) {
    return text == service.model_name() || service.options().aliases.contains(std::string(text));
  };
  if (known(name)) return true;
  if (!name.ends_with(kLatest)) return false;
  name.remove_suffix(kLatest.size());
  return known(name);
}

void refuse_managing(const http::Request& request,
                     const std::shared_ptr<http::Responder>& responder) {
  send_status(request, *responder,
              unimplemented("this server has one model and manages none; start it with -m FILE to "
                            "serve another one"));
}

}  // namespace

Result<api::GenerationRequest> OllamaEndpoints::generate(const Json& body) const {
  HCACHE_ASSIGN_OR_RETURN(api::InfillRequest request,
                          api::parse_ollama_generate(body, service_.options().sampling));
  if (request.suffix.empty()) return std::move(request.generation);
  return fill_gap(service_, std::move(request));
}

api::OllamaModel OllamaEndpoints::model() const {
  state::Runtime& runtime = service_.runtime();
  const state::ModelCard& loaded = runtime.card();
  api::OllamaModel out;
  out.card = model_card(service_);
  out.digest = to_hex(runtime.fingerprint());
  out.architecture = loaded.architecture;
  out.weight_types = loaded.weight_types;
  out.numbers = numbers_of(loaded, service_.context());
  if (runtime.llama() == nullptr) {
    out.accelerator_bytes = bytes_on_accelerators(runtime.model());
    add_numbers(runtime.model().hparams(), &out.numbers);
  }
  out.chat_template = service_.chat_template().source();
  out.thinks = service_.chat_template().thinks();
  out.fills_gaps = knows_gaps(service_.tokenizer());
  out.sees = service_.takes_pictures();
  out.sampling = service_.options().sampling;
  return out;
}

Result<Json> OllamaEndpoints::show(const Call& call) const {
  HCACHE_ASSIGN_OR_RETURN(const std::string name, api::parse_ollama_show(call.body));
  if (!is_name_of(service_, name)) {
    return not_found(
        fmt::format("there is no model '{}'; this server has '{}'", name, service_.model_name()));
  }
  return api::ollama_show_answer(model());
}

void OllamaEndpoints::add_to(http::Router* router) {
  const auto quick = [this](Answer answer) {
    return answer_on(service_.intake(), std::move(answer));
  };
  router->add("POST", "/api/chat", generate_by(service_, [this](const Json& body) {
                return api::parse_ollama_chat(body, service_.options().sampling);
              }));
  router->add("POST", "/api/generate",
              generate_by(service_, [this](const Json& body) { return generate(body); }));
  router->add("GET", "/api/tags", quick([this](Call&) -> Result<Json> {
                const api::OllamaModel only = model();
                return api::ollama_tags_answer({&only, 1});
              }));
  router->add("GET", "/api/ps", quick([this](Call&) -> Result<Json> {
                const api::OllamaModel only = model();
                return api::ollama_ps_answer({&only, 1});
              }));
  router->add("POST", "/api/show", quick([this](Call& call) { return show(call); }));
  router->add("GET", "/api/version", quick([](Call&) -> Result<Json> {
                return api::ollama_version_answer(HCACHE_VERSION);
              }));
  for (const char* path :
       {"/api/pull", "/api/push", "/api/create", "/api/copy", "/api/blobs/{digest}"}) {
    router->add("POST", path, refuse_managing);
  }
  router->add("DELETE", "/api/delete", refuse_managing);
}

}  // namespace hcache::server
