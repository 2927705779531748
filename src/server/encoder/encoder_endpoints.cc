#include "encoder_endpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <numeric>
#include <set>
#include <utility>

#include "api/answers.h"
#include "api/ollama.h"
#include "api/prompt_tokens.h"
#include "api/request.h"
#include "base/log.h"

namespace hcache::encoder {
namespace {

using api::Json;
using http::Request;
using http::Responder;
using http::RouteOptions;
using libllama::EncodedText;

constexpr int kOk = 200;
constexpr int kTooMany = 429;
constexpr int64_t kNsPerSecond = 1'000'000'000;

void send_json(Responder& responder, const Json& json) {
  responder.send(kOk, {{"Content-Type", "application/json"}}, api::to_text(json));
}

std::string name_of(const EncoderServerOptions& options) {
  return options.aliases.empty() ? std::filesystem::path(options.model_path).stem().string()
                                 : *options.aliases.begin();
}

int64_t tokens_of(const std::vector<std::vector<int32_t>>& texts) {
  return std::accumulate(texts.begin(), texts.end(), int64_t{0}, [](int64_t sum, const auto& text) {
    return sum + static_cast<int64_t>(text.size());
  });
}

}  // namespace

EncoderEndpoints::EncoderEndpoints(Env& env, const EncoderServerOptions& options,
                                   EncodeQueue& queue, const model::Tokenizer& tokenizer)
    : env_(env),
      options_(options),
      queue_(queue),
      tokenizer_(tokenizer),
      model_name_(name_of(options)),
      started_s_(env.wall_ns() / kNsPerSecond),
      card_(encoder_card(options, queue.encoder(), model_name_, started_s_)) {}

bool EncoderEndpoints::ranks() const {
  return queue_.encoder().options().pooling == model::Pooling::kRank;
}

bool EncoderEndpoints::pools() const {
  return queue_.encoder().options().pooling != model::Pooling::kNone;
}

// ---- From a request to its answer ---------------------------------------------------------------

http::Handler EncoderEndpoints::on_intake(std::function<void(const AskedPtr&)> run) {
  return [this, run = std::move(run)](Request request, std::shared_ptr<Responder> responder) {
    auto asked = std::make_shared<Asked>();
    asked->request = std::move(request);
    asked->responder = std::move(responder);
    intake_->post([this, run, asked] {
      if (!asked->request.body.empty()) {
        Result<Json> body = api::parse_body(asked->request.body);
        if (!body.ok()) return fail(*asked, body.status());
        asked->body = std::move(*body);
      }
      run(asked);
    });
  };
}

http::Handler EncoderEndpoints::quick(Answer answer) {
  return on_intake([this, answer = std::move(answer)](const AskedPtr& asked) {
    const Result<Json> json = answer(*asked);
    if (!json.ok()) return fail(*asked, json.status());
    send_json(*asked->responder, *json);
  });
}

void EncoderEndpoints::fail(const Asked& asked, const Status& status) const {
  const api::ErrorStyle style = api::error_style(asked.request.path);
  api::ErrorAnswer answer = api::render_error(status, style);
  if (status.code() == Code::kOutOfRange) {
    api::tell_context(asked.longest, queue_.encoder().options().max_text_tokens, style, &answer);
  }
  http::Headers headers = {{"Content-Type", "application/json"}};
  if (answer.http_status == kTooMany) headers.emplace_back("Retry-After", "1");
  asked.responder->send(answer.http_status, headers, api::to_text(answer.body));
}

Status EncoderEndpoints::check_text(const std::vector<int32_t>& text, const std::string& name,
                                    Asked* asked) const {
  asked->longest = static_cast<int64_t>(text.size());
  if (text.empty()) return invalid_argument(name + ": it has no tokens");
  const int64_t most = queue_.encoder().options().max_text_tokens;
  if (static_cast<int64_t>(text.size()) <= most) {
    const auto known = [&](int32_t token) { return token >= 0 && token < tokenizer_.n_vocab(); };
    if (std::ranges::all_of(text, known)) return {};
    return data_loss(name + ": the vocabulary in the model's file makes tokens that it has not");
  }
  return out_of_range(
      fmt::format("{}: {} tokens, and this model takes {} at most (what it was trained for, or "
                  "--ctx where that is less); send it in parts",
                  name, text.size(), most));
}

void EncoderEndpoints::submit(const AskedPtr& asked, Texts texts, Make make) {
  auto job = std::make_shared<EncodeJob>();
  const int64_t begin_ns = env_.monotonic_ns();
  const size_t n = texts.size();
  const int64_t tokens = tokens_of(texts);
  job->texts = std::move(texts);
  job->done = [this, asked, make = std::move(make), begin_ns, n,
               tokens](Result<std::vector<EncodedText>> rows) {
    // Shared, since the queue's tasks are copied.
    auto made = std::make_shared<Result<std::vector<EncodedText>>>(std::move(rows));
    writer_->post([this, asked, make, made, begin_ns, n, tokens] {
      if (options_.log_requests) {
        const double seconds = static_cast<double>(env_.monotonic_ns() - begin_ns) * 1e-9;
        log::write(log::Level::kInfo,
                   fmt::format("{} {} texts, {} tokens, {:.3f} s{}{}", asked->request.path, n,
                               tokens, seconds, asked->request.key_name.empty() ? "" : ", ",
                               asked->request.key_name));
      }
      if (!made->ok()) return fail(*asked, made->status());
      const Result<Json> answer = make(std::move(**made));
      if (!answer.ok()) return fail(*asked, answer.status());
      send_json(*asked->responder, *answer);
    });
  };
  asked->responder->on_disconnect([job = std::weak_ptr(job)] {
    if (const auto waiting = job.lock()) waiting->gone.store(true);
  });
  if (const Status status = queue_.submit(job); !status.ok()) fail(*asked, status);
}

// ---- Vectors ------------------------------------------------------------------------------------

Result<EncoderEndpoints::Texts> EncoderEndpoints::texts_of(const api::EmbeddingRequest& request,
                                                           Asked* asked) const {
  if (ranks()) {
    return unimplemented("this model ranks documents and makes no vectors; ask /v1/rerank");
  }
  HCACHE_RETURN_IF_ERROR(api::check_pooling(request, pools()));
  Texts texts;
  const auto most = static_cast<size_t>(queue_.encoder().options().max_text_tokens);
  for (const api::Prompt& input : request.inputs) {
    HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> text, api::prompt_tokens(tokenizer_, input));
    if (request.truncate && text.size() > most) {
      const int32_t end = tokenizer_.adds_end() ? text.back() : text[most - 1];
      text.resize(most);
      text.back() = end;
    }
    HCACHE_RETURN_IF_ERROR(check_text(text, fmt::format("input[{}]", texts.size()), asked));
    texts.push_back(std::move(text));
  }
  if (texts.empty()) return invalid_argument("input: expected at least one text");
  return texts;
}

