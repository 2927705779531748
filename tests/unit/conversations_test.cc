// Conversations found by their text, and kept by name: in memory, over a restart, apart by salt.
#include "conversations.h"

#include <gtest/gtest.h>

#include "base_testing.h"
#include "store/session_name.h"
#include "text_gguf.h"

namespace hcache::server {
namespace {

using hcache::testing::TempDir;
using namespace std::string_literals;

class ConversationsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto tokenizer = model::Tokenizer::load(vocab_.path());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
    tokenizer_ = std::move(*tokenizer);
    open();
  }
  // As a process that starts.
  void open() {
    conversations_.reset();
    store_.reset();
    store::StoreOptions options;
    options.dirs = {dir_ / "store"};
    auto store = store::Store::open(Env::real(), options);
    ASSERT_TRUE(store.ok()) << store.status().to_string();
    store_ = std::move(*store);
    conversations_ = std::make_unique<Conversations>(
        Env::real(), *tokenizer_, store_.get(), Fingerprint(),
        [this](std::span<const int32_t> tokens, const SaltId& salt) -> Result<store::Match> {
          HCACHE_RETURN_IF_ERROR(broken_);
          return store_->match(chain_, salt, tokens);
        });
    ASSERT_TRUE(conversations_->load().ok());
  }
  std::vector<int32_t> encode(std::string_view text) {
    return tokenizer_->encode(text, {}).value_or({});
  }
  // The text's bytes one by one: tokens that stand for it and that encode() would never give.
  std::vector<int32_t> spelled(std::string_view text) {
    std::vector<int32_t> tokens;
    for (const char c : text) {
      const auto one = encode(std::string_view(&c, 1));
      tokens.insert(tokens.end(), one.begin(), one.end());
    }
    return tokens;
  }
  std::string remember(std::vector<int32_t> tokens, const std::string& name = "",
                       const SaltId& salt = salt_id("")) {
    FinishedChain chain;
    chain.salt = salt;
    chain.name = name;
    chain.tokens = std::move(tokens);
    chain.messages = "[]";
    const std::string given = conversations_->remember(std::move(chain));
    EXPECT_TRUE(conversations_->persist(salt, given).ok());
    return given;
  }
  Conversations::Tokens tokenise(std::string_view text, const SaltId& salt = salt_id("")) {
    auto tokens = conversations_->tokenise(salt, text, {});
    EXPECT_TRUE(tokens.ok()) << tokens.status().to_string();
    return tokens.value_or({});
  }

  TempDir dir_;
  model::test::TempFile vocab_{model::test::tiny_vocab()};
  std::unique_ptr<model::Tokenizer> tokenizer_;
  std::unique_ptr<store::Store> store_;
  store::ChainFingerprints chain_{Fingerprint()};  // of what is saved
  Status broken_;                                  // what looking into the store fails with
  std::unique_ptr<Conversations> conversations_;
};

TEST_F(ConversationsTest, WhatIsKeptForADayIsNotEvictedAndDoesNotExpire) {
  const auto keep = [&](const std::string& text, int64_t keep_ns) {
    FinishedChain chain;
    chain.salt = salt_id("");
    chain.tokens = encode(text);
    chain.ttl_ns = 1;
    chain.keep_ns = keep_ns;
    const std::string name = conversations_->remember(std::move(chain));
    EXPECT_TRUE(conversations_->persist(salt_id(""), name).ok());
    return name;
  };
  const std::string kept = keep("hello there", 3'600'000'000'000);
  const std::string brief = keep("hello you", 1);
  EXPECT_EQ(conversations_->expire().value_or(-1), 1);
  EXPECT_FALSE(conversations_->get(salt_id(""), brief).ok());
  open();  // kept across processes
  const auto conversation = conversations_->get(salt_id(""), kept);
  ASSERT_TRUE(conversation.ok());
  EXPECT_GT(conversation->kept_ns, Env::real().wall_ns());
  EXPECT_GE(conversation->expires_ns, conversation->kept_ns);
}

