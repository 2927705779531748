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
#include "base/sync.h"

namespace hcache::store {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kFirstPauseNs = 200 * kMs;
constexpr std::int64_t kLongestPauseNs = 30'000 * kMs;
constexpr std::int64_t kRetryNs = 50 * kMs;  // before the first repetition; doubles
constexpr int kMaxTries = 5;
constexpr int kMaxFailures = 3;  // in a row: the breaker opens
constexpr std::int64_t kProbeNs = 2'000 * kMs;
constexpr std::size_t kMaxAtOnce = 32;  // requests in flight
constexpr std::size_t kMaxBulk = 4;     // … of them bulk
constexpr long kConnectMs = 2000;
constexpr const char* kProbeKey = "hcache-probe";

struct Call {
  S3Call call;
  int tries = 0;
  std::int64_t not_before = 0;
  bool probe = false;
};

// A request in flight.
struct Transfer {
  Call call;
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
  void call(S3Call call) override HCACHE_EXCLUDES(mutex_);
  bool available() const override { return available_; }

 private:
  void run() HCACHE_EXCLUDES(mutex_);
  void take_inbox() HCACHE_EXCLUDES(mutex_);
  void start_due();
  void begin(Call call);
  void end(CURL* handle, CURLcode result);
  void answered(Call call, long status, std::string answer);
  void unanswered(Call call, const std::string& why);
  void expire();
  void probe();
  [[nodiscard]] std::string address_of(const std::string& key) const;

  Env& env_;
  const S3Url url_;
  const S3Credentials credentials_;
  CURLM* multi_ = nullptr;
  std::atomic<bool> available_ = true;

  Mutex mutex_;
  std::vector<Call> inbox_ HCACHE_GUARDED_BY(mutex_);
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;

  // The thread's own.
  std::deque<Call> waiting_;
  std::deque<Call> bulk_;
  std::vector<std::unique_ptr<Transfer>> flying_;
  std::vector<CURL*> idle_;
  std::size_t bulk_flying_ = 0;
  bool stopping_ = false;
  int failures_ = 0;  // in a row
  int pauses_ = 0;
  bool probing_ = false;
  std::int64_t probe_after_ = 0;

