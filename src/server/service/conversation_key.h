// The key of a conversation, by which a balancer sends all its requests to one server
// (docs/operations.md, "Several servers behind a proxy").
//
// Threading: pure functions.
#pragma once

#include <string>
#include <string_view>

#include "api/request.h"

namespace hcache::server {

// Of requests: the key that a balancer or the client has chosen. Of answers: the key that was used.
inline constexpr std::string_view kConversationHeader = "X-HCache-Conversation";

// 16 hex digits: `given` where it is such a key, else the hash of the first of these that there is:
// `given`, the conversation that goes on (its id begins with the key), the session, the prompt
// cache key, the response that is continued (so does its id), the first message that is not the
// system's, the beginning of a prompt. So the requests of one conversation have one key, and a
// system message that many have in common is not it.
[[nodiscard]] std::string conversation_key(std::string_view given,
                                           const api::GenerationRequest& request);

// The id of a response of that conversation, or of a conversation; `unique` is 32 hex digits.
[[nodiscard]] std::string keyed_id(const std::string& key, const std::string& unique);

}  // namespace hcache::server
