#include "text/reply_format.h"

#include <exception>
#include <optional>
#include <utility>

#include "text/llama_handle.h"

namespace hcache::model {
namespace {

// Spaces, braces and tags that a parser of anything but plain content would touch.
constexpr std::string_view kProbe = " {\"a\": <b>} \n";

void drop_prefix(std::string* text, const std::string& prefix) {
  if (text->rfind(prefix, 0) == 0) text->erase(0, prefix.size());
}

}  // namespace

struct ReplyFormat::Impl {
  common_chat_parser_params params;
  ChatReply before;  // what the conversation's last message holds already
  bool plain = false;
  bool one_call = false;

  // Throws when the text does not follow the format.
  [[nodiscard]] ChatReply parse(std::string_view text, bool whole) const {
    const ErrorLog log;
    common_chat_msg msg = common_chat_parse(std::string(text), !whole, params);
    ChatReply reply{std::move(msg.content), std::move(msg.reasoning_content), {}};
    for (common_chat_tool_call& call : msg.tool_calls) {
      reply.tool_calls.push_back(
          {std::move(call.id), std::move(call.name), std::move(call.arguments)});
    }
    if (one_call && reply.tool_calls.size() > 1) reply.tool_calls.resize(1);
    drop_prefix(&reply.content, before.content);
    drop_prefix(&reply.reasoning, before.reasoning);
    return reply;
  }

  [[nodiscard]] std::optional<ChatReply> try_parse(std::string_view text, bool whole) const {
    try {
      return parse(text, whole);
    } catch (const std::exception&) {
      return {};
    }
  }
};

ReplyFormat::ReplyFormat(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ReplyFormat::~ReplyFormat() = default;

bool ReplyFormat::plain() const { return impl_->plain; }

ChatReply ReplyFormat::parse(std::string_view text, bool whole) const {
  if (impl_->plain) return {std::string(text), {}, {}};
  std::optional<ChatReply> reply = impl_->try_parse(text, whole);
  // A reply that breaks off its own format is read as far as that goes.
  if (!reply && whole) reply = impl_->try_parse(text, false);
  if (!reply) return {std::string(text), {}, {}};
  // What began like a call and became none is content; the library drops it.
  const bool content_only = reply->tool_calls.empty() && reply->reasoning.empty();
  if (whole && content_only && text.rfind(reply->content, 0) == 0) reply->content = text;
  return *std::move(reply);
}

std::shared_ptr<const ReplyFormat> make_reply_format(const common_chat_params& params,
                                                     const ReplyRules& rules) {
  auto impl = std::make_unique<ReplyFormat::Impl>();
  impl->params = common_chat_parser_params(params);
  impl->params.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
  impl->params.is_continuation = rules.continues;
  impl->one_call = rules.one_call;
  if (!params.parser.empty()) impl->params.parser.load(params.parser);
  if (rules.continues) impl->before = impl->parse("", false);
  if (!rules.constrained && !rules.continues && !params.supports_thinking) {
    impl->plain = impl->try_parse(kProbe, true) == ChatReply{std::string(kProbe), {}, {}};
  }
  return std::make_shared<const ReplyFormat>(std::move(impl));
}

}  // namespace hcache::model
