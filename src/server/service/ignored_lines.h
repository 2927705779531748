// What of a system prompt is no part of it: lines that an agent writes anew into every request, so
// that no two prompts of a conversation would begin alike and nothing saved of it could be used.
//
// Threading: immutable.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/chat.h"

namespace hcache::server {

class IgnoredLines {
 public:
  // Lines that one of the patterns matches as a whole, as file names are matched (fnmatch(3): * ?
  // []) are left out, and so is the header that Claude Code begins its system prompt with
  // (x-anthropic-billing-header), which bills a request and tells the model nothing.
  explicit IgnoredLines(std::vector<std::string> patterns) : patterns_(std::move(patterns)) {}

  // From the system messages at the chat's beginning. A message that nothing is left of goes.
  void drop_from(model::ChatInput* chat) const;

 private:
  [[nodiscard]] std::string kept(std::string_view text) const;
  [[nodiscard]] bool matches(std::string_view line) const;

  const std::vector<std::string> patterns_;
};

}  // namespace hcache::server
