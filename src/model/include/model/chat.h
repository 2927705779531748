// Conversations as the model sees them: its own Jinja chat template, and the way back from the
// text of a reply to content, reasoning and tool calls.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/sampler.h"
#include "model/tokenizer.h"

namespace hcache::model {

struct ToolCall {
  std::string id{};  // empty where the model gives none
  std::string name{};
  std::string arguments{};  // JSON; cut short where the reply was

  friend bool operator==(const ToolCall&, const ToolCall&) = default;
};

// A picture or a sound in a message.
struct Medium {
  std::shared_ptr<const std::string> bytes{};  // of a file
  std::string name{};                          // or its name in the server's folder of media
};
// What stands for one in a text. A text that has it by chance is not taken together with media.
inline constexpr std::string_view kMediaMarker = "<__media_2f9c61d0b57e48a3__>";

struct ChatMessage {
  std::string role;  // "system", "user", "assistant", "tool"
  std::string content{};
  std::string reasoning{};             // assistant: what it thought before the content
  std::vector<ToolCall> tool_calls{};  // assistant
  std::string tool_call_id{};          // tool: the call that it answers
  std::string name{};                  // tool: which one
  std::vector<Medium> media{};         // in the order of the content's markers
};

struct ChatTool {
  std::string name;
  std::string description{};
  std::string parameters{};  // a JSON schema; empty: takes none
};

enum class ToolChoice { kAuto, kNone, kRequired };

// Everything that decides about a prompt and the shape of the reply to it.
struct ChatInput {
  std::vector<ChatMessage> messages;  // when the last one is the assistant's, the reply goes on
  std::vector<ChatTool> tools{};
  ToolChoice tool_choice = ToolChoice::kAuto;
  std::string only_tool{};  // with kRequired: the one that must be called; empty: any
  bool parallel_tool_calls = true;
  std::string json_schema{};                           // that the content must follow; empty: none
  bool begins_reply = true;                            // the prompt has the head of a reply
  bool thinking = true;                                // where the template has a switch for it
  std::map<std::string, std::string> template_args{};  // more variables: name to JSON
};

// A reply taken apart.
struct ChatReply {
  std::string content{};
  std::string reasoning{};
  std::vector<ToolCall> tool_calls{};

  friend bool operator==(const ChatReply&, const ChatReply&) = default;
};

// How the replies to one prompt are read. Immutable; safe to use from any thread.
class ReplyFormat {
 public:
  struct Impl;
  explicit ReplyFormat(std::unique_ptr<Impl> impl);
  ~ReplyFormat();
  ReplyFormat(const ReplyFormat&) = delete;
  ReplyFormat& operator=(const ReplyFormat&) = delete;

  // True when the text is the content, whatever it says: no need to parse it.
  [[nodiscard]] bool plain() const;
  // The text so far, or all of it. What does not follow the format is content. The time is linear
  // in the text.
  [[nodiscard]] ChatReply parse(std::string_view text, bool whole) const;

 private:
  std::unique_ptr<Impl> impl_;
};

// A rendered conversation with all that its reply needs.
struct ChatPrompt {
  std::string text;
  std::string grammar;  // that the sampler must follow; empty: none
  GrammarScope grammar_scope;
  std::vector<std::string> stops;       // strings that end the reply, beside the model's own tokens
  std::vector<int32_t> visible_tokens;  // control tokens whose text belongs to the reply
  std::shared_ptr<const ReplyFormat> format;

  // The text that `token` adds to a reply; need not be whole UTF-8 characters.
  [[nodiscard]] std::string piece(const Tokenizer& tokenizer, int32_t token) const;
};

// The first position from `from` on, below the tokens' end, at which a message begins, as every
// chat template has them: behind a token that ends a reply or a turn, and the white space after
// that. -1: there is none.
[[nodiscard]] int64_t next_message(const Tokenizer& tokenizer, std::span<const int32_t> tokens,
                                   int64_t from);

// Immutable after create; safe to use from any thread. The Tokenizer must outlive it.
//
// A conversation that is restored from storage is a chain of tokens; what a new turn adds must be
// appended to that chain and never change it. So the first turn is rendered with render(), and
// each later one with render_next(), which gives only what comes after the last reply. A server,
// which gets every conversation whole, uses prompt(). The text of all three is encoded with
// EncodeOptions{.parse_special = true}, whole conversations also with add_special = add_special().
class ChatTemplate {
 public:
  // Uses `override_template` (Jinja source, or one of llama.cpp's names) where given, else the
  // file's, else chatml (see is_fallback). kInvalidArgument when the template does not parse.
  static Result<std::unique_ptr<ChatTemplate>> create(const Tokenizer& tokenizer,
                                                      const std::string& override_template = {});
  struct Impl;
  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&) = delete;
  ChatTemplate& operator=(const ChatTemplate&) = delete;

  // Whether it is one of llama.cpp's names of templates: "chatml", "llama3", "command-r", ...
  [[nodiscard]] static bool is_name(std::string_view text);

  // True when the file has no template and chatml is used instead: worth a line to the user.
  [[nodiscard]] bool is_fallback() const;
  // Whether it has replies begin with thoughts, as far as it can be told from rendering it.
  [[nodiscard]] bool thinks() const;
  // The Jinja source in use.
  [[nodiscard]] const std::string& source() const;
  // Whether encode() should add BOS to render()'s text: false where the template writes it itself.
  [[nodiscard]] bool add_special(const std::string& rendered) const;

  // The whole conversation as text; with add_generation_prompt it ends where the assistant's reply
  // begins. kInvalidArgument with the template's own words when it refuses the messages.
  [[nodiscard]] Result<std::string> render(std::span<const ChatMessage> messages,
                                           bool add_generation_prompt) const;

  // The whole conversation up to the reply, and how that is constrained and read. Templates that
  // know no tools get them described in the system message, and replies call them as
  // <tool_call>{"name": ..., "arguments": {...}}</tool_call>, the most common way.
  // kInvalidArgument as render(), and for schemas that can't be made a grammar.
  [[nodiscard]] Result<ChatPrompt> prompt(const ChatInput& input) const;

  // What `message` adds to a conversation whose last reply's tokens are already in place: the end
  // of that reply, the message, and the beginning of the next reply. `reply_ended` says that the
  // chain already ends with the reply's end-of-turn token (false when the reply was cut short).
  [[nodiscard]] Result<std::string> render_next(const ChatMessage& message, bool reply_ended) const;

 private:
  explicit ChatTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hcache::model
