// OpenAI's conversations: what requests may say, and how items are kept and shown.
#include <gtest/gtest.h>

#include "api/conversations.h"
#include "api/list_page.h"
#include "api_testing.h"

namespace hcache::api {
namespace {

using test::expect_documented;
using test::json;

std::string refused(const std::string& body) {
  const auto r = parse_create_conversation(json(body));
  EXPECT_EQ(r.code(), Code::kInvalidArgument) << body;
  return r.status().message();
}

TEST(Conversations, MayBeginWithItemsAndMetadata) {
  for (const Json& nothing : {Json(), json("{}"), json(R"({"items": null, "metadata": null})")}) {
    const auto r = parse_create_conversation(nothing);
    ASSERT_TRUE(r.ok()) << r.status().to_string();
    EXPECT_EQ(r->metadata, Json::object());
    EXPECT_TRUE(r->items.empty());
  }
  const auto r = parse_create_conversation(json(R"({"metadata": {"topic": "x"}, "items": [
      {"role": "user", "content": "a"}, {"type": "function_call", "call_id": "1", "name": "f",
       "arguments": "{}"}]})"));
  ASSERT_TRUE(r.ok()) << r.status().to_string();
  EXPECT_EQ(r->metadata["topic"], "x");
  EXPECT_EQ(r->items.size(), 2U);

  EXPECT_EQ(refused("[]"), "the body: expected an object, got an array");
  EXPECT_EQ(refused(R"({"items": {}})"), "items: expected an array of items, got an object");
  EXPECT_EQ(refused(R"({"items": [{"role": "user"}]})"), "items[0].content: missing");
  EXPECT_EQ(refused(R"({"metadata": {"x": 1}})"),
            "metadata: expected keys of at most 64 bytes and texts of at most 512");
  Json many = Json::array();
  for (size_t i = 0; i <= kMaxNewItems; ++i) many.push_back({{"role", "user"}, {"content", "a"}});
  EXPECT_EQ(parse_create_items({{"items", many}}).status().message(),
            "items: 21 are given, 1 to 20 are allowed");
  many.erase(many.begin());
  EXPECT_TRUE(parse_create_items({{"items", many}}).ok());
  EXPECT_EQ(parse_create_items(json(R"({"items": []})")).status().message(),
            "items: 0 are given, 1 to 20 are allowed");
  EXPECT_EQ(parse_create_items(json("{}")).status().message(), "items: missing");
  EXPECT_EQ(parse_update_conversation(json("{}")).status().message(), "metadata: missing");
  EXPECT_EQ(parse_update_conversation(json(R"({"metadata": {}})")).value_or({}), Json::object());
}

TEST(Conversations, ItemsAreKeptInOneForm) {
  const std::pair<const char*, const char*> forms[] = {
      {R"({"role": "user", "content": "a", "id": "mine", "more": 1})",
       R"({"type": "message", "id": "msg_1", "status": "completed", "role": "user",
           "content": [{"type": "input_text", "text": "a"}]})"},
      {R"({"type": null, "role": "assistant", "content": "a"})",
       R"({"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
           "content": [{"type": "output_text", "text": "a", "annotations": []}]})"},
      {R"({"type": "message", "role": "assistant", "content": [
           {"type": "output_text", "text": "a", "logprobs": [{}]}, {"type": "refusal", "refusal": "b"}]})",
       R"({"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
           {"type": "output_text", "text": "a", "annotations": []},
           {"type": "refusal", "refusal": "b"}]})"},
      {R"({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"})",
       R"({"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "1",
           "name": "f", "arguments": "{}"})"},
      {R"({"type": "function_call_output", "call_id": "1", "output": "r"})",
       R"({"type": "function_call_output", "id": "fco_1", "status": "completed", "call_id": "1",
           "output": "r"})"},
      {R"({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]})",
       R"({"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [],
           "content": [{"type": "reasoning_text", "text": "hm"}]})"}};
  for (const auto& [given, form] : forms) {
    const Json item = json(given);
    const Json kept = kept_item(item, item_id(item, "1"));
    EXPECT_EQ(kept, json(form)) << given;
    EXPECT_EQ(kept_item(kept, kept["id"].get<std::string>()), kept);  // as it comes back
    expect_documented(kept, "ConversationItem");
    // It says what it said.
    const auto said = messages_of_items(std::vector<Json>{item});
    const auto says = messages_of_items(std::vector<Json>{kept});
    ASSERT_TRUE(said.ok() && says.ok());
    ASSERT_EQ(says->size(), 1U);
    EXPECT_EQ(says->front().content, said->front().content);
    EXPECT_EQ(says->front().reasoning, said->front().reasoning);
    EXPECT_EQ(says->front().tool_calls, said->front().tool_calls);
    EXPECT_EQ(says->front().tool_call_id, said->front().tool_call_id);
  }
  EXPECT_EQ(messages_of_items(std::vector<Json>{json(R"({"type": "x"})")}).code(), Code::kDataLoss);
}

TEST(Conversations, OneTurnOfTheAssistantsIsOneMessage) {
  std::vector<Json> items;
  for (const char* item :
       {R"({"role": "user", "content": "a"})",
        R"({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]})",
        R"({"role": "assistant", "content": "b"})",
        R"({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"})",
        R"({"type": "function_call_output", "call_id": "1", "output": "r"})"}) {
    items.push_back(kept_item(json(item), "id"));
  }
  const auto messages = messages_of_items(items);
  ASSERT_TRUE(messages.ok()) << messages.status().to_string();
  ASSERT_EQ(messages->size(), 3U);
  EXPECT_EQ((*messages)[1].reasoning, "hm");
  EXPECT_EQ((*messages)[1].content, "b");
  EXPECT_EQ((*messages)[1].tool_calls.size(), 1U);
}

TEST(Conversations, AnswersAreAsDocumented) {
  expect_documented(conversation_answer("conv_1", 5, Json::object()), "Conversation");
  expect_documented(conversation_deleted_answer("conv_1"), "ConversationDeleted");
  const std::vector<std::string_view> ids = {"a", "b", "c"};
  const auto word = [](size_t i) -> Result<Json> {
    return kept_item({{"role", "user"}, {"content", "x"}},
                     std::string(1, static_cast<char>('a' + i)));
  };
  const auto page = page_json(ids, {.limit = 1, .after = "a"}, word);
  ASSERT_TRUE(page.ok());
  expect_documented(*page, "ConversationItems");
  EXPECT_EQ((*page)["first_id"], "b");
  EXPECT_EQ((*page)["last_id"], "b");
  EXPECT_EQ((*page)["has_more"], true);
  EXPECT_EQ(page_json({}, {}, word).value_or({})["first_id"], Json());
  EXPECT_EQ(page_json(ids, {.after = "z"}, word).code(), Code::kInvalidArgument);
  EXPECT_EQ(page_json(ids, {}, [](size_t) -> Result<Json> { return data_loss("x"); }).code(),
            Code::kDataLoss);
}

}  // namespace
}  // namespace hcache::api
