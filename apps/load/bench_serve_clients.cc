#include "bench_serve_clients.h"

#include <fmt/format.h>

#include <deque>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/env.h"

namespace hcache::load {
namespace {

constexpr int kOk = 200;
constexpr int kTooManyRequests = 429;
constexpr double kRetryAfterS = 1;  // where a 429 names no time
constexpr size_t kMostErrorBytes = 64 * 1024;

double now_s() { return static_cast<double>(Env::real().monotonic_ns()) * 1e-9; }

const char* kind_of(HttpEnd end) {
  switch (end) {
    case HttpEnd::kDone: return "";
    case HttpEnd::kConnect: return "connect";
    case HttpEnd::kDisconnect: return "disconnect";
    case HttpEnd::kTimeout: return "timeout";
    case HttpEnd::kMalformed: return "malformed";
  }
  return "";
}

// A session that is under way.
struct Conversation {
  size_t session = 0;
  size_t round = 0;
  Json messages = Json::array();
};

// A request that is under way.
struct Flight {
  std::shared_ptr<Conversation> conversation;
  Record record;
  std::string body;
  HttpHead head;
  AnswerReader reader;
  std::string error_body;  // of a status other than 200
};
using FlightPtr = std::shared_ptr<Flight>;

class Clients {
 public:
  Clients(HttpLoop& loop, const sim::Schedule& schedule, const TextSource& text,
          const ClientOptions& options, const Proceed& proceed)
      : loop_(loop), schedule_(schedule), text_(text), options_(options), proceed_(proceed) {
    for (const sim::Session& session : schedule.sessions) rounds_left_ += session.rounds.size();
    rounds_ = rounds_left_;
  }

  Outcome run() {
    started_s_ = now_s();
    const size_t sessions = schedule_.sessions.size();
    if (options_.concurrency == 0) {
      for (size_t i = 0; i < sessions; i++) {
        loop_.after(schedule_.sessions[i].start_s, [this, i] { begin(i); });
      }
    } else {
      for (int64_t i = 0; i < options_.concurrency; i++) begin_next();
    }
    work();
    if (!resting_.empty() && proceed()) {
      const double rest_s = now_s();
      options_.pause();
      started_s_ += now_s() - rest_s;
      wake();
      work();
    }
    for (const FlightPtr& flight : flights_) {
      flight->record.error = kInterrupted;
      keep(*flight);
    }
    return std::move(outcome_);
  }

 private:
  // Until nothing is left to do for now.
  void work() {
    loop_.run([this] { return proceed(); });
  }

  [[nodiscard]] bool proceed() const {
    return proceed_(static_cast<double>(rounds_ - rounds_left_) / static_cast<double>(rounds_));
  }

  void begin(size_t session) {
    auto conversation = std::make_shared<Conversation>();
    conversation->session = session;
    say(conversation);
  }

  // Of the closed mode: a client takes the next session, or one that rested, if there is one.
  void begin_next() {
    if (next_session_ < schedule_.sessions.size()) {
      begin(next_session_++);
    } else if (awake_ && !resting_.empty()) {
      const auto conversation = resting_.front();
      resting_.pop_front();
      say(conversation);
    }
  }

  void rest(const std::shared_ptr<Conversation>& conversation) {
    resting_.push_back(conversation);
    if (options_.concurrency > 0) begin_next();
  }

  void wake() {
    awake_ = true;
    if (options_.concurrency == 0) {
      for (const auto& conversation : resting_) {
        const double start_s = schedule_.sessions[conversation->session].start_s;
        loop_.after(start_s, [this, conversation] { say(conversation); });
      }
    } else {
      for (int64_t i = 0; i < options_.concurrency; i++) begin_next();
    }
  }

  void say(const std::shared_ptr<Conversation>& conversation) {
    const sim::Session& session = schedule_.sessions[conversation->session];
    const sim::Round& round = session.rounds[conversation->round];
    conversation->messages.push_back({{"role", "user"}, {"content", message_text(text_, round)}});
    const auto flight = std::make_shared<Flight>();
    flight->conversation = conversation;
    flight->body = body_of(*conversation, round);
    flight->record.session = static_cast<int64_t>(conversation->session);
    flight->record.round = static_cast<int64_t>(conversation->round);
    flight->record.warmup = session.warmup;
    flight->record.returning = round.returning;
    flight->record.max_tokens = round.output_tokens;
    flight->record.start_s = elapsed_s();
    flights_.insert(flight);
    send(flight);
  }