TEST_F(ConversationsTest, ACacheKeyRenewsTheConversationsOfItsKind) {
  const auto hold = [&](const std::string& text, const std::string& key, int64_t ttl_ns) {
    FinishedChain chain;
    chain.salt = salt_id("");
    chain.tokens = encode(text);
    chain.cache_key = key;
    chain.ttl_ns = ttl_ns;
    return conversations_->remember(std::move(chain));
  };
  const std::string alike = hold("hello there", "k", 1);
  const std::string other = hold("hello you", "other", 1);
  const std::string last = hold("there you are", "k", 3'600'000'000'000);
  EXPECT_EQ(conversations_->expire().value_or(-1), 1);
  EXPECT_TRUE(conversations_->get(salt_id(""), alike).ok());
  EXPECT_FALSE(conversations_->get(salt_id(""), other).ok());
  EXPECT_EQ(conversations_->get(salt_id(""), last)->cache_key, "k");
}

TEST_F(ConversationsTest, TextIsFoundAgainAsTheTokensItWas) {
  const std::vector<int32_t> chain = spelled("hello there");
  ASSERT_NE(chain, encode("hello there"));
  remember(chain);
  for (int process = 0; process < 2; ++process) {
    const Conversations::Tokens found = tokenise("hello there, you");
    EXPECT_EQ(found.known, static_cast<int64_t>(chain.size()));
    std::vector<int32_t> expected = chain;
    const std::vector<int32_t> rest = encode(", you");
    expected.insert(expected.end(), rest.begin(), rest.end());
    EXPECT_EQ(found.tokens, expected);
    EXPECT_EQ(tokenise("hello").known, 0);
    EXPECT_EQ(tokenise("hello thera, you").known, 0);
    open();
  }
}

TEST_F(ConversationsTest, EveryTurnIsKnownAndTheLongestWins) {
  const std::string name = remember(spelled("one"));
  remember(spelled("one the"));
  EXPECT_EQ(remember(spelled("one the three four")), name);
  for (int process = 0; process < 2; ++process) {
    EXPECT_EQ(tokenise("one the three").known, static_cast<int64_t>(spelled("one the").size()));
    EXPECT_EQ(tokenise("one, the").known, static_cast<int64_t>(spelled("one").size()));
    open();
  }
  // Going back to an earlier turn begins another conversation, and keeps the first.
  const std::string other = remember(spelled("one the other"));
  EXPECT_NE(other, name);
  EXPECT_EQ(tokenise("one the three four five").known,
            static_cast<int64_t>(spelled("one the three four").size()));
  ASSERT_TRUE(conversations_->remove(salt_id(""), name).ok());
  EXPECT_EQ(tokenise("one the others").known,
            static_cast<int64_t>(spelled("one the other").size()));
}

TEST_F(ConversationsTest, SaltsAreApart) {
  const SaltId other = salt_id("other");
  remember(spelled("secret"), "name");
  EXPECT_EQ(tokenise("secret", other).known, 0);
  EXPECT_TRUE(conversations_->list(other).empty());
  EXPECT_EQ(conversations_->get(other, "name").code(), Code::kNotFound);
  remember(spelled("public"), "name", other);
  EXPECT_EQ(conversations_->tokens(salt_id(""), "name").value_or({}), spelled("secret"));
  open();
  EXPECT_EQ(conversations_->tokens(other, "name").value_or({}), spelled("public"));
  EXPECT_EQ(conversations_->tokens(salt_id(""), "name").value_or({}), spelled("secret"));
}

TEST_F(ConversationsTest, NoNameReachesAnotherSaltsRow) {
  const SaltId open_salt = salt_id("");
  const SaltId own = salt_id("b");
  for (const SaltId& salt : {own, open_salt}) {
    const std::string taken = store::stored_name(own, "x");
    for (const std::string& name : {taken, store::stored_name(open_salt, taken), "plain"s}) {
      const std::string stored = store::stored_name(salt, name);
      EXPECT_NE(stored, taken);
      EXPECT_EQ(store::client_name(salt, stored), name);
    }
  }
  EXPECT_EQ(store::stored_name(open_salt, "plain"), "plain");
}

TEST_F(ConversationsTest, AReplyContinuesItsConversation) {
  const std::string name = remember(spelled("hello"));
  EXPECT_EQ(remember(spelled("hello there")), name);
  EXPECT_NE(remember(spelled("hullo")), name);
  EXPECT_EQ(conversations_->list(salt_id("")).size(), 2U);
  EXPECT_FALSE(conversations_->get(salt_id(""), name)->named);
  remember(spelled("hi"), "mine");
  EXPECT_TRUE(conversations_->get(salt_id(""), "mine")->named);
}

