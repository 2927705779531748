#include "session_endpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/log.h"
#include "state/identity.h"
#include "store/archive.h"

namespace hcache::server {
namespace {

using api::Json;

constexpr double kNsPerSecond = 1e9;
// What a turn leaves behind is on disk so soon after it, unless storage is slow.
constexpr int64_t kSettleNs = 2'000'000'000;
constexpr int64_t kSettlePollNs = 20'000'000;

Json session_json(const Conversation& c, int64_t now_ns) {
  const auto seconds = [](int64_t ns) { return static_cast<double>(ns) / kNsPerSecond; };
  Json json = {{"object", "session"},
               {"id", c.name},
               {"tokens", c.tokens},
               {"named", c.named},
               {"pinned", c.pinned},
               {"created", seconds(c.created_ns)},
               {"updated", seconds(c.updated_ns)},
               {"age_s", seconds(now_ns - c.updated_ns)},
               {"expires", nullptr},
               {"kept_until", nullptr},
               {"user", c.user},
               {"prompt_cache_key", c.cache_key}};
  if (c.expires_ns > 0) json["expires"] = seconds(c.expires_ns);
  if (c.kept_ns > 0) json["kept_until"] = seconds(c.kept_ns);
  return json;
}

// What the store has of a session, and what of that a file takes along.
Status add_saved(Service& service, const SaltId& salt, std::span<const int32_t> tokens,
                 Json* json) {
  (*json)["saved_tokens"] = 0;
  (*json)["saved_bytes"] = 0;
  if (store::Store* saved = service.store(); saved != nullptr) {
    HCACHE_ASSIGN_OR_RETURN(const store::Match match,
                            saved->match(service.runtime().fingerprint(), salt, tokens));
    (*json)["saved_tokens"] = match.n_tokens;
    (*json)["saved_bytes"] = page_bytes(match);
  }
  return {};
}

// The state of a session that may have been used just now: all but the last token's, which no
// request has computed yet.
Result<store::Match> settled_match(Service& service, const Conversation& conversation,
                                   const store::Session& session, const std::atomic<bool>& gone) {
  HCACHE_ASSIGN_OR_RETURN(store::Store * store, store_of(service));
  while (true) {
    HCACHE_ASSIGN_OR_RETURN(store::Match match,
                            store->match(session.fingerprint, session.salt, session.tokens));
    const bool whole = match.n_tokens + 1 >= session.tokens.size();
    const bool settled = service.env().wall_ns() > conversation.updated_ns + kSettleNs;
    if (whole || settled || gone.load(std::memory_order_relaxed)) return match;
    match = {};  // no pins while waiting
    service.env().sleep_ns(kSettlePollNs);
  }
}

// Whether a page of a chunk could have been written by this server's model, for that salt.
bool page_could_be(Service& service, const Salt& salt, const store::ArchiveChunk& chunk,
                   const store::PageWrite& page) {
  state::Runtime& runtime = service.runtime();
  if (state::OpenLlama* llama = runtime.llama(); llama != nullptr) {
    const std::vector<size_t>& rows = llama->engine->layout().row_bytes;
    if (page.encoding == store::Encoding::kSnapshot) return llama->engine->layout().snapshots;
    return page.encoding == store::Encoding::kRows && page.layer < rows.size() &&
           page.bytes.size() == rows[page.layer] * chunk.n_tokens;
  }
  if (page.encoding == store::Encoding::kSnapshot) {
    return salt.kv_budget < 1 && chunk.n_tokens == store::kChunkTokens;
  }
  const model::HParams& hparams = runtime.model().hparams();
  const ggml_type kv_type = service.options().runtime.engine.kv_type;
  const auto element = state::element_type(kv_type);
  const bool typed =
      !store::is_kv(page.encoding) || (chunk.k_type == element && chunk.v_type == element);
  const auto row = state::row_bytes(hparams, kv_type, page.encoding);
  return page.layer < hparams.n_layer && row && typed &&
         state::page_fits(page.encoding, kv_type, page.bytes.size(), *row * chunk.n_tokens);
}

// Whether this server's model could have written the file.
Status check_fits(Service& service, const store::Archive& archive, const Salt& salt) {
  const Fingerprint own = service.file_fingerprint(salt);
  if (archive.head.fingerprint != own) {
    return failed_precondition(fmt::format(
        "the session file is of model '{}' with state {}, this server has '{}' with state {}; "
        "weights, adapters, RoPE parameters, --kv-type and --kv-budget must be the same",
        archive.head.model, to_hex(archive.head.fingerprint), service.model_name(), to_hex(own)));
  }
  const int32_t n_vocab = service.tokenizer().n_vocab();
  for (const int32_t token : archive.head.tokens) {
    if (token < 0 || token >= n_vocab) {
      return invalid_argument(
          fmt::format("the session file has token {} outside of the vocabulary", token));
    }
  }
  for (const store::ArchiveChunk& chunk : archive.chunks) {
    for (const store::PageWrite& page : chunk.pages) {
      if (!page_could_be(service, salt, chunk, page)) {
        return invalid_argument(fmt::format(
            "the session file has a page that this model can't have: layer {}, {}, {} bytes",
            page.layer, store::encoding_name(page.encoding), page.bytes.size()));
      }
    }
  }
  return {};
}

}  // namespace

Result<Json> SessionEndpoints::list(const Call& call) const {
  Json data = Json::array();
  for (const Conversation& c : service_.conversations().list(salt_of(service_, call.request).id)) {
    data.push_back(session_json(c, service_.env().wall_ns()));
  }
  return Json{{"object", "list"}, {"data", std::move(data)}};
}

Result<Json> SessionEndpoints::get(const Call& call) const {
  const std::string& name = *call.request.param("id");
  const SaltId salt = salt_of(service_, call.request).id;
  HCACHE_ASSIGN_OR_RETURN(const Conversation c, service_.conversations().get(salt, name));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                          service_.conversations().tokens(salt, name));
  HCACHE_ASSIGN_OR_RETURN(std::string text, model::text_with_media(service_.tokenizer(), tokens));
  Json json = session_json(c, service_.env().wall_ns());
  json["text"] = std::move(text);
  HCACHE_RETURN_IF_ERROR(add_saved(service_, salt, tokens, &json));
  return json;
}

