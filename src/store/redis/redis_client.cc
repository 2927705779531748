#include "redis/redis_client.h"

#include <async.h>
#include <hiredis.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "base/log.h"
#include "net/call_queue.h"
#include "redis/redis_node.h"
#include "redis/redis_slots.h"
#include "redis/redis_tls.h"

namespace hcache::store {
namespace {

constexpr std::int64_t kAgainNs = 50 * kMs;      // before a call that was refused for now
constexpr std::int64_t kRefreshNs = 200 * kMs;   // between two fetches of the map at least
constexpr std::int64_t kFailoverNs = 500 * kMs;  // … while a node of it is down
constexpr std::int64_t kTickNs = 20 * kMs;       // deadlines are looked at this often
constexpr int kMaxAttempts = 8;                  // of one call, redirections included
constexpr std::size_t kBulkWindow = 8U << 20;    // bytes of writes in flight on a connection
constexpr std::size_t kMaxNodes = 4096;

// What hiredis hands back with a reply.
class RedisClientImpl;
struct Sent {
  RedisClientImpl* client = nullptr;
  Connection* connection = nullptr;
  CallPtr call;                                     // or
  std::function<void(const redisReply*)> internal;  // our own; null: no answer
  std::size_t bytes = 0;                            // of payload
};

std::string text_of(const redisReply* reply) {
  return reply == nullptr || reply->str == nullptr ? std::string()
                                                   : std::string(reply->str, reply->len);
}

class RedisClientImpl : public RedisClient {
 public:
  RedisClientImpl(Env& env, RedisUrl url) : env_(env), url_(std::move(url)) {}
  ~RedisClientImpl() override;
  RedisClientImpl(const RedisClientImpl&) = delete;
  RedisClientImpl& operator=(const RedisClientImpl&) = delete;

  Status start();
  void call(RedisCall call) override;
  bool available() const override { return available_; }

 private:
  enum class Mode { kUnknown, kSingle, kCluster };
  struct Shard {
    Node* master = nullptr;
    std::vector<Node*> replicas;
  };

  Clock now() { return env_.monotonic_ns(); }
  Node* node_at(const RedisAddress& address);
  Connection* lane_of(Node* node, bool bulk) { return node->lanes[bulk ? 1 : 0].get(); }

  // ---- The thread
  void run();
  void wake() const;
  [[nodiscard]] int nap_ms();
  void wait_for_events();
  void expire();
  void probe_nodes();
  void close_marked();

  // ---- Calls
  void dispatch(const CallPtr& call);
  Node* choose(const Call& call);
  void send(Node* node, const CallPtr& call);
  void pump(Connection* connection);
  void later(const CallPtr& call, Clock delay);
  void finish(Call& call, Result<const redisReply*> result);
  void on_answer(Connection* connection, const CallPtr& call, const redisReply* reply);
  void on_refusal(const CallPtr& call, const redisReply* reply);

  // ---- Connections
  bool connect(Connection* connection);
  void send_internal(Connection* connection, const std::vector<std::string>& args,
                     std::function<void(const redisReply*)> done);
  static void on_reply(redisAsyncContext* context, void* reply, void* data);
  static void on_connect(const redisAsyncContext* context, int status);
  static void on_disconnect(const redisAsyncContext* context, int status);
  static void on_cleanup(void* data);

  // ---- Nodes
  void fail(Node* node, const std::string& why);
  void revive(Node* node);
  void note_availability();
  void discover();
  void on_slots(Node* node, const redisReply* reply);
  void on_slots_refused(Node* node, const std::string& text);
  void use_slots(Node* node, const std::vector<SlotRange>& ranges);

  Env& env_;
  const RedisUrl url_;
  SslContext tls_;
  int wake_fd_ = -1;
  std::atomic<bool> available_ = true;
  CallQueue<Call> queue_;

  // The thread's own.
  Mode mode_ = Mode::kUnknown;
  std::map<std::string, std::unique_ptr<Node>> nodes_;
  std::array<Shard, kRedisSlots> slots_;
  std::vector<CallPtr> waiting_;  // for the mode
  Node* asked_ = nullptr;         // for the map of slots
  bool refresh_ = true;           // the map of slots is wanted
  Clock next_discovery_ = 0;
  std::size_t turn_ = 0;  // whom to ask for the map
  bool stopping_ = false;

