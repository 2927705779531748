// What a server streams back: server-sent events, and the chat answer that they carry.
// Threading: values, one thread each.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hcache::load {

using Json = nlohmann::ordered_json;

// Finds the events in a stream that arrives in pieces of any size. Comments, event names and ids
// are skipped; lines may end with LF, CRLF or CR.
class SseParser {
 public:
  // Calls on_event with the data of each event that these bytes complete, until it returns false.
  void feed(std::string_view bytes, const std::function<bool(std::string_view data)>& on_event);

 private:
  bool end_line(const std::function<bool(std::string_view)>& on_event);

  std::string line_;
  std::string data_;
  bool has_data_ = false;
  bool after_cr_ = false;
};

struct Answer {
  std::string text;
  std::string finish_reason;  // empty: none came, the answer is not whole
  std::string error;          // what the server said was wrong, or what is wrong with its stream
  // As the server counts; nothing where it does not.
  std::optional<int64_t> prompt_tokens;
  std::optional<int64_t> cached_tokens;
  std::optional<int64_t> completion_tokens;
  Json server = Json::object();  // what it tells of itself: "timings", "hcache"
  // When pieces of text came (reasoning included), in seconds of the caller's clock.
  std::vector<double> token_times_s;
};

// Reads one streamed answer of /v1/chat/completions.
class AnswerReader {
 public:
  // Bytes that came at now_s. False: the answer has ended ([DONE]) or failed, nothing else matters.
  bool feed(std::string_view bytes, double now_s);
  [[nodiscard]] const Answer& answer() const { return answer_; }

 private:
  bool on_event(std::string_view data, double now_s);
  void on_delta(const Json& choice, double now_s);
  void on_usage(const Json& usage);

  SseParser events_;
  Answer answer_;
  bool ended_ = false;
};

// The message of {"error": {"message": ...}} or {"error": "..."}; where `body` is neither, its
// beginning.
[[nodiscard]] std::string error_message(std::string_view body);

}  // namespace hcache::load