// {"pinned": bool, "ttl_s": number (0: never expires), "id": new name}; each may be left out.
Result<Json> SessionEndpoints::change(const Call& call) {
  Conversations& conversations = service_.conversations();
  const SaltId salt = salt_of(service_, call.request).id;
  std::string name = *call.request.param("id");
  const Json& body = call.body;
  if (!body.is_object()) return invalid_argument("expected an object");
  const auto wrong = [](const char* field, const char* expected) {
    return invalid_argument(fmt::format("{}: expected {}", field, expected));
  };
  // Everything is checked before anything changes.
  if (body.contains("pinned") && !body["pinned"].is_boolean()) return wrong("pinned", "a boolean");
  if (body.contains("ttl_s") && (!body["ttl_s"].is_number() || body["ttl_s"].get<double>() < 0 ||
                                 body["ttl_s"].get<double>() > 1e9)) {
    return wrong("ttl_s", "seconds from 0 (never expires) to 1e9");
  }
  if (body.contains("id") && (!body["id"].is_string() || body["id"].get<std::string>().empty())) {
    return wrong("id", "a name");
  }
  HCACHE_RETURN_IF_ERROR(conversations.get(salt, name).status());
  if (body.contains("id")) {
    const auto to = body["id"].get<std::string>();
    HCACHE_RETURN_IF_ERROR(conversations.rename(salt, name, to));
    name = to;
  }
  if (body.contains("pinned")) {
    HCACHE_RETURN_IF_ERROR(conversations.set_pinned(salt, name, body["pinned"].get<bool>()));
  }
  if (body.contains("ttl_s")) {
    HCACHE_RETURN_IF_ERROR(conversations.set_ttl(
        salt, name, static_cast<int64_t>(body["ttl_s"].get<double>() * kNsPerSecond)));
  }
  HCACHE_ASSIGN_OR_RETURN(const Conversation c, conversations.get(salt, name));
  return session_json(c, service_.env().wall_ns());
}

