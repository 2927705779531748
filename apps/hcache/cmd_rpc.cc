// hcache rpc-serve: lends this machine's device to another process (ggml's RPC backend), and
// `--device list`.

#include <fmt/format.h>
#include <ggml-backend.h>
#include <ggml-rpc.h>

#include "base/units.h"
#include "commands.h"
#include "common_options.h"
#include "model/device.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

struct RpcArgs : Options {
  std::string host = text(&host, "--host", "ADDRESS", "127.0.0.1", "address to listen on");
  int port = integer(&port, "--port", "N", 50052, {1, 65535}, "port to listen on");
  ModelOptions model{nullptr};

  RpcArgs() { offer(model, {&model.device, &model.threads}); }
};

Status serve(const RpcArgs& args) {
  if (args.model.device == "list") return list_devices();
  HCACHE_ASSIGN_OR_RETURN(const auto device,
                          model::Device::open(args.model.device, args.model.threads));
  const std::string endpoint = fmt::format("{}:{}", args.host, args.port);
  ggml_backend_dev_t dev = device->dev();
  fmt::print("serving {} on {}\n", device->description(), endpoint);
  std::fflush(stdout);
  release_interrupts();
  // Returns only when it can't listen.
  ggml_backend_rpc_start_server(endpoint.c_str(), nullptr, static_cast<size_t>(device->n_threads()),
                                1, &dev);
  return unavailable(fmt::format("can't listen on {}", endpoint));
}

}  // namespace

Status list_devices() {
  std::vector<std::vector<std::string>> rows = {{"device", "description", "memory", "free"}};
  const auto size = [](size_t bytes) { return bytes == 0 ? "-" : format_bytes(bytes); };
  for (const model::DeviceInfo& d : model::Device::list()) {
    rows.push_back({d.name, d.description, size(d.memory_total), size(d.memory_free)});
  }
  fmt::print("{}", format_columns(rows));
  fmt::print("rpc:HOST:PORT reaches a device that `hcache rpc-serve` lends.\n");
  return {};
}

void add_rpc_serve(CLI::App& app, Verb* verb) {
  add_verb<RpcArgs>(
      app, verb, "rpc-serve",
      "Lend this machine's device to other processes over ggml's RPC protocol. It has "
      "no authentication: keep it on loopback or a network you trust",
      serve);
}

}  // namespace hcache::cli
