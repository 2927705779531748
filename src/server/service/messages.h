// Chat messages as text, for conversations that the server itself continues.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/chat.h"

namespace hcache::server {

[[nodiscard]] std::string messages_text(std::span<const model::ChatMessage> messages);
// kDataLoss for what messages_text() did not make.
[[nodiscard]] Result<std::vector<model::ChatMessage>> messages_from_text(std::string_view text);

}  // namespace hcache::server
