// The key by which a balancer sends a conversation's requests to one server.
#include <gtest/gtest.h>

#include "conversation_key.h"

namespace hcache::server {
namespace {

api::GenerationRequest conversation_of(std::vector<model::ChatMessage> messages) {
  api::GenerationRequest request;
  request.chat.emplace();
  request.chat->messages = std::move(messages);
  return request;
}

api::GenerationRequest prompt_of(std::string text) {
  api::GenerationRequest request;
  request.prompts = {api::Prompt{{std::move(text)}}};
  return request;
}

TEST(ConversationKeyTest, IsThatOfTheFirstMessageWhichIsNotTheSystems) {
  const std::string key = conversation_key({}, conversation_of({{"user", "Hello"}}));
  EXPECT_EQ(key.size(), 16U);
  EXPECT_EQ(key.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(key, conversation_key({}, conversation_of({{"system", "Be brief."},
                                                       {"user", "Hello"},
                                                       {"assistant", "Hi"},
                                                       {"user", "Go on."}})));
  EXPECT_NE(key, conversation_key({}, conversation_of({{"user", "Hello!"}})));
}

TEST(ConversationKeyTest, IsThatOfAPromptsBeginning) {
  const std::string begins(1024, 'x');
  EXPECT_EQ(conversation_key({}, prompt_of(begins + "one")),
            conversation_key({}, prompt_of(begins + "two")));
  EXPECT_NE(conversation_key({}, prompt_of("one")), conversation_key({}, prompt_of("two")));
}

TEST(ConversationKeyTest, ANameComesBeforeTheText) {
  api::GenerationRequest request = conversation_of({{"user", "Hello"}});
  const std::string of_text = conversation_key({}, request);
  request.cache_key = "talk";
  const std::string of_name = conversation_key({}, request);
  EXPECT_NE(of_name, of_text);
  request.session_id = "other";
  EXPECT_NE(conversation_key({}, request), of_name);
  EXPECT_EQ(conversation_key("talk", request), of_name);
  EXPECT_EQ(conversation_key("0123456789abcdef", request), "0123456789abcdef");
}

TEST(ConversationKeyTest, TheIdOfAResponseLeadsBack) {
  api::GenerationRequest request = conversation_of({{"user", "Hello"}});
  const std::string key = conversation_key({}, request);
  const std::string id = keyed_id(key, "00112233445566778899aabbccddeeff");
  EXPECT_EQ(id, key + "8899aabbccddeeff");
  request.previous_response_id = "resp_" + id;
  request.chat->messages = {{"user", "Go on."}};
  EXPECT_EQ(conversation_key({}, request), key);
  request.previous_response_id = "resp_short";
  EXPECT_NE(conversation_key({}, request), key);
  // That of a conversation before all names: no other server knows it.
  request.conversation_id = "conv_" + id;
  request.cache_key = request.session_id = "talk";
  EXPECT_EQ(conversation_key({}, request), key);
  EXPECT_NE(conversation_key("given", request), key);
  request.conversation_id = "resp_" + id;
  EXPECT_NE(conversation_key({}, request), key);
}

}  // namespace
}  // namespace hcache::server