void EncoderEndpoints::embed(const AskedPtr& asked, const ParseEmbedding& parse) {
  const int64_t begin_ns = env_.monotonic_ns();
  Result<api::EmbeddingRequest> request = parse(asked->body);
  if (!request.ok()) return fail(*asked, request.status());
  Result<Texts> texts = texts_of(*request, asked.get());
  if (!texts.ok()) return fail(*asked, texts.status());
  std::vector<int64_t> tokens;
  for (const auto& text : *texts) tokens.push_back(static_cast<int64_t>(text.size()));
  submit(asked, std::move(*texts),
         [this, request = std::move(*request), tokens = std::move(tokens),
          begin_ns](std::vector<EncodedText> rows) -> Result<Json> {
           std::vector<api::Embedding> embeddings(rows.size());
           for (size_t i = 0; i < rows.size(); ++i) {
             embeddings[i].tokens = tokens[i];
             embeddings[i].rows = std::move(rows[i]);
             HCACHE_RETURN_IF_ERROR(api::shape_embedding(request, pools(), &embeddings[i]));
           }
           const std::string& name = request.model_name.empty() ? model_name_ : request.model_name;
           return api::embeddings_answer(request, name, embeddings, env_.monotonic_ns() - begin_ns);
         });
}

http::Handler EncoderEndpoints::embed_by(ParseEmbedding parse) {
  return on_intake(
      [this, parse = std::move(parse)](const AskedPtr& asked) { embed(asked, parse); });
}

// ---- Ranks --------------------------------------------------------------------------------------

void EncoderEndpoints::rerank(const AskedPtr& asked) {
  if (!ranks()) {
    return fail(*asked, unimplemented("this model makes vectors and ranks nothing; start `hcache "
                                      "serve -m FILE` with the file of a reranker"));
  }
  Result<api::RerankRequest> request = api::parse_rerank(asked->body);
  if (!request.ok()) return fail(*asked, request.status());
  Texts texts;
  std::vector<int64_t> tokens;
  for (const std::string& document : request->documents) {
    auto pair = tokenizer_.encode_pair(request->query, document);
    if (!pair.ok()) return fail(*asked, pair.status());
    const char* field = request->tei ? "texts" : "documents";
    const Status status =
        check_text(*pair, fmt::format("{}[{}] with the query", field, texts.size()), asked.get());
    if (!status.ok()) return fail(*asked, status);
    tokens.push_back(static_cast<int64_t>(pair->size()));
    texts.push_back(std::move(*pair));
  }
  submit(asked, std::move(texts),
         [this, request = std::move(*request),
          tokens = std::move(tokens)](std::vector<EncodedText> rows) -> Result<Json> {
           std::vector<api::Rank> ranks(rows.size());
           for (size_t i = 0; i < rows.size(); ++i) {
             ranks[i] = {.score = rows[i].front().front(), .tokens = tokens[i]};
           }
           const std::string& name = request.model_name.empty() ? model_name_ : request.model_name;
           return api::rerank_answer(request, name, ranks);
         });
}