TEST_F(ConversationsTest, WhatIsPinnedStaysAlsoBehindItsCuts) {
  const SaltId salt = salt_id("");
  chain_.add(store::kChunkTokens, Fingerprint{{1}});
  const std::vector<int32_t> tokens = spelled(std::string(2 * store::kChunkTokens, 'a'));
  const auto save = [&] {
    ChunkId parent;
    for (size_t at = 0; at < tokens.size(); at += store::kChunkTokens) {
      store::ChunkWrite chunk;
      chunk.parent = parent;
      chunk.fingerprint = chain_.at(at);
      chunk.salt = salt;
      chunk.first_position = at;
      chunk.tokens = std::span(tokens).subspan(at, store::kChunkTokens);
      chunk.id = chunk_id(chunk.fingerprint, salt, parent, chunk.tokens);
      ASSERT_TRUE(store_->put({&chunk, 1}).ok());
      parent = chunk.id;
    }
  };
  save();
  remember(tokens, "a");
  EXPECT_EQ(store_->remove({}).value_or(0), 2U);
  save();
  ASSERT_TRUE(conversations_->set_pinned(salt, "a", true).ok());
  EXPECT_EQ(store_->remove({}).value_or(9), 0U);
  open();
  EXPECT_EQ(store_->remove({}).value_or(9), 0U);
  ASSERT_TRUE(conversations_->set_pinned(salt, "a", false).ok());
  EXPECT_EQ(store_->remove({}).value_or(0), 2U);
}

TEST_F(ConversationsTest, PinsNamesAndTimesSurviveARestart) {
  const SaltId salt = salt_id("");
  remember(spelled("hello"), "a");
  remember(spelled("there"), "b");
  ASSERT_TRUE(conversations_->set_pinned(salt, "a", true).ok());
  ASSERT_TRUE(conversations_->set_ttl(salt, "a", 1).ok());
  ASSERT_TRUE(conversations_->set_ttl(salt, "b", 1).ok());
  EXPECT_EQ(conversations_->set_ttl(salt, "b", -1).code(), Code::kInvalidArgument);
  EXPECT_EQ(conversations_->rename(salt, "a", "b").code(), Code::kAlreadyExists);
  ASSERT_TRUE(conversations_->rename(salt, "a", "c").ok());
  open();
  EXPECT_EQ(conversations_->get(salt, "a").code(), Code::kNotFound);
  const auto kept = conversations_->get(salt, "c");
  ASSERT_TRUE(kept.ok());
  EXPECT_TRUE(kept->pinned);
  EXPECT_EQ(conversations_->messages(salt, "c").value_or(""), "[]");
  EXPECT_EQ(tokenise("hello you").known, static_cast<int64_t>(spelled("hello").size()));
  // What is pinned does not expire.
  EXPECT_EQ(conversations_->expire().value_or(-1), 1);
  EXPECT_EQ(conversations_->get(salt, "b").code(), Code::kNotFound);
  ASSERT_TRUE(conversations_->remove(salt, "c").ok());
  EXPECT_EQ(conversations_->remove(salt, "c").code(), Code::kNotFound);
  EXPECT_EQ(tokenise("hello you").known, 0);
  open();
  EXPECT_TRUE(conversations_->list(salt).empty());
}

TEST_F(ConversationsTest, ASnapshotStaysAsItWas) {
  const SaltId salt = salt_id("");
  const std::string name = remember(spelled("hello"));
  FinishedChain chain;
  chain.salt = salt;
  chain.name = "kept";
  chain.tokens = spelled("hello");
  chain.snapshot = true;
  ASSERT_EQ(conversations_->remember(std::move(chain)), "kept");
  ASSERT_TRUE(conversations_->persist(salt, "kept").ok());
  for (int process = 0; process < 2; ++process) {
    // The conversation goes on as itself, with the snapshot beside it.
    EXPECT_EQ(remember(spelled(process == 0 ? "hello there" : "hello there you")), name);
    EXPECT_EQ(conversations_->tokens(salt, "kept").value_or({}), spelled("hello"));
    open();
  }
  // What begins with the snapshot's text alone is a conversation of its own.
  EXPECT_NE(remember(spelled("hello again")), "kept");
  EXPECT_EQ(conversations_->tokens(salt, "kept").value_or({}), spelled("hello"));
  // Its text is found again when all others have gone.
  for (const Conversation& c : conversations_->list(salt)) {
    if (c.name == "kept") continue;
    ASSERT_TRUE(conversations_->remove(salt, c.name).ok());
  }
  ASSERT_TRUE(conversations_->recall(salt, "kept").ok());
  EXPECT_EQ(tokenise("hello, you").known, static_cast<int64_t>(spelled("hello").size()));
  EXPECT_EQ(conversations_->recall(salt, "none").code(), Code::kNotFound);
}

