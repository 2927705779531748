// Commands to a Redis server or cluster, pipelined, over one background thread.
//
// Cluster: the map of slots is fetched from any node that answers, followed through MOVED and ASK,
// and fetched again when a node fails; reads go to a replica while their master is down. A server
// that knows no cluster mode gets everything itself.
// Circuit breaker: a node that does not connect, or leaves two commands in a row unanswered until
// their deadlines and for 50 ms at least, gets no commands any more: they fail at once. It is
// pinged in growing intervals (0.1 to 10 s) and used again when it answers.
// Reads and writes have a connection each, so that no read waits behind bulk data.
//
// Threading: any thread. `done` is called exactly once, on the client's thread (at destruction, on
// the destroying one); it must not wait.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "redis/redis_url.h"

struct redisReply;

namespace hcache::store {

struct RedisCall {
  // The reply, valid during the call and never of type error. What the server refused:
  // resource_exhausted (out of memory), permission_denied, failed_precondition. unavailable: nobody
  // answered in time. cancelled: the client is gone.
  using Done = std::function<void(Result<const redisReply*>)>;

  std::string key;                               // says which node
  std::vector<std::string> args;                 // the command's name first
  std::shared_ptr<const AlignedBuffer> payload;  // one more argument; null: none
  std::int64_t deadline_ns = 0;                  // monotonic
  bool bulk = false;  // over the connection for writes; else a replica may answer as well
  Done done;
};

class RedisClient {
 public:
  // Connects in the background. invalid_argument: the TLS certificates can't be loaded.
  [[nodiscard]] static Result<std::unique_ptr<RedisClient>> open(Env& env, RedisUrl url);
  RedisClient() = default;
  RedisClient(const RedisClient&) = delete;
  RedisClient& operator=(const RedisClient&) = delete;
  virtual ~RedisClient() = default;

  virtual void call(RedisCall call) = 0;
  // Whether any node is thought to answer.
  [[nodiscard]] virtual bool available() const = 0;
};

}  // namespace hcache::store
