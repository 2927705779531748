// llama-server: /completion.
#include <algorithm>
#include <cmath>
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

Json settings_json(const GenerationRequest& request) {
  Json out = sampling_json(request.sampling);
  out["seed"] = request.seed ? Json(*request.seed) : Json(nullptr);
  out["stop"] = request.stop;
  out["max_tokens"] = request.max_tokens;
  out["n_predict"] = request.max_tokens;
  out["ignore_eos"] = request.ignore_eos;
  out["stream"] = request.stream;
  out["n_probs"] = request.top_logprobs;
  if (request.adapters) {
    for (const AdapterScale& adapter : *request.adapters) {
      out["lora"].push_back({{"id", adapter.id}, {"scale", adapter.scale}});
    }
  }
  out["timings_per_token"] = request.timings_per_token;
  out["post_sampling_probs"] = request.sampled_probs;
  return out;
}

// "a/b" of an object: what it has of these.
Json chosen_fields(const Json& answer, const std::vector<std::string>& fields) {
  Json out = Json::object();
  for (const std::string& path : fields) {
    const Json* at = &answer;
    for (size_t begin = 0; at != nullptr && begin <= path.size();) {
      const size_t end = std::min(path.find('/', begin), path.size());
      const auto found = at->is_object() ? at->find(path.substr(begin, end - begin)) : at->end();
      at = found == at->end() ? nullptr : &*found;
      begin = end + 1;
    }
    if (at != nullptr) out[path] = *at;
  }
  return out;
}

class LlamaReply : public ReplyBase {
 public:
  LlamaReply(const GenerationRequest& request, ReplyContext context)
      : ReplyBase(request, std::move(context), "") {}

  std::string progress(const PromptProgress& progress) override {
    Json event = {{"index", 0},
                  {"content", ""},
                  {"tokens", Json::array()},
                  {"stop", false},
                  {"id_slot", request_.id_slot},
                  {"prompt_progress", progress_json(progress)}};
    if (request_.timings_per_token) event["timings"] = progress_timings_json(progress);
    return sse(event);
  }

  // One object, or an array where there are several replies.
  [[nodiscard]] Json answer() const override {
    Json all = Json::array();
    for (int i = 0; i < count(); i++) {
      const Choice& c = choice(i);
      Json one = llama_json(i, c.reader.reply().content);
      if (request_.return_tokens) one["tokens"] = c.tokens;
      if (request_.logprobs) one["completion_probabilities"] = logprobs_json(c, 0);
      if (!request_.response_fields.empty()) one = chosen_fields(one, request_.response_fields);
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
    if (request_.timings_per_token) event["timings"] = timings_so_far(c);
    c.events_sent = c.tokens.size();
    *out += sse(event);
  }

  void write_finish(int i, std::string* out) override {
    Choice& c = choice(i);
    Json last = llama_json(i, "");
    if (request_.logprobs) last["completion_probabilities"] = logprobs_json(c, c.events_sent);
    if (!request_.response_fields.empty()) last = chosen_fields(last, request_.response_fields);
    *out += sse(last);
  }

  void write_end(std::string* /*out*/) override {}

 private:
  [[nodiscard]] Json token_json(const TokenInfo& info) const {
    Json out = {
        {"id", info.token}, {"token", valid_text(info.bytes)}, {"bytes", bytes_json(info.bytes)}};
    out[request_.sampled_probs ? "prob" : "logprob"] = finite(info.logprob);
    return out;
  }

  [[nodiscard]] Json logprobs_json(const Choice& c, size_t from) const {
    const char* others = request_.sampled_probs ? "top_probs" : "top_logprobs";
    Json out = Json::array();
    for (size_t t = from; t < c.logprobs.size(); t++) {
      Json token = token_json(c.logprobs[t].chosen);
      token[others] = Json::array();
      for (const TokenInfo& top : c.logprobs[t].top) token[others].push_back(token_json(top));
      out.push_back(std::move(token));
    }
    return out;
  }

  int64_t prompt_tokens_ = 0;
};

}  // namespace

Json sampling_json(const model::SamplingOptions& s) {
  Json bias = Json::array();
  for (const auto& [token, value] : s.logit_bias) {
    bias.push_back({{"token", token}, {"bias", std::isinf(value) ? Json(nullptr) : Json(value)}});
  }
  return {{"temperature", s.temperature},
          {"dynatemp_range", 0.0},
          {"dynatemp_exponent", 1.0},
          {"top_k", s.top_k},
          {"top_p", s.top_p},
          {"min_p", s.min_p},
          {"top_n_sigma", -1.0},
          {"xtc_probability", 0.0},
          {"xtc_threshold", 0.1},
          {"typical_p", 1.0},
          {"repeat_last_n", s.penalty_last_n},
          {"repeat_penalty", s.repeat_penalty},
          {"presence_penalty", s.presence_penalty},
          {"frequency_penalty", s.frequency_penalty},
          {"dry_multiplier", 0.0},
          {"mirostat", 0},
          {"adaptive_target", -1.0},
          {"adaptive_decay", 0.9},
          {"logit_bias", std::move(bias)},
          {"grammar", s.grammar},
          {"samplers", {"penalties", "top_k", "top_p", "min_p", "temperature"}},
          {"lora", Json::array()}};
}

Json ReplyBase::llama_json(int i, const std::string& content) const {
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
          {"generation_settings", settings_json(request_)},
          {"prompt", prompt < context_.prompts.size() ? context_.prompts[prompt] : ""},
          {"has_new_line", c.reader.reply().content.find('\n') != std::string::npos},
          {"truncated", o.dropped > 0},
          {"stop_type", stop_type(c.finish.reason)},
          {"stopping_word", c.finish.stop_string},
          {"tokens_cached", o.cached()},
          {"timings", timings_json(o)},
          {"hcache", outcome_json(o)}};
}

std::unique_ptr<ReplyBuilder> make_llama_reply(const GenerationRequest& request,
                                               ReplyContext context) {
  return std::make_unique<LlamaReply>(request, std::move(context));
}

}  // namespace hcache::api
