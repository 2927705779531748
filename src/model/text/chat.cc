#include "model/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "text/chat_template.h"

namespace hcache::model {
namespace {

constexpr const char* kChatml = "chatml";  // which the library has in Jinja, too
// Stands for the last reply while the template is rendered. Plain letters, so that no template
// trims, escapes or parses it.
constexpr const char* kReplyMark = "HCACHE5d1bREPLY";

std::string apply(const ChatTemplate::Impl& impl, std::span<const ChatMessage> messages,
                  bool add_generation_prompt) {
  common_chat_templates_inputs inputs;
  inputs.use_jinja = !impl.by_name;
  inputs.add_generation_prompt = add_generation_prompt;
  inputs.messages = to_common(messages);
  return common_chat_templates_apply(impl.templates.get(), inputs).prompt;
}

bool knows_thoughts(const common_chat_templates* templates) {
  try {
    return common_chat_templates_support_enable_thinking(templates);
  } catch (const std::exception&) {
    return false;  // it refuses the conversation that this is tried with
  }
}

}  // namespace

std::vector<common_chat_msg> to_common(std::span<const ChatMessage> messages) {
  std::vector<common_chat_msg> out;
  for (const ChatMessage& m : messages) {
    common_chat_msg msg;
    msg.role = m.role;
    msg.content = m.content;
    msg.reasoning_content = m.reasoning;
    for (const ToolCall& call : m.tool_calls) {
      msg.tool_calls.push_back({call.name, call.arguments, call.id});
    }
    msg.tool_call_id = m.tool_call_id;
    msg.tool_name = m.name;
    out.push_back(std::move(msg));
  }
  return out;
}

ChatTemplate::ChatTemplate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChatTemplate::~ChatTemplate() = default;

bool ChatTemplate::is_name(std::string_view text) {
  std::vector<const char*> names(static_cast<size_t>(llama_chat_builtin_templates(nullptr, 0)));
  llama_chat_builtin_templates(names.data(), names.size());
  return std::ranges::find(names, text) != names.end();
}

Result<std::unique_ptr<ChatTemplate>> ChatTemplate::create(const Tokenizer& tokenizer,
                                                           const std::string& override_template) {
  const ErrorLog log;
  auto impl = std::make_unique<Impl>();
  impl->tokenizer = &tokenizer;
  try {
    impl->templates = common_chat_templates_init(tokenizer.impl().model.get(), override_template);
    impl->fallback = !common_chat_templates_was_explicit(impl->templates.get());
    impl->source = common_chat_templates_source(impl->templates.get());
    impl->knows_tools =
        common_chat_templates_get_caps(impl->templates.get())["supports_tool_calls"];
    impl->by_name = is_name(override_template) && override_template != kChatml;
    if (!impl->knows_tools) impl->tool_templates = make_tool_templates();
    impl->thinks = !impl->by_name && knows_thoughts(impl->templates.get());
  } catch (const std::exception& e) {
    return invalid_argument(fmt::format("can't read the chat template: {}", e.what()));
  }
  return std::unique_ptr<ChatTemplate>(new ChatTemplate(std::move(impl)));
}

bool ChatTemplate::is_fallback() const { return impl_->fallback; }
bool ChatTemplate::thinks() const { return impl_->thinks; }
const std::string& ChatTemplate::source() const { return impl_->source; }

bool ChatTemplate::add_special(const std::string& rendered) const {
  const Tokenizer& tokenizer = *impl_->tokenizer;
  if (!tokenizer.adds_bos()) return true;  // encode() knows what else the vocabulary wants
  return rendered.rfind(tokenizer.piece(tokenizer.bos(), true), 0) != 0;
}

Result<std::string> ChatTemplate::render(std::span<const ChatMessage> messages,
                                         bool add_generation_prompt) const {
  if (messages.empty()) return invalid_argument("a conversation needs a message");
  const ErrorLog log;
  try {
    return apply(*impl_, messages, add_generation_prompt);
  } catch (const std::exception& e) {
    return invalid_argument(fmt::format("the chat template refuses the messages: {}", e.what()));
  }
}

int64_t next_message(const Tokenizer& tokenizer, std::span<const int32_t> tokens, int64_t from) {
  const auto is_space = [&](int32_t token) {
    const std::string piece = tokenizer.piece(token);
    return !piece.empty() && piece.find_first_not_of(" \t\r\n") == std::string::npos;
  };
  const auto length = static_cast<int64_t>(tokens.size());
  const auto at = [&](int64_t i) { return tokens[static_cast<size_t>(i)]; };
  // White space between the end of a message and `from`.
  int64_t i = std::clamp<int64_t>(from, 0, length);
  while (i > 0 && is_space(at(i - 1))) --i;
  bool ended = i > 0 && tokenizer.is_eog(at(i - 1));
  for (; i < length; ++i) {
    if (tokenizer.is_eog(at(i))) {
      ended = true;
    } else if (ended && !is_space(at(i))) {
      if (i >= from) return i;
      ended = false;
    }
  }
  return -1;
}

Result<std::string> ChatTemplate::render_next(const ChatMessage& message, bool reply_ended) const {
  const ErrorLog log;
  const std::vector<ChatMessage> messages = {{"user", "?"}, {"assistant", kReplyMark}, message};
  std::string text;
  try {
    text = apply(*impl_, messages, true);
  } catch (const std::exception& e) {
    return invalid_argument(fmt::format("the chat template refuses the message: {}", e.what()));
  }
  const size_t mark = text.find(kReplyMark);
  if (mark == std::string::npos) {
    return unimplemented("the chat template leaves out replies; it can't continue a conversation");
  }
  text.erase(0, mark + std::string(kReplyMark).size());
  if (!reply_ended) return text;
  // The chain's last token is the end of the turn: don't end it twice.
  const Tokenizer& tokenizer = *impl_->tokenizer;
  Result<std::vector<int32_t>> tokens = tokenizer.encode(text, {.parse_special = true});
  if (!tokens.ok()) return tokens.status();
  if (!tokens->empty() && tokenizer.is_eog(tokens->front())) {
    text.erase(0, tokenizer.piece(tokens->front(), true).size());
  }
  return text;
}

}  // namespace hcache::model
