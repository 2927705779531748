// The conversations that the server has held: found again by their text, listed and kept by name.
//
// Why by text. Clients resend a whole conversation as text, and a reply's text does not always
// tokenise to the tokens that were generated. So every finished chain is also known by the text it
// stands for: where a rendered conversation begins with that text, the chain's own tokens are used,
// and only what follows is tokenised. The state saved under those tokens then fits.
//
// A conversation is a named session of the store; one without a client's name gets a name of its
// own. Salts are kept apart: a name means another session under another salt, and the text of one
// salt is never found under another. A snapshot is a chain as it was when it was given a name:
// replies that continue it belong to another conversation. One of OpenAI's conversations is a
// session that has items too, whose tokens are those of its last reply.
//
// Threading: any thread. remember() is quick; what else changes something, and persist(), waits for
// the disk: not for threads that serve.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "base/sync.h"
#include "item_list.h"
#include "model/tokenizer.h"
#include "store/store.h"

namespace hcache::server {

struct Conversation {
  std::string name;  // without the salt's part
  int64_t tokens = 0;
  int64_t created_ns = 0;  // wall clock
  int64_t updated_ns = 0;
  bool named = false;      // by the client
  bool pinned = false;     // its state is not evicted, it does not expire
  bool snapshot = false;   // no reply continues it
  bool adapted = false;    // its state is the model's with adapters
  int64_t expires_ns = 0;  // wall clock; 0: never
  int64_t kept_ns = 0;     // wall clock: until then its state is not evicted; 0: not asked for
  std::string user;
  std::string cache_key;  // the client's: conversations that are likely to begin alike
};

// What is remembered of a finished reply.
struct FinishedChain {
  SaltId salt;
  std::string name;  // empty: the conversation that it continues, or a new one
  std::string user;
  std::vector<int32_t> tokens;  // prompt and reply
  std::string messages;         // the caller's, kept as it is
  int64_t ttl_ns = 0;           // 0: as long as there is room
  std::string cache_key;
  int64_t keep_ns = 0;    // so long its state is not evicted, and it does not expire
  bool snapshot = false;  // kept as it is now; needs a name
  bool adapted = false;   // computed with adapters
};

// So that no client fills the memory.
inline constexpr uint64_t kMaxItemBytes = uint64_t{16} << 20U;       // of a conversation
inline constexpr uint64_t kMaxSaltItemBytes = uint64_t{256} << 20U;  // of all that a salt has
inline constexpr uint64_t kItemListBytes = 1024;  // that each counts beside what it holds

class Conversations {
 public:
  // What the store has of a conversation, however it was cut. Any thread.
  using Saved =
      std::function<Result<store::Match>(std::span<const int32_t> tokens, const SaltId& salt)>;

  // tokenizer and store must outlive it, and what `saved` refers to. Without a store it forgets at
  // the process's end.
  Conversations(Env& env, const model::Tokenizer& tokenizer, store::Store* store,
                const Fingerprint& fingerprint, Saved saved)
      : env_(env),
        tokenizer_(tokenizer),
        store_(store),
        fingerprint_(fingerprint),
        saved_(std::move(saved)) {}

  // Reads what the store has of this model. Damaged sessions are left out.
  Status load() HCACHE_EXCLUDES(mutex_);

  struct Tokens {
    std::vector<int32_t> tokens;
    int64_t known = 0;  // leading ones that come from a conversation; 0: none fits
  };
  // `text` as tokens. `options` as for Tokenizer::encode of the whole text.
  Result<Tokens> tokenise(const SaltId& salt, std::string_view text,
                          const model::EncodeOptions& options) const HCACHE_EXCLUDES(mutex_);

  // Remembers a chain in memory; returns the conversation's name. persist() makes it durable. All
  // conversations of the salt with its cache key that expire do so a ttl from now.
  std::string remember(FinishedChain chain) HCACHE_EXCLUDES(mutex_);
  // Ok for a conversation that is gone meanwhile.
  Status persist(const SaltId& salt, std::string_view name) HCACHE_EXCLUDES(mutex_);

  // ---- With items; kNotFound where the salt has no such conversation of that name.
  // Durable when it returns. kAlreadyExists: there is a session of that name. kInvalidArgument,
  // kResourceExhausted: above the limits.
  Status begin(const SaltId& salt, const std::string& name, ItemList list) HCACHE_EXCLUDES(mutex_);
  Result<ItemList> items(const SaltId& salt, std::string_view name) HCACHE_EXCLUDES(mutex_);
  // What `change` makes of the list, at once and as a whole, or nothing of it. Durable when it
  // returns. `change` is quick and does not call back. Errors as of begin(), and its own.
  using Change = std::function<Status(ItemList*)>;
  Status change_items(const SaltId& salt, std::string_view name, const Change& change)
      HCACHE_EXCLUDES(mutex_);
  // The limits, for more that is going to be added. Ok where there is room for it.
  Status check_room(const SaltId& salt, std::string_view name, uint64_t bytes)
      HCACHE_EXCLUDES(mutex_);
  // Adds the items of an answer, whatever the limits. The conversation is that of the chain's
  // name; its tokens become the chain's, where that has some. In memory, as remember().
  Status append(FinishedChain chain, const std::vector<ItemPtr>& items) HCACHE_EXCLUDES(mutex_);

