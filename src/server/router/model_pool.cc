#include "model_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <limits>
#include <utility>

#include "base/ids.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/units.h"
#include "model_files.h"

namespace hcache::router {
namespace {

constexpr std::chrono::milliseconds kTick{100};
constexpr std::chrono::milliseconds kSoon{5};  // for a server that is about to end
constexpr double kNsPerSecond = 1e9;
constexpr std::size_t kMostWaiting = 1024;
constexpr std::size_t kMostWaitingBytes = std::size_t{1} << 30;
// How long a request whose server went away waits for how that server ended.
constexpr std::int64_t kBrokenNs = 5'000'000'000;
// A server that has not ended so long after it was told to is killed; its disk may be slow.
constexpr std::int64_t kEndNs = 300'000'000'000;

// How often the server of a model that seems to be idle is asked what it does: so often before it
// would leave, and no more seldom than so.
constexpr std::int64_t kAsksPerIdleTime = 4;
constexpr std::int64_t kAskNs = 1'000'000'000;
constexpr std::string_view kRequestsHeader = "HCache-Requests";

constexpr int kBadRequest = 400;
constexpr int kTooMany = 429;
constexpr int kBadGateway = 502;
constexpr int kNotNow = 503;

// Of the versions of its files: enough to tell replaced ones.
std::string id_of(Env& env, const ModelFile& file) {
  Hasher hasher("hcache model file");
  hasher.add_u64(file.bytes);
  for (const std::string& path : {file.path, file.projector}) {
    FileIdentity identity;
    if (const auto opened = env.open_file(path, {}); opened.ok()) {
      if (const auto found = (*opened)->identity(); found.ok()) identity = *found;
    }
    hasher.add(path).add_u64(static_cast<std::uint64_t>(identity.mtime_ns));
  }
  return to_hex(hasher.finish<Id128<struct ModelFileTag>>());
}

// "exit code 2: no such file".
std::string how_it_ended(const ExitStatus& status, const std::string& last_line) {
  return last_line.empty() ? to_text(status) : fmt::format("{}: {}", to_text(status), last_line);
}

}  // namespace

ModelPool::ModelPool(Env& env, boost::asio::io_context& context, const ModelRouterOptions& options)
    : env_(env),
      context_(context),
      options_(options),
      limits_{.max_loaded = options.max_loaded,
              .idle_ns = options.idle_ns,
              .memory_bytes = options.memory_bytes,
              .patience_ns = options.patience_ns},
      ticker_(context) {}

void ModelPool::say(const Model& m, const std::string& line) const {
  if (options_.on_line) options_.on_line(m.status.file.name, line);
}

// ---- The folder ---------------------------------------------------------------------------------

Status ModelPool::scan() {
  std::vector<ModelFile> files;
  if (options_.only) {
    files.push_back(*options_.only);
  } else {
    HCACHE_ASSIGN_OR_RETURN(files, find_models(env_, options_.models_dir));
  }
  for (auto& [name, m] : models_) m->gone = true;
  for (const ModelFile& file : files) add(file);
  for (auto& [name, m] : models_) {
    if (m->gone && m->status.state != ModelState::kUnloaded) m->unload_asked = true;
    if (m->gone) fail_waiting(*m, kNotNow, fmt::format("the model '{}' was removed", name));
  }
  std::erase_if(models_, [](const auto& entry) {
    const Model& m = *entry.second;
    return m.gone && m.status.state == ModelState::kUnloaded && m.running == 0 && m.broken.empty();
  });
  return {};
}

void ModelPool::add(const ModelFile& file) {
  std::unique_ptr<Model>& m = models_[file.name];
  if (!m) m = std::make_unique<Model>();
  m->gone = false;
  const std::string id = id_of(env_, file);
  if (m->status.id == id) return;
  // Of a replaced file the old version may still be loaded.
  if (m->status.state != ModelState::kUnloaded) m->unload_asked = true;
  m->status.id = id;
  m->status.file = file;
  m->status.facts = {};
  m->status.facts.memory_bytes = file.bytes;
  if (!options_.describe) return;
  Result<ModelFacts> facts = options_.describe(file);
  if (facts.ok()) {
    m->status.facts = std::move(*facts);
  } else {
    say(*m, facts.status().message());
  }
}

std::string ModelPool::find(std::string_view name) const {
  const auto known = [&](std::string_view text) {
    const auto found = models_.find(std::string(text));
    return found != models_.end() && !found->second->gone;
  };
  if (known(name)) return std::string(name);
  for (const std::string_view ending : {":latest", ".gguf"}) {
    if (!name.ends_with(ending)) continue;
    const std::string_view rest = name.substr(0, name.size() - ending.size());
    if (known(rest)) return std::string(rest);
  }
  return {};
}

std::vector<ModelStatus> ModelPool::statuses() const {
  std::vector<ModelStatus> out;
  for (const auto& [name, m] : models_) {
    if (m->gone) continue;
    ModelStatus status = m->status;
    status.running = m->running;
    status.waiting = static_cast<std::int64_t>(m->waiting.size());
    status.wanted = status.state == ModelState::kUnloaded && !m->waiting.empty();
    out.push_back(std::move(status));
  }
  return out;
}

// ---- Requests -----------------------------------------------------------------------------------

bool ModelPool::takes_requests(const Model& m) const {
  return m.status.state == ModelState::kLoaded && !m.unload_asked && &m != held_;
}

void ModelPool::submit(const std::string& name, std::shared_ptr<Relay> relay, bool autoload) {
  Model& m = model(name);
  if (closed_) return relay->refuse(kNotNow, "the server is stopping");
  if (takes_requests(m)) return forward(m, relay);
  if (!autoload && m.status.state == ModelState::kUnloaded && m.waiting.empty()) {
    return relay->refuse(kBadRequest, fmt::format("model '{}' is not loaded", name));
  }
  if (waiting_ >= kMostWaiting || waiting_bytes_ + relay->bytes() > kMostWaitingBytes) {
    return relay->refuse(kTooMany, "too many requests wait for models; try again later");
  }
  enqueue(m, std::move(relay));
  swap();
}

void ModelPool::observe(const std::string& name, const std::shared_ptr<Relay>& relay) {
  Model& m = model(name);
  if (closed_) return relay->refuse(kNotNow, "the server is stopping");
  if (m.status.state != ModelState::kLoaded) {
    return relay->refuse(kBadRequest, fmt::format("model '{}' is not loaded", name));
  }
  relay->run(m.port, [relay](ForwardEnd how) {
    if (how == ForwardEnd::kNoHead) relay->refuse(kBadGateway, "the model's server went away");
  });
}

void ModelPool::enqueue(Model& m, std::shared_ptr<Relay> relay) {
  ++waiting_;
  waiting_bytes_ += relay->bytes();
  relay->on_gone([this, &m, raw = relay.get()] {
    const auto found = std::ranges::find_if(
        m.waiting, [raw](const Waiting& waiting) { return waiting.relay.get() == raw; });
    if (found == m.waiting.end()) return;
    --waiting_;
    waiting_bytes_ -= raw->bytes();
    m.waiting.erase(found);
    swap();
  });
  m.waiting.push_back({.relay = std::move(relay), .since_ns = env_.monotonic_ns()});
}

void ModelPool::dispatch(Model& m) {
  std::deque<Waiting> ready;
  ready.swap(m.waiting);
  for (const Waiting& waiting : ready) {
    if (!waiting.relay) continue;
    --waiting_;
    waiting_bytes_ -= waiting.relay->bytes();
    forward(m, waiting.relay);
  }
}

void ModelPool::fail(const Waiting& waiting, int status, const std::string& message) {
  if (!waiting.relay) return;
  --waiting_;
  waiting_bytes_ -= waiting.relay->bytes();
  waiting.relay->on_gone(nullptr);
  waiting.relay->refuse(status, message);
}

void ModelPool::fail_waiting(Model& m, int status, const std::string& message) {
  std::deque<Waiting> failed;
  failed.swap(m.waiting);
  for (const Waiting& waiting : failed) fail(waiting, status, message);
}

void ModelPool::fail_late(Model& m) {
  const std::int64_t now = env_.monotonic_ns();
  while (!m.waiting.empty() && now - m.waiting.front().since_ns > options_.wait_ns) {
    const Waiting late = std::move(m.waiting.front());
    m.waiting.pop_front();
    fail(late, kNotNow,
         fmt::format("the model '{}' was not ready within {}: others hold the room that it needs, "
                     "or it takes longer to load",
                     m.status.file.name, format_duration(options_.wait_ns)));
  }
}

// Clients whose requests its server left unanswered.
void ModelPool::answer_broken(Model& m) {
  std::vector<Broken> broken;
  broken.swap(m.broken);
  for (const Broken& b : broken) {
    b.relay->refuse(kBadGateway, fmt::format("the model '{}' went away before it had answered "
                                             "({}); it is loaded again for the next request",
                                             m.status.file.name, m.how_ended));
  }
}

void ModelPool::forward(Model& m, const std::shared_ptr<Relay>& relay) {
  ++m.running;
  ++m.status.requests;
  m.used_ns = env_.monotonic_ns();
  relay->run(m.port, [this, &m, relay](ForwardEnd how) { on_forwarded(m, relay, how); });
}

void ModelPool::on_forwarded(Model& m, const std::shared_ptr<Relay>& relay, ForwardEnd how) {
  --m.running;
  m.used_ns = env_.monotonic_ns();
  if (how == ForwardEnd::kNoHead) m.broken.push_back({.relay = relay, .since_ns = m.used_ns});
  look_after(m);
  swap();
}

// ---- Loading and unloading ----------------------------------------------------------------------

Status ModelPool::load(const std::string& name) {
  Model& m = model(name);
  if (closed_) return unavailable("the server is stopping");
  if (m.status.state == ModelState::kLoaded || m.status.state == ModelState::kLoading ||
      !m.waiting.empty()) {
    return failed_precondition(fmt::format("model '{}' is already running", name));
  }
  m.waiting.push_back({.relay = nullptr, .since_ns = env_.monotonic_ns()});
  swap();
  return {};
}

Status ModelPool::unload(const std::string& name) {
  Model& m = model(name);
  const bool only_asked = std::ranges::none_of(
      m.waiting, [](const Waiting& waiting) { return waiting.relay != nullptr; });
  if (m.status.state == ModelState::kUnloaded && m.waiting.empty()) {
    return failed_precondition(fmt::format("model '{}' is not running", name));
  }
  if (only_asked) m.waiting.clear();
  if (m.status.state == ModelState::kLoading && only_asked) {
    stop(m);
  } else if (m.status.state != ModelState::kUnloaded) {
    m.unload_asked = true;
  }
  swap();
  return {};
}

SwapSnapshot ModelPool::snapshot(const std::vector<Model*>& order) const {
  SwapSnapshot out;
  out.now_ns = env_.monotonic_ns();
  bool queued = false;
  for (const Model* m : order) {
    queued = queued || (m->status.state == ModelState::kUnloaded && !m->waiting.empty());
    out.models.push_back({.state = m->status.state,
                          .running = m->running,
                          .waiting = static_cast<std::int64_t>(m->waiting.size()),
                          .waits_since_ns = m->waiting.empty() ? 0 : m->waiting.front().since_ns,
                          .loaded_ns = m->loaded_ns,
                          .used_ns = m->used_ns,
                          .bytes = m->status.facts.memory_bytes,
                          .most_beside = m->most_beside,
                          .unload_asked = m->unload_asked});
  }
  // Where memory is full the system says nothing, and the model's server finds out.
  if (queued && options_.look_at_free_memory) {
    if (const auto free = free_memory(env_); free.ok()) out.free_bytes = *free;
  }
  return out;
}

void ModelPool::swap() {
  if (closed_) return;
  std::vector<Model*> order;
  for (auto& [name, m] : models_) order.push_back(m.get());
  const SwapPlan plan = plan_swap(snapshot(order), limits_);
  held_ = plan.hold ? order[*plan.hold] : nullptr;
  for (const std::size_t i : plan.unload) stop(*order[i]);
  for (const std::size_t i : plan.load) start(*order[i]);
  // Of a model that is not held any more.
  for (Model* m : order) {
    if (takes_requests(*m) && !m->waiting.empty()) dispatch(*m);
  }
}

void ModelPool::start(Model& m) {
  m.started_ns = env_.monotonic_ns();
  m.unload_asked = false;
  m.killed = false;
  m.status.failed = std::nullopt;
  ModelProcessHandler handler = {.on_ready = [this, &m](std::uint16_t port) { on_ready(m, port); },
                                 .on_line = [this, &m](const std::string& line) { say(m, line); },
                                 .on_closed = [this] { watch_in(kSoon); }};
  auto process = ModelProcess::start(context_, options_.command(m.status.file), std::move(handler));
  if (!process.ok()) {
    ++m.status.failures;
    return fail_waiting(m, kNotNow,
                        fmt::format("the model '{}' could not be loaded: {}", m.status.file.name,
                                    process.status().message()));
  }
  m.process = std::move(*process);
  m.status.state = ModelState::kLoading;
  say(m, fmt::format("loading {}", m.status.file.path));
}

void ModelPool::stop(Model& m) {
  m.status.state = ModelState::kUnloading;
  m.ending_ns = env_.monotonic_ns();
  m.process->send_signal(SIGTERM);
}

void ModelPool::on_ready(Model& m, std::uint16_t port) {
  if (m.status.state != ModelState::kLoading) return;
  m.port = port;
  m.status.state = ModelState::kLoaded;
  m.most_beside = ModelView().most_beside;
  m.loaded_ns = m.used_ns = env_.monotonic_ns();
  const double seconds = static_cast<double>(m.loaded_ns - m.started_ns) / kNsPerSecond;
  ++m.status.loads;
  m.status.load_seconds += seconds;
  say(m, fmt::format("loaded in {:.2f} s", seconds));
  ask_card(m);
  // Even where it is to leave at once: who has waited for it is answered.
  dispatch(m);
  swap();
}

// What its server says of it is shown with it from now on.
void ModelPool::ask_card(Model& m) {
  const auto text = std::make_shared<std::string>();
  Forwarding::start(context_, m.port,
                    {.method = "GET", .target = "/v1/models", .headers = {}, .body = {}},
                    {.on_head = [](int, const http::Headers&, std::int64_t) {},
                     .on_body =
                         [text](std::string_view piece) {
                           text->append(piece);
                           return true;
                         },
                     .on_end =
                         [this, text, name = m.status.file.name](ForwardEnd how) {
                           const auto found = models_.find(name);
                           if (how != ForwardEnd::kWhole || found == models_.end()) return;
                           const Result<api::Json> body = api::parse_body(*text);
                           if (!body.ok() || !body->is_object() || !body->contains("data")) return;
                           const api::Json& data = (*body)["data"];
                           if (data.is_array() && !data.empty())
                             found->second->status.card = data[0];
                         }});
}

// Batches run in its server without any request that is passed on.
void ModelPool::ask_health(Model& m) {
  m.asked_ns = env_.monotonic_ns();
  Forwarding::start(
      context_, m.port, {.method = "GET", .target = "/health", .headers = {}, .body = {}},
      {.on_head =
           [this, name = m.status.file.name](int, const http::Headers& headers, std::int64_t) {
             const auto busy = std::ranges::any_of(headers, [](const auto& header) {
               return header.first == kRequestsHeader && header.second != "0";
             });
             const auto found = models_.find(name);
             if (busy && found != models_.end()) found->second->used_ns = env_.monotonic_ns();
           },
       .on_body = [](std::string_view) { return true; },
       .on_end = [](ForwardEnd) {}});
}

void ModelPool::on_exit(Model& m, const ExitStatus& status) {
  m.how_ended = how_it_ended(status, m.process->last_line());
  const ModelState before = m.status.state;
  m.process.reset();
  m.port = 0;
  m.status.state = ModelState::kUnloaded;
  m.unload_asked = false;
  answer_broken(m);
  if (before == ModelState::kUnloading) {
    ++m.status.unloads;
    say(m, status == ExitStatus{} ? "unloaded" : "unloaded: " + m.how_ended);
    return;
  }
  m.status.failed = status;
  ++m.status.failures;
  say(m, "its server ended: " + to_text(status));
  if (before == ModelState::kLoading) on_failed_load(m, status);
}

// Where it lacked room others leave, one after the other, until it fits or is alone.
void ModelPool::on_failed_load(Model& m, const ExitStatus& status) {
  const std::int64_t others = std::ranges::count_if(models_, [](const auto& entry) {
    return entry.second->status.state != ModelState::kUnloaded;
  });
  const bool lacked_room =
      status.code == exit_code(Code::kResourceExhausted) || status.signal == SIGKILL;
  if (lacked_room && others > 0) {
    m.most_beside = others - 1;
    return say(m, "does not fit beside what is loaded; others make room");
  }
  m.most_beside = ModelView().most_beside;
  fail_waiting(
      m, kNotNow,
      fmt::format("the model '{}' could not be loaded ({})", m.status.file.name, m.how_ended));
}

// ---- Time ---------------------------------------------------------------------------------------

void ModelPool::watch() { watch_in(kTick); }

// In place of the look that was to come.
void ModelPool::watch_in(std::chrono::milliseconds delay) {
  ticker_.expires_after(delay);
  ticker_.async_wait([this](boost::system::error_code error) {
    if (error) return;
    tick();
    watch();
  });
}

void ModelPool::tick() {
  for (auto& [name, m] : models_) look_after(*m);
  swap();
  const bool running = std::ranges::any_of(
      models_, [](const auto& entry) { return entry.second->process != nullptr; });
  if (ended_ && !running) std::exchange(ended_, nullptr)();
}

void ModelPool::look_after(Model& m) {
  if (m.process) {
    if (const auto ended = m.process->poll()) on_exit(m, *ended);
  }
  const std::int64_t now = env_.monotonic_ns();
  if (m.status.state == ModelState::kUnloading && now - m.ending_ns > kEndNs && !m.killed) {
    m.killed = true;
    say(m,
        fmt::format("killed: it had not ended {} after it was told to", format_duration(kEndNs)));
    m.process->send_signal(SIGKILL);
  }
  const bool seems_idle = m.status.state == ModelState::kLoaded && m.running == 0;
  const std::int64_t ask_ns = std::min(kAskNs, options_.idle_ns / kAsksPerIdleTime);
  if (options_.idle_ns > 0 && seems_idle && now - m.asked_ns > ask_ns) ask_health(m);
  // A server that closed a connection and does not end was not at its end after all.
  const bool late =
      std::ranges::any_of(m.broken, [&](const Broken& b) { return now - b.since_ns > kBrokenNs; });
  if (m.process && late) m.how_ended = "its connection broke";
  if (!m.process || late) answer_broken(m);
  fail_late(m);
}

// ---- The end ------------------------------------------------------------------------------------

void ModelPool::close() {
  closed_ = true;
  held_ = nullptr;
  for (auto& [name, m] : models_) fail_waiting(*m, kNotNow, "the server is stopping");
}

void ModelPool::end(std::function<void()> done) {
  for (auto& [name, m] : models_) {
    const bool runs = m->process != nullptr && m->status.state != ModelState::kUnloading;
    if (runs) stop(*m);
  }
  ended_ = std::move(done);
}

}  // namespace hcache::router