TEST_F(ConversationsTest, MovesElsewhereWithItsTurns) {
  const SaltId salt = salt_id("");
  const SaltId other = salt_id("other");
  remember(spelled("one"), "mine");
  remember(spelled("one the three"), "mine");
  ASSERT_TRUE(conversations_->set_pinned(salt, "mine", true).ok());
  ASSERT_TRUE(conversations_->set_ttl(salt, "mine", 1).ok());
  const auto session = conversations_->session(salt, "mine");
  ASSERT_TRUE(session.ok());
  EXPECT_EQ(session->name, "mine");
  ASSERT_TRUE(conversations_->add(other, *session).ok());
  EXPECT_EQ(conversations_->add(other, *session).code(), Code::kAlreadyExists);
  for (int process = 0; process < 2; ++process) {
    const auto moved = conversations_->get(other, "mine");
    ASSERT_TRUE(moved.ok());
    EXPECT_TRUE(moved->named);
    EXPECT_FALSE(moved->pinned);
    EXPECT_EQ(moved->expires_ns, 0);
    EXPECT_EQ(conversations_->messages(other, "mine").value_or(""), "[]");
    EXPECT_EQ(tokenise("one the threes", other).known,
              static_cast<int64_t>(spelled("one the three").size()));
    EXPECT_EQ(tokenise("one, you", other).known, static_cast<int64_t>(spelled("one").size()));
    open();
  }
}

TEST_F(ConversationsTest, WhatComesFromElsewhereIsChecked) {
  const SaltId salt = salt_id("");
  store::Session session;
  EXPECT_EQ(conversations_->add(salt, session).code(), Code::kInvalidArgument);  // no name
  session.name = "x";
  session.tokens = {0, tokenizer_->n_vocab()};
  EXPECT_EQ(conversations_->add(salt, session).code(), Code::kInvalidArgument);
  session.tokens = spelled("hello");
  session.fingerprint.bytes[0] = 1;
  EXPECT_EQ(conversations_->add(salt, session).code(), Code::kInvalidArgument);
  EXPECT_TRUE(conversations_->list(salt).empty());
  session.fingerprint = {};
  // Metadata of any shape: what is not understood counts as absent.
  int n = 0;
  for (const char* metadata :
       {"", "[]", "{", R"({"named": 5, "user": [], "messages": {}, "turns": 7})",
        R"({"turns": [-1, 0, 1.5, "x", 99, 2], "expires_ns": "never", "pinned": "yes"})"}) {
    session.name = std::to_string(n++);
    session.metadata_json = metadata;
    const auto added = conversations_->add(salt, session);
    ASSERT_TRUE(added.ok()) << metadata;
    EXPECT_EQ(added->tokens, static_cast<int64_t>(session.tokens.size()));
  }
  open();
  EXPECT_EQ(conversations_->list(salt).size(), static_cast<size_t>(n));
}

// ---- With items

ItemList list_of(const std::vector<std::string>& ids, const std::string& json = "{}") {
  ItemList list{.created_s = 5, .metadata = R"({"a":"b"})", .items = {}};
  for (const std::string& id : ids)
    list.items.push_back(std::make_shared<const Item>(Item{id, json}));
  return list;
}

std::vector<std::string> ids_of(const Result<ItemList>& list) {
  std::vector<std::string> ids;
  if (!list.ok()) return {list.status().to_string()};
  for (const ItemPtr& item : list->items) ids.push_back(item->id);
  return ids;
}

using Ids = std::vector<std::string>;

