#include "conversations.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/log.h"
#include "store/session_name.h"

namespace hcache::server {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxTurns = 256;  // of one conversation that are known by their text

// A member of metadata that may come from anywhere; `fallback` where it is of another type.
template <typename T>
T field(const Json& metadata, const char* name, T fallback) {
  const bool usable = metadata.is_object() && metadata.contains(name) &&
                      metadata[name].type() == Json(fallback).type();
  return usable ? metadata[name].template get<T>() : fallback;
}

// A list as metadata has it; it need not come from here.
std::optional<ItemList> items_of(const Json& json) {
  if (json.empty()) return std::nullopt;
  ItemList list;
  list.created_s = static_cast<int64_t>(field(json, "created_s", uint64_t{0}));
  list.metadata = field(json, "metadata", std::string("{}"));
  for (const Json& item : field(json, "items", Json::array())) {
    const bool usable =
        item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string();
    if (!usable) continue;
    list.items.push_back(
        std::make_shared<const Item>(Item{item[0].get<std::string>(), item[1].get<std::string>()}));
  }
  return list;
}

Json items_json(const ItemList& list) {
  Json items = Json::array();
  for (const ItemPtr& item : list.items) items.push_back({item->id, item->json});
  return {{"created_s", static_cast<uint64_t>(list.created_s)},
          {"metadata", list.metadata},
          {"items", std::move(items)}};
}

}  // namespace

std::string Conversations::chain_text(std::span<const int32_t> tokens) const {
  if (!tokens.empty() && tokens[0] == tokenizer_.bos()) tokens = tokens.subspan(1);
  return model::text_with_media(tokenizer_, tokens).value_or({});
}

Conversations::TextKey Conversations::key_of(std::string_view text) {
  return {text.size(), XXH3_64bits(text.data(), text.size())};
}

Status Conversations::load() {
  if (store_ == nullptr) return {};
  HCACHE_ASSIGN_OR_RETURN(const auto sessions, store_->list_sessions());
  for (const store::SessionSummary& summary : sessions) {
    if (summary.fingerprint != fingerprint_) continue;
    auto session = store_->get_session(summary.name);
    if (!session.ok()) {
      log::warn("session {} can't be read: {}", summary.name, session.status().to_string());
      continue;
    }
    const SaltId salt = session->salt;
    session->name = store::client_name(salt, session->name);
    Entry entry = entry_of(std::move(*session));
    if (is_held(entry.conversation)) {
      auto match = saved_(entry.tokens, salt);
      if (match.ok()) entry.pins = std::move(*match);
    }
    MutexLock lock(mutex_);
    insert(&tenants_[salt], std::move(entry));
  }
  return {};
}

Conversations::Entry Conversations::entry_of(store::Session session) const {
  const Json metadata = Json::parse(session.metadata_json, nullptr, false);
  Entry entry;
  Conversation& c = entry.conversation;
  c.name = std::move(session.name);
  c.tokens = static_cast<int64_t>(session.tokens.size());
  c.created_ns = session.created_ns;
  c.updated_ns = session.updated_ns;
  c.named = field(metadata, "named", true);  // the command line's sessions have no such field
  c.pinned = field(metadata, "pinned", false);
  c.snapshot = field(metadata, "snapshot", false);
  c.adapted = field(metadata, store::kAdapted, false);
  c.kept_ns = static_cast<int64_t>(field(metadata, "kept_ns", uint64_t{0}));
  c.user = field(metadata, "user", std::string());
  c.cache_key = field(metadata, "cache_key", std::string());
  c.expires_ns = static_cast<int64_t>(field(metadata, "expires_ns", uint64_t{0}));
  entry.messages = field(metadata, "messages", std::string());
  entry.items = items_of(field(metadata, "items", Json::object()));
  entry.tokens = std::move(session.tokens);
  const auto add_turn = [&](size_t n) {
    entry.turns.push_back({key_of(chain_text(std::span(entry.tokens).first(n))), n});
  };
  const Json turns = field(metadata, "turns", Json::array());
  for (size_t i = turns.size() - std::min(turns.size(), kMaxTurns); i < turns.size(); ++i) {
    const Json& turn = turns[i];
    const bool usable = turn.is_number_unsigned() && turn.get<uint64_t>() > 0 &&
                        turn.get<uint64_t>() < entry.tokens.size();
    if (usable) add_turn(turn.get<uint64_t>());
  }
  if (!entry.tokens.empty()) add_turn(entry.tokens.size());
  return entry;
}