  std::thread thread_;
};

RedisClientImpl::~RedisClientImpl() {
  if (thread_.joinable()) {
    queue_.stop();
    wake();
    thread_.join();
  }
  if (wake_fd_ >= 0) ::close(wake_fd_);
}

Status RedisClientImpl::start() {
  HCACHE_ASSIGN_OR_RETURN(tls_, make_tls(url_));
  for (const RedisAddress& seed : url_.seeds) node_at(seed);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) return resource_exhausted("no more file descriptors for an eventfd");
  thread_ = std::thread([this] { run(); });
  return {};
}

Node* RedisClientImpl::node_at(const RedisAddress& address) {
  std::unique_ptr<Node>& node = nodes_[address.name()];
  if (!node) {
    node = std::make_unique<Node>();
    node->address = address;
    for (auto& lane : node->lanes) {
      lane = std::make_unique<Connection>();
      lane->node = node.get();
    }
  }
  return node.get();
}

void RedisClientImpl::call(RedisCall call) {
  auto entry = std::make_shared<Call>();
  entry->deadline_ns = call.deadline_ns;
  entry->call = std::move(call);
  if (queue_.push(std::move(entry))) wake();
}

void RedisClientImpl::wake() const {
  const std::uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof one) < 0 && errno != EAGAIN) die("an eventfd can't be written");
}

// ---- The thread ---------------------------------------------------------------------------------

void RedisClientImpl::run() {
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  std::vector<CallPtr> fresh;
  while (queue_.take(&fresh)) {
    expire();  // first: what is late already is not sent
    // What waited was given before: an expiry follows the write that it is of.
    for (const CallPtr& call : queue_.take_due(now())) dispatch(call);
    for (const CallPtr& call : fresh) dispatch(call);
    fresh.clear();
    probe_nodes();
    if (refresh_ && (mode_ != Mode::kSingle)) discover();
    close_marked();
    wait_for_events();
  }
  stopping_ = true;
  for (const CallPtr& call : queue_.take_all()) {
    finish(*call, cancelled("the Redis client is gone"));
  }
  for (auto& [name, node] : nodes_) {
    for (auto& lane : node->lanes) {
      if (lane->context != nullptr) redisAsyncFree(lane->context);
    }
  }
}

// -1: until something happens.
int RedisClientImpl::nap_ms() {
  const bool calm = queue_.empty() && asked_ == nullptr && !(refresh_ && mode_ != Mode::kSingle) &&
                    std::none_of(nodes_.begin(), nodes_.end(), [](const auto& entry) {
                      return entry.second->listed && entry.second->down();
                    });
  if (calm) return -1;
  return static_cast<int>((queue_.nap_ns(now(), kTickNs) + kMs - 1) / kMs);
}

void RedisClientImpl::wait_for_events() {
  struct Watched {
    Connection* connection;
    redisAsyncContext* context;
  };
  std::vector<pollfd> fds = {{wake_fd_, POLLIN, 0}};
  std::vector<Watched> watched = {{nullptr, nullptr}};
  for (auto& [name, node] : nodes_) {
    for (auto& lane : node->lanes) {
      if (lane->context == nullptr) continue;
      const int events = (lane->want_read ? POLLIN : 0) | (lane->want_write ? POLLOUT : 0);
      if (events == 0) continue;
      fds.push_back({lane->context->c.fd, static_cast<short>(events), 0});
      watched.push_back({lane.get(), lane->context});
    }
  }
  if (poll(fds.data(), fds.size(), nap_ms()) <= 0) return;
  if (fds[0].revents != 0) {
    std::uint64_t count = 0;
    if (read(wake_fd_, &count, sizeof count) < 0 && errno != EAGAIN)
      die("an eventfd can't be read");
  }
  for (std::size_t i = 1; i < fds.size(); ++i) {
    // A callback of an earlier one may have ended this one.
    const auto alive = [&] { return watched[i].connection->context == watched[i].context; };
    const bool broken = (fds[i].revents & (POLLERR | POLLHUP)) != 0;
    if (((fds[i].revents & POLLOUT) != 0 || broken) && alive()) {
      redisAsyncHandleWrite(watched[i].context);
    }
    if (((fds[i].revents & POLLIN) != 0 || broken) && alive()) {
      redisAsyncHandleRead(watched[i].context);
    }
  }
}

