#include "answer_args.h"

#include <fmt/format.h>

#include "base/env.h"
#include "model/chat.h"

namespace hcache::cli {

Status AnswerArgs::apply(server::ServerOptions* options) const {
  server::ServerOptions& o = *options;
  o.aliases = {aliases.begin(), aliases.end()};
  o.chat_template = chat_template;
  const bool jinja = o.chat_template.find('{') != std::string::npos;
  if (!o.chat_template.empty() && !jinja && !model::ChatTemplate::is_name(o.chat_template)) {
    return invalid_argument(fmt::format(
        "--chat-template: '{}' is neither a Jinja template nor the name of one (chatml, llama3, "
        "gemma, mistral-v7, …)",
        o.chat_template));
  }
  if (!chat_template_file.empty()) {
    HCACHE_ASSIGN_OR_RETURN(o.chat_template, read_whole_file(Env::real(), chat_template_file));
  }
  o.ignored_lines = ignore_lines;
  o.template_args = template_args;
  if (reasoning != "auto") o.thinking = reasoning == "on";
  if (seed >= 0) o.seed = static_cast<uint32_t>(seed);
  o.max_new_tokens = max_new_tokens;
  return {};
}

}  // namespace hcache::cli
