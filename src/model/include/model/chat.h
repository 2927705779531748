// Renders conversations with the model's own Jinja chat template.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "model/tokenizer.h"

namespace hcache::model {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant", "tool"
  std::string content;
};

// Immutable after create; safe to use from any thread. The Tokenizer must outlive it.
//
// A conversation that is restored from storage is a chain of tokens; what a new turn adds must be
// appended to that chain and never change it. So the first turn is rendered with render(), and
// each later one with render_next(), which gives only what comes after the last reply. The text of
// both is encoded with EncodeOptions{.parse_special = true}, the first also with add_special =
// add_special().
class ChatTemplate {
 public:
  // Uses `override_template` (Jinja source) where given, else the file's, else chatml (see
  // is_fallback). kInvalidArgument when the template does not parse.
  static Result<std::unique_ptr<ChatTemplate>> create(const Tokenizer& tokenizer,
                                                      const std::string& override_template = {});
  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&) = delete;
  ChatTemplate& operator=(const ChatTemplate&) = delete;

  // True when the file has no template and chatml is used instead: worth a line to the user.
  [[nodiscard]] bool is_fallback() const;
  // Whether encode() should add BOS to render()'s text: false where the template writes it itself.
  [[nodiscard]] bool add_special(const std::string& rendered) const;

  // The whole conversation as text; with add_generation_prompt it ends where the assistant's reply
  // begins. kInvalidArgument with the template's own words when it refuses the messages.
  [[nodiscard]] Result<std::string> render(std::span<const ChatMessage> messages,
                                           bool add_generation_prompt) const;

  // What `message` adds to a conversation whose last reply's tokens are already in place: the end
  // of that reply, the message, and the beginning of the next reply. `reply_ended` says that the
  // chain already ends with the reply's end-of-turn token (false when the reply was cut short).
  [[nodiscard]] Result<std::string> render_next(const ChatMessage& message, bool reply_ended) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hcache::model