void RedisClientImpl::expire() {
  const Clock time = now();
  for (const CallPtr& call : queue_.take_late(time)) {
    Node* node = call->sent_to;
    finish(*call, unavailable("no answer from Redis in time"));
    if (node != nullptr && node->breaker.given_up(call->sent, time)) {
      fail(node, "it does not answer");
    }
  }
  std::erase_if(waiting_, [](const CallPtr& call) { return call->finished; });
}

void RedisClientImpl::probe_nodes() {
  const Clock time = now();
  if (asked_ != nullptr && time >= next_discovery_ + kProbeNs) fail(asked_, "it does not answer");
  for (auto& [name, entry] : nodes_) {
    Node* node = entry.get();
    if (node->listed && node->breaker.probe_overdue(time)) fail(node, "it does not answer");
    if (!node->listed || !node->breaker.probe_due(time)) continue;
    Connection* lane = lane_of(node, false);
    if (lane->close) continue;
    node->breaker.probe_begins(time);
    if (lane->context == nullptr && !connect(lane)) continue;
    send_internal(lane, {"PING"}, [this, node](const redisReply* reply) {
      if (reply != nullptr && reply->type != REDIS_REPLY_ERROR) {
        revive(node);
      } else if (node->breaker.probing()) {
        fail(node, reply == nullptr ? "it can't be reached" : text_of(reply));
      }
    });
  }
}

void RedisClientImpl::close_marked() {
  for (auto& [name, node] : nodes_) {
    for (auto& lane : node->lanes) {
      if (!std::exchange(lane->close, false)) continue;
      if (lane->context != nullptr) redisAsyncFree(lane->context);
      std::deque<CallPtr> backlog;
      backlog.swap(lane->backlog);
      for (const CallPtr& call : backlog) later(call, 0);
    }
  }
}

// ---- Calls --------------------------------------------------------------------------------------

void RedisClientImpl::dispatch(const CallPtr& call) {
  if (call->finished) return;
  if (mode_ == Mode::kUnknown) {
    if (!available_) return finish(*call, unavailable("no Redis node answers"));
    waiting_.push_back(call);
    refresh_ = true;
    return;
  }
  if (++call->attempts > kMaxAttempts) {
    return finish(*call, unavailable("Redis sent the command around too often"));
  }
  Node* node = choose(*call);
  if (node == nullptr) return finish(*call, unavailable("the Redis node for this key is down"));
  send(node, call);
}

Node* RedisClientImpl::choose(const Call& call) {
  if (call.redirect != nullptr && !call.redirect->down()) return call.redirect;
  const Shard& shard = slots_[static_cast<std::size_t>(redis_slot(call.call.key))];
  if (shard.master != nullptr && !shard.master->down()) return shard.master;
  if (call.call.bulk) return nullptr;
  for (Node* replica : shard.replicas) {
    if (!replica->down()) return replica;
  }
  return nullptr;
}

void RedisClientImpl::send(Node* node, const CallPtr& call) {
  Connection* lane = lane_of(node, call->call.bulk);
  const std::size_t bytes = call->call.payload ? call->call.payload->size() : 0;
  if (lane->close) return later(call, 0);
  if (call->call.bulk && lane->in_flight > 0 && lane->in_flight + bytes > kBulkWindow) {
    lane->backlog.push_back(call);
    return;
  }
  if (lane->context == nullptr && !connect(lane)) return later(call, 0);
  if (std::exchange(call->asking, false)) send_internal(lane, {"ASKING"}, nullptr);
  call->redirect = nullptr;
  std::vector<const char*> args;
  std::vector<std::size_t> sizes;
  for (const std::string& arg : call->call.args) {
    args.push_back(arg.data());
    sizes.push_back(arg.size());
  }
  if (call->call.payload) {
    args.push_back(reinterpret_cast<const char*>(call->call.payload->data()));
    sizes.push_back(bytes);
  }
  auto sent = std::make_unique<Sent>();
  sent->client = this;
  sent->connection = lane;
  sent->call = call;
  sent->bytes = bytes;
  call->sent_to = node;
  call->sent = now();
  if (redisAsyncCommandArgv(lane->context, on_reply, sent.get(), static_cast<int>(args.size()),
                            args.data(), sizes.data()) != REDIS_OK) {
    lane->close = true;
    return later(call, 0);
  }
  (void)sent.release();  // hiredis calls back in any case
  lane->in_flight += bytes;
}

