// What the reply builders of all dialects share.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "api/reply.h"

namespace hcache::api {

// What a piece of text adds to a reply.
struct CallDelta {
  size_t index = 0;  // of the call
  std::string id;    // id and name: in the call's first delta only
  std::string name;
  std::string arguments;
};
struct Delta {
  std::string reasoning;
  std::string content;
  std::vector<CallDelta> calls;
};

// Reads a reply while it grows. What deltas have given is never taken back.
class ReplyReader {
 public:
  // `call_id` names the calls that the model gives no id. `eager`: give deltas before the end.
  using CallId = std::function<std::string(size_t)>;
  ReplyReader(std::shared_ptr<const model::ReplyFormat> format, CallId call_id, bool eager);

  Delta push(std::string_view text);
  // `whole`: the model ended the reply itself.
  Delta finish(bool whole);
  // The sum of the deltas.
  [[nodiscard]] const model::ChatReply& reply() const { return reply_; }

 private:
  // The delta that leads from `reply_` to `parsed`, as far as it does.
  Delta advance(const model::ChatReply& parsed, bool last);
  void advance_calls(const std::vector<model::ToolCall>& parsed, bool last, Delta* delta);

  std::shared_ptr<const model::ReplyFormat> format_;  // null: plain text
  CallId call_id_;
  bool eager_;
  std::string text_;         // not of plain replies
  size_t parsed_bytes_ = 0;  // of text_, when it was last parsed
  model::ChatReply reply_;
};

struct Choice {
  ReplyReader reader;
  std::vector<int32_t> tokens{};
  std::vector<TokenEvent> logprobs{};  // where the request asks for them
  size_t events_sent = 0;              // of both
  double reply_ms = 0;                 // up to the last token
  Finish finish{};
};

// Keeps the choices and turns calls into deltas; a dialect writes them down.
class ReplyBase : public ReplyBuilder {
 public:
  std::string progress(const PromptProgress& progress) override;
  std::string begin(const PromptCounts& counts) final;
  std::string push(int choice, const TokenEvent& event) final;
  std::string finish(int choice, std::string_view rest, const Finish& finish) final;
  std::string end() final;
  std::string fail(const Status& status) override;
  [[nodiscard]] model::ChatMessage message(int choice) const final;

 protected:
  // `call_prefix`: of the ids of tool calls.
  ReplyBase(const GenerationRequest& request, ReplyContext context, std::string call_prefix);

  // Append the events that are due. Called for streams only.
  virtual void write_begin(const PromptCounts& counts, std::string* out) = 0;
  virtual void write_delta(int choice, const Delta& delta, std::string* out) = 0;
  virtual void write_finish(int choice, std::string* out) = 0;
  virtual void write_end(std::string* out) = 0;

  [[nodiscard]] int count() const { return static_cast<int>(choices_.size()); }
  [[nodiscard]] Choice& choice(int i) { return choices_.at(static_cast<size_t>(i)); }
  [[nodiscard]] const Choice& choice(int i) const { return choices_.at(static_cast<size_t>(i)); }
  // Of a stream that is not at its end.
  [[nodiscard]] Json timings_so_far(const Choice& choice) const;
  // The whole answer as llama-server's /completion has it, with `content` for its text.
  [[nodiscard]] Json llama_json(int choice, const std::string& content) const;
  // The sum over the choices; what belongs to a prompt counts once, however many replies it has.
  [[nodiscard]] Outcome total() const;
  // An id made of the context's, with a prefix: "msg_...".
  [[nodiscard]] std::string id(std::string_view prefix) const;

  const GenerationRequest request_;
  const ReplyContext context_;

 private:
  std::vector<Choice> choices_;
  PromptCounts prompt_;
};

// "data: {...}\n\n", with the event's name before it where the dialect has names.
[[nodiscard]] std::string sse(const Json& data);
[[nodiscard]] std::string sse(std::string_view event, const Json& data);
// One line of newline-delimited JSON.
[[nodiscard]] std::string ndjson(const Json& data);
// A call's arguments; an empty object where the reply was cut short within them.
[[nodiscard]] Json arguments_json(const model::ToolCall& call);
[[nodiscard]] Json progress_json(const PromptProgress& progress);
// The timings of a reply whose prompt is not done.
[[nodiscard]] Json progress_timings_json(const PromptProgress& progress);

// Text that is certainly UTF-8, of bytes that need not be.
[[nodiscard]] std::string valid_text(std::string bytes);
[[nodiscard]] Json bytes_json(std::string_view bytes);
// OpenAI's list of tokens with their log-probabilities and the likeliest others, from one of them
// on.
[[nodiscard]] Json token_logprobs(const std::vector<TokenEvent>& events, size_t from);
// JSON has no infinity.
[[nodiscard]] float finite(float logprob);

[[nodiscard]] std::unique_ptr<ReplyBuilder> make_chat_reply(const GenerationRequest& request,
                                                            ReplyContext context);
[[nodiscard]] std::unique_ptr<ReplyBuilder> make_completion_reply(const GenerationRequest& request,
                                                                  ReplyContext context);
[[nodiscard]] std::unique_ptr<ReplyBuilder> make_response_reply(const GenerationRequest& request,
                                                                ReplyContext context);
[[nodiscard]] std::unique_ptr<ReplyBuilder> make_messages_reply(const GenerationRequest& request,
                                                                ReplyContext context);
[[nodiscard]] std::unique_ptr<ReplyBuilder> make_llama_reply(const GenerationRequest& request,
                                                             ReplyContext context);
[[nodiscard]] std::unique_ptr<ReplyBuilder> make_ollama_reply(const GenerationRequest& request,
                                                              ReplyContext context);

}  // namespace hcache::api
