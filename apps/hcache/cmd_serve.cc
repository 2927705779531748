#include <fmt/format.h>
#include <unistd.h>

#include <memory>
#include <sstream>
#include <utility>

#include "base/env.h"
#include "base/log.h"
#include "base/units.h"
#include "commands.h"
#include "options.h"
#include "server/server.h"
#include "session.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

constexpr int64_t kPollNs = 100'000'000;

// Named as llama-server's; llama_flags.h has those whose values differ.
constexpr std::pair<const char*, const char*> kVariables[] = {
    {"--model", "LLAMA_ARG_MODEL"},
    {"--host", "LLAMA_ARG_HOST"},
    {"--port", "LLAMA_ARG_PORT"},
    {"--api-key", "LLAMA_API_KEY"},
    {"--api-key-file", "LLAMA_ARG_API_KEY_FILE"},
    {"--cors", "LLAMA_ARG_CORS_ORIGINS"},
    {"--alias", "LLAMA_ARG_ALIAS"},
    {"--chat-template-file", "LLAMA_ARG_CHAT_TEMPLATE_FILE"},
    {"--ctx", "LLAMA_ARG_CTX_SIZE"},
    {"--threads", "LLAMA_ARG_THREADS"},
    {"--parallel", "LLAMA_ARG_N_PARALLEL"},
    {"--max-tokens", "LLAMA_ARG_N_PREDICT"},
    {"--temperature", "LLAMA_ARG_TEMPERATURE"},
    {"--top-k", "LLAMA_ARG_TOP_K"},
    {"--top-p", "LLAMA_ARG_TOP_P"},
    {"--min-p", "LLAMA_ARG_MIN_P"},
    {"--repeat-penalty", "LLAMA_ARG_REPEAT_PENALTY"},
    {"--presence-penalty", "LLAMA_ARG_PRESENCE_PENALTY"},
    {"--frequency-penalty", "LLAMA_ARG_FREQUENCY_PENALTY"},
};

struct ServeArgs {
  RuntimeArgs runtime;
  model::SamplingOptions sampling;
  std::string host;
  int port = 0;
  std::vector<std::string> api_keys;
  std::string api_key_file;
  bool shared_keys = false;
  std::vector<std::string> cors;
  std::string alias;
  std::string chat_template_file;
  std::string slot_save_path;
  uint64_t dram_bytes = 0;
  std::string dram_place;
  std::string evict_policy;
  std::string fetch_policy;
  int64_t flush_interval_ns = 0;
  int64_t grace_ns = 0;
  int64_t ttl_ns = 0;
  int parallel = 0;
  int64_t step_tokens = 0;
  double restore_share = 0;
  double offload_above = 0;
  bool restore_exclusive = false;
  std::string queue_policy;
  int64_t max_queued = 0;
  int64_t max_queued_per_key = 0;
  int64_t max_running_per_key = 0;
  uint64_t quota_per_key = 0;
  int64_t max_new_tokens = 0;
  std::string log_requests;
  bool verbose = false;
};

Result<std::vector<http::ApiKey>> api_keys(const ServeArgs& args) {
  std::vector<std::string> keys = args.api_keys;
  if (!args.api_key_file.empty()) {
    HCACHE_ASSIGN_OR_RETURN(const std::string text,
                            read_whole_file(Env::real(), args.api_key_file));
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (!line.empty() && line.back() == '\r') line.pop_back();
      if (!line.empty() && line[0] != '#') keys.push_back(line);
    }
    if (keys.empty()) {
      return invalid_argument(
          fmt::format("{} holds no key; put one on each line", args.api_key_file));
    }
  }
  std::vector<http::ApiKey> out;
  for (const std::string& key : keys) {
    const http::KeyHash hash = http::hash_api_key(key);
    // Names that tell keys apart in logs and give nothing away.
    out.push_back({.name = "key-" + to_hex(hash).substr(0, 8), .hash = hash});
  }
  return out;
}

Result<server::ServerOptions> server_options(const ServeArgs& args) {
  server::ServerOptions o;
  HCACHE_ASSIGN_OR_RETURN(o.runtime, runtime_options(args.runtime));
  o.runtime.dram_bytes = args.dram_bytes;
  o.runtime.dram_place = args.dram_place;
  o.runtime.key_quota_bytes = args.quota_per_key;
  o.runtime.saver.flush_interval_ms = args.flush_interval_ns / 1'000'000;
  o.http.host = args.host;
  o.http.port = static_cast<uint16_t>(args.port);
  o.http.cors_origins = args.cors;
  HCACHE_ASSIGN_OR_RETURN(o.http.api_keys, api_keys(args));
  o.salt_per_key = !args.shared_keys;
  o.alias = args.alias;
  if (!args.chat_template_file.empty()) {
    HCACHE_ASSIGN_OR_RETURN(o.chat_template, read_whole_file(Env::real(), args.chat_template_file));
  }
  o.sampling = args.sampling;
  o.slot_actions = !args.slot_save_path.empty();
  o.ttl_ns = args.ttl_ns;
  o.max_new_tokens = args.max_new_tokens;
  o.log_requests = args.log_requests == "on";
  HCACHE_ASSIGN_OR_RETURN(o.restore_mode, policy::parse_mode(args.runtime.restore_method));
  HCACHE_ASSIGN_OR_RETURN(o.runtime.dram_evict, policy::parse_evict_policy(args.evict_policy));
  HCACHE_ASSIGN_OR_RETURN(o.scheduler.fetch, policy::parse_fetch_policy(args.fetch_policy));
  o.scheduler.evict = o.runtime.dram_evict;
  o.scheduler.offload_above = args.offload_above;
  o.scheduler.batch.max_sequences = args.parallel;
  o.scheduler.batch.max_step_tokens = static_cast<int32_t>(args.step_tokens);
  o.scheduler.restore.share = args.restore_share;
  o.scheduler.restore.exclusive = args.restore_exclusive;
  HCACHE_ASSIGN_OR_RETURN(o.scheduler.queue.policy, policy::parse_queue_policy(args.queue_policy));
  o.scheduler.max_queued = args.max_queued;
  o.scheduler.max_queued_per_key = args.max_queued_per_key;
  o.scheduler.max_running_per_key = args.max_running_per_key;
  o.max_sequences = std::max(64, 4 * args.parallel);
  return o;
}