void RedisClientImpl::pump(Connection* connection) {
  while (!connection->backlog.empty() && connection->in_flight < kBulkWindow / 2 &&
         connection->context != nullptr && !connection->close) {
    const CallPtr call = std::move(connection->backlog.front());
    connection->backlog.pop_front();
    if (!call->finished) send(connection->node, call);
  }
}

void RedisClientImpl::later(const CallPtr& call, Clock delay) {
  if (call->finished) return;
  call->sent_to = nullptr;
  queue_.again(call, now() + delay);
}

void RedisClientImpl::finish(Call& call, Result<const redisReply*> result) {
  if (std::exchange(call.finished, true)) return;
  call.call.payload.reset();
  const RedisCall::Done done = std::exchange(call.call.done, nullptr);
  if (done) done(std::move(result));
}

void RedisClientImpl::on_reply(redisAsyncContext* /*context*/, void* reply, void* data) {
  const std::unique_ptr<Sent> sent(static_cast<Sent*>(data));
  const auto* answer = static_cast<const redisReply*>(reply);
  RedisClientImpl& client = *sent->client;
  Node* node = sent->connection->node;
  if (answer != nullptr) node->breaker.answered(client.now());
  if (sent->call) {
    Connection& connection = *sent->connection;
    connection.in_flight -= std::min(connection.in_flight, sent->bytes);
    if (answer == nullptr) connection.lost = true;
    client.on_answer(&connection, sent->call, answer);
  } else if (sent->internal) {
    sent->internal(answer);
  }
}

void RedisClientImpl::on_answer(Connection* connection, const CallPtr& call,
                                const redisReply* reply) {
  if (reply == nullptr) {
    if (!stopping_) later(call, 0);
    return;
  }
  if (reply->type == REDIS_REPLY_ERROR) {
    on_refusal(call, reply);
  } else {
    finish(*call, reply);
  }
  pump(connection);
}

void RedisClientImpl::on_refusal(const CallPtr& call, const redisReply* reply) {
  const std::string text = text_of(reply);
  const auto is = [&](std::string_view code) { return std::string_view(text).starts_with(code); };
  if (is("MOVED ") || is("ASK ")) {
    const auto address = parse_redis_address(text.substr(text.rfind(' ') + 1));
    if (!address.ok() || nodes_.size() >= kMaxNodes) {
      return finish(*call, failed_precondition("Redis answered " + text));
    }
    call->redirect = node_at(*address);
    call->asking = is("ASK ");
    if (is("MOVED ")) refresh_ = true;
    return later(call, 0);
  }
  if (is("TRYAGAIN") || is("CLUSTERDOWN") || is("LOADING") || is("MASTERDOWN") || is("READONLY")) {
    refresh_ = true;
    return later(call, kAgainNs);
  }
  if (is("OOM ")) return finish(*call, resource_exhausted("Redis has no memory left"));
  if (is("NOAUTH") || is("NOPERM") || is("WRONGPASS")) {
    return finish(*call, permission_denied("Redis refuses: " + text));
  }
  finish(*call, failed_precondition("Redis answered: " + text));
}

// ---- Connections --------------------------------------------------------------------------------

