#include "s3/s3_client.h"

#include <curl/curl.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "net/breaker.h"
#include "net/call_queue.h"

namespace hcache::store {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr Breaker::Limits kBreaker = {.unanswered = 3,
                                      .first_pause_ns = 200 * kMs,
                                      .longest_pause_ns = 30'000 * kMs,
                                      .probe_ns = 2'000 * kMs,
                                      .least_wait_ns = 50 * kMs};
constexpr std::int64_t kRetryNs = 50 * kMs;  // before the first repetition; doubles
constexpr std::int64_t kTickNs = 20 * kMs;   // deadlines are looked at this often
constexpr int kMaxTries = 5;
constexpr std::size_t kMaxAtOnce = 32;  // requests in flight
constexpr std::size_t kMaxBulk = 4;     // … of them bulk
constexpr long kConnectMs = 2000;
constexpr const char* kProbeKey = "hcache-probe";

struct Call : QueuedCall {
  S3Call call;
  int tries = 0;
  bool probe = false;
};
using CallPtr = std::shared_ptr<Call>;

// A request in flight.
struct Transfer {
  CallPtr call;
  std::int64_t sent_ns = 0;
  CURL* handle = nullptr;
  curl_slist* headers = nullptr;
  std::string answer;
  std::size_t most = 0;  // bytes that the answer may have
};

// Objects are at most this large, whatever a server sends.
constexpr std::size_t kMaxAnswer = 128U << 20;

std::size_t take_bytes(char* data, std::size_t size, std::size_t n, void* user) {
  auto* transfer = static_cast<Transfer*>(user);
  if (transfer->answer.size() + size * n > transfer->most) return 0;  // ends it with an error
  transfer->answer.append(data, size * n);
  return size * n;
}

class S3ClientImpl : public S3Client {
 public:
  S3ClientImpl(Env& env, S3Url url, S3Credentials credentials)
      : env_(env), url_(std::move(url)), credentials_(std::move(credentials)) {}
  ~S3ClientImpl() override;
  S3ClientImpl(const S3ClientImpl&) = delete;
  S3ClientImpl& operator=(const S3ClientImpl&) = delete;

  Status start();
  void call(S3Call call) override;
  bool available() const override { return available_; }

 private:
  void run();
  void admit(const CallPtr& call);
  void start_due();
  void begin(const CallPtr& call);
  void sign(Transfer* transfer);
  void end(CURL* handle, CURLcode result);
  void end_probe(bool ok);
  void answered(Call& call, long status, std::string answer);
  void unanswered(const CallPtr& call, bool silent, const std::string& why);
  static void finish(Call& call, Result<std::string> result);
  void probe();
  [[nodiscard]] std::string address_of(const std::string& key) const;

  Env& env_;
  const S3Url url_;
  const S3Credentials credentials_;
  CURLM* multi_ = nullptr;
  std::atomic<bool> available_ = true;  // the breaker is closed, for other threads
  CallQueue<Call> queue_;

  // The thread's own.
  Breaker breaker_{kBreaker};
  std::deque<CallPtr> waiting_;  // for their turn
  std::deque<CallPtr> bulk_;
  std::vector<std::unique_ptr<Transfer>> flying_;
  std::vector<CURL*> idle_;
  std::size_t bulk_flying_ = 0;

