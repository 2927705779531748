#include "batch_answerer.h"

#include <memory>
#include <optional>
#include <utility>

#include "api/answers.h"
#include "api/request.h"
#include "base/log.h"
#include "generation.h"

namespace hcache::server {
namespace {

constexpr int kTooMany = 429;

// Takes the answer instead of a client. Threading: any thread.
class AnswerTaker final : public http::Responder {
 public:
  explicit AnswerTaker(Answerer::Done done) : done_(std::move(done)) {}
  // Nobody can answer any more.
  ~AnswerTaker() override {
    if (done_) done_({});
  }

  bool send(int status, const http::Headers& /*headers*/, std::string body) override {
    BatchAnswer answer;
    Answerer::Done done;
    {
      MutexLock lock(mutex_);
      if (!done_) return false;
      done = std::exchange(done_, nullptr);
      answer = std::exchange(answer_, {});
      answer.kind = BatchAnswer::Kind::kAnswered;
      if (cancelled_) answer.kind = BatchAnswer::Kind::kCancelled;
      // A failure of its own is an answer; that the queue was full is none.
      if (status == kTooMany && !failed_) answer.kind = BatchAnswer::Kind::kRefused;
    }
    answer.http_status = status;
    // Longer than what a client may send, perhaps.
    auto json = api::parse_body(body, {.max_depth = 128, .max_values = size_t{1} << 24U});
    answer.body = json.ok() ? std::move(*json) : api::Json(std::move(body));
    if (answer.body.is_object() && answer.body.contains("id") && answer.body["id"].is_string()) {
      answer.request_id = answer.body["id"].get<std::string>();
    }
    done(std::move(answer));
    return true;
  }
  bool send_error(int status, std::string_view message, const http::Headers& headers) override {
    return send(status, headers,
                api::to_text(api::error_body(status, message, api::ErrorStyle::kOpenAi)));
  }
  // Batches ask for no streams.
  bool start_stream(int /*status*/, const http::Headers& /*headers*/) override { return false; }
  bool write(std::string_view /*bytes*/) override { return false; }
  bool finish() override { return false; }
  [[nodiscard]] bool writable() const override { return false; }
  [[nodiscard]] std::size_t unsent_bytes() const override { return 0; }
  void on_disconnect(std::function<void()> callback) override {
    {
      MutexLock lock(mutex_);
      if (!gone_) {
        on_gone_ = std::move(callback);
        return;
      }
    }
    callback();
  }

  void add(const scheduler::Outcome& outcome) {
    MutexLock lock(mutex_);
    cancelled_ = cancelled_ || outcome.phase == scheduler::Phase::kCancelled;
    failed_ = failed_ || outcome.phase == scheduler::Phase::kFailed;
    answer_.prompt_tokens += outcome.prompt_tokens;
    answer_.cached_tokens += outcome.resident_tokens + outcome.hidden_tokens + outcome.kv_tokens;
    answer_.reply_tokens += outcome.generated_tokens;
  }
  // As a client that goes away.
  void leave() {
    std::function<void()> on_gone;
    {
      MutexLock lock(mutex_);
      gone_ = true;
      on_gone = std::exchange(on_gone_, nullptr);
    }
    if (on_gone) on_gone();
  }

 private:
  Mutex mutex_;
  Answerer::Done done_ HCACHE_GUARDED_BY(mutex_);
  std::function<void()> on_gone_ HCACHE_GUARDED_BY(mutex_);
  BatchAnswer answer_ HCACHE_GUARDED_BY(mutex_);
  bool gone_ HCACHE_GUARDED_BY(mutex_) = false;
  bool cancelled_ HCACHE_GUARDED_BY(mutex_) = false;
  bool failed_ HCACHE_GUARDED_BY(mutex_) = false;
};

Result<api::GenerationRequest> parse(const BatchRequest& request, const api::Defaults& defaults) {
  if (request.url == "/v1/chat/completions") {
    return api::parse_chat_completion(request.body, defaults);
  }
  if (request.url == "/v1/completions") return api::parse_completion(request.body, defaults);
  if (request.url == "/v1/responses") return api::parse_response(request.body, defaults);
  return api::parse_messages(request.body, defaults);
}

}  // namespace

Answerer::Cancel ServiceAnswerer::submit(BatchRequest request, Done done) {
  auto taker = std::make_shared<AnswerTaker>(std::move(done));
  service_.intake().post(
      [&service = service_, client = client_, request = std::move(request), taker] {
        const auto refuse = [&](const Status& status) {
          const api::ErrorAnswer answer = api::render_error(status, api::error_style(request.url));
          taker->send(answer.http_status, {}, api::to_text(answer.body));
        };
        Result<api::GenerationRequest> parsed = parse(request, service.options().sampling);
        if (!parsed.ok()) return refuse(parsed.status());
        parsed->stream = false;
        http::Request from;  // the key and what the body adds are the salt, as over HTTP
        from.key_index = client.key_index;
        const Result<Salt> salt = service.salt_of(from, *parsed);
        if (!salt.ok()) return refuse(salt.status());
        GenerationOptions options;
        options.background = client.background;
        options.remember_named_only = true;
        options.on_outcome = [taker = std::weak_ptr(taker)](const scheduler::Outcome& outcome) {
          if (const auto held = taker.lock()) held->add(outcome);
        };
        std::make_shared<Generation>(service, taker, std::move(*parsed), *salt, client.key_name,
                                     std::move(options))
            ->start();
      });
  return [taker = std::weak_ptr(taker)] {
    if (const auto held = taker.lock()) held->leave();
  };
}

}  // namespace hcache::server
