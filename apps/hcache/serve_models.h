// `hcache serve --models-dir`: several models behind one port.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "http/server.h"
#include "options.h"
#include "router/model_router.h"

namespace hcache::cli {

struct ModelsArgs : Options {
  using Options::Options;

  std::string dir =
      text(&dir, "--models-dir", "DIR", "",
           "serve every model in this folder: each is loaded when a request names it, and "
           "unloaded, with its conversations saved, when others need its room");
  int64_t max = integer(&max, "--models-max", "N", 4, {0},
                        "most models of --models-dir in memory at a time; beyond it the one that "
                        "was used least recently goes; 0: no limit");
  bool no_autoload = flag(&no_autoload, "--no-models-autoload",
                          "models are loaded by POST /models/load alone, not by requests");
  int64_t idle_ns = duration(&idle_ns, "--models-idle", 0,
                             "unload a model that nobody has asked for so long, the one of -m too: "
                             "requests load it again; 0: never");
  uint64_t memory_bytes =
      bytes(&memory_bytes, "--models-memory", 0,
            "most memory of all loaded models together, by their files and --ctx; 0: what is free, "
            "where models are computed on the CPU");
  int64_t wait_ns = duration(&wait_ns, "--models-wait", 600 * kSecond,
                             "a request waits so long for its model to be loaded; then 503");

  // All of them.
  [[nodiscard]] std::vector<const void*> fields() const {
    return {&dir, &max, &no_autoload, &idle_ns, &memory_bytes, &wait_ns};
  }
};

// What the servers of all models have in common.
struct ModelServers {
  Options::Given given;               // the user's options, but for those that follow
  std::vector<std::string> api_keys;  // of --api-key; they go by the environment
  std::string state_dir;              // each model has a folder below it
  std::vector<std::string> stores;    // the user's, each with a folder for every model
  int64_t ctx = 0;                    // tokens
  std::string device;
  // Instead of --models-dir, with state and names as without a router; empty: there is none.
  std::string only_path;
  std::string only_name;
};

// Starts the router; `http` says where it listens. Errors of ModelRouter::start.
[[nodiscard]] Result<std::unique_ptr<router::ModelRouter>> start_models(const ModelsArgs& args,
                                                                        const ModelServers& servers,
                                                                        const http::Options& http,
                                                                        bool page);

}  // namespace hcache::cli
