// Makes a ReplyFormat of what the library says about a prompt.
#pragma once

// clang-format off
#include <memory>

#include "model/chat.h"

#include <chat.h>  // last: it defines a macro named die
// clang-format on

namespace hcache::model {

struct ReplyRules {
  bool constrained = false;  // there are tools or a schema
  bool continues = false;    // the reply goes on with the conversation's last message
  bool one_call = false;     // of several calls, the first one counts
};

// Throws what the library throws when it can't load its own parser.
[[nodiscard]] std::shared_ptr<const ReplyFormat> make_reply_format(const common_chat_params& params,
                                                                   const ReplyRules& rules);

}  // namespace hcache::model