Result<Json> SessionEndpoints::remove(const Call& call) {
  const std::string& name = *call.request.param("id");
  HCACHE_RETURN_IF_ERROR(service_.remove_session(salt_of(service_, call.request).id, name));
  return Json{{"object", "session.deleted"}, {"id", name}, {"deleted", true}};
}

// ---- Session files ------------------------------------------------------------------------------

void SessionEndpoints::export_file(const Call& call) {
  http::Responder& responder = *call.responder;
  PacedStream to(service_, responder);
  const Salt salt = salt_of(service_, call.request);
  const std::string& name = *call.request.param("id");
  const auto conversation = service_.conversations().get(salt.id, name);
  if (!conversation.ok()) return send_status(call.request, responder, conversation.status());
  auto session = service_.conversations().session(salt.id, name);
  if (!session.ok()) return send_status(call.request, responder, session.status());
  const auto match = settled_match(service_, *conversation, *session, to.gone());
  if (!match.ok()) return send_status(call.request, responder, match.status());

  to.start("application/octet-stream",
           {{"Content-Disposition", "attachment; filename=\"session.hcache\""}});
  const store::ArchiveHead head = {.fingerprint = service_.file_fingerprint(salt),
                                   .model = service_.model_name(),
                                   .name = std::move(session->name),
                                   .tokens = std::move(session->tokens),
                                   .metadata_json = std::move(session->metadata_json)};
  to.finish(store::write_archive(*service_.store(), head, *match,
                                 [&](std::string_view piece) { return to.write(piece); }));
}

Result<Json> SessionEndpoints::import_file(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(store::Store * store, store_of(service_));
  HCACHE_ASSIGN_OR_RETURN(store::Archive archive, store::read_archive(call.request.body));
  const Salt salt = salt_of(service_, call.request);
  HCACHE_RETURN_IF_ERROR(check_fits(service_, archive, salt));
  const std::string* id = call.request.query_value("id");
  store::Session session;
  session.name = id != nullptr ? *id : archive.head.name;
  // Here the salt keeps apart what adapters were in.
  archive.head.fingerprint = session.fingerprint = service_.runtime().fingerprint();
  session.salt = salt.id;
  session.tokens = archive.head.tokens;
  session.metadata_json = archive.head.metadata_json;
  if (session.name.empty()) return invalid_argument("id: expected a name");
  if (service_.conversations().get(salt.id, session.name).ok()) {
    return already_exists(fmt::format(
        "there is a session '{}'; delete it, or import under another name (?id=)", session.name));
  }
  HCACHE_RETURN_IF_ERROR(store::put_archive(*store, archive, salt).status());
  HCACHE_ASSIGN_OR_RETURN(const Conversation added,
                          service_.conversations().add(salt.id, std::move(session)));
  Json json = session_json(added, service_.env().wall_ns());
  HCACHE_RETURN_IF_ERROR(add_saved(service_, salt.id, archive.head.tokens, &json));
  return json;
}

void SessionEndpoints::add_to(http::Router* router) {
  const auto slow = [this](Answer answer) {
    return answer_on(service_.keeper(), std::move(answer));
  };
  router->add("GET", "/v1/sessions", slow([this](Call& call) { return list(call); }));
  router->add("GET", "/v1/sessions/{id}", slow([this](Call& call) { return get(call); }));
  router->add("PATCH", "/v1/sessions/{id}", slow([this](Call& call) { return change(call); }));
  router->add("DELETE", "/v1/sessions/{id}", slow([this](Call& call) { return remove(call); }));
  router->add("GET", "/v1/sessions/{id}/export",
              transfer_on(transfers_, [this](const Call& call) { export_file(call); }));
  // One upload leaves half of what all of them together may take for the others.
  const http::RouteOptions large = {.max_body_bytes = service_.options().http.max_bodies_bytes / 2};
  router->add("POST", "/v1/sessions/import",
              transfer_on(transfers_,
                          [this](const Call& call) {
                            const Result<Json> json = import_file(call);
                            if (!json.ok())
                              return send_status(call.request, *call.responder, json.status());
                            send_json(*call.responder, *json);
                          }),
              large);
}

}  // namespace hcache::server
