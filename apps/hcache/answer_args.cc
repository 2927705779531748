#include "answer_args.h"

#include <fmt/format.h>

#include "base/env.h"

namespace hcache::cli {

Status AnswerArgs::apply(server::ServerOptions* options) const {
  server::ServerOptions& o = *options;
  o.alias = alias;
  o.chat_template = chat_template;
  if (!o.chat_template.empty() && o.chat_template != "chatml" &&
      o.chat_template.find('{') == std::string::npos) {
    return invalid_argument(
        fmt::format("--chat-template: '{}' is no Jinja template; of names only chatml is known",
                    o.chat_template));
  }
  if (!chat_template_file.empty()) {
    HCACHE_ASSIGN_OR_RETURN(o.chat_template, read_whole_file(Env::real(), chat_template_file));
  }
  o.template_args = template_args;
  if (seed >= 0) o.seed = static_cast<uint32_t>(seed);
  o.max_new_tokens = max_new_tokens;
  return {};
}

}  // namespace hcache::cli