TEST_F(ConversationsTest, ItemsAreKeptUnderTheirSaltOverARestart) {
  const SaltId salt = salt_id("");
  const SaltId other = salt_id("other");
  ASSERT_TRUE(conversations_->begin(salt, "conv", list_of({"1", "2"})).ok());
  EXPECT_EQ(conversations_->begin(salt, "conv", {}).code(), Code::kAlreadyExists);
  ASSERT_TRUE(conversations_->begin(other, "conv", list_of({})).ok());
  remember(spelled("hello"), "plain");
  for (int process = 0; process < 2; ++process) {
    const auto list = conversations_->items(salt, "conv");
    EXPECT_EQ(ids_of(list), (Ids{"1", "2"}));
    EXPECT_EQ(list->created_s, 5);
    EXPECT_EQ(list->metadata, R"({"a":"b"})");
    EXPECT_EQ(ids_of(conversations_->items(other, "conv")), Ids());
    EXPECT_EQ(conversations_->items(salt, "plain").code(), Code::kNotFound);
    EXPECT_EQ(conversations_->items(salt, "none").code(), Code::kNotFound);
    open();
  }
  ASSERT_TRUE(conversations_->remove(salt, "conv").ok());
  open();
  EXPECT_EQ(conversations_->items(salt, "conv").code(), Code::kNotFound);
  EXPECT_TRUE(conversations_->items(other, "conv").ok());
}

TEST_F(ConversationsTest, AChangeOfItemsIsWholeOrNotAtAll) {
  const SaltId salt = salt_id("");
  ASSERT_TRUE(conversations_->begin(salt, "conv", list_of({"1"})).ok());
  const auto add = [&](const std::string& id, const Status& then) {
    return conversations_->change_items(salt, "conv", [&](ItemList* list) {
      list->items.push_back(list_of({id}).items.front());
      return then;
    });
  };
  EXPECT_TRUE(add("2", {}).ok());
  EXPECT_EQ(add("3", not_found("x")).code(), Code::kNotFound);
  EXPECT_EQ(ids_of(conversations_->items(salt, "conv")), (Ids{"1", "2"}));
  // What can't be made durable is taken back.
  ASSERT_TRUE(conversations_->set_pinned(salt, "conv", true).ok());
  broken_ = data_loss("the disk");
  EXPECT_EQ(add("4", {}).code(), Code::kDataLoss);
  broken_ = {};
  EXPECT_EQ(ids_of(conversations_->items(salt, "conv")), (Ids{"1", "2"}));
  EXPECT_TRUE(add("5", {}).ok());
  open();
  EXPECT_EQ(ids_of(conversations_->items(salt, "conv")), (Ids{"1", "2", "5"}));
  EXPECT_EQ(conversations_->change_items(salt, "none", [](ItemList*) { return Status(); }).code(),
            Code::kNotFound);
}

TEST_F(ConversationsTest, AnAnswerAddsItsItemsAndItsTokens) {
  const SaltId salt = salt_id("");
  ASSERT_TRUE(conversations_->begin(salt, "conv", list_of({"1"})).ok());
  const auto answer = [&](const std::string& text, const Ids& ids) {
    FinishedChain chain;
    chain.salt = salt;
    chain.name = "conv";
    chain.tokens = spelled(text);
    const Status status = conversations_->append(std::move(chain), list_of(ids).items);
    EXPECT_TRUE(conversations_->persist(salt, "conv").ok());
    return status;
  };
  EXPECT_TRUE(answer("hello", {"2", "3"}).ok());
  EXPECT_TRUE(answer("", {"4"}).ok());  // that is not to be saved
  for (int process = 0; process < 2; ++process) {
    EXPECT_EQ(ids_of(conversations_->items(salt, "conv")), (Ids{"1", "2", "3", "4"}));
    EXPECT_EQ(conversations_->tokens(salt, "conv").value_or({}), spelled("hello"));
    EXPECT_EQ(tokenise("hello, you").known, static_cast<int64_t>(spelled("hello").size()));
    open();
  }
  // Requests that do not name it leave it as it is, and those that name it as a session its items.
  EXPECT_NE(remember(spelled("hello there")), "conv");
  remember(spelled("other"), "conv");
  EXPECT_EQ(ids_of(conversations_->items(salt, "conv")), (Ids{"1", "2", "3", "4"}));
  ASSERT_TRUE(conversations_->rename(salt, "conv", "again").ok());
  EXPECT_EQ(conversations_->items(salt, "conv").code(), Code::kNotFound);
  EXPECT_EQ(ids_of(conversations_->items(salt, "again")).size(), 4U);
  // One that was deleted meanwhile stays deleted.
  EXPECT_EQ(answer("hello", {"5"}).code(), Code::kNotFound);
  EXPECT_EQ(conversations_->get(salt, "conv").code(), Code::kNotFound);
}