  [[nodiscard]] std::string body_of(const Conversation& conversation,
                                    const sim::Round& round) const {
    Json body = {{"model", options_.model},
                 {"messages", conversation.messages},
                 {"stream", true},
                 {"stream_options", {{"include_usage", true}}},
                 {"max_tokens", round.output_tokens},
                 {"temperature", options_.temperature}};
    if (options_.exact_length) body["ignore_eos"] = true;
    body.update(options_.extra);
    return body.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

  void send(const FlightPtr& flight) {
    HttpHandler handler;
    handler.on_head = [flight](const HttpHead& head) { flight->head = head; };
    handler.on_body = [this, flight](std::string_view piece) {
      if (flight->head.status == kOk) return flight->reader.feed(piece, elapsed_s());
      flight->error_body += piece;
      return flight->error_body.size() < kMostErrorBytes;
    };
    handler.on_end = [this, flight](HttpEnd end, const std::string& message) {
      on_end(flight, end, message);
    };
    loop_.send({"/v1/chat/completions", flight->body}, std::move(handler));
  }

  void on_end(const FlightPtr& flight, HttpEnd end, const std::string& message) {
    Record& record = flight->record;
    const HttpHead head = flight->head;
    if (end == HttpEnd::kDone && head.status == kTooManyRequests &&
        record.retries < options_.retries) {
      record.retries++;
      flight->error_body.clear();
      loop_.after(head.retry_after_s.value_or(kRetryAfterS), [this, flight] { send(flight); });
      return;
    }
    judge(*flight, end, message);
    flights_.erase(flight);
    keep(*flight);
    go_on(flight->conversation, record.error.empty(), record.answer.text);
  }

  // Says in the record what went wrong, if anything did.
  static void judge(Flight& flight, HttpEnd end, const std::string& message) {
    const Answer& answer = flight.reader.answer();
    Record& record = flight.record;
    if (end != HttpEnd::kDone) {
      record.error = kind_of(end);
      record.message = message;
    } else if (flight.head.status != kOk) {
      record.error = fmt::format("http-{}", flight.head.status);
      record.message = error_message(flight.error_body);
    } else if (!answer.error.empty()) {
      record.error = "server";
      record.message = answer.error;
    } else if (answer.finish_reason.empty()) {
      record.error = "truncated";
      record.message = "the stream ended without a finish_reason";
    }
  }

  void keep(Flight& flight) {
    flight.record.end_s = elapsed_s();
    flight.record.answer = flight.reader.answer();
    outcome_.records.push_back(flight.record);
  }

  // After a round: the next one, or the conversation's end.
  void go_on(const std::shared_ptr<Conversation>& conversation, bool ok,
             const std::string& answer) {
    const sim::Session& session = schedule_.sessions[conversation->session];
    conversation->round++;
    rounds_left_--;
    const size_t left = session.rounds.size() - conversation->round;
    if (ok && left > 0) {
      conversation->messages.push_back({{"role", "assistant"}, {"content", answer}});
      if (static_cast<int64_t>(conversation->round) == options_.pause_after) {
        rest(conversation);
      } else {
        say_later(conversation);
      }
      return;
    }
    if (!session.warmup) outcome_.not_sent += static_cast<int64_t>(left);
    rounds_left_ -= left;
    if (options_.concurrency > 0) begin_next();
  }

  void say_later(const std::shared_ptr<Conversation>& conversation) {
    const sim::Session& session = schedule_.sessions[conversation->session];
    const double pause_s =
        options_.concurrency > 0 ? 0 : session.rounds[conversation->round].think_s;
    loop_.after(pause_s, [this, conversation] { say(conversation); });
  }

  // The time of the load: it stands still during a pause.
  [[nodiscard]] double elapsed_s() const { return now_s() - started_s_; }

  HttpLoop& loop_;
  const sim::Schedule& schedule_;
  const TextSource& text_;
  const ClientOptions& options_;
  const Proceed& proceed_;
  double started_s_ = 0;
  size_t next_session_ = 0;
  size_t rounds_ = 0;
  size_t rounds_left_ = 0;
  std::deque<std::shared_ptr<Conversation>> resting_;
  bool awake_ = false;
  std::set<FlightPtr> flights_;
  Outcome outcome_;
};

}  // namespace

Result<std::string> first_model(HttpLoop& loop, const Proceed& proceed) {
  HttpHead head;
  std::string body;
  Status status = cancelled("interrupted");
  HttpHandler handler;
  handler.on_head = [&](const HttpHead& h) { head = h; };
  handler.on_body = [&](std::string_view piece) {
    body += piece;
    return true;
  };
  handler.on_end = [&](HttpEnd end, const std::string& message) {
    status = end == HttpEnd::kDone ? Status()
                                   : unavailable(fmt::format("{}: {}", kind_of(end), message));
  };
  loop.send({"/v1/models", ""}, std::move(handler));
  loop.run([&] { return proceed(0); });
  HCACHE_RETURN_IF_ERROR(status.with_context("asking the server for its models"));
  const Json json = Json::parse(body, nullptr, false);
  if (head.status == kOk && json.is_object() && json.contains("data") && json["data"].is_array() &&
      !json["data"].empty()) {
    const Json& model = json["data"].front();
    if (model.is_object() && model.contains("id") && model["id"].is_string()) {
      return model["id"].get<std::string>();
    }
  }
  return not_found(
      fmt::format("the server names no model at /v1/models (status {}: {}); use "
                  "--model NAME",
                  head.status, error_message(body)));
}

Outcome run_clients(HttpLoop& loop, const sim::Schedule& schedule, const TextSource& text,
                    const ClientOptions& options, const Proceed& proceed) {
  return Clients(loop, schedule, text, options, proceed).run();
}

std::string message_text(const TextSource& text, const sim::Round& round) {
  std::string out;
  for (const sim::Piece& piece : round.message) {
    if (!out.empty()) out += '\n';
    out += text.passage(piece.key, piece.tokens);
  }
  return out;
}

}  // namespace hcache::load
