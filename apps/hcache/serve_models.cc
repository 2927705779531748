#include "serve_models.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/env.h"
#include "model/tools.h"

namespace hcache::cli {
namespace {

using router::ModelCommand;
using router::ModelFacts;
using router::ModelFile;

constexpr std::string_view kLlamaVariables = "LLAMA_";

// Of "Q4_1 (211 tensors), F32 (61)" the first, which most weights have.
std::string first_type(const std::string& types) { return types.substr(0, types.find(' ')); }

// What stands in the file: its architecture, and the numbers of that.
void read_metadata(const model::ModelInfo& info, ModelFacts* facts) {
  for (const auto& [key, value] : info.metadata) {
    if (key == "general.architecture") facts->architecture = value;
  }
  const std::string prefix = facts->architecture + ".";
  for (const auto& [key, value] : info.metadata) {
    if (!key.starts_with(prefix)) continue;
    double number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error == std::errc() && end == value.data() + value.size()) {
      facts->numbers[key.substr(prefix.size())] = number;
    }
  }
}

Result<ModelFacts> describe(const ModelFile& file, int64_t ctx) {
  HCACHE_ASSIGN_OR_RETURN(const model::ModelInfo info, model::describe_model(file.path));
  ModelFacts facts;
  read_metadata(info, &facts);
  facts.weight_types = first_type(info.types);
  facts.parameters = static_cast<int64_t>(info.n_params);
  facts.memory_bytes = file.bytes;
  if (info.supported) facts.memory_bytes += info.kv_bytes_per_token() * static_cast<uint64_t>(ctx);
  return facts;
}

// This process's own, without llama-server's variables: what they say stands in the arguments.
std::vector<std::string> inherited_environment(const std::vector<std::string>& replaced) {
  std::vector<std::string> out = replaced;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('=') + 1);
    const bool is_replaced = std::ranges::any_of(
        replaced, [&](const std::string& own) { return own.starts_with(name); });
    if (!is_replaced && !text.starts_with(kLlamaVariables)) out.emplace_back(text);
  }
  return out;
}

ModelCommand command_of(const ModelServers& servers, const std::string& program,
                        const ModelFile& file) {
  ModelCommand out;
  out.program = program;
  out.args = {"serve", "--host=127.0.0.1", "--port=0", "--model=" + file.path};
  const bool only = !servers.only_path.empty();
  const std::string state =
      only ? servers.state_dir : join_path(join_path(servers.state_dir, "models"), file.name);
  out.args.push_back("--state-dir=" + state);
  for (const std::string& store : servers.stores) {
    out.args.push_back("--store=" + (only ? store : join_path(store, file.name)));
  }
  if (!only) out.args.push_back("--alias=" + file.name);
  if (!file.projector.empty()) out.args.push_back("--mmproj=" + file.projector);
  out.args.insert(out.args.end(), servers.given.args.begin(), servers.given.args.end());
  std::vector<std::string> environment = servers.given.environment;
  if (!servers.api_keys.empty()) {
    environment.push_back(fmt::format("LLAMA_API_KEY={}", fmt::join(servers.api_keys, ",")));
  }
  out.environment = inherited_environment(environment);
  return out;
}

}  // namespace

Result<std::unique_ptr<router::ModelRouter>> start_models(const ModelsArgs& args,
                                                          const ModelServers& servers,
                                                          const http::Options& http, bool page) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return unavailable("/proc/self/exe does not say where this program is");
  router::ModelRouterOptions o;
  o.http = http;
  o.models_dir = args.dir;
  if (!servers.only_path.empty()) {
    HCACHE_ASSIGN_OR_RETURN(const model::ModelInfo info, model::describe_model(servers.only_path));
    o.only = {.name = servers.only_name, .path = servers.only_path, .bytes = info.n_bytes};
  }
  o.command = [servers, program = self.string()](const ModelFile& file) {
    return command_of(servers, program, file);
  };
  o.describe = [ctx = servers.ctx](const ModelFile& file) { return describe(file, ctx); };
  o.max_loaded = args.max;
  o.idle_ns = args.idle_ns;
  o.memory_bytes = args.memory_bytes;
  o.look_at_free_memory =
      args.memory_bytes == 0 && !o.only && (servers.device == "cpu" || servers.device == "none");
  o.autoload = !args.no_autoload;
  o.wait_ns = args.wait_ns;
  o.page = page;
  o.version = HCACHE_VERSION;
  o.on_line = [](const std::string& model, const std::string& line) {
    fmt::print(stderr, "[{}] {}\n", model, line);
    std::fflush(stderr);
  };
  return router::ModelRouter::start(Env::real(), std::move(o));
}

}  // namespace hcache::cli
