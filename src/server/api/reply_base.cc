#include "reply_base.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "api/answers.h"
#include "model/tokenizer.h"

namespace hcache::api {
namespace {

constexpr double kMsPerSecond = 1e3;
constexpr size_t kMaxSpans = 12;  // of a timeline: what a person can take in

double per_second(int64_t tokens, double ms) {
  return ms > 0 && tokens > 0 ? 1e3 * static_cast<double>(tokens) / ms : 0;
}

double per_token_ms(int64_t tokens, double ms) {
  return tokens > 0 ? ms / static_cast<double>(tokens) : 0;
}

void add_prompt(const Outcome& one, Outcome* sum) {
  sum->prompt_tokens += one.prompt_tokens;
  sum->resident += one.resident;
  sum->hidden += one.hidden;
  sum->kv += one.kv;
  sum->recomputed += one.recomputed;
  sum->fresh += one.fresh;
  sum->dropped_before += one.dropped_before;
  sum->saved += one.saved;
  sum->restore_ms += one.restore_ms;
  sum->prompt_ms += one.prompt_ms;
  sum->queue_ms = std::max(sum->queue_ms, one.queue_ms);
  sum->first_ms = std::max(sum->first_ms, one.first_ms);
  if (sum->restore.schedule.empty()) sum->restore = one.restore;
}

// Neighbouring layers with the same method in groups, few enough to look at. Milliseconds since the
// restore began; both times of reading 0: nothing was read.
Json timeline_json(const std::vector<policy::RestoredLayer>& layers) {
  const size_t most = (layers.size() + kMaxSpans - 1) / kMaxSpans;  // layers of a group
  Json spans = Json::array();
  for (size_t first = 0; first < layers.size();) {
    policy::RestoredLayer span = layers[first];
    size_t end = first + 1;
    for (; end < layers.size() && end - first < most && layers[end].method == span.method; ++end) {
      span.io_end_s = std::max(span.io_end_s, layers[end].io_end_s);
      span.compute_end_s = std::max(span.compute_end_s, layers[end].compute_end_s);
    }
    spans.push_back(
        {{"layers", fmt::format("{}-{}", first, end - 1)},
         {"method", policy::method_name(span.method)},
         {"io_ms", {span.io_begin_s * kMsPerSecond, span.io_end_s * kMsPerSecond}},
         {"compute_ms", {span.compute_begin_s * kMsPerSecond, span.compute_end_s * kMsPerSecond}}});
    first = end;
  }
  return spans;
}

Json devices_json(const std::vector<policy::RestoredDevice>& devices) {
  Json parts = Json::array();
  for (const policy::RestoredDevice& part : devices) {
    parts.push_back(
        {{"device", part.device}, {"layers", part.n_layers}, {"bytes", part.pages.total()}});
  }
  return parts;
}

}  // namespace

Json outcome_json(const Outcome& o) {
  return {{"tokens",
           {{"resident", o.resident},
            {"hidden", o.hidden},
            {"kv", o.kv},
            {"recomputed", o.recomputed},
            {"new", o.fresh},
            {"dropped_before", o.dropped_before}}},
          {"dropped_tokens", o.dropped},
          {"bytes", {{"dram", o.bytes.dram}, {"disk", o.bytes.disk}, {"remote", o.bytes.remote}}},
          {"restore_ms", o.restore_ms},
          {"overlap", o.restore.overlap},
          {"schedule", o.restore.schedule},
          {"kept_rows", o.restore.kept_rows},
          {"timeline", timeline_json(o.restore.layers)},
          {"devices", devices_json(o.restore.devices)},
          {"queue_ms", o.queue_ms},
          {"first_token_ms", o.first_ms},
          {"preemptions", o.preemptions}};
}

Json timings_json(const Outcome& o) {
  const int64_t computed = o.prompt_tokens - o.dropped_before - o.cached();
  Json timings = {{"cache_n", o.cached()},
                  {"prompt_n", computed},
                  {"prompt_ms", o.prompt_ms},
                  {"prompt_per_token_ms", per_token_ms(computed, o.prompt_ms)},
                  {"prompt_per_second", per_second(computed, o.prompt_ms)},
                  {"predicted_n", o.reply_tokens},
                  {"predicted_ms", o.reply_ms},
                  // The first one came with the prompt's last.
                  {"predicted_per_token_ms", per_token_ms(o.reply_tokens - 1, o.reply_ms)},
                  {"predicted_per_second", per_second(o.reply_tokens - 1, o.reply_ms)}};
  if (o.drafted > 0) {
    timings["draft_n"] = o.drafted;
    timings["draft_n_accepted"] = o.accepted;
  }
  return timings;
}

Json progress_json(const PromptProgress& progress) {
  return {{"total", progress.total},
          {"cache", progress.cached},
          {"processed", progress.processed},
          {"time_ms", progress.ms}};
}

Json progress_timings_json(const PromptProgress& progress) {
  Outcome so_far;
  so_far.prompt_tokens = progress.processed;
  so_far.resident = progress.cached;
  so_far.prompt_ms = progress.ms;
  return timings_json(so_far);
}

std::string sse(const Json& data) { return "data: " + to_text(data) + "\n\n"; }

std::string sse(std::string_view event, const Json& data) {
  return fmt::format("event: {}\n{}", event, sse(data));
}

std::string ndjson(const Json& data) { return to_text(data) + "\n"; }

Json arguments_json(const model::ToolCall& call) {
  Json arguments = Json::parse(call.arguments, nullptr, /*allow_exceptions=*/false);
  return arguments.is_object() ? arguments : Json::object();
}

std::string valid_text(std::string bytes) {
  std::string text = model::take_valid_utf8(bytes);
  return bytes.empty() ? text : text + "\uFFFD";
}

Json bytes_json(std::string_view bytes) {
  Json out = Json::array();
  for (const char c : bytes) out.push_back(static_cast<unsigned char>(c));
  return out;
}

namespace {

Json token_json(const TokenInfo& info) {
  return {{"token", valid_text(info.bytes)},
          {"logprob", finite(info.logprob)},
          {"bytes", bytes_json(info.bytes)}};
}

}  // namespace

Json token_logprobs(const std::vector<TokenEvent>& events, size_t from) {
  Json out = Json::array();
  for (size_t t = from; t < events.size(); t++) {
    Json token = token_json(events[t].chosen);
    token["top_logprobs"] = Json::array();
    for (const TokenInfo& top : events[t].top) token["top_logprobs"].push_back(token_json(top));
    out.push_back(std::move(token));
  }
  return out;
}

float finite(float logprob) {
  constexpr float kNever = -9999.0F;  // as OpenAI writes it
  return logprob > kNever ? logprob : kNever;
}

std::unique_ptr<ReplyBuilder> ReplyBuilder::create(const GenerationRequest& request,
                                                   ReplyContext context) {
  switch (request.dialect) {
    case Dialect::kChat: return make_chat_reply(request, std::move(context));
    case Dialect::kCompletion: return make_completion_reply(request, std::move(context));
    case Dialect::kResponse: return make_response_reply(request, std::move(context));
    case Dialect::kMessages: return make_messages_reply(request, std::move(context));
    case Dialect::kLlama: return make_llama_reply(request, std::move(context));
    case Dialect::kOllamaChat:
    case Dialect::kOllamaGenerate: return make_ollama_reply(request, std::move(context));
  }
  die("a request without a dialect");
}

ReplyBase::ReplyBase(const GenerationRequest& request, ReplyContext context,
                     std::string call_prefix)
    : request_(request), context_(std::move(context)) {
  const size_t prompts = std::max<size_t>(request_.prompts.size(), 1);
  const size_t choices = prompts * static_cast<size_t>(std::max(request_.n, 1));
  for (size_t c = 0; c < choices; c++) {
    auto call_id = [this, call_prefix, c](size_t i) {
      return fmt::format("{}_{}_{}", id(call_prefix), c, i);
    };
    choices_.push_back({ReplyReader(context_.format, std::move(call_id), request_.stream)});
  }
}

// Most dialects have no word for it.
std::string ReplyBase::progress(const PromptProgress& /*progress*/) { return {}; }

std::string ReplyBase::begin(const PromptCounts& counts) {
  std::string out;
  prompt_ = counts;
  if (request_.stream) write_begin(counts, &out);
  return out;
}

std::string ReplyBase::push(int index, const TokenEvent& event) {
  Choice& c = choice(index);
  c.tokens.push_back(event.chosen.token);
  c.reply_ms = event.reply_ms;
  if (request_.logprobs) c.logprobs.push_back(event);
  const Delta delta = c.reader.push(event.text);
  std::string out;
  const bool empty = delta.content.empty() && delta.reasoning.empty() && delta.calls.empty();
  if (request_.stream && !empty) write_delta(index, delta, &out);
  return out;
}

std::string ReplyBase::finish(int index, std::string_view rest, const Finish& finish) {
  Choice& c = choice(index);
  c.finish = finish;
  std::string out;
  const bool whole = finish.reason == FinishReason::kEnd || finish.reason == FinishReason::kStop;
  const Delta deltas[] = {c.reader.push(rest), c.reader.finish(whole)};
  if (!request_.stream) return out;
  for (const Delta& delta : deltas) {
    const bool empty = delta.content.empty() && delta.reasoning.empty() && delta.calls.empty();
    if (!empty) write_delta(index, delta, &out);
  }
  write_finish(index, &out);
  return out;
}

std::string ReplyBase::end() {
  std::string out;
  if (request_.stream) write_end(&out);
  return out;
}

std::string ReplyBase::fail(const Status& status) {
  const ErrorStyle style = error_style(request_.dialect);
  const Json body = render_error(status, style).body;
  return style == ErrorStyle::kAnthropic ? sse("error", body) : sse(body);
}

model::ChatMessage ReplyBase::message(int index) const {
  const model::ChatReply& reply = choice(index).reader.reply();
  return {"assistant", reply.content, reply.reasoning, reply.tool_calls};
}

Json ReplyBase::timings_so_far(const Choice& choice) const {
  Outcome so_far;
  so_far.prompt_tokens = prompt_.tokens;
  so_far.resident = prompt_.cached;
  so_far.prompt_ms = prompt_.prompt_ms;
  so_far.reply_tokens = static_cast<int64_t>(choice.tokens.size());
  so_far.reply_ms = choice.reply_ms;
  return timings_json(so_far);
}

Outcome ReplyBase::total() const {
  Outcome sum;
  for (int i = 0; i < count(); i++) {
    const Outcome& one = choice(i).finish.outcome;
    if (i % std::max(request_.n, 1) == 0) add_prompt(one, &sum);
    sum.reply_tokens += one.reply_tokens;
    sum.drafted += one.drafted;
    sum.accepted += one.accepted;
    sum.bytes += one.bytes;
    sum.dropped = std::max(sum.dropped, one.dropped);
    sum.preemptions += one.preemptions;
    sum.reply_ms = std::max(sum.reply_ms, one.reply_ms);
  }
  return sum;
}

std::string ReplyBase::id(std::string_view prefix) const {
  return fmt::format("{}{}", prefix, context_.id);
}

}  // namespace hcache::api