store::Session Conversations::session_of(const Entry& entry) const {
  const Conversation& c = entry.conversation;
  store::Session session;
  session.name = c.name;
  session.fingerprint = fingerprint_;
  session.tokens = entry.tokens;
  session.created_ns = c.created_ns;
  session.updated_ns = c.updated_ns;
  Json turns = Json::array();
  for (const Turn& turn : entry.turns) turns.push_back(turn.tokens);
  Json metadata = {{"named", c.named},
                   {"pinned", c.pinned},
                   {"snapshot", c.snapshot},
                   {store::kAdapted, c.adapted},
                   {"expires_ns", static_cast<uint64_t>(c.expires_ns)},
                   {"kept_ns", static_cast<uint64_t>(c.kept_ns)},
                   {"user", c.user},
                   {"cache_key", c.cache_key},
                   {"messages", entry.messages},
                   {"turns", std::move(turns)}};
  if (entry.items) metadata["items"] = items_json(*entry.items);
  session.metadata_json = metadata.dump(-1, ' ', false, Json::error_handler_t::replace);
  return session;
}

// Lengths are few compared to bytes: one pass over the text gives the hash at each of them.
Conversations::Found Conversations::find_text(const Tenant& tenant, std::string_view text) const {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  const Tenant::Place* best = nullptr;
  Found found;
  uint64_t done = 0;
  uint64_t hash = 0;
  for (const auto& [key, place] : tenant.by_text) {
    if (key.length > text.size()) break;
    if (key.length == 0) continue;
    if (key.length != done) {
      XXH3_64bits_update(state.get(), text.data() + done, key.length - done);
      done = key.length;
      hash = XXH3_64bits_digest(state.get());
    }
    if (key.hash != hash) continue;
    best = &place;
    found.turn = {key, place.tokens};
  }
  if (best == nullptr) return {};
  found.entry = &tenant.by_name.find(best->name)->second;
  // The hash is no proof.
  const auto chain = std::span(found.entry->tokens).first(best->tokens);
  return text.starts_with(chain_text(chain)) ? found : Found();
}

Result<Conversations::Tokens> Conversations::tokenise(const SaltId& salt, std::string_view text,
                                                      const model::EncodeOptions& options) const {
  Tokens out;
  const std::string bos = tokenizer_.bos() == model::Tokenizer::kNoToken
                              ? std::string()
                              : tokenizer_.piece(tokenizer_.bos(), true);
  const bool writes_bos = !bos.empty() && text.starts_with(bos);
  const bool begins_with_bos = writes_bos || (options.add_special && tokenizer_.adds_bos());
  const std::string_view body = writes_bos ? text.substr(bos.size()) : text;
  uint64_t known_bytes = 0;
  {
    MutexLock lock(mutex_);
    const auto tenant = tenants_.find(salt);
    const Found found = tenant == tenants_.end() ? Found() : find_text(tenant->second, body);
    std::span<const int32_t> chain;
    if (found.entry != nullptr) chain = std::span(found.entry->tokens).first(found.turn.tokens);
    // A text that names pictures as chain_text() does has none.
    const bool text_alone = std::ranges::none_of(chain, [](int32_t token) { return token < 0; });
    if (!chain.empty() && text_alone && (chain[0] == tokenizer_.bos()) == begins_with_bos) {
      out.tokens.assign(chain.begin(), chain.end());
      out.known = static_cast<int64_t>(chain.size());
      known_bytes = found.turn.text.length;
    }
  }
  if (out.known == 0) {
    HCACHE_ASSIGN_OR_RETURN(out.tokens, tokenizer_.encode(text, options));
    return out;
  }
  model::EncodeOptions rest = options;
  rest.add_special = false;
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> added,
                          tokenizer_.encode(body.substr(known_bytes), rest));
  out.tokens.insert(out.tokens.end(), added.begin(), added.end());
  return out;
}