  std::thread thread_;
};

S3ClientImpl::~S3ClientImpl() {
  if (thread_.joinable()) {
    {
      MutexLock lock(mutex_);
      stop_ = true;
    }
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
  {
    MutexLock lock(mutex_);
    inbox_.emplace_back();
    inbox_.back().call = std::move(call);
  }
  curl_multi_wakeup(multi_);
}

void S3ClientImpl::run() {
  while (true) {
    take_inbox();
    if (stopping_) break;
    expire();
    probe();
    start_due();
    int running = 0;
    curl_multi_perform(multi_, &running);
    int left = 0;
    while (const CURLMsg* message = curl_multi_info_read(multi_, &left)) {
      if (message->msg == CURLMSG_DONE) end(message->easy_handle, message->data.result);
    }
    const bool calm = flying_.empty() && waiting_.empty() && bulk_.empty() && available_;
    curl_multi_poll(multi_, nullptr, 0, calm ? 60'000 : 20, nullptr);
  }
  const auto cancel = [](Call& call) {
    if (call.call.done) call.call.done(cancelled("the S3 client is gone"));
  };
  for (Call& call : waiting_) cancel(call);
  for (Call& call : bulk_) cancel(call);
  for (const auto& transfer : flying_) {
    curl_multi_remove_handle(multi_, transfer->handle);
    curl_easy_cleanup(transfer->handle);
    curl_slist_free_all(transfer->headers);
    cancel(transfer->call);
  }
  for (CURL* handle : idle_) curl_easy_cleanup(handle);
}

void S3ClientImpl::take_inbox() {
  std::vector<Call> calls;
  {
    MutexLock lock(mutex_);
    calls.swap(inbox_);
    stopping_ = stop_;
  }
  for (Call& call : calls) {
    if (!available_ && !stopping_) {
      call.call.done(unavailable("S3 does not answer"));
    } else {
      (call.call.bulk ? bulk_ : waiting_).push_back(std::move(call));
    }
  }
}

void S3ClientImpl::expire() {
  const std::int64_t now = env_.monotonic_ns();
  for (std::deque<Call>* queue : {&waiting_, &bulk_}) {
    std::deque<Call> left;
    for (Call& call : *queue) {
      if (now < call.call.deadline_ns) {
        left.push_back(std::move(call));
      } else if (call.call.done) {
        call.call.done(unavailable("no answer from S3 in time"));
      }
    }
    queue->swap(left);
  }
}

void S3ClientImpl::probe() {
  const std::int64_t now = env_.monotonic_ns();
  if (available_ || probing_ || now < probe_after_) return;
  probing_ = true;
  Call call;
  call.call.key = kProbeKey;
  call.call.deadline_ns = now + kProbeNs;
  call.probe = true;
  begin(std::move(call));
}

void S3ClientImpl::start_due() {
  const std::int64_t now = env_.monotonic_ns();
  const auto take = [&](std::deque<Call>& queue, std::size_t most, std::size_t& count) {
    for (std::size_t i = 0; i < queue.size() && flying_.size() < kMaxAtOnce && count < most;) {
      if (queue[i].not_before > now) {
        ++i;
        continue;
      }
      Call call = std::move(queue[i]);
      queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(i));
      begin(std::move(call));
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

void S3ClientImpl::begin(Call call) {
  auto transfer = std::make_unique<Transfer>();
  transfer->call = std::move(call);
  const S3Call& request = transfer->call.call;
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
  const std::int64_t left = (request.deadline_ns - env_.monotonic_ns()) / kMs;
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
  if (!credentials_.access_key.empty()) {
    const std::string scheme = fmt::format("aws:amz:{}:s3", url_.region);
    curl_easy_setopt(handle, CURLOPT_AWS_SIGV4, scheme.c_str());
    const std::string who = credentials_.access_key + ":" + credentials_.secret_key;
    curl_easy_setopt(handle, CURLOPT_USERPWD, who.c_str());
    if (!credentials_.session_token.empty()) {
      const std::string token = "x-amz-security-token: " + credentials_.session_token;
      transfer->headers = curl_slist_append(transfer->headers, token.c_str());
    }
  }
  curl_easy_setopt(handle, CURLOPT_HTTPHEADER, transfer->headers);
  curl_multi_add_handle(multi_, handle);
  flying_.push_back(std::move(transfer));
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
  Call& call = transfer->call;
  if (call.call.bulk) --bulk_flying_;
  if (call.probe) {
    probing_ = false;
    if (result == CURLE_OK && status < 500) {
      log::info("S3 at {} answers again", url_.display());
      available_ = true;
      failures_ = 0;
      pauses_ = 0;
    } else {
      probe_after_ =
          env_.monotonic_ns() + std::min(kLongestPauseNs, kFirstPauseNs << std::min(++pauses_, 10));
    }
    return;
  }
  if (result == CURLE_OK && status < 500 && status != 429) {
    failures_ = 0;
    return answered(std::move(call), status, std::move(transfer->answer));
  }
  unanswered(std::move(call), result != CURLE_OK ? curl_easy_strerror(result)
                                                 : fmt::format("HTTP status {}", status));
}

void S3ClientImpl::answered(Call call, long status, std::string answer) {
  const S3Call& request = call.call;
  const std::uint64_t got = answer.size();
  if (status == 206 || status == 200 || status == 204) {
    if (request.bytes > 0 && got != request.bytes) {
      return request.done(
          data_loss(fmt::format("{} has {} of {} bytes", request.key, got, request.bytes)));
    }
    return request.done(std::move(answer));
  }
  if (status == 404) return request.done(not_found(request.key + " is not in S3"));
  if (status == 416) return request.done(data_loss(request.key + " is shorter than it was"));
  if (status == 401 || status == 403) {
    return request.done(permission_denied(
        fmt::format("S3 refuses {} of {} (HTTP {}): check the credentials and the bucket's policy",
                    request.method, request.key, status)));
  }
  request.done(
      failed_precondition(fmt::format("S3 answered {} with HTTP {}", request.key, status)));
}

void S3ClientImpl::unanswered(Call call, const std::string& why) {
  const std::int64_t now = env_.monotonic_ns();
  if (++failures_ >= kMaxFailures && available_) {
    log::warn("S3 at {}: {}; going on without it", url_.display(), why);
    available_ = false;
    pauses_ = 0;
    probe_after_ = now + kFirstPauseNs;
  }
  const std::int64_t pause = kRetryNs << call.tries;
  if (available_ && ++call.tries < kMaxTries && now + pause < call.call.deadline_ns) {
    // Not all at the same moment again.
    call.not_before = now + pause + static_cast<std::int64_t>(env_.random_u64() % kRetryNs);
    (call.call.bulk ? bulk_ : waiting_).push_back(std::move(call));
    return;
  }
  call.call.done(unavailable("S3 does not answer: " + why));
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