bool RedisClientImpl::connect(Connection* connection) {
  Node* node = connection->node;
  redisAsyncContext* context = redisAsyncConnect(node->address.host.c_str(), node->address.port);
  if (context == nullptr || context->err != 0) {
    const std::string why = context == nullptr ? "no memory" : context->errstr;
    if (context != nullptr) redisAsyncFree(context);
    fail(node, why);
    return false;
  }
  connection->context = context;
  connection->want_read = connection->want_write = false;
  connection->in_flight = 0;
  connection->lost = false;
  context->data = this;
  context->ev.data = connection;
  context->ev.addRead = [](void* c) { static_cast<Connection*>(c)->want_read = true; };
  context->ev.delRead = [](void* c) { static_cast<Connection*>(c)->want_read = false; };
  context->ev.addWrite = [](void* c) { static_cast<Connection*>(c)->want_write = true; };
  context->ev.delWrite = [](void* c) { static_cast<Connection*>(c)->want_write = false; };
  context->ev.cleanup = on_cleanup;
  redisAsyncSetConnectCallback(context, on_connect);
  redisAsyncSetDisconnectCallback(context, on_disconnect);
  if (url_.tls) {
    if (const Status status = start_tls(tls_.get(), context, node->address.host); !status.ok()) {
      redisAsyncFree(context);
      fail(node, status.message());
      return false;
    }
  }
  const auto must = [this, node](const redisReply* reply) {
    if (reply != nullptr && reply->type == REDIS_REPLY_ERROR) fail(node, text_of(reply));
  };
  if (!url_.password.empty()) {
    std::vector<std::string> auth = {"AUTH"};
    if (!url_.user.empty()) auth.push_back(url_.user);
    auth.push_back(url_.password);
    send_internal(connection, auth, must);
  }
  if (url_.database != 0) {
    send_internal(connection, {"SELECT", std::to_string(url_.database)}, must);
  }
  // A replica answers reads only to those who ask for it; a master does not mind.
  if (mode_ == Mode::kCluster && connection == lane_of(node, false)) {
    send_internal(connection, {"READONLY"}, nullptr);
  }
  return true;
}

void RedisClientImpl::send_internal(Connection* connection, const std::vector<std::string>& args,
                                    std::function<void(const redisReply*)> done) {
  std::vector<const char*> data;
  std::vector<std::size_t> sizes;
  for (const std::string& arg : args) {
    data.push_back(arg.data());
    sizes.push_back(arg.size());
  }
  auto sent = std::make_unique<Sent>();
  sent->client = this;
  sent->connection = connection;
  sent->internal = std::move(done);
  if (redisAsyncCommandArgv(connection->context, on_reply, sent.get(),
                            static_cast<int>(data.size()), data.data(), sizes.data()) == REDIS_OK) {
    (void)sent.release();
    return;
  }
  connection->close = true;
  if (sent->internal) sent->internal(nullptr);
}

void RedisClientImpl::on_connect(const redisAsyncContext* context, int status) {
  if (status == REDIS_OK) return;
  auto* connection = static_cast<Connection*>(context->ev.data);
  static_cast<RedisClientImpl*>(context->data)
      ->fail(connection->node, std::string("it can't be reached: ") + context->errstr);
}

void RedisClientImpl::on_disconnect(const redisAsyncContext* context, int status) {
  auto* client = static_cast<RedisClientImpl*>(context->data);
  auto* connection = static_cast<Connection*>(context->ev.data);
  // A server may close what was idle: the next call connects again.
  if (status == REDIS_OK || client->stopping_ || !connection->lost) return;
  if (connection->node->breaker.lost()) {
    client->fail(connection->node, std::string("the connection broke: ") + context->errstr);
  }
}

// The context ends now, on either side's initiative.
void RedisClientImpl::on_cleanup(void* data) {
  auto* connection = static_cast<Connection*>(data);
  connection->context = nullptr;
  connection->want_read = connection->want_write = false;
  connection->in_flight = 0;
}

// ---- Nodes --------------------------------------------------------------------------------------

void RedisClientImpl::fail(Node* node, const std::string& why) {
  if (stopping_) return;
  if (node->breaker.trip(now())) {
    log::warn("Redis at {}: {}; going on without it", node->address.name(), why);
  }
  for (auto& lane : node->lanes) lane->close = true;
  refresh_ = true;
  note_availability();
}

void RedisClientImpl::revive(Node* node) {
  if (!node->breaker.close()) return;
  log::info("Redis at {} answers again", node->address.name());
  refresh_ = true;
  next_discovery_ = 0;
  note_availability();
}

