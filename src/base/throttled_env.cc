#include "base/throttled_env.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

#include "base/sync.h"

namespace hcache {
namespace {

constexpr double kNsPerSecond = 1e9;
// Of the link's time between two partial completions of a read.
constexpr double kReportS = 2e-3;
// The longest sleep before a queue looks again whether its reads were cancelled or sped up.
constexpr std::int64_t kMaxSleepNs = 10'000'000;

}  // namespace

// A request of a queue until its last completion.
struct ThrottledEnv::Transfer {
  std::uint64_t tag = 0;
  double length = 0;     // bytes
  double carried = 0;    // of them, over the link
  double reported = 0;   // of those, by partial completions
  bool arrived = false;  // from the base Env; `completion` holds its result
  bool cancelled = false;
  IoCompletion completion;

  [[nodiscard]] bool done() const { return carried >= length; }
};

// Reads in the order in which they cross. Threading: any thread.
struct ThrottledEnv::Link {
  explicit Link(Env& base, double bytes_per_s)
      : env(base), rate(bytes_per_s), now_ns(base.monotonic_ns()) {}

  // Carries what could cross since the last call.
  void advance() HCACHE_REQUIRES(mutex) {
    const std::int64_t last_ns = std::exchange(now_ns, env.monotonic_ns());
    double budget = rate * static_cast<double>(now_ns - last_ns) / kNsPerSecond;
    while (!crossing.empty()) {
      Transfer& first = *crossing.front();
      const double left = std::max(0.0, first.length - first.carried);
      if (rate > 0 && left > budget + 0.5) {
        first.carried += budget;
        return;
      }
      budget -= left;
      first.carried = first.length;
      crossing.pop_front();
    }
  }
  void add(Transfer* transfer) HCACHE_REQUIRES(mutex) {
    advance();
    crossing.push_back(transfer);
  }
  void remove(Transfer* transfer) HCACHE_REQUIRES(mutex) {
    advance();
    std::erase(crossing, transfer);
  }
  // Nanoseconds until so many bytes of a transfer that is crossing will be over, at this rate.
  [[nodiscard]] std::int64_t ns_until(const Transfer& wanted, double bytes) const
      HCACHE_REQUIRES(mutex) {
    double ahead = bytes - wanted.carried;
    for (const Transfer* transfer : crossing) {
      if (transfer == &wanted) break;
      ahead += transfer->length - transfer->carried;
    }
    return static_cast<std::int64_t>(std::ceil(std::min(ahead / rate, 1.0) * kNsPerSecond));
  }

  Env& env;
  mutable Mutex mutex;
  double rate HCACHE_GUARDED_BY(mutex);  // bytes/s; 0: not slowed
  std::int64_t now_ns HCACHE_GUARDED_BY(mutex);
  std::deque<Transfer*> crossing HCACHE_GUARDED_BY(mutex);
};

class ThrottledEnv::ThrottledQueue final : public IoQueue {
 public:
  ThrottledQueue(Env& env, Link& link, std::unique_ptr<IoQueue> base)
      : env_(env), link_(link), base_(std::move(base)) {}
  ~ThrottledQueue() override { cancel(); }

  Status submit(const IoRequest& request) override {
    if (in_flight() == depth()) return resource_exhausted("the I/O queue is full");
    auto transfer = std::make_unique<Transfer>();
    transfer->tag = request.tag;
    if (request.op == IoOp::kRead) transfer->length = static_cast<double>(request.buffer.size());
    IoRequest tagged = request;
    tagged.tag = reinterpret_cast<std::uintptr_t>(transfer.get());
    HCACHE_RETURN_IF_ERROR(base_->submit(tagged));
    MutexLock lock(link_.mutex);
    link_.add(transfer.get());
    transfers_.push_back(std::move(transfer));
    return {};
  }

  Status reap(bool block, std::vector<IoCompletion>* out) override {
    const std::size_t before = out->size();
    while (true) {
      arrivals_.clear();
      HCACHE_RETURN_IF_ERROR(base_->reap(block && !any_arrived(), &arrivals_));
      std::int64_t wait_ns = 0;
      {
        MutexLock lock(link_.mutex);
        for (IoCompletion& arrival : arrivals_) take(std::move(arrival));
        wait_ns = hand_over(out);
        if (!block || out->size() > before || transfers_.empty()) return {};
      }
      if (wait_ns > 0) env_.sleep_ns(std::min(wait_ns, kMaxSleepNs));
    }
  }

  void cancel() override {
    base_->cancel();
    MutexLock lock(link_.mutex);
    for (const auto& transfer : transfers_) {
      link_.remove(transfer.get());
      transfer->cancelled = !transfer->done();
    }
  }

  [[nodiscard]] std::size_t in_flight() const override {
    MutexLock lock(link_.mutex);
    return transfers_.size();
  }
  [[nodiscard]] std::size_t depth() const override { return base_->depth(); }
  [[nodiscard]] const char* name() const override { return base_->name(); }