Status serve(const ServeArgs& args) {
  if (args.runtime.model.device == "list") return list_devices();
  if (args.verbose) log::set_level(log::Level::kInfo);
  HCACHE_ASSIGN_OR_RETURN(server::ServerOptions options, server_options(args));
  if (!http::is_loopback_host(args.host) && options.http.api_keys.empty()) {
    log::warn(
        "{} can be reached from elsewhere and no API key is set: anyone may use this server "
        "and read what is stored (--api-key)",
        args.host);
  }
  ProgressLine line;
  options.runtime.progress = [&line](const std::string& what, double fraction) {
    return line.update(what, fraction);
  };
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const Link link, parse_link(args.runtime.link));
  slow_to(link, env, &options.runtime);
  HCACHE_ASSIGN_OR_RETURN(const auto server, server::Server::start(env, options));
  line.finish();
  const bool bracketed = args.host.find(':') != std::string::npos;
  fmt::print("hcache: serving on http://{}{}{}:{}\n", bracketed ? "[" : "", args.host,
             bracketed ? "]" : "", server->port());
  std::fflush(stdout);
  while (!interrupted()) Env::real().sleep_ns(kPollNs);
  fmt::print(stderr, "hcache: stopping; running requests have {}, a second signal ends at once\n",
             format_duration(args.grace_ns));
  return server->stop(args.grace_ns);
}

}  // namespace

void add_serve(CLI::App& app, Verb* verb) {
  CLI::App* sub = app.add_subcommand(
      "serve", "Serve the model over HTTP: OpenAI's, Anthropic's and llama-server's protocols");
  const auto args = std::make_shared<ServeArgs>();
  add_option(*sub, "serve-host", &args->host);
  add_option(*sub, "serve-port", &args->port);
  add_option(*sub, "api-key", &args->api_keys);
  add_option(*sub, "api-key-file", &args->api_key_file);
  add_option(*sub, "shared-keys", &args->shared_keys);
  add_option(*sub, "cors", &args->cors);
  add_option(*sub, "log-requests", &args->log_requests);
  add_option(*sub, "alias", &args->alias);
  add_option(*sub, "chat-template-file", &args->chat_template_file);
  add_option(*sub, "reply-tokens", &args->max_new_tokens);
  add_option(*sub, "parallel", &args->parallel);
  add_option(*sub, "step-tokens", &args->step_tokens);
  add_option(*sub, "restore-share", &args->restore_share);
  add_option(*sub, "restore-exclusive", &args->restore_exclusive);
  add_option(*sub, "queue-policy", &args->queue_policy);
  add_option(*sub, "max-queued", &args->max_queued);
  add_option(*sub, "max-queued-per-key", &args->max_queued_per_key);
  add_option(*sub, "max-running-per-key", &args->max_running_per_key);
  add_option(*sub, "quota-per-key", &args->quota_per_key);
  add_option(*sub, "dram", &args->dram_bytes);
  add_option(*sub, "dram-place", &args->dram_place);
  std::vector<Choice> evict_policies;
  for (const auto& [name, keeps] : policy::evict_policies())
    evict_policies.push_back({name, keeps});
  offer(add_option(*sub, "evict-policy", &args->evict_policy), evict_policies);
  add_option(*sub, "offload-above", &args->offload_above);
  add_option(*sub, "fetch-policy", &args->fetch_policy);
  add_option(*sub, "link", &args->runtime.link);
  add_option(*sub, "flush-interval", &args->flush_interval_ns);
  add_option(*sub, "slot-save-path", &args->slot_save_path);
  add_option(*sub, "grace", &args->grace_ns);
  add_option(*sub, "ttl", &args->ttl_ns);
  add_runtime_options(*sub, &args->runtime);
  add_option(*sub, "restore-method", &args->runtime.restore_method);
  add_sampling_options(*sub, &args->sampling);
  add_option(*sub, "verbose", &args->verbose);
  for (const auto& [option, variable] : kVariables) sub->get_option(option)->envname(variable);
  sub->callback([args, verb] { *verb = [args] { return serve(*args); }; });
}

}  // namespace hcache::cli
