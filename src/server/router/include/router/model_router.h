// `hcache serve --models-dir`: one port for the models of a folder. It runs none itself: each runs
// in a process of its own, a server with a port of its own on the loopback, that is started with
// the first request for it and ended when it is idle or others want its room. Requests and answers
// pass through unchanged (docs/adr/0050-several-models.md).
//
// Threading: start, stop and the destructor from one thread; port from any.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "http/server.h"

namespace hcache::router {

// A model in the folder.
struct ModelFile {
  std::string name;         // for clients
  std::string path;         // the file, or the first of its parts
  std::uint64_t bytes = 0;  // of all parts, and of the projector
  std::string projector{};  // for pictures and sounds, in the model's own folder; empty: none
};

// What its file says of a model.
struct ModelFacts {
  std::string architecture;
  std::string weight_types;  // "Q4_1"
  std::int64_t parameters = 0;
  std::uint64_t memory_bytes = 0;  // that it takes when it is loaded
  // By its keys in the file, without the architecture's name before them.
  std::map<std::string, double> numbers;
};

// How a model's server is started.
struct ModelCommand {
  std::string program;                   // a path
  std::vector<std::string> args;         // without the program's name
  std::vector<std::string> environment;  // NAME=VALUE, all of it
};

struct ModelRouterOptions {
  http::Options http;
  std::string models_dir;
  // One model instead of a folder's, whatever its clients call it, and loaded from the beginning:
  // the port is then that of a server with one model, which leaves memory when it is idle.
  std::optional<ModelFile> only;
  // The command that serves a model on any free port of 127.0.0.1 and says "serving on http://…"
  // on stdout when it is ready. It wants the same API keys as `http`. SIGTERM ends it, with
  // everything saved.
  std::function<ModelCommand(const ModelFile&)> command;
  // What is told of a model that is not loaded; errors are for the log.
  std::function<Result<ModelFacts>(const ModelFile&)> describe;
  std::int64_t max_loaded = 4;      // models in memory at a time; 0: no limit
  std::int64_t idle_ns = 0;         // a model that nobody asked for so long leaves; 0: never
  std::uint64_t memory_bytes = 0;   // of all models in memory together; 0: no limit
  bool look_at_free_memory = true;  // load a model only where the host's free memory holds it
  bool autoload = true;             // false: POST /models/load alone loads
  std::int64_t wait_ns = 600'000'000'000;  // how long a request waits for its model
  // Who has waited so long for room is not overtaken any more: the model that has been loaded for
  // longest takes no further requests until it has made room.
  std::int64_t patience_ns = 10'000'000'000;
  bool page = true;     // at /, and every model's below /upstream/NAME/
  std::string version;  // of this program
  // A line that a model's server wrote to stderr, or what the router says of it. On the router's
  // thread.
  std::function<void(const std::string& model, const std::string& line)> on_line;
};

class ModelRouter {
 public:
  // Reads the folder and listens. Errors of http::Server::start; not_found: there is no such
  // folder, or no model in it.
  [[nodiscard]] static Result<std::unique_ptr<ModelRouter>> start(Env& env,
                                                                  ModelRouterOptions options);
  virtual ~ModelRouter() = default;  // as stop(0)

  // Accepts nothing more, lets what runs end for grace_ns, cuts off the rest, ends the models'
  // servers and waits for them: all state is durable when it returns.
  virtual void stop(std::int64_t grace_ns) = 0;
  [[nodiscard]] virtual std::uint16_t port() const = 0;
};

}  // namespace hcache::router
