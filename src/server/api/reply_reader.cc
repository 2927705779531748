#include <utility>

#include "reply_base.h"

namespace hcache::api {
namespace {

using model::ChatReply;
using model::ToolCall;

// A parse takes the whole text, so it is parsed anew only when it has grown by this share.
constexpr size_t kGrowth = 256;

// Appends to `sent` what `now` has more, and returns it; nothing when `now` does not begin so.
std::string grow(std::string* sent, const std::string& now) {
  if (now.size() <= sent->size() || now.compare(0, sent->size(), *sent) != 0) return {};
  std::string more = now.substr(sent->size());
  *sent = now;
  return more;
}

}  // namespace

ReplyReader::ReplyReader(std::shared_ptr<const model::ReplyFormat> format, CallId call_id,
                         bool eager)
    : format_(std::move(format)), call_id_(std::move(call_id)), eager_(eager) {
  if (format_ != nullptr && format_->plain()) format_ = nullptr;
}

Delta ReplyReader::push(std::string_view text) {
  if (format_ == nullptr) {
    reply_.content += text;
    return {{}, std::string(text), {}};
  }
  text_ += text;
  if (!eager_ || text_.size() - parsed_bytes_ <= text_.size() / kGrowth) return {};
  parsed_bytes_ = text_.size();
  return advance(format_->parse(text_, false), false);
}

Delta ReplyReader::finish(bool whole) {
  if (format_ == nullptr) return {};
  return advance(format_->parse(text_, whole), true);
}

Delta ReplyReader::advance(const ChatReply& parsed, bool last) {
  Delta delta;
  delta.reasoning = grow(&reply_.reasoning, parsed.reasoning);
  delta.content = grow(&reply_.content, parsed.content);
  advance_calls(parsed.tool_calls, last, &delta);
  return delta;
}

void ReplyReader::advance_calls(const std::vector<ToolCall>& parsed, bool last, Delta* delta) {
  std::vector<ToolCall>& calls = reply_.tool_calls;
  for (size_t i = 0; i < parsed.size(); i++) {
    const ToolCall& now = parsed[i];
    // A name is complete when something follows it.
    const bool begun = last || i + 1 < parsed.size() || now.arguments.size() > 1;
    if (now.name.empty() || !begun || i > calls.size()) return;
    CallDelta more{i, {}, {}, {}};
    if (i == calls.size()) {
      calls.push_back({now.id.empty() ? call_id_(i) : now.id, now.name, {}});
      more.id = calls[i].id;
      more.name = now.name;
    }
    more.arguments = grow(&calls[i].arguments, now.arguments);
    if (!more.name.empty() || !more.arguments.empty()) delta->calls.push_back(std::move(more));
  }
}

}  // namespace hcache::api