// ---- The table ----------------------------------------------------------------------------------

void EncoderEndpoints::add_quick(http::Router* router) {
  router->add("POST", "/tokenize", quick([this](const Asked& asked) -> Result<Json> {
                HCACHE_ASSIGN_OR_RETURN(const api::TokenizeRequest request,
                                        api::parse_tokenize(asked.body));
                HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                                        api::prompt_tokens(tokenizer_, request));
                return api::tokenize_answer(request, tokenizer_, tokens);
              }));
  router->add("POST", "/detokenize", quick([this](const Asked& asked) -> Result<Json> {
                HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                                        api::parse_detokenize(asked.body));
                HCACHE_ASSIGN_OR_RETURN(const std::string text, tokenizer_.decode(tokens, true));
                return api::detokenize_answer(text);
              }));
  router->add("GET", "/props", quick([this](const Asked&) -> Result<Json> { return card_.props; }));
  router->add("GET", "/api/tags", quick([this](const Asked&) -> Result<Json> {
                return api::ollama_tags_answer({&card_.ollama, 1});
              }));
  router->add("GET", "/api/ps", quick([this](const Asked&) -> Result<Json> {
                return api::ollama_ps_answer({&card_.ollama, 1});
              }));
  router->add("GET", "/api/version", quick([this](const Asked&) -> Result<Json> {
                return api::ollama_version_answer(options_.version);
              }));
  router->add("GET", "/metrics",
              [this](const Request&, const std::shared_ptr<Responder>& responder) {
                responder->send(kOk, {{"Content-Type", "text/plain; version=0.0.4; charset=utf-8"}},
                                encoder_metrics(queue_.counts()));
              });
}

void EncoderEndpoints::add_public(http::Router* router) {
  const RouteOptions is_public = {.is_public = true};
  for (const char* path : {"/v1/models", "/models"}) {
    router->add("GET", path, quick([this](const Asked&) -> Result<Json> {
                  return api::models_answer({&card_.card, 1});
                }),
                is_public);
  }
  router->add("GET", "/v1/models/{model}", quick([this](const Asked& asked) -> Result<Json> {
                const std::string& name = *asked.request.param("model");
                if (name == model_name_ || options_.aliases.contains(name)) {
                  return api::model_answer(card_.card);
                }
                return not_found(
                    fmt::format("there is no model '{}'; this server has '{}'", name, model_name_));
              }),
              is_public);
  for (const char* path : {"/health", "/v1/health"}) {
    router->add(
        "GET", path,
        [this](Request request, std::shared_ptr<Responder> responder) {
          if (draining_.load(std::memory_order_relaxed)) {
            Asked asked;
            asked.request = std::move(request);
            asked.responder = std::move(responder);
            return fail(asked, unavailable("the server is stopping"));
          }
          responder->send(kOk,
                          {{"Content-Type", "application/json"},
                           {"HCache-Requests", fmt::to_string(queue_.counts().waiting)}},
                          R"({"status":"ok"})");
        },
        is_public);
  }
  router->add("GET", "/openapi.json", quick([](const Asked&) -> Result<Json> {
                return encoder_document(Json::parse(api::openapi_document()));
              }),
              is_public);
}

void EncoderEndpoints::add_refusals(http::Router* router) {
  const auto refuse = [](const Request& request, const std::shared_ptr<Responder>& responder) {
    const api::ErrorAnswer answer = api::render_error(
        unimplemented("this model makes vectors or ranks, no text; start `hcache serve -m FILE` "
                      "with the file of a model that writes"),
        api::error_style(request.path));
    responder->send(answer.http_status, {{"Content-Type", "application/json"}},
                    api::to_text(answer.body));
  };
  const Json all = Json::parse(api::openapi_document());
  const Json answered = encoder_document(all);
  for (const auto& path : all["paths"].items()) {
    if (answered["paths"].contains(path.key())) continue;
    for (const auto& operation : path.value().items()) {
      std::string method = operation.key();
      for (char& c : method) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      router->add(std::move(method), path.key(), refuse);
    }
  }
  router->add("POST", "/chat/completions", refuse);
}

void EncoderEndpoints::add_to(http::Router* router) {
  for (api::EmbeddingRoute& route : api::embedding_routes(options_.embd_normalize)) {
    router->add("POST", route.path, embed_by(std::move(route.parse)));
  }
  for (const char* path : {"/v1/rerank", "/rerank", "/v1/reranking", "/reranking"}) {
    router->add("POST", path, on_intake([this](const AskedPtr& asked) { rerank(asked); }));
  }
  add_quick(router);
  add_public(router);
  add_refusals(router);
}

}  // namespace hcache::encoder