void Conversations::insert(Tenant* tenant, Entry entry) {
  const std::string name = entry.conversation.name;
  forget(tenant, name);
  for (const Turn& turn : entry.turns) {
    const Tenant::Place place = {name, turn.tokens};
    const auto [known, added] = tenant->by_text.try_emplace(turn.text, place);
    // The conversation that a snapshot was taken of goes on.
    if (!added && !entry.conversation.snapshot) known->second = place;
  }
  tenant->item_bytes += item_bytes(entry.items);
  tenant->by_name.insert_or_assign(name, std::move(entry));
}

void Conversations::forget(Tenant* tenant, const std::string& name) {
  const auto it = tenant->by_name.find(name);
  if (it == tenant->by_name.end()) return;
  for (const Turn& turn : it->second.turns) {
    const auto text = tenant->by_text.find(turn.text);
    if (text != tenant->by_text.end() && text->second.name == name) tenant->by_text.erase(text);
  }
  tenant->item_bytes -= item_bytes(it->second.items);
  tenant->by_name.erase(it);
}

Conversations::Entry Conversations::entry_for(const FinishedChain& chain, std::string_view text) {
  const Tenant& tenant = tenants_[chain.salt];
  const auto begins_with = [&](std::span<const int32_t> tokens) {
    return tokens.size() <= chain.tokens.size() &&
           std::equal(tokens.begin(), tokens.end(), chain.tokens.begin());
  };
  Entry entry;
  Conversation& c = entry.conversation;
  // A client that resends an earlier turn and goes on differently begins another conversation.
  const Found before = find_text(tenant, text);
  const bool continues =
      before.entry != nullptr && !before.entry->conversation.snapshot && !is_said(*before.entry) &&
      before.turn.tokens == before.entry->tokens.size() && begins_with(before.entry->tokens);
  if (chain.name.empty()) {
    if (continues) c = before.entry->conversation;
  } else {
    const auto named = tenant.by_name.find(chain.name);
    if (named != tenant.by_name.end()) {
      c = named->second.conversation;
      entry.items = named->second.items;
    }
    c.name = chain.name;
    c.named = true;
    c.snapshot = chain.snapshot;
  }
  if (c.name.empty()) c.name = fmt::format("c-{:012x}", env_.random_u64() >> 16);
  c.adapted = chain.adapted;
  if (!chain.user.empty()) c.user = chain.user;
  if (!chain.cache_key.empty()) c.cache_key = chain.cache_key;
  if (before.entry != nullptr) {
    for (const Turn& turn : before.entry->turns) {
      if (begins_with(std::span(before.entry->tokens).first(turn.tokens))) {
        entry.turns.push_back(turn);
      }
    }
  }
  if (entry.turns.size() >= kMaxTurns) entry.turns.erase(entry.turns.begin());
  return entry;
}

std::string Conversations::remember(FinishedChain chain) {
  const std::string text = chain_text(chain.tokens);
  MutexLock lock(mutex_);
  return keep(std::move(chain), text);
}

std::string Conversations::keep(FinishedChain chain, std::string_view text) {
  const int64_t now = env_.wall_ns();
  Entry entry = entry_for(chain, text);
  Conversation& c = entry.conversation;
  c.tokens = static_cast<int64_t>(chain.tokens.size());
  c.updated_ns = now;
  if (c.created_ns == 0) c.created_ns = now;
  if (chain.ttl_ns > 0) c.expires_ns = now + chain.ttl_ns;
  if (chain.keep_ns > 0) c.kept_ns = now + chain.keep_ns;
  if (c.expires_ns > 0) c.expires_ns = std::max(c.expires_ns, c.kept_ns);
  if (chain.ttl_ns > 0 && !chain.cache_key.empty()) {
    for (auto& [name, other] : tenants_[chain.salt].by_name) {
      Conversation& o = other.conversation;
      if (o.cache_key != chain.cache_key || o.expires_ns == 0) continue;
      o.expires_ns = std::max(o.expires_ns, now + chain.ttl_ns);
    }
  }
  entry.turns.push_back({key_of(text), chain.tokens.size()});
  entry.tokens = std::move(chain.tokens);
  entry.messages = std::move(chain.messages);
  std::string name = c.name;
  insert(&tenants_[chain.salt], std::move(entry));
  return name;
}