TEST_F(ConversationsTest, AResponseIsNotOverwrittenByWhatGoesOnFromItsText) {
  remember(spelled("hello"), "resp_1");
  EXPECT_NE(remember(spelled("hello there")), "resp_1");
  EXPECT_EQ(conversations_->tokens(salt_id(""), "resp_1").value_or({}), spelled("hello"));
}

TEST_F(ConversationsTest, ItemsHaveLimits) {
  // Without a store: these are many bytes to write.
  conversations_ =
      std::make_unique<Conversations>(Env::real(), *tokenizer_, nullptr, Fingerprint(), nullptr);
  const SaltId salt = salt_id("");
  const std::string large(kMaxItemBytes / 2, 'x');
  ASSERT_TRUE(conversations_->begin(salt, "conv", list_of({"1"}, large)).ok());
  EXPECT_EQ(conversations_->begin(salt, "more", list_of({"1", "2"}, large)).code(),
            Code::kInvalidArgument);
  const auto set = [&](const Ids& ids) {
    return conversations_->change_items(salt, "conv", [&](ItemList* list) {
      *list = list_of(ids, large);
      return Status();
    });
  };
  EXPECT_EQ(set({"1", "2"}).code(), Code::kInvalidArgument);
  EXPECT_EQ(ids_of(conversations_->items(salt, "conv")), Ids{"1"});
  EXPECT_TRUE(conversations_->check_room(salt, "conv", large.size() / 2).ok());
  EXPECT_EQ(conversations_->check_room(salt, "conv", large.size()).code(), Code::kInvalidArgument);
  EXPECT_EQ(conversations_->check_room(salt, "none", 1).code(), Code::kNotFound);
  Status status;
  int n = 0;
  while (status.ok() && n < 100) {
    status = conversations_->begin(salt, std::to_string(n++), list_of({"1"}, large));
  }
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(n, static_cast<int>(kMaxSaltItemBytes / large.size()) - 1);
  EXPECT_TRUE(conversations_->begin(salt_id("other"), "conv", list_of({"1"}, large)).ok());
  // Room comes back with what is deleted.
  ASSERT_TRUE(set({}).ok());
  EXPECT_TRUE(conversations_->begin(salt, "next", list_of({"1"}, large)).ok());
  ASSERT_TRUE(conversations_->remove(salt, "next").ok());
  EXPECT_TRUE(set({"1"}).ok());
}

TEST_F(ConversationsTest, ItemsFromElsewhereAreChecked) {
  const SaltId salt = salt_id("");
  ASSERT_TRUE(conversations_->begin(salt, "conv", list_of({"1", "2"})).ok());
  auto session = conversations_->session(salt, "conv");
  ASSERT_TRUE(session.ok());
  ASSERT_TRUE(conversations_->add(salt_id("other"), *session).ok());
  EXPECT_EQ(ids_of(conversations_->items(salt_id("other"), "conv")), (Ids{"1", "2"}));
  session->name = "odd";
  session->metadata_json =
      R"({"items": {"created_s": "x", "metadata": [], "items": [5, ["a"], ["b", "{}"], ["c", 1]]}})";
  ASSERT_TRUE(conversations_->add(salt, *session).ok());
  const auto odd = conversations_->items(salt, "odd");
  EXPECT_EQ(ids_of(odd), Ids{"b"});
  EXPECT_EQ(odd->metadata, "{}");
  session->name = "large";
  session->metadata_json =
      R"({"items": {"items": [["1", ")" + std::string(kMaxItemBytes, 'x') + R"("]]}})";
  EXPECT_EQ(conversations_->add(salt, *session).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace hcache::server
