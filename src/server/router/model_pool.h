// The models of a folder: their servers, the requests that wait for them, and what each has done.
// Applies what plan_swap() decides.
//
// Threading: everything on the thread that runs the context.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api/json.h"
#include "base/env.h"
#include "base/status.h"
#include "model_process.h"
#include "relay.h"
#include "router/model_router.h"
#include "swap_plan.h"

namespace hcache::router {

// What is told of a model.
struct ModelStatus {
  ModelFile file;
  ModelFacts facts;
  std::string id;  // tells one version of the file from another: hexadecimal digits
  ModelState state = ModelState::kUnloaded;
  bool wanted = false;               // not loaded, and requests wait for it
  std::optional<ExitStatus> failed;  // how its server ended, where that was not asked for
  api::Json card;  // what its server says of it (an entry of GET /v1/models); null: nothing yet
  std::int64_t running = 0;
  std::int64_t waiting = 0;
  // Since the router was started.
  std::int64_t requests = 0;
  std::int64_t loads = 0;
  std::int64_t unloads = 0;
  std::int64_t failures = 0;
  double load_seconds = 0;  // of all loads together, from the start of a server until it was ready
};

class ModelPool {
 public:
  // All of them must outlive it.
  ModelPool(Env& env, boost::asio::io_context& context, const ModelRouterOptions& options);
  ~ModelPool() = default;  // ends all servers
  ModelPool(const ModelPool&) = delete;
  ModelPool& operator=(const ModelPool&) = delete;

  // Reads the folder again: new files are models from now on, and those that have gone, or were
  // replaced, leave as soon as they answer nothing. Errors as find_models().
  Status scan();
  // Looks after the servers from now on, a few times per second.
  void watch();

  // The model's own name; empty where there is none of that name. Names may end with ":latest", as
  // Ollama's clients have it, or ".gguf".
  [[nodiscard]] std::string find(std::string_view name) const;
  // Sorted by name.
  [[nodiscard]] std::vector<ModelStatus> statuses() const;

  // Of a model that find() gave.
  void submit(const std::string& name, std::shared_ptr<Relay> relay, bool autoload);
  // A request that only observes: it loads nothing and keeps nothing loaded.
  void observe(const std::string& name, const std::shared_ptr<Relay>& relay);
  // kFailedPrecondition: it is loaded, or about to be, already; or it is not.
  Status load(const std::string& name);
  Status unload(const std::string& name);

  // Refuses what waits and what comes from now on.
  void close();
  // Ends all servers, and calls `done` once they have ended.
  void end(std::function<void()> done);

 private:
  struct Waiting {
    std::shared_ptr<Relay> relay;  // null: only the loading was asked for
    std::int64_t since_ns = 0;
  };
  struct Broken {
    std::shared_ptr<Relay> relay;
    std::int64_t since_ns = 0;
  };
  struct Model {
    ModelStatus status;  // its `wanted`, `running` and `waiting` are filled in when asked for
    bool gone = false;   // from the folder
    std::unique_ptr<ModelProcess> process;
    std::uint16_t port = 0;
    std::deque<Waiting> waiting;
    std::vector<Broken> broken;  // unanswered: told how the server ended as soon as that is known
    std::int64_t running = 0;
    std::int64_t started_ns = 0;
    std::int64_t loaded_ns = 0;
    std::int64_t used_ns = 0;
    std::int64_t ending_ns = 0;  // since when it is kUnloading
    std::int64_t asked_ns = 0;   // when its server was last asked what it does
    std::string how_ended;       // its last server
    std::int64_t most_beside = ModelView().most_beside;
    bool killed = false;
    bool unload_asked = false;
  };

  [[nodiscard]] Model& model(const std::string& name) { return *models_.find(name)->second; }
  [[nodiscard]] bool takes_requests(const Model& m) const;
  void add(const ModelFile& file);
  void forward(Model& m, const std::shared_ptr<Relay>& relay);
  void on_forwarded(Model& m, const std::shared_ptr<Relay>& relay, ForwardEnd how);
  void enqueue(Model& m, std::shared_ptr<Relay> relay);
  void dispatch(Model& m);
  void fail(const Waiting& waiting, int status, const std::string& message);
  void fail_waiting(Model& m, int status, const std::string& message);
  void fail_late(Model& m);
  static void answer_broken(Model& m);

  void swap();
  [[nodiscard]] SwapSnapshot snapshot(const std::vector<Model*>& order) const;
  void start(Model& m);
  void stop(Model& m);
  void on_ready(Model& m, std::uint16_t port);
  void ask_card(Model& m);
  void ask_health(Model& m);
  void on_exit(Model& m, const ExitStatus& status);
  void on_failed_load(Model& m, const ExitStatus& status);
  void watch_in(std::chrono::milliseconds delay);
  void tick();
  void look_after(Model& m);
  void say(const Model& m, const std::string& line) const;

  Env& env_;
  boost::asio::io_context& context_;
  const ModelRouterOptions& options_;
  const SwapLimits limits_;
  boost::asio::steady_timer ticker_;
  std::map<std::string, std::unique_ptr<Model>> models_;
  const Model* held_ = nullptr;
  std::size_t waiting_ = 0;  // requests
  std::size_t waiting_bytes_ = 0;
  bool closed_ = false;
  std::function<void()> ended_;
};

}  // namespace hcache::router
