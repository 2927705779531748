#include "endpoint.h"

#include <fmt/format.h>

#include <charconv>
#include <utility>

#include "base/log.h"

namespace hcache::server {

using api::Json;

namespace {

constexpr int64_t kClientPollNs = 2'000'000;  // while a client has enough to read
constexpr size_t kMaxWaiting = 8;             // transfers in the queue; their bodies are in memory

}  // namespace

void send_json(http::Responder& responder, const Json& json, int status) {
  responder.send(status, {{"Content-Type", "application/json"}}, api::to_text(json));
}

void send_error(http::Responder& responder, const api::ErrorAnswer& answer) {
  http::Headers headers = {{"Content-Type", "application/json"}};
  if (answer.http_status == 429) headers.emplace_back("Retry-After", "1");
  responder.send(answer.http_status, headers, api::to_text(answer.body));
}

void send_status(const http::Request& request, http::Responder& responder, const Status& status) {
  send_error(responder, api::render_error(status, api::error_style(request.path)));
}

http::Handler answer_on(WorkQueue& queue, Answer answer) {
  return [&queue, answer = std::move(answer)](http::Request request,
                                              std::shared_ptr<http::Responder> responder) {
    auto call = std::make_shared<Call>();
    call->request = std::move(request);
    call->responder = std::move(responder);
    queue.post([answer, call] {
      if (!call->request.body.empty()) {
        Result<Json> body = api::parse_body(call->request.body);
        if (!body.ok()) return send_status(call->request, *call->responder, body.status());
        call->body = std::move(*body);
      }
      const Result<Json> json = answer(*call);
      if (!json.ok()) return send_status(call->request, *call->responder, json.status());
      send_json(*call->responder, *json);
    });
  };
}

http::Handler transfer_on(WorkQueue& transfers, std::function<void(const Call&)> run) {
  return [&transfers, run = std::move(run)](http::Request request,
                                            std::shared_ptr<http::Responder> responder) {
    if (transfers.size() >= kMaxWaiting) {
      return send_status(request, *responder, unavailable("too many transfers wait; try again"));
    }
    auto call = std::make_shared<Call>();
    call->request = std::move(request);
    call->responder = std::move(responder);
    transfers.post([run, call] { run(*call); });
  };
}

PacedStream::PacedStream(Service& service, http::Responder& responder)
    : service_(service), responder_(responder) {
  responder.on_disconnect([gone = gone_] { gone->store(true, std::memory_order_relaxed); });
}

void PacedStream::start(const char* content_type, const http::Headers& more) {
  http::Headers headers = {{"Content-Type", content_type}};
  headers.insert(headers.end(), more.begin(), more.end());
  responder_.start_stream(200, headers);
}

Status PacedStream::write(std::string_view piece) {
  while (!responder_.writable() && !gone_->load(std::memory_order_relaxed)) {
    service_.env().sleep_ns(kClientPollNs);
  }
  return responder_.write(piece) ? Status() : cancelled("the client has gone");
}

void PacedStream::finish(const Status& written) {
  if (written.ok()) responder_.finish();
  if (!written.ok() && written.code() != Code::kCancelled) {
    log::warn("a stream was cut off: {}", written.to_string());
  }
}

Salt salt_of(const Service& service, const http::Request& request) {
  const std::string* extra = request.query_value("cache_salt");
  return service.salt_of(request, extra == nullptr ? std::string() : *extra);
}

uint64_t page_bytes(const store::Match& match) {
  uint64_t bytes = 0;
  for (const store::MatchedChunk& chunk : match.chunks) {
    for (const store::PageInfo& page : chunk.chunk.info().pages) bytes += page.bytes;
  }
  return bytes;
}

api::ModelCard model_card(Service& service) {
  const state::ModelCard& model = service.runtime().card();
  api::ModelCard card;
  card.name = service.model_name();
  card.aliases = service.options().aliases;
  card.tags = service.options().tags;
  card.created_s = service.started_s();
  card.context = service.context();
  card.vocabulary = service.tokenizer().n_vocab();
  card.width = model.n_embd;
  card.parameters = model.n_params;
  card.bytes = model.n_bytes;
  return card;
}

Result<int64_t> parse_number(std::string_view name, std::string_view text, int64_t least,
                             int64_t most) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    return invalid_argument(fmt::format("{}: expected a number from {} to {}", name, least, most));
  }
  return value;
}

Result<api::ListPage> page_of(const http::Request& request, size_t usual, size_t most,
                              const char* after, const char* before) {
  api::ListPage page;
  page.limit = usual;
  if (const std::string* limit = request.query_value("limit")) {
    HCACHE_ASSIGN_OR_RETURN(const int64_t n,
                            parse_number("limit", *limit, 1, static_cast<int64_t>(most)));
    page.limit = static_cast<size_t>(n);
  }
  if (const std::string* id = request.query_value(after)) page.after = *id;
  if (before == nullptr) return page;
  if (const std::string* id = request.query_value(before)) page.before = *id;
  return page;
}

Result<bool> is_ascending(const http::Request& request) {
  const std::string* order = request.query_value("order");
  if (order == nullptr || *order == "desc") return false;
  if (*order == "asc") return true;
  return invalid_argument("order: expected asc or desc");
}

Result<store::Store*> store_of(Service& service) {
  if (service.store() == nullptr) {
    return failed_precondition("this server saves nothing: it was started with --no-store");
  }
  return service.store();
}

}  // namespace hcache::server
