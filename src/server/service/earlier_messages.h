// What was said before a request's own messages, where it names that instead of sending it.
#pragma once

#include <string>

#include "api/conversations.h"
#include "api/request.h"
#include "base/ids.h"
#include "conversations.h"

namespace hcache::server {

// Puts the messages of the response, or of the conversation, that the request goes on from before
// its own. kNotFound names what is not there.
Status add_earlier_messages(Conversations& conversations, const SaltId& salt,
                            api::GenerationRequest* request);

// An item in the form in which it is kept. kDataLoss where it is none.
[[nodiscard]] Result<api::Json> item_json(const Item& item);
[[nodiscard]] ItemPtr make_item(const api::Json& item, const std::string& id);

}  // namespace hcache::server
