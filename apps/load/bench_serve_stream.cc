#include "bench_serve_stream.h"

namespace hcache::load {
namespace {

constexpr size_t kMessageBytes = 300;

// Members of anything: null where `json` is no object or has none of that name.
const Json& member(const Json& json, const char* name) {
  static const Json kNull;
  if (!json.is_object()) return kNull;
  const auto it = json.find(name);
  return it == json.end() ? kNull : *it;
}

std::string text_of(const Json& json) {
  return json.is_string() ? json.get<std::string>() : std::string();
}

void read_count(const Json& json, std::optional<int64_t>* out) {
  if (json.is_number_integer()) *out = json.get<int64_t>();
}

std::string message_of(const Json& error) {
  if (error.is_string()) return error.get<std::string>();
  const std::string message = text_of(member(error, "message"));
  return message.empty() ? error.dump(-1, ' ', false, Json::error_handler_t::replace) : message;
}

}  // namespace

void SseParser::feed(std::string_view bytes,
                     const std::function<bool(std::string_view data)>& on_event) {
  for (const char c : bytes) {
    const bool second_half = after_cr_ && c == '\n';  // of a CRLF
    after_cr_ = c == '\r';
    if (second_half) continue;
    if (c != '\n' && c != '\r') {
      line_ += c;
    } else if (!end_line(on_event)) {
      return;
    }
  }
}

bool SseParser::end_line(const std::function<bool(std::string_view)>& on_event) {
  constexpr std::string_view kField = "data:";
  if (line_.starts_with(kField)) {
    std::string_view value = std::string_view(line_).substr(kField.size());
    if (value.starts_with(' ')) value.remove_prefix(1);
    if (has_data_) data_ += '\n';
    data_ += value;
    has_data_ = true;
  }
  const bool event = line_.empty() && has_data_;
  line_.clear();
  if (!event) return true;
  const std::string data = std::move(data_);
  data_.clear();
  has_data_ = false;
  return on_event(data);
}

bool AnswerReader::feed(std::string_view bytes, double now_s) {
  if (ended_) return false;
  events_.feed(bytes, [&](std::string_view data) { return on_event(data, now_s); });
  return !ended_;
}

bool AnswerReader::on_event(std::string_view data, double now_s) {
  if (data == "[DONE]") {
    ended_ = true;
    return false;
  }
  const Json event = Json::parse(data, nullptr, false);
  if (!event.is_object()) {
    answer_.error = "an event is not a JSON object";
  } else if (const Json& error = member(event, "error"); !error.is_null()) {
    answer_.error = message_of(error);
  }
  if (!answer_.error.empty()) {
    ended_ = true;
    return false;
  }
  const Json& choices = member(event, "choices");
  if (choices.is_array() && !choices.empty()) on_delta(choices.front(), now_s);
  on_usage(member(event, "usage"));
  for (const char* name : {"timings", "hcache"}) {
    if (const Json& told = member(event, name); !told.is_null()) answer_.server[name] = told;
  }
  return true;
}

void AnswerReader::on_delta(const Json& choice, double now_s) {
  const Json& delta = member(choice, "delta");
  const std::string text = text_of(member(delta, "content"));
  answer_.text += text;
  if (!text.empty() || !text_of(member(delta, "reasoning_content")).empty()) {
    answer_.token_times_s.push_back(now_s);
  }
  if (const std::string reason = text_of(member(choice, "finish_reason")); !reason.empty()) {
    answer_.finish_reason = reason;
  }
}

void AnswerReader::on_usage(const Json& usage) {
  read_count(member(usage, "prompt_tokens"), &answer_.prompt_tokens);
  read_count(member(usage, "completion_tokens"), &answer_.completion_tokens);
  read_count(member(member(usage, "prompt_tokens_details"), "cached_tokens"),
             &answer_.cached_tokens);
}

std::string error_message(std::string_view body) {
  const Json json = Json::parse(body, nullptr, false);
  if (const Json& error = member(json, "error"); !error.is_null()) return message_of(error);
  return std::string(body.substr(0, kMessageBytes));
}

}  // namespace hcache::load