  std::thread thread_;
};

S3ClientImpl::~S3ClientImpl() {
  if (thread_.joinable()) {
    queue_.stop();
    curl_multi_wakeup(multi_);
    thread_.join();
  }
  if (multi_ != nullptr) curl_multi_cleanup(multi_);
}

Status S3ClientImpl::start() {
  static const CURLcode once = curl_global_init(CURL_GLOBAL_DEFAULT);
  multi_ = once == CURLE_OK ? curl_multi_init() : nullptr;
  if (multi_ == nullptr) return internal_error("libcurl can't be initialised");
  thread_ = std::thread([this] { run(); });
  return {};
}

void S3ClientImpl::call(S3Call call) {
  auto entry = std::make_shared<Call>();
  entry->deadline_ns = call.deadline_ns;
  entry->call = std::move(call);
  if (queue_.push(std::move(entry))) curl_multi_wakeup(multi_);
}

void S3ClientImpl::run() {
  std::vector<CallPtr> fresh;
  while (queue_.take(&fresh)) {
    for (const CallPtr& call : fresh) admit(call);
    fresh.clear();
    const std::int64_t now = env_.monotonic_ns();
    for (const CallPtr& call : queue_.take_due(now)) {
      (call->call.bulk ? bulk_ : waiting_).push_back(call);
    }
    for (const CallPtr& call : queue_.take_late(now)) {
      finish(*call, unavailable("no answer from S3 in time"));
    }
    probe();
    start_due();
    int running = 0;
    curl_multi_perform(multi_, &running);
    int left = 0;
    while (const CURLMsg* message = curl_multi_info_read(multi_, &left)) {
      if (message->msg == CURLMSG_DONE) end(message->easy_handle, message->data.result);
    }
    const bool calm = queue_.empty() && flying_.empty() && !breaker_.open();
    const std::int64_t nap = calm ? 60'000 * kMs : queue_.nap_ns(env_.monotonic_ns(), kTickNs);
    curl_multi_poll(multi_, nullptr, 0, static_cast<int>((nap + kMs - 1) / kMs), nullptr);
  }
  for (const auto& transfer : flying_) {
    curl_multi_remove_handle(multi_, transfer->handle);
    curl_easy_cleanup(transfer->handle);
    curl_slist_free_all(transfer->headers);
  }
  for (CURL* handle : idle_) curl_easy_cleanup(handle);
  for (const CallPtr& call : queue_.take_all()) {
    finish(*call, cancelled("the S3 client is gone"));
  }
}

void S3ClientImpl::admit(const CallPtr& call) {
  if (breaker_.open()) return finish(*call, unavailable("S3 does not answer"));
  (call->call.bulk ? bulk_ : waiting_).push_back(call);
}

void S3ClientImpl::finish(Call& call, Result<std::string> result) {
  if (std::exchange(call.finished, true)) return;
  const S3Call::Done done = std::exchange(call.call.done, nullptr);
  if (done) done(std::move(result));
}

void S3ClientImpl::probe() {
  const std::int64_t now = env_.monotonic_ns();
  if (!breaker_.probe_due(now)) return;
  breaker_.probe_begins(now);
  const auto call = std::make_shared<Call>();
  call->call.key = kProbeKey;
  call->deadline_ns = now + kBreaker.probe_ns;
  call->probe = true;
  begin(call);
}

void S3ClientImpl::start_due() {
  const auto take = [&](std::deque<CallPtr>& queue, std::size_t most, std::size_t& count) {
    while (!queue.empty() && flying_.size() < kMaxAtOnce && count < most) {
      const CallPtr call = std::move(queue.front());
      queue.pop_front();
      if (call->finished) continue;
      begin(call);
      ++count;
    }
  };
  std::size_t any = 0;
  take(waiting_, kMaxAtOnce, any);
  take(bulk_, kMaxBulk, bulk_flying_);
}

std::string S3ClientImpl::address_of(const std::string& key) const {
  const std::string endpoint = url_.endpoint.empty()
                                   ? fmt::format("https://s3.{}.amazonaws.com", url_.region)
                                   : url_.endpoint;
  return fmt::format("{}/{}/{}{}", endpoint, url_.bucket, url_.prefix, key);
}

void S3ClientImpl::begin(const CallPtr& call) {
  auto transfer = std::make_unique<Transfer>();
  transfer->call = call;
  transfer->sent_ns = env_.monotonic_ns();
  const S3Call& request = call->call;
  CURL* handle = idle_.empty() ? curl_easy_init() : idle_.back();
  if (!idle_.empty()) idle_.pop_back();
  if (handle == nullptr) die("libcurl is out of memory");
  curl_easy_reset(handle);
  transfer->handle = handle;
  transfer->most = request.bytes > 0 ? request.bytes : kMaxAnswer;
  const std::string address = address_of(request.key);
  curl_easy_setopt(handle, CURLOPT_URL, address.c_str());
  curl_easy_setopt(handle, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(handle, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(handle, CURLOPT_CONNECTTIMEOUT_MS, kConnectMs);
  const std::int64_t left = (call->deadline_ns - transfer->sent_ns) / kMs;
  curl_easy_setopt(handle, CURLOPT_TIMEOUT_MS, static_cast<long>(std::max<std::int64_t>(left, 1)));
  curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, take_bytes);
  curl_easy_setopt(handle, CURLOPT_WRITEDATA, transfer.get());
  if (request.bytes > 0) {
    const std::string range =
        fmt::format("{}-{}", request.offset, request.offset + request.bytes - 1);
    curl_easy_setopt(handle, CURLOPT_RANGE, range.c_str());
  }
  if (request.method != "GET") {
    curl_easy_setopt(handle, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  }
  if (request.body) {
    curl_easy_setopt(handle, CURLOPT_POSTFIELDSIZE_LARGE,
                     static_cast<curl_off_t>(request.body->size()));
    curl_easy_setopt(handle, CURLOPT_POSTFIELDS, request.body->data());
    transfer->headers =
        curl_slist_append(transfer->headers, "Content-Type: application/octet-stream");
    transfer->headers = curl_slist_append(transfer->headers, "Expect:");
  }
  if (!credentials_.access_key.empty()) sign(transfer.get());
  curl_easy_setopt(handle, CURLOPT_HTTPHEADER, transfer->headers);
  curl_multi_add_handle(multi_, handle);
  flying_.push_back(std::move(transfer));
}

void S3ClientImpl::sign(Transfer* transfer) {
  const std::string scheme = fmt::format("aws:amz:{}:s3", url_.region);
  curl_easy_setopt(transfer->handle, CURLOPT_AWS_SIGV4, scheme.c_str());
  const std::string who = credentials_.access_key + ":" + credentials_.secret_key;
  curl_easy_setopt(transfer->handle, CURLOPT_USERPWD, who.c_str());
  if (credentials_.session_token.empty()) return;
  const std::string token = "x-amz-security-token: " + credentials_.session_token;
  transfer->headers = curl_slist_append(transfer->headers, token.c_str());
}

void S3ClientImpl::end(CURL* handle, CURLcode result) {
  const auto at =
      std::find_if(flying_.begin(), flying_.end(),
                   [&](const std::unique_ptr<Transfer>& t) { return t->handle == handle; });
  const std::unique_ptr<Transfer> transfer = std::move(*at);
  flying_.erase(at);
  long status = 0;
  curl_easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &status);
  curl_multi_remove_handle(multi_, handle);
  curl_slist_free_all(transfer->headers);
  idle_.push_back(handle);
  const CallPtr& call = transfer->call;
  if (call->call.bulk) --bulk_flying_;
  const bool ok = result == CURLE_OK && status < 500 && status != 429;
  if (call->probe) return end_probe(ok || status == 429);
  if (ok) {
    breaker_.answered(env_.monotonic_ns());
    return answered(*call, status, std::move(transfer->answer));
  }
  const bool silent = result == CURLE_OPERATION_TIMEDOUT
                          ? breaker_.given_up(transfer->sent_ns, env_.monotonic_ns())
                          : breaker_.unanswered(transfer->sent_ns);
  unanswered(
      call, silent,
      result != CURLE_OK ? curl_easy_strerror(result) : fmt::format("HTTP status {}", status));
}

void S3ClientImpl::end_probe(bool ok) {
  if (!ok) {
    breaker_.trip(env_.monotonic_ns());
    return;
  }
  log::info("S3 at {} answers again", url_.display());
  breaker_.answered(env_.monotonic_ns());
  breaker_.close();
  available_ = true;
}

void S3ClientImpl::answered(Call& call, long status, std::string answer) {
  const S3Call& request = call.call;
  const std::uint64_t got = answer.size();
  if (status == 206 || status == 200 || status == 204) {
    const bool enough = got == request.bytes || (request.at_most && got < request.bytes);
    if (request.bytes > 0 && !enough) {
      return finish(
          call, data_loss(fmt::format("{} has {} of {} bytes", request.key, got, request.bytes)));
    }
    return finish(call, std::move(answer));
  }
  if (status == 404) return finish(call, not_found(request.key + " is not in S3"));
  if (status == 416) return finish(call, data_loss(request.key + " is shorter than it was"));
  if (status == 401 || status == 403) {
    return finish(call, permission_denied(fmt::format(
                            "S3 refuses {} of {} (HTTP {}): check the credentials and the "
                            "bucket's policy",
                            request.method, request.key, status)));
  }
  finish(call,
         failed_precondition(fmt::format("S3 answered {} with HTTP {}", request.key, status)));
}

void S3ClientImpl::unanswered(const CallPtr& call, bool silent, const std::string& why) {
  const std::int64_t now = env_.monotonic_ns();
  if (silent) {
    log::warn("S3 at {}: {}; going on without it", url_.display(), why);
    breaker_.trip(now);
    available_ = false;
  }
  const std::int64_t pause = kRetryNs << call->tries;
  if (!breaker_.open() && ++call->tries < kMaxTries && now + pause < call->deadline_ns) {
    // Not all at the same moment again.
    queue_.again(call, now + pause + static_cast<std::int64_t>(env_.random_u64() % kRetryNs));
    return;
  }
  finish(*call, unavailable("S3 does not answer: " + why));
}

}  // namespace

std::string S3Url::display() const {
  return fmt::format("s3://{}/{}{}", bucket, prefix, endpoint.empty() ? "" : " at " + endpoint);
}

Result<S3Url> parse_s3_url(std::string_view url) {
  const auto bad = [](const std::string& why) {
    return invalid_argument("the URL of an S3 store: " + why +
                            " (s3://bucket[/prefix][?endpoint=http[s]://host[:port]&region=NAME])");
  };
  constexpr std::string_view kScheme = "s3://";
  constexpr std::string_view kSafe =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._/";
  if (!url.starts_with(kScheme)) return bad("it does not begin with s3://");
  url.remove_prefix(kScheme.size());
  S3Url out;
  const std::size_t question = url.find('?');
  std::string_view query =
      question == std::string_view::npos ? std::string_view() : url.substr(question + 1);
  const std::string_view path = url.substr(0, question);
  const std::size_t slash = path.find('/');
  out.bucket = path.substr(0, slash);
  if (slash != std::string_view::npos) out.prefix = path.substr(slash + 1);
  while (out.prefix.ends_with('/')) out.prefix.pop_back();
  if (!out.prefix.empty()) out.prefix += '/';
  if (out.bucket.empty()) return bad("the bucket is missing");
  if (path.find_first_not_of(kSafe) != std::string_view::npos) {
    return bad("bucket and prefix are letters, digits and -._/");
  }
  while (!query.empty()) {
    const std::size_t end = query.find('&');
    const std::string_view part = query.substr(0, end);
    query = end == std::string_view::npos ? std::string_view() : query.substr(end + 1);
    const std::size_t equals = part.find('=');
    const std::string_view name = part.substr(0, equals);
    std::string value(equals == std::string_view::npos ? "" : part.substr(equals + 1));
    if (name == "endpoint" && (value.starts_with("http://") || value.starts_with("https://"))) {
      while (value.ends_with('/')) value.pop_back();
      out.endpoint = value;
    } else if (name == "region" && !value.empty()) {
      out.region = value;
    } else {
      return bad(fmt::format("'{}' can't be read", part));
    }
  }
  return out;
}

Result<std::unique_ptr<S3Client>> S3Client::open(Env& env, S3Url url, S3Credentials credentials) {
  auto client = std::make_unique<S3ClientImpl>(env, std::move(url), std::move(credentials));
  HCACHE_RETURN_IF_ERROR(client->start());
  return std::unique_ptr<S3Client>(std::move(client));
}

}  // namespace hcache::store
