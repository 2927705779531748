// What the files behind ChatTemplate share.
#pragma once

// clang-format off
#include <span>

#include "model/chat.h"
#include "text/llama_handle.h"

#include <chat.h>  // last: it defines a macro named die
// clang-format on

namespace hcache::model {

struct ChatTemplate::Impl {
  const Tokenizer* tokenizer = nullptr;
  common_chat_templates_ptr templates;
  // Describes and calls tools for templates that can't; see chat_prompt.cc.
  common_chat_templates_ptr tool_templates;
  std::string source;
  bool fallback = false;
  bool knows_tools = false;
  bool thinks = false;
  bool by_name = false;  // one of the library's, which it writes without Jinja
};

// The same in the library's words.
[[nodiscard]] std::vector<common_chat_msg> to_common(std::span<const ChatMessage> messages);

// A template whose tool calls every template can take part in.
[[nodiscard]] common_chat_templates_ptr make_tool_templates();

}  // namespace hcache::model