  // ---- By name; kNotFound where the salt has none of that name.
  [[nodiscard]] std::vector<Conversation> list(const SaltId& salt) const HCACHE_EXCLUDES(mutex_);
  Result<Conversation> get(const SaltId& salt, std::string_view name) HCACHE_EXCLUDES(mutex_);
  Result<std::vector<int32_t>> tokens(const SaltId& salt, std::string_view name)
      HCACHE_EXCLUDES(mutex_);
  // What remember() was given.
  Result<std::string> messages(const SaltId& salt, std::string_view name) HCACHE_EXCLUDES(mutex_);
  Status set_pinned(const SaltId& salt, std::string_view name, bool pinned) HCACHE_EXCLUDES(mutex_);
  // ttl_ns from now; 0: never expires.
  Status set_ttl(const SaltId& salt, std::string_view name, int64_t ttl_ns) HCACHE_EXCLUDES(mutex_);
  // kAlreadyExists where the new name is taken.
  Status rename(const SaltId& salt, std::string_view name, std::string_view to)
      HCACHE_EXCLUDES(mutex_);
  // A snapshot's text is found again, though the conversation that it was taken of has gone.
  Status recall(const SaltId& salt, std::string_view name) HCACHE_EXCLUDES(mutex_);
  // All that is remembered of it, with its name as clients know it.
  Result<store::Session> session(const SaltId& salt, std::string_view name) HCACHE_EXCLUDES(mutex_);
  // Takes in what session() gave, here or elsewhere; neither a pin nor an end comes along. Durable
  // when it returns. kInvalidArgument: another model's fingerprint, tokens outside the vocabulary,
  // no name. kAlreadyExists: the name is taken.
  Result<Conversation> add(const SaltId& salt, store::Session session) HCACHE_EXCLUDES(mutex_);
  // Removes it and the state that only it uses.
  Status remove(const SaltId& salt, std::string_view name) HCACHE_EXCLUDES(mutex_);
  // Removes what has expired, gives up what was kept long enough; returns how many were removed.
  // `removal`: for whom there is more to do than remove() does.
  using Removal = std::function<Status(const SaltId& salt, const std::string& name)>;
  Result<int64_t> expire(const Removal& removal = {}) HCACHE_EXCLUDES(mutex_);

 private:
  // The text of a chain, without the token that begins every text.
  struct TextKey {
    uint64_t length = 0;
    uint64_t hash = 0;
    bool operator==(const TextKey&) const = default;
    bool operator<(const TextKey& other) const {
      return length != other.length ? length < other.length : hash < other.hash;
    }
  };
  // The end of a turn: what clients may resend when they go back and ask something else.
  struct Turn {
    TextKey text;
    size_t tokens = 0;  // from the chain's beginning
  };
  struct Entry {
    Conversation conversation;
    std::vector<Turn> turns;  // the last one is the whole chain
    std::vector<int32_t> tokens;
    std::string messages;
    std::optional<ItemList> items;
    store::Match pins;  // of a pinned one
  };
  struct Tenant {
    std::map<std::string, Entry, std::less<>> by_name;
    struct Place {
      std::string name;
      size_t tokens = 0;
    };
    std::map<TextKey, Place> by_text;  // the newest of that text
    uint64_t item_bytes = 0;           // of all entries
  };
  struct Found {
    const Entry* entry = nullptr;  // null: nothing fits
    Turn turn;
  };

  // As model::text_with_media() has it, without BOS at the beginning.
  [[nodiscard]] std::string chain_text(std::span<const int32_t> tokens) const;
  [[nodiscard]] static TextKey key_of(std::string_view text);
  // The longest known text that `text` begins with.
  [[nodiscard]] Found find_text(const Tenant& tenant, std::string_view text) const
      HCACHE_REQUIRES(mutex_);
  [[nodiscard]] Entry entry_of(store::Session session) const;
  [[nodiscard]] store::Session session_of(const Entry& entry) const;
  // kNotFound. Valid while the lock is held.
  Result<Entry*> find(const SaltId& salt, std::string_view name) HCACHE_REQUIRES(mutex_);
  Result<Entry*> find_with_items(const SaltId& salt, std::string_view name) HCACHE_REQUIRES(mutex_);
  static uint64_t item_bytes(const std::optional<ItemList>& list) {
    return list ? list->bytes() + kItemListBytes : 0;
  }
  // Whether a list may become so large.
  static Status check_room(const Tenant& tenant, uint64_t before, uint64_t after);
  static void set_items(Tenant* tenant, Entry* entry, ItemList list);
  // Whether its state must not be evicted.
  [[nodiscard]] static bool is_held(const Conversation& c) { return c.pinned || c.kept_ns > 0; }
  // Whether clients go on from it by its name, as it was then: no other request changes it.
  [[nodiscard]] static bool is_said(const Entry& entry) {
    return entry.items || (entry.conversation.named && !entry.messages.empty());
  }
  static void insert(Tenant* tenant, Entry entry);
  // The same for a name that is free yet, and makes it durable; after an error nothing is there.
  Status insert_new(const SaltId& salt, Entry entry) HCACHE_EXCLUDES(mutex_);
  static void forget(Tenant* tenant, const std::string& name);
  // The conversation that a chain continues, as a new entry without tokens.
  Entry entry_for(const FinishedChain& chain, std::string_view text) HCACHE_REQUIRES(mutex_);
  // remember(), of a chain that stands for `text`.
  std::string keep(FinishedChain chain, std::string_view text) HCACHE_REQUIRES(mutex_);
  Status delete_stored(const SaltId& salt, std::string_view name);

  Env& env_;
  const model::Tokenizer& tokenizer_;
  store::Store* const store_;
  const Fingerprint fingerprint_;
  const Saved saved_;
  // Memory changes first, under mutex_, which is held for moments. Writers of the store take turns,
  // each with what memory holds when its turn has come.
  Mutex write_mutex_;
  mutable Mutex mutex_;
  std::unordered_map<SaltId, Tenant> tenants_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::server
