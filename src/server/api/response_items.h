// The items that the input of responses and OpenAI's conversations are made of.
#pragma once

#include <string>

#include "api/json.h"
#include "base/status.h"
#include "model/chat.h"

namespace hcache::api {

// Adds what the item says. Items of one turn of the assistant's become one message.
[[nodiscard]] Status read_item(const Json& value, const std::string& path, model::ChatInput* chat);
// Any of them.
[[nodiscard]] Json item_schema();

}  // namespace hcache::api