 private:
  // Then the link is what is waited for.
  [[nodiscard]] bool any_arrived() const {
    MutexLock lock(link_.mutex);
    return std::any_of(transfers_.begin(), transfers_.end(),
                       [](const auto& transfer) { return transfer->arrived; });
  }

  void take(IoCompletion arrival) HCACHE_REQUIRES(link_.mutex) {
    if (arrival.partial) return;
    auto& transfer = *reinterpret_cast<Transfer*>(static_cast<std::uintptr_t>(arrival.tag));
    transfer.arrived = true;
    // What a short or failed read does not bring need not cross.
    const auto bytes = static_cast<double>(arrival.status.ok() ? arrival.bytes : 0);
    transfer.length = std::min(transfer.length, bytes);
    transfer.completion = std::move(arrival);
    transfer.completion.tag = transfer.tag;
  }

  // Completes what the base has and the link has carried. Returns when there is more to report,
  // in nanoseconds from now; 0: the base decides.
  std::int64_t hand_over(std::vector<IoCompletion>* out) HCACHE_REQUIRES(link_.mutex) {
    link_.advance();
    std::int64_t wait_ns = 0;
    const double piece = link_.rate * kReportS;
    const auto complete =
        [&](const std::unique_ptr<Transfer>& transfer) HCACHE_REQUIRES(link_.mutex) {
          if (!transfer->arrived) return false;
          IoCompletion& completion = transfer->completion;
          if (transfer->cancelled && completion.status.ok()) {
            completion.status = hcache::cancelled("the read was cancelled");
            completion.bytes = 0;
          }
          if (transfer->cancelled || transfer->done()) {
            link_.remove(transfer.get());
            out->push_back(std::move(completion));
            return true;
          }
          if (transfer->carried >= transfer->reported + piece) {
            transfer->reported = transfer->carried;
            out->push_back({.tag = transfer->tag,
                            .status = {},
                            .bytes = static_cast<std::size_t>(transfer->carried),
                            .partial = true});
          }
          const double next = std::min(transfer->length, transfer->reported + piece);
          const std::int64_t ns = std::max<std::int64_t>(1, link_.ns_until(*transfer, next));
          wait_ns = wait_ns == 0 ? ns : std::min(wait_ns, ns);
          return false;
        };
    std::erase_if(transfers_, complete);
    return wait_ns;
  }

  Env& env_;
  Link& link_;
  std::vector<IoCompletion> arrivals_;
  // In order of submission. Only the owner's thread adds and removes.
  std::deque<std::unique_ptr<Transfer>> transfers_ HCACHE_GUARDED_BY(link_.mutex);
  std::unique_ptr<IoQueue> base_;  // ends first: it writes into what the transfers stand for
};

ThrottledEnv::ThrottledEnv(Env& base, double bytes_per_s)
    : base_(base), link_(std::make_unique<Link>(base, bytes_per_s)) {}
ThrottledEnv::~ThrottledEnv() = default;

void ThrottledEnv::set_read_bytes_per_s(double bytes_per_s) {
  MutexLock lock(link_->mutex);
  link_->advance();
  link_->rate = bytes_per_s;
}

double ThrottledEnv::nominal_read_bytes_per_s() const {
  MutexLock lock(link_->mutex);
  return link_->rate;
}

Result<std::unique_ptr<IoQueue>> ThrottledEnv::new_io_queue(std::size_t depth) {
  HCACHE_ASSIGN_OR_RETURN(auto queue, base_.new_io_queue(depth));
  return std::unique_ptr<IoQueue>(
      std::make_unique<ThrottledQueue>(base_, *link_, std::move(queue)));
}

Result<std::unique_ptr<File>> ThrottledEnv::open_file(const std::string& path,
                                                      const OpenOptions& options) {
  return base_.open_file(path, options);
}
Status ThrottledEnv::make_dirs(const std::string& path) { return base_.make_dirs(path); }
Result<std::vector<std::string>> ThrottledEnv::list_dir(const std::string& path) {
  return base_.list_dir(path);
}
Result<FileInfo> ThrottledEnv::file_info(const std::string& path) { return base_.file_info(path); }
Status ThrottledEnv::rename_file(const std::string& from, const std::string& to) {
  return base_.rename_file(from, to);
}
Status ThrottledEnv::remove_path(const std::string& path) { return base_.remove_path(path); }
Status ThrottledEnv::sync_dir(const std::string& path) { return base_.sync_dir(path); }
Result<SpaceInfo> ThrottledEnv::space(const std::string& path) { return base_.space(path); }
Result<std::unique_ptr<FileLock>> ThrottledEnv::lock_file(const std::string& path) {
  return base_.lock_file(path);
}
std::int64_t ThrottledEnv::monotonic_ns() { return base_.monotonic_ns(); }
std::int64_t ThrottledEnv::wall_ns() { return base_.wall_ns(); }
void ThrottledEnv::sleep_ns(std::int64_t duration_ns) { base_.sleep_ns(duration_ns); }
std::uint64_t ThrottledEnv::random_u64() { return base_.random_u64(); }

}  // namespace hcache
