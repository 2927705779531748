#include "conversation_key.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "base/ids.h"

namespace hcache::server {
namespace {

using KeyId = Id128<struct ConversationKeyTag>;

constexpr size_t kKeyDigits = 16;
constexpr size_t kIdDigits = 32;
constexpr size_t kPromptBytes = 1024;
constexpr size_t kPromptTokens = 256;

bool is_hex(std::string_view text) {
  return std::ranges::all_of(
      text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

constexpr std::string_view kPurpose = "hcache conversation key";

std::string key_of(Hasher& hasher) { return to_hex(hasher.finish<KeyId>()).substr(0, kKeyDigits); }

std::string key_of_text(std::string_view text) {
  Hasher hasher(kPurpose);
  return key_of(hasher.add(text));
}

// Of a conversation that has only a system message, that one.
std::string key_of_chat(const std::vector<model::ChatMessage>& messages) {
  const auto first =
      std::ranges::find_if(messages, [](const auto& message) { return message.role != "system"; });
  if (first != messages.end()) {
    Hasher hasher(kPurpose);
    hasher.add(first->content);
    for (const model::Medium& medium : first->media) {
      hasher.add(medium.bytes ? std::string_view(*medium.bytes) : medium.name);
    }
    return key_of(hasher);
  }
  return key_of_text(messages.empty() ? std::string() : messages.front().content);
}

std::string key_of_prompt(const api::Prompt& prompt) {
  Hasher hasher(kPurpose);
  if (prompt.parts.empty()) return key_of(hasher);
  if (const auto* text = std::get_if<std::string>(&prompt.parts.front())) {
    return key_of(hasher.add(std::string_view(*text).substr(0, kPromptBytes)));
  }
  const auto& tokens = std::get<std::vector<int32_t>>(prompt.parts.front());
  for (size_t i = 0; i < std::min(tokens.size(), kPromptTokens); ++i) {
    hasher.add_u64(static_cast<uint64_t>(tokens[i]));
  }
  return key_of(hasher);
}

// That an id begins with behind its prefix.
std::optional<std::string> key_in_id(std::string_view id, std::string_view prefix) {
  if (!id.starts_with(prefix)) return std::nullopt;
  const std::string_view digits = id.substr(prefix.size());
  if (digits.size() != kIdDigits || !is_hex(digits)) return std::nullopt;
  return std::string(digits.substr(0, kKeyDigits));
}

}  // namespace

std::string conversation_key(std::string_view given, const api::GenerationRequest& request) {
  if (given.size() == kKeyDigits && is_hex(given)) return std::string(given);
  if (!given.empty()) return key_of_text(given);
  // One server alone knows it.
  if (auto key = key_in_id(request.conversation_id, "conv_")) return *std::move(key);
  if (!request.session_id.empty()) return key_of_text(request.session_id);
  if (!request.cache_key.empty()) return key_of_text(request.cache_key);
  if (auto key = key_in_id(request.previous_response_id, "resp_")) return *std::move(key);
  if (request.chat) return key_of_chat(request.chat->messages);
  return request.prompts.empty() ? key_of_text({}) : key_of_prompt(request.prompts.front());
}

std::string keyed_id(const std::string& key, const std::string& unique) {
  return key + unique.substr(key.size());
}

}  // namespace hcache::server
