#include "ignored_lines.h"

#include <fnmatch.h>

#include <algorithm>

namespace hcache::server {
namespace {

constexpr std::string_view kBilling = "x-anthropic-billing-header:";
constexpr size_t kLongestLine = 4096;  // that is matched with patterns

// Of the header with its fields ("name=value;" each) and the line's end; 0: the text begins with
// something else. What follows the fields in the same line belongs to the prompt.
size_t billing_bytes(std::string_view text) {
  if (!text.starts_with(kBilling)) return 0;
  size_t end = kBilling.size();
  for (size_t at = end;;) {
    at = text.find_first_not_of(' ', at);
    if (at == std::string_view::npos) break;
    const size_t name_end = text.find_first_of("= ;\n", at);
    if (name_end == std::string_view::npos || text[name_end] != '=') break;
    const size_t field_end = text.find_first_of(" ;\n", name_end);
    if (field_end == std::string_view::npos || text[field_end] != ';') break;
    end = at = field_end + 1;
  }
  if (end == kBilling.size()) end = std::min(text.find('\n'), text.size());  // other fields
  const size_t next = text.find_first_not_of(" \n", end);
  return next == std::string_view::npos ? text.size() : next;
}

}  // namespace

bool IgnoredLines::matches(std::string_view line) const {
  if (line.size() > kLongestLine) return false;
  const std::string text(line);
  return std::ranges::any_of(patterns_, [&](const std::string& pattern) {
    return fnmatch(pattern.c_str(), text.c_str(), 0) == 0;
  });
}

std::string IgnoredLines::kept(std::string_view text) const {
  text.remove_prefix(billing_bytes(text));
  if (patterns_.empty()) return std::string(text);
  std::string out;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const size_t next = std::min(end + 1, text.size());
    if (!matches(text.substr(0, end))) out += text.substr(0, next);
    text.remove_prefix(next);
  }
  return out;
}

void IgnoredLines::drop_from(model::ChatInput* chat) const {
  std::vector<model::ChatMessage>& messages = chat->messages;
  const auto end =
      std::ranges::find_if(messages, [](const auto& message) { return message.role != "system"; });
  for (auto at = messages.begin(); at != end; ++at) {
    std::string left = kept(at->content);
    // An empty message that came so stays.
    if (left.empty() && !at->content.empty()) at->role.clear();
    at->content = std::move(left);
  }
  std::erase_if(messages, [](const auto& message) { return message.role.empty(); });
}

}  // namespace hcache::server
