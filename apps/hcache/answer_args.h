// How requests in the server's protocols are answered: options of the verbs that take them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.h"
#include "server/server.h"

namespace hcache::cli {

struct AnswerArgs : Options {
  using Options::Options;

  std::vector<std::string> aliases =
      texts(&aliases, "-a,--alias", "NAME,...", "", "",
            "the model's names for clients, of which the first in alphabetical order is its id; "
            "default: its file's");
  std::string chat_template =
      text(&chat_template, "--chat-template", "JINJA", "",
           "chat template to use instead of the model's own, or the name of one (chatml, llama3, "
           "gemma, ...)");
  std::string chat_template_file = text(&chat_template_file, "--chat-template-file", "FILE", "",
                                        "or the one in this file", {.excludes = "--chat-template"});
  std::string template_args =
      text(&template_args, "--chat-template-kwargs", "JSON", "",
           "variables of the chat template for requests that do not set them: "
           "{\"enable_thinking\": false}");
  std::vector<std::string> ignore_lines =
      texts(&ignore_lines, "--ignore-line", "PATTERN,...", "", "",
            "leave out of system prompts the lines that a pattern with * and ? matches, such as "
            "\"Today's date is *\": what differs from request to request at a prompt's beginning "
            "keeps all saved state of it from being used");
  std::string reasoning = choice(
      &reasoning, "--reasoning", "auto", "auto|on|off",
      "whether the model thinks before it answers, where its chat template has a switch for it and "
      "a request does not say; auto: as the template has it");
  int64_t seed = integer(&seed, "-s,--seed", "N", -1, {-1, 4294967295.0},
                         "of requests that name none: the same seed gives the same answer; -1: "
                         "another one for each");
  int64_t max_new_tokens =
      integer(&max_new_tokens, "-n,--max-tokens,--predict,--n-predict", "TOKENS", -1, {-1},
              "end a reply after this many where a request names no limit; -1: when the room ends");

  // Sets what they say. kInvalidArgument, kNotFound.
  [[nodiscard]] Status apply(server::ServerOptions* options) const;
};

}  // namespace hcache::cli