Status Conversations::persist(const SaltId& salt, std::string_view name) {
  if (store_ == nullptr) return {};
  MutexLock writing(write_mutex_);
  Entry entry;
  {
    MutexLock lock(mutex_);
    const Result<Entry*> found = find(salt, name);
    if (!found.ok()) return {};  // gone meanwhile
    entry = **found;
  }
  store::Session session = session_of(entry);
  session.name = store::stored_name(salt, session.name);
  session.salt = salt;
  HCACHE_RETURN_IF_ERROR(store_->put_session(session));
  // The chunks of what is pinned or kept are held, so that the store does not evict them.
  store::Match pins;
  if (is_held(entry.conversation)) {
    HCACHE_ASSIGN_OR_RETURN(pins, saved_(entry.tokens, salt));
  }
  MutexLock lock(mutex_);
  if (const auto now = find(salt, name); now.ok()) (*now)->pins = std::move(pins);
  return {};
}

Result<Conversations::Entry*> Conversations::find(const SaltId& salt, std::string_view name) {
  const auto tenant = tenants_.find(salt);
  if (tenant != tenants_.end()) {
    const auto it = tenant->second.by_name.find(name);
    if (it != tenant->second.by_name.end()) return &it->second;
  }
  return not_found(fmt::format("there is no session '{}'", name));
}

std::vector<Conversation> Conversations::list(const SaltId& salt) const {
  std::vector<Conversation> out;
  {
    MutexLock lock(mutex_);
    const auto tenant = tenants_.find(salt);
    if (tenant == tenants_.end()) return out;
    for (const auto& [name, entry] : tenant->second.by_name) out.push_back(entry.conversation);
  }
  std::sort(out.begin(), out.end(), [](const Conversation& a, const Conversation& b) {
    return std::pair(b.updated_ns, a.name) < std::pair(a.updated_ns, b.name);
  });
  return out;
}

Result<Conversation> Conversations::get(const SaltId& salt, std::string_view name) {
  MutexLock lock(mutex_);
  HCACHE_ASSIGN_OR_RETURN(const Entry* entry, find(salt, name));
  return entry->conversation;
}

Result<std::vector<int32_t>> Conversations::tokens(const SaltId& salt, std::string_view name) {
  MutexLock lock(mutex_);
  HCACHE_ASSIGN_OR_RETURN(const Entry* entry, find(salt, name));
  return entry->tokens;
}

Result<std::string> Conversations::messages(const SaltId& salt, std::string_view name) {
  MutexLock lock(mutex_);
  HCACHE_ASSIGN_OR_RETURN(const Entry* entry, find(salt, name));
  return entry->messages;
}

Status Conversations::set_pinned(const SaltId& salt, std::string_view name, bool pinned) {
  {
    MutexLock lock(mutex_);
    HCACHE_ASSIGN_OR_RETURN(Entry * entry, find(salt, name));
    entry->conversation.pinned = pinned;
  }
  return persist(salt, name);
}

Status Conversations::set_ttl(const SaltId& salt, std::string_view name, int64_t ttl_ns) {
  if (ttl_ns < 0) return invalid_argument("a time to live must not be negative");
  {
    MutexLock lock(mutex_);
    HCACHE_ASSIGN_OR_RETURN(Entry * entry, find(salt, name));
    entry->conversation.expires_ns = ttl_ns == 0 ? 0 : env_.wall_ns() + ttl_ns;
  }
  return persist(salt, name);
}

Status Conversations::rename(const SaltId& salt, std::string_view name, std::string_view to) {
  if (to.empty()) return invalid_argument("a session's name must not be empty");
  {
    MutexLock lock(mutex_);
    HCACHE_ASSIGN_OR_RETURN(const Entry* entry, find(salt, name));
    if (name == to) return {};
    if (find(salt, to).ok()) return already_exists(fmt::format("there is a session '{}'", to));
    Entry renamed = *entry;
    renamed.conversation.name = to;
    renamed.conversation.named = true;
    Tenant& tenant = tenants_[salt];
    forget(&tenant, std::string(name));
    insert(&tenant, std::move(renamed));
  }
  // The new name first: after a crash between the two there are both, which loses nothing.
  HCACHE_RETURN_IF_ERROR(persist(salt, to));
  return delete_stored(salt, name);
}

