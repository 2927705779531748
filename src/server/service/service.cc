#include "service.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "base/tokens.h"

namespace hcache::server {
namespace {

constexpr int64_t kNsPerSecond = 1'000'000'000;
constexpr int64_t kIoPollNs = 1'000'000;
constexpr int64_t kIdleWaitNs = 100'000'000;
constexpr int64_t kExpiryNs = 60 * kNsPerSecond;
constexpr int64_t kStatNs = 5 * kNsPerSecond;
constexpr int64_t kStopPollNs = 10'000'000;
// Separates the parts of a salt, none of which can contain it.
constexpr char kSaltSeparator = '\x1f';

}  // namespace

Result<std::unique_ptr<Service>> Service::open(Env& env, const ServerOptions& options) {
  std::unique_ptr<Service> service(new Service(env, options));
  HCACHE_RETURN_IF_ERROR(service->init());
  return service;
}

Status Service::init() {
  started_s_ = env_.wall_ns() / kNsPerSecond;
  const std::string& path = options_.runtime.model_path;
  model_name_ =
      options_.alias.empty() ? std::filesystem::path(path).stem().string() : options_.alias;
  HCACHE_ASSIGN_OR_RETURN(tokenizer_, model::Tokenizer::load(path));
  HCACHE_ASSIGN_OR_RETURN(chat_template_,
                          model::ChatTemplate::create(*tokenizer_, options_.chat_template));
  // On a thread that ends: OpenMP keeps a team for each thread that has computed, and with more
  // threads in teams than cores it puts them to sleep between any two operations of a step.
  Status opened;
  std::thread([&] {
    auto runtime = state::Runtime::open(env_, options_.runtime);
    opened = runtime.status();
    if (runtime.ok()) runtime_ = std::move(*runtime);
  }).join();
  HCACHE_RETURN_IF_ERROR(opened);
  conversations_ = std::make_unique<Conversations>(env_, *tokenizer_, runtime_->store(),
                                                   runtime_->fingerprint());
  HCACHE_RETURN_IF_ERROR(conversations_->load());
  EngineExecutorOptions executor;
  executor.max_sequences = options_.max_sequences;
  executor.restore_mode = options_.restore_mode;
  executor.fetch = options_.scheduler.fetch;
  executor.dram_bytes = options_.runtime.dram_bytes;
  executor_ = std::make_unique<EngineExecutor>(env_, *runtime_, executor);
  HCACHE_ASSIGN_OR_RETURN(scheduler_, scheduler::Scheduler::create(*executor_, options_.scheduler));
  keeper_ = std::make_unique<WorkQueue>(1);
  writer_ = std::make_unique<WorkQueue>(1);
  intake_ = std::make_unique<WorkQueue>(options_.intake_threads);
  events_ = std::make_unique<Events>([this] { return event_text(); });
  scheduler_thread_ = std::thread([this] { run_scheduler(); });
  return {};
}

void Service::run_scheduler() {
  int64_t next_expiry_ns = env_.monotonic_ns() + kExpiryNs;
  while (!stop_scheduler_.load(std::memory_order_acquire)) {
    const scheduler::Activity activity = scheduler_->run_once();
    if (activity != scheduler::Activity::kWorked) {
      scheduler_->wait_for_work(activity == scheduler::Activity::kWaiting ? kIoPollNs
                                                                          : kIdleWaitNs);
    }
    if (env_.monotonic_ns() < next_expiry_ns) continue;
    next_expiry_ns = env_.monotonic_ns() + kExpiryNs;
    keeper_->post([this] {
      const Result<int64_t> removed = conversations_->expire();
      if (!removed.ok()) log::warn("sessions can't expire: {}", removed.status().to_string());
    });
  }
}

Status Service::stop(int64_t grace_ns) {
  if (!scheduler_thread_.joinable()) return {};
  events_.reset();
  intake_.reset();  // what was received is submitted
  scheduler_->drain();
  const int64_t end_ns = env_.monotonic_ns() + grace_ns;
  const auto busy = [this] { return scheduler_->running() + scheduler_->queued() > 0; };
  while (busy() && env_.monotonic_ns() < end_ns) env_.sleep_ns(kStopPollNs);
  scheduler_->stop_all(unavailable("the server is shutting down"));
  while (busy()) env_.sleep_ns(kStopPollNs);
  stop_scheduler_.store(true, std::memory_order_release);
  scheduler_->wake();
  scheduler_thread_.join();
  writer_.reset();
  keeper_.reset();
  // The engine's owner is this thread from here on.
  scheduler_.reset();
  executor_.reset();
  conversations_.reset();  // its pins
  return runtime_->close();
}

Service::~Service() {
  stop(0).ignore("a destructor has nobody to tell; Runtime::close logs what it meets");
}

Salt Service::salt_of(const http::Request& request, const std::string& cache_salt) const {
  std::string salt = options_.runtime.salt;
  if (request.key_index >= 0 && options_.salt_per_key) {
    salt += kSaltSeparator;
    salt += to_hex(options_.http.api_keys[static_cast<size_t>(request.key_index)].hash);
  }
  Salt out = own_salt(salt);
  if (!cache_salt.empty()) out.id = salt_id(salt + kSaltSeparator + cache_salt);
  return out;
}

// Counting a large store takes a while: a few seconds old is new enough to watch.
store::StoreStat Service::store_stat() {
  MutexLock lock(stat_mutex_);
  const int64_t now = env_.monotonic_ns();
  if (store() != nullptr && (stat_ns_ == 0 || now - stat_ns_ > kStatNs)) {
    if (auto stat = store()->stat(); stat.ok()) stat_ = std::move(*stat);
    stat_ns_ = now;
  }
  return stat_;
}

std::string Service::event_text() {
  const scheduler::Snapshot s = scheduler_->stats();
  nlohmann::json json = {
      {"arena", {{"cells", s.arena_cells}, {"active", s.active_cells}, {"idle", s.idle_cells}}},
      {"requests",
       {{"queued", s.queued},
        {"fetching", s.fetching},
        {"restoring", s.restoring},
        {"prefill", s.prefill},
        {"decoding", s.decoding},
        {"done", s.done},
        {"failed", s.failed}}}};
  if (store() != nullptr) {
    const store::StoreStat stat = store_stat();
    json["tiers"] = {{"dram", {{"used", stat.dram_bytes}, {"capacity", stat.dram_capacity_bytes}}},
                     {"disk", {{"used", stat.allocated_bytes}, {"capacity", stat.quota_bytes}}}};
    json["sessions"] = stat.sessions;
  }
  return json.dump();
}

std::string Service::metrics_text() {
  MetricsSnapshot snapshot;
  snapshot.scheduler = scheduler_->stats();
  snapshot.store = store_stat();
  if (const state::Saver* saver = runtime_->saver(); saver != nullptr) {
    snapshot.saver = saver->stats();
  }
  if (const http::Server* http = http_.load(std::memory_order_acquire); http != nullptr) {
    snapshot.http = http->counters();
  }
  snapshot.bytes_read_ahead = executor_->bytes_read_ahead();
  return metrics_.text(snapshot);
}

Status Service::remove_session(const Salt& salt, const std::string& name) {
  const SaltId& id = salt.id;
  HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, conversations_->tokens(id, name));
  HCACHE_RETURN_IF_ERROR(conversations_->remove(id, name));
  // What other conversations begin with stays.
  int64_t shared = 0;
  for (const Conversation& other : conversations_->list(id)) {
    const auto theirs = conversations_->tokens(id, other.name);
    if (!theirs.ok()) continue;  // gone meanwhile
    shared = std::max(shared, common_prefix(tokens, *theirs));
  }
  scheduler_->forget(salt, std::move(tokens), shared);
  return {};
}

std::string Service::new_id() {
  return fmt::format("{:016x}{:016x}", env_.random_u64(), env_.random_u64());
}

}  // namespace hcache::server