void RedisClientImpl::note_availability() {
  available_ = std::any_of(nodes_.begin(), nodes_.end(), [](const auto& entry) {
    return entry.second->listed && !entry.second->down();
  });
  if (available_ || mode_ != Mode::kUnknown) return;
  for (const CallPtr& call : std::exchange(waiting_, {})) {
    finish(*call, unavailable("no Redis node answers"));
  }
}

void RedisClientImpl::discover() {
  if (asked_ != nullptr || now() < next_discovery_) return;
  std::vector<Node*> up;
  for (auto& [name, node] : nodes_) {
    if (node->listed && !node->down()) up.push_back(node.get());
  }
  if (up.empty()) return;
  Node* node = up[turn_++ % up.size()];
  Connection* lane = lane_of(node, false);
  if (lane->close || (lane->context == nullptr && !connect(lane))) return;
  asked_ = node;
  refresh_ = false;
  next_discovery_ = now() + kRefreshNs;
  send_internal(lane, {"CLUSTER", "SLOTS"}, [this, node](const redisReply* reply) {
    asked_ = nullptr;
    if (reply == nullptr) {
      refresh_ = true;
    } else {
      on_slots(node, reply);
    }
  });
}

void RedisClientImpl::on_slots(Node* node, const redisReply* reply) {
  if (reply->type == REDIS_REPLY_ERROR) {
    on_slots_refused(node, text_of(reply));
    if (mode_ == Mode::kUnknown) return;
  } else {
    const std::vector<SlotRange> ranges = parse_slots(*reply, node->address.host);
    if (ranges.empty()) {
      refresh_ = true;  // a cluster without slots yet
      return;
    }
    use_slots(node, ranges);
  }
  for (const CallPtr& call : std::exchange(waiting_, {})) later(call, 0);
}

void RedisClientImpl::on_slots_refused(Node* node, const std::string& text) {
  if (text.starts_with("NOAUTH") || text.starts_with("LOADING")) {
    // The one fails with the connection, the other passes.
    refresh_ = true;
    if (text.starts_with("NOAUTH")) fail(node, text);
    return;
  }
  if (mode_ != Mode::kUnknown) return;
  mode_ = Mode::kSingle;
  for (Shard& shard : slots_) shard.master = node;
}

void RedisClientImpl::use_slots(Node* node, const std::vector<SlotRange>& ranges) {
  std::array<Shard, kRedisSlots> fresh;
  std::vector<Node*> listed;
  const auto known = [&](const RedisAddress& address) -> Node* {
    if (nodes_.size() >= kMaxNodes) return nullptr;
    listed.push_back(node_at(address));
    return listed.back();
  };
  for (const SlotRange& range : ranges) {
    Shard shard;
    if (range.master) shard.master = known(*range.master);
    for (const RedisAddress& address : range.replicas) {
      if (Node* replica = known(address)) shard.replicas.push_back(replica);
    }
    for (int slot = range.first; slot <= range.last; ++slot) {
      fresh[static_cast<std::size_t>(slot)] = shard;
    }
  }
  slots_ = std::move(fresh);
  mode_ = Mode::kCluster;
  for (auto& [name, entry] : nodes_) {
    if (entry->listed && entry->down()) {  // until another node has replaced it
      refresh_ = true;
      next_discovery_ = now() + kFailoverNs;
    }
    entry->listed =
        std::find(listed.begin(), listed.end(), entry.get()) != listed.end() ||
        std::find(url_.seeds.begin(), url_.seeds.end(), entry->address) != url_.seeds.end();
  }
  // This connection was made before anybody knew of a cluster.
  if (Connection* lane = lane_of(node, false); lane->context != nullptr) {
    send_internal(lane, {"READONLY"}, nullptr);
  }
}

}  // namespace

Result<std::unique_ptr<RedisClient>> RedisClient::open(Env& env, RedisUrl url) {
  auto client = std::make_unique<RedisClientImpl>(env, std::move(url));
  HCACHE_RETURN_IF_ERROR(client->start());
  return std::unique_ptr<RedisClient>(std::move(client));
}

}  // namespace hcache::store
