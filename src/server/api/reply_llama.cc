// llama-server: /completion.
#include <algorithm>
#include <utility>

#include "reply_base.h"

namespace hcache::api {
namespace {

const char* stop_type(FinishReason reason) {
  switch (reason) {
    case FinishReason::kEnd: return "eos";
    case FinishReason::kStop: return "word";
    case FinishReason::kLength: return "limit";
    case FinishReason::kCancelled: return "none";
  }
  return "none";
}

class LlamaReply : public ReplyBase {
 public:
  LlamaReply(const GenerationRequest& request, ReplyContext context)
      : ReplyBase(request, std::move(context), "") {}

  // One object, or an array where there are several replies.
  [[nodiscard]] Json answer() const override {
    Json all = Json::array();
    for (int i = 0; i < count(); i++) {
      const Choice& c = choice(i);
      Json one = final_json(i, c.reader.reply().content);
      if (request_.return_tokens) one["tokens"] = c.tokens;
      if (request_.logprobs) one["completion_probabilities"] = logprobs_json(c, 0);
      all.push_back(std::move(one));
    }
    return all.size() == 1 ? all.front() : all;
  }

 protected:
  void write_begin(const PromptCounts& counts, std::string* /*out*/) override {
    prompt_tokens_ = counts.tokens;
  }

  void write_delta(int i, const Delta& delta, std::string* out) override {
    Choice& c = choice(i);
    const auto sent = static_cast<std::ptrdiff_t>(c.events_sent);
    Json event = {{"index", i},
                  {"content", delta.content},
                  {"tokens", std::vector<int32_t>(c.tokens.begin() + sent, c.tokens.end())},
                  {"stop", false},
                  {"id_slot", request_.id_slot},
                  {"tokens_predicted", c.tokens.size()},
                  {"tokens_evaluated", prompt_tokens_}};
    if (request_.logprobs) event["completion_probabilities"] = logprobs_json(c, c.events_sent);
    c.events_sent = c.tokens.size();
    *out += sse(event);
  }

  void write_finish(int i, std::string* out) override {
    Choice& c = choice(i);
    Json last = final_json(i, "");
    if (request_.logprobs) last["completion_probabilities"] = logprobs_json(c, c.events_sent);
    *out += sse(last);
  }

  void write_end(std::string* /*out*/) override {}

 private:
  [[nodiscard]] Json final_json(int i, const std::string& content) const {
    const Choice& c = choice(i);
    const Outcome& o = c.finish.outcome;
    const auto prompt = static_cast<size_t>(i / std::max(request_.n, 1));
    return {{"index", i},
            {"content", content},
            {"tokens", Json::array()},
            {"id_slot", request_.id_slot},
            {"stop", true},
            {"model", context_.model_name},
            {"tokens_predicted", o.reply_tokens},
            {"tokens_evaluated", o.prompt_tokens},
            {"generation_settings", settings_json()},
            {"prompt", prompt < context_.prompts.size() ? context_.prompts[prompt] : ""},
            {"has_new_line", c.reader.reply().content.find('\n') != std::string::npos},
            {"truncated", o.dropped > 0},
            {"stop_type", stop_type(c.finish.reason)},
            {"stopping_word", c.finish.stop_string},
            {"tokens_cached", o.cached()},
            {"timings", timings_json(o)},
            {"hcache", outcome_json(o)}};
  }

  [[nodiscard]] Json settings_json() const {
    const model::SamplingOptions& s = request_.sampling;
    Json out = {{"temperature", s.temperature},
                {"top_k", s.top_k},
                {"top_p", s.top_p},
                {"min_p", s.min_p},
                {"repeat_last_n", s.penalty_last_n},
                {"repeat_penalty", s.repeat_penalty},
                {"presence_penalty", s.presence_penalty},
                {"frequency_penalty", s.frequency_penalty},
                {"stop", request_.stop},
                {"max_tokens", request_.max_tokens},
                {"n_predict", request_.max_tokens},
                {"ignore_eos", request_.ignore_eos},
                {"stream", request_.stream},
                {"n_probs", request_.top_logprobs},
                {"grammar", s.grammar}};
    out["seed"] = request_.seed ? Json(*request_.seed) : Json(nullptr);
    return out;
  }

  static Json token_json(const TokenInfo& info) {
    return {{"id", info.token},
            {"token", valid_text(info.bytes)},
            {"bytes", bytes_json(info.bytes)},
            {"logprob", finite(info.logprob)}};
  }

  static Json logprobs_json(const Choice& c, size_t from) {
    Json out = Json::array();
    for (size_t t = from; t < c.logprobs.size(); t++) {
      Json token = token_json(c.logprobs[t].chosen);
      token["top_logprobs"] = Json::array();
      for (const TokenInfo& top : c.logprobs[t].top)
        token["top_logprobs"].push_back(token_json(top));
      out.push_back(std::move(token));
    }
    return out;
  }

  int64_t prompt_tokens_ = 0;
};

}  // namespace

std::unique_ptr<ReplyBuilder> make_llama_reply(const GenerationRequest& request,
                                               ReplyContext context) {
  return std::make_unique<LlamaReply>(request, std::move(context));
}

}  // namespace hcache::api