Status Conversations::recall(const SaltId& salt, std::string_view name) {
  MutexLock lock(mutex_);
  HCACHE_ASSIGN_OR_RETURN(const Entry* entry, find(salt, name));
  Entry again = *entry;
  insert(&tenants_[salt], std::move(again));
  return {};
}

Result<store::Session> Conversations::session(const SaltId& salt, std::string_view name) {
  MutexLock lock(mutex_);
  HCACHE_ASSIGN_OR_RETURN(const Entry* entry, find(salt, name));
  store::Session session = session_of(*entry);
  session.salt = salt;
  return session;
}

Result<Conversation> Conversations::add(const SaltId& salt, store::Session session) {
  if (session.name.empty()) return invalid_argument("a session's name must not be empty");
  if (session.fingerprint != fingerprint_) {
    return invalid_argument(fmt::format("session '{}' is another model's", session.name));
  }
  HCACHE_RETURN_IF_ERROR(model::text_with_media(tokenizer_, session.tokens).status());
  session.created_ns = session.updated_ns = env_.wall_ns();
  Entry entry = entry_of(std::move(session));
  entry.conversation.pinned = false;
  entry.conversation.expires_ns = 0;
  entry.conversation.kept_ns = 0;
  const Conversation added = entry.conversation;
  HCACHE_RETURN_IF_ERROR(insert_new(salt, std::move(entry)));
  return added;
}

Status Conversations::insert_new(const SaltId& salt, Entry entry) {
  const std::string name = entry.conversation.name;
  {
    MutexLock lock(mutex_);
    if (find(salt, name).ok()) return already_exists(fmt::format("there is a session '{}'", name));
    Tenant& tenant = tenants_[salt];
    HCACHE_RETURN_IF_ERROR(check_room(tenant, 0, item_bytes(entry.items)));
    insert(&tenant, std::move(entry));
  }
  const Status status = persist(salt, name);
  if (!status.ok()) {
    remove(salt, name).ignore("what is not on disk is taken back; the first error is reported");
  }
  return status;
}

Status Conversations::remove(const SaltId& salt, std::string_view name) {
  {
    MutexLock lock(mutex_);
    HCACHE_RETURN_IF_ERROR(find(salt, name).status());
    forget(&tenants_[salt], std::string(name));  // and its pins: pinned chunks are not deleted
  }
  return delete_stored(salt, name);
}

Status Conversations::delete_stored(const SaltId& salt, std::string_view name) {
  if (store_ == nullptr) return {};
  MutexLock writing(write_mutex_);
  const Status status = store_->delete_session(store::stored_name(salt, name)).status();
  return status.code() == Code::kNotFound ? Status() : status;  // was not written yet
}

Result<int64_t> Conversations::expire(const Removal& removal) {
  std::vector<std::pair<SaltId, std::string>> expired;
  std::vector<std::pair<SaltId, std::string>> given_up;
  {
    const int64_t now = env_.wall_ns();
    MutexLock lock(mutex_);
    for (auto& [salt, tenant] : tenants_) {
      for (auto& [name, entry] : tenant.by_name) {
        Conversation& c = entry.conversation;
        if (c.kept_ns > 0 && c.kept_ns <= now) {
          c.kept_ns = 0;
          given_up.emplace_back(salt, name);
        }
        if (!c.pinned && c.expires_ns > 0 && c.expires_ns <= now) expired.emplace_back(salt, name);
      }
    }
  }
  for (const auto& [salt, name] : given_up) HCACHE_RETURN_IF_ERROR(persist(salt, name));
  int64_t removed = 0;
  for (const auto& [salt, name] : expired) {
    const Status status = removal ? removal(salt, name) : remove(salt, name);
    if (status.ok()) {
      ++removed;
    } else if (status.code() != Code::kNotFound) {  // a client was faster
      return status;
    }
  }
  return removed;
}

}  // namespace hcache::server
