#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "answer_args.h"
#include "base/env.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/units.h"
#include "commands.h"
#include "draft_args.h"
#include "encoder/encoder_server.h"
#include "media_args.h"
#include "model/pooling.h"
#include "model/tools.h"
#include "overflow_args.h"
#include "serve_models.h"
#include "server/server.h"
#include "session.h"
#include "state/llama_runtime.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

constexpr int64_t kPollNs = 100'000'000;

std::vector<Choice> evict_policy_choices() {
  std::vector<Choice> choices;
  for (const auto& [name, keeps] : policy::evict_policies()) choices.push_back({name, keeps});
  return choices;
}

struct ServeArgs : Options {
  ServeArgs() {
    integer(&scheduler.max_queued, "--max-queued", "N", scheduler.max_queued, {1},
            "most requests that wait; beyond it 429");
    integer(&scheduler.max_queued_per_key, "--max-queued-per-key", "N",
            scheduler.max_queued_per_key, {0}, "the same for one API key; 0: no limit");
    integer(&scheduler.max_running_per_key, "--max-running-per-key", "N",
            scheduler.max_running_per_key, {0},
            "most requests of one API key that run at a time; 0: no limit");
    number(&scheduler.restore.share, "--restore-share", "X", scheduler.restore.share, {0.01, 10},
           "how much longer a restore may make a step in which others decode");
    flag(&scheduler.restore.exclusive, "--restore-exclusive",
         "compute nothing else while a restore is in flight, as the HCache paper does: the first "
         "token comes earliest, replies under way stall");
    number(&scheduler.offload_above, "--offload-above", "SHARE", scheduler.offload_above, {0, 1},
           "of the arena: fuller than this, idle sequences that are saved leave at once, and not "
           "only when room is wanted");
    withhold({&runtime.token_rounding, &sampling.seed});
  }

  std::string host =
      text(&host, "--host", "ADDRESS", "127.0.0.1",
           "address to listen on, several with commas; without an API key others than loopback are "
           "warned about");
  int port = integer(&port, "--port", "N", 8080, {0, 65535}, "port to listen on; 0: any free one");
  std::vector<std::string> api_keys =
      texts(&api_keys, "--api-key", "KEY,...", "", "",
            "keys that clients must present one of; each has state of its own");
  std::string api_key_file =
      text(&api_key_file, "--api-key-file", "FILE", "", "file with one API key per line");
  bool shared_keys =
      flag(&shared_keys, "--share-between-keys", "all API keys share their conversations' state");
  std::vector<std::string> cors =
      texts(&cors, "--cors", "ORIGIN,...", "", "",
            "web origins that may call (https://app.example; localhost: all of this machine; *: "
            "all); default: localhost, or all where an API key is asked for");
  std::string log_requests = choice(&log_requests, "--log-requests", "on", "on|off",
                                    "one line to stderr for every request that has ended");
  ModelsArgs models{this};
  AnswerArgs answers{this};
  OverflowArgs overflow{this, "refuse"};
  int parallel =
      integer(&parallel, "--parallel,--np", "N", 8, {1, 4096}, "most sequences in one step");
  int64_t sequence_ctx =
      integer(&sequence_ctx, "--sequence-ctx", "TOKENS", 0, {0},
              "most tokens of one conversation; 0: as many as --ctx and the model have");
  DraftArgs draft{this};
  MediaArgs media{this};
  int step_tokens = integer(&step_tokens, "--step-tokens", "TOKENS", 256, {1, 65536},
                            "most tokens of one step: replies first, then prompts");
  std::string queue_policy =
      choice(&queue_policy, "--queue-policy", "fcfs", "fcfs|car",
             "who is admitted next: the first; or, of the first 16, who needs the least loading");
  uint64_t quota_per_key =
      bytes(&quota_per_key, "--quota-per-key", 0,
            "most saved state of one API key; its own least recently used goes first; 0: no limit");
  std::optional<uint64_t> dram_bytes =
      bytes(&dram_bytes, "--dram",
            "host memory for saved state, in front of the disks; default: a quarter of what is "
            "free beside the model; 0: none");
  std::string dram_place =
      text(&dram_place, "--dram-place", "PLACE", "",
           "where --dram lies: node:N, a NUMA node (a CXL expander, say); or a path, a DAX device "
           "or a directory on a DAX file system, tmpfs or hugetlbfs");
  std::string evict_policy =
      choice(&evict_policy, "--evict-policy", "scheduler-aware", evict_policy_choices(),
             "what stays in --dram, on the disks (--quota) and of idle sequences in the arena");
  bool evict_whole = flag(&evict_whole, "--evict-whole",
                          "whole conversations leave --dram and the disks, not their ends");
  double evict_reserve = number(
      &evict_reserve, "--evict-reserve", "SHARE", 0, {0, 0.5},
      "of --dram and --quota: when something has to leave, so much more leaves that this share is "
      "free afterwards, and what is saved next need not wait for it");
  std::string fetch_policy = choice(
      &fetch_policy, "--fetch-policy", "scheduler-aware", "scheduler-aware|car-timer|on-demand",
      "what is read for requests that wait: into --dram the state of all, in the order of the "
      "queue; into the arena that of the next, in time for the end of a running one; or nothing");
  int64_t flush_interval_ns =
      duration(&flush_interval_ns, "--flush-interval", kSecond,
               "state is on disk at the latest so long after it was computed");
  int batch_parallel = integer(&batch_parallel, "--batch-parallel", "N", 0, {0, 4096},
                               "most requests of /v1/batches that are in flight, behind all "
                               "others; 0: as many as --parallel");
  uint64_t batch_quota = bytes(&batch_quota, "--batch-quota", 10ULL << 30,
                               "most disk space of uploaded files and of batches; 0: no limit");
  int64_t batch_ttl_ns =
      duration(&batch_ttl_ns, "--batch-ttl", 30 * 24 * 3600 * kSecond,
               "files go so long after their upload, batches after their end; 0: never");
  std::vector<std::string> tags =
      texts(&tags, "--tags", "TAG,...", "", "", "what /v1/models says of the model, for clients");
  bool no_page = flag(&no_page, "--no-page", "serve no page at /");
  bool hide_slots = flag(&hide_slots, "--hide-slots", "answer GET /slots with 501");
  bool spm_infill = flag(&spm_infill, "--spm-infill",
                         "prompts of /infill begin with what follows the gap, as some models "
                         "learned it");
  std::string pooling = choice(&pooling, "--pooling", "model", "model|none|mean|cls|last|rank",
                               "how the rows of a text become its vector in /v1/embeddings; model: "
                               "as the file says, or mean; rank: as --reranking");
  bool reranking = flag(&reranking, "--reranking,--rerank",
                        "rank documents at /v1/rerank, and write no text; files that say so of "
                        "themselves need no option");
  int embd_normalize = integer(
      &embd_normalize, "--embd-normalize", "N", 2, {-1, 100},
      "how vectors of texts are normalised, unless requests say: -1 not, 0 the largest "
      "number becomes 32760, 1 by the sum of magnitudes, 2 to length 1, more: by that norm");
  std::string slot_save_path =
      text(&slot_save_path, "--slot-save-path", "DIR", "",
           "allow /slots/ID?action=save|restore|erase, as llama-server's; slots are saved in the "
           "store, nothing is written to this folder");
  int64_t grace_ns = duration(&grace_ns, "--grace", 10 * kSecond,
                              "time that running requests have to end after SIGTERM");
  int64_t drain_ns = duration(
      &drain_ns, "--drain", 0,
      "time after SIGTERM in which requests are still taken while /health already says 503, so "
      "that a balancer sends them elsewhere; then --grace begins");
  int64_t ttl_ns = duration(
      &ttl_ns, "--ttl", 0,
      "conversations without a name are forgotten so long after their last turn; 0: never");
  scheduler::SchedulerOptions scheduler;  // bound in the constructor
  RuntimeArgs runtime{this};
  std::string engine = runtime.offer_engine();
  std::optional<double> kv_budget = runtime.offer_kv_budget();
  bool adapters_off = flag(&adapters_off, "--lora-init-without-apply",
                           "adapters count only where a request or POST /lora-adapters says so");
  SamplingArgs sampling{this};
  bool verbose = flag(&verbose, "-v,--verbose", "log what is done, to stderr");
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

Result<http::Options> http_options(const ServeArgs& args) {
  http::Options http;
  http.host = args.host;
  http.port = static_cast<uint16_t>(args.port);
  HCACHE_ASSIGN_OR_RETURN(http.api_keys, api_keys(args));
  http.cors_origins = args.cors;
  // A page without a key can do nothing.
  if (args.cors.empty()) http.cors_origins = {http.api_keys.empty() ? "localhost" : "*"};
  return http;
}

// Of what weights and arena leave of the free memory. Rounded, so that it reads well; below the
// least of it a cache in memory is not worth having.
constexpr uint64_t kDramDivisor = 4;
constexpr uint64_t kDramStep = 64ULL << 20;

uint64_t default_dram(const state::RuntimeOptions& options) {
  if (!options.use_store) return 0;
  uint64_t free = 0;
  if (const auto now = free_memory(Env::real()); now.ok()) free = *now;
  uint64_t taken = 0;
  if (const auto info = model::describe_model(options.model_path); info.ok()) {
    taken = info->n_bytes + static_cast<uint64_t>(info->kv_bytes_per_token()) *
                                static_cast<uint64_t>(options.engine.arena_tokens);
  }
  const uint64_t bytes = (free - std::min(free, taken)) / kDramDivisor / kDramStep * kDramStep;
  if (bytes > 0) {
    fmt::print(stderr,
               "hcache: up to {} of host memory for saved state, a quarter of what is free beside "
               "the model (--dram BYTES, 0: none)\n",
               format_bytes(bytes));
  }
  return bytes;
}

Result<server::ServerOptions> server_options(const ServeArgs& args) {
  if (args.dram_bytes.value_or(0) == 0) {
    HCACHE_RETURN_IF_ERROR(args.refuse({&args.dram_place}, "needs --dram, the bytes to use of it"));
  }
  server::ServerOptions o;
  HCACHE_ASSIGN_OR_RETURN(o.runtime, runtime_options(args.runtime));
  if (args.adapters_off) {
    for (state::AdapterFile& file : o.runtime.adapters) file.scale = 0;
  }
  o.runtime.dram_bytes = args.dram_bytes ? *args.dram_bytes : default_dram(o.runtime);
  o.runtime.dram_place = args.dram_place;
  o.runtime.key_quota_bytes = args.quota_per_key;
  o.runtime.saver.flush_interval_ms = args.flush_interval_ns / 1'000'000;
  o.salt_per_key = !args.shared_keys;
  HCACHE_RETURN_IF_ERROR(args.answers.apply(&o));
  HCACHE_ASSIGN_OR_RETURN(o.sampling, args.sampling.resolved());
  o.tags = {args.tags.begin(), args.tags.end()};
  o.page = !args.no_page;
  o.slots = !args.hide_slots;
  o.verbose_answers = args.verbose;
  o.suffix_first = args.spm_infill;
  if (args.pooling != "model") {
    HCACHE_ASSIGN_OR_RETURN(o.pooling, model::pooling_named(args.pooling));
  }
  o.embd_normalize = args.embd_normalize;
  o.slot_actions = !args.slot_save_path.empty();
  o.ttl_ns = args.ttl_ns;
  o.batches_dir = join_path(o.runtime.state_dir, "batches");
  o.batch_quota_bytes = args.batch_quota;
  o.batch_ttl_ns = args.batch_ttl_ns;
  o.batch_parallel = args.batch_parallel;
  o.log_requests = args.log_requests == "on";
  HCACHE_ASSIGN_OR_RETURN(o.restore_mode, policy::parse_mode(args.runtime.restore_method));
  HCACHE_ASSIGN_OR_RETURN(o.runtime.evict.evict, policy::parse_evict_policy(args.evict_policy));
  o.scheduler = args.scheduler;
  HCACHE_ASSIGN_OR_RETURN(o.scheduler.fetch, policy::parse_fetch_policy(args.fetch_policy));
  o.runtime.evict.whole_chains = args.evict_whole;
  o.runtime.evict.reserve = args.evict_reserve;
  o.scheduler.evict = o.runtime.evict.evict;
  o.scheduler.batch.max_sequences = args.parallel;
  o.scheduler.batch.max_step_tokens = args.step_tokens;
  HCACHE_ASSIGN_OR_RETURN(o.scheduler.queue.policy, policy::parse_queue_policy(args.queue_policy));
  o.max_context = args.sequence_ctx;
  o.max_sequences = std::max(64, 4 * args.parallel);
  o.runtime.engine.window_sequences = std::max(4, 2 * args.parallel);
  o.truncate = args.overflow.truncates();
  o.runtime.truncates = o.truncate;
  o.truncation = args.overflow.limits();
  args.media.apply(&o);
  o.scheduler.draft = args.draft.limits();
  o.draft = args.draft.drafter(args.runtime, o.runtime);
  return o;
}

std::string urls_of(const std::string& hosts, uint16_t port) {
  std::string urls;
  for (const std::string& host : http::split_hosts(hosts)) {
    const bool bare = host.find(':') != std::string::npos && !host.starts_with('[');
    urls += fmt::format("{}http://{}{}{}:{}", urls.empty() ? "" : ", ", bare ? "[" : "", host,
                        bare ? "]" : "", port);
  }
  return urls;
}

// Says that the server is ready, and waits for a signal.
void wait_for_signal(const ServeArgs& args, uint16_t port) {
  fmt::print("hcache: serving on {}\n", urls_of(args.host, port));
  std::fflush(stdout);
  while (!interrupted()) Env::real().sleep_ns(kPollNs);
}

void tell_stopping(const ServeArgs& args) {
  fmt::print(stderr, "hcache: stopping; running requests have {}, a second signal ends at once\n",
             format_duration(args.grace_ns));
}

// Of a folder, or the one of -m.
Status serve_models(const ServeArgs& args, const http::Options& http) {
  HCACHE_RETURN_IF_ERROR(
      args.refuse({&args.drain_ns}, "is not known with --models-dir or --models-idle"));
  std::vector<const void*> own = args.models.fields();
  own.insert(own.end(),
             {&args.host, &args.port, &args.cors, &args.api_keys, &args.runtime.model.path,
              &args.runtime.state.state_dir, &args.runtime.state.stores});
  ModelServers servers;
  servers.given = args.given_but(own);
  servers.api_keys = args.api_keys;
  servers.state_dir = args.runtime.state.state_dir;
  servers.stores = args.runtime.state.stores;
  const std::string default_store = join_path(servers.state_dir, "store");
  if (servers.stores == std::vector<std::string>{default_store}) servers.stores.clear();
  servers.ctx = args.runtime.ctx;
  servers.device = args.runtime.model.device;
  if (args.models.dir.empty()) {
    HCACHE_ASSIGN_OR_RETURN(servers.only_path, resolve_model(args.runtime.model.path));
    const std::set<std::string> aliases(args.answers.aliases.begin(), args.answers.aliases.end());
    servers.only_name = aliases.empty() ? std::filesystem::path(servers.only_path).stem().string()
                                        : *aliases.begin();
  } else {
    HCACHE_RETURN_IF_ERROR(args.refuse({&args.runtime.model.path, &args.answers.aliases},
                                       "can't be had with --models-dir, whose files are the "
                                       "models and their names"));
    HCACHE_RETURN_IF_ERROR(
        args.refuse({&args.runtime.adapters, &args.runtime.scaled_adapters, &args.adapters_off,
                     &args.draft.model, &args.media.projector},
                    "is for one model, and --models-dir has several"));
  }
  HCACHE_ASSIGN_OR_RETURN(const auto router,
                          start_models(args.models, servers, http, !args.no_page));
  wait_for_signal(args, router->port());
  tell_stopping(args);
  router->stop(args.grace_ns);
  return {};
}

// Until a balancer has noticed; a second signal ends the process.
template <typename AnyServer>
void drain(AnyServer& server, int64_t ns) {
  if (ns <= 0) return;
  server.drain();
  fmt::print(stderr, "hcache: draining for {}: /health says 503, requests are still served\n",
             format_duration(ns));
  Env::real().sleep_ns(ns);
}

// The pooling of a model that makes vectors or ranks and no text; what --pooling says otherwise.
struct EncoderChoice {
  bool encodes = false;
  std::optional<model::Pooling> pooling;  // absent: as the model's file says
};

Result<EncoderChoice> encoder_choice(const ServeArgs& args, const std::string& path) {
  EncoderChoice choice;
  if (args.pooling != "model") {
    HCACHE_ASSIGN_OR_RETURN(choice.pooling, model::pooling_named(args.pooling));
  }
  if (args.reranking) {
    if (choice.pooling && choice.pooling != model::Pooling::kRank) {
      return invalid_argument(
          fmt::format("--reranking and --pooling {} contradict each other", args.pooling));
    }
    choice.pooling = model::Pooling::kRank;
  }
  choice.encodes = choice.pooling == model::Pooling::kRank;
  // What is wrong with the file is told where it is loaded.
  if (const auto facts = model::encoder_facts(path); facts.ok()) {
    choice.encodes = choice.encodes || facts->encodes || facts->pooling == model::Pooling::kRank;
  }
  return choice;
}

Status serve_encoder(const ServeArgs& args, const http::Options& http, const std::string& path,
                     const EncoderChoice& choice) {
  constexpr std::string_view kNotHere = "is not known for a model that makes vectors or ranks";
  HCACHE_RETURN_IF_ERROR(
      args.refuse({&args.runtime.adapters, &args.runtime.scaled_adapters}, kNotHere));
  HCACHE_ASSIGN_OR_RETURN(const model::RopeOverride rope, args.runtime.rope.resolved());
  if (rope.any()) return invalid_argument(fmt::format("--rope-scaling and its like: {}", kNotHere));
  const model::Offload offload = offload_options(args.runtime.model);
  HCACHE_ASSIGN_OR_RETURN(
      const model::OpenDevices devices,
      model::open_devices(args.runtime.model.device, args.runtime.model.threads, offload));
  HCACHE_ASSIGN_OR_RETURN(const libllama::LlamaOptions placed,
                          state::llama_placement(devices, offload));
  ProgressLine line;
  encoder::EncoderServerOptions o;
  o.model_path = path;
  o.encoder.devices = placed.devices;
  o.encoder.gpu_layers = placed.gpu_layers;
  o.encoder.device_parts = placed.device_parts;
  o.encoder.n_threads = placed.n_threads;
  o.encoder.pooling = choice.pooling;
  o.encoder.max_text_tokens = args.runtime.ctx;
  o.encoder.max_batch_tokens = args.runtime.batch;
  o.encoder.progress = [&line](float part) { return line.update("loading the model", part); };
  o.http = http;
  o.aliases = {args.answers.aliases.begin(), args.answers.aliases.end()};
  o.tags = {args.tags.begin(), args.tags.end()};
  o.embd_normalize = args.embd_normalize;
  o.max_queued = args.scheduler.max_queued;
  o.log_requests = args.log_requests == "on";
  o.version = HCACHE_VERSION;
  o.on_listening = [&](uint16_t port) {
    fmt::print(stderr, "hcache: listening on {}; requests get 503 until the model is loaded\n",
               urls_of(args.host, port));
  };
  HCACHE_ASSIGN_OR_RETURN(const auto server, encoder::EncoderServer::start(Env::real(), o));
  line.finish();
  wait_for_signal(args, server->port());
  drain(*server, args.drain_ns);
  tell_stopping(args);
  server->stop(args.grace_ns);
  return {};
}

Status serve(const ServeArgs& args) {
  if (args.runtime.model.device == "list") return list_devices();
  if (args.verbose) log::set_level(log::Level::kInfo);
  HCACHE_ASSIGN_OR_RETURN(const http::Options http, http_options(args));
  if (!http::are_loopback_hosts(args.host) && http.api_keys.empty()) {
    log::warn(
        "{} can be reached from elsewhere and no API key is set: anyone may use this server "
        "and read what is stored (--api-key)",
        args.host);
  }
  if (!args.models.dir.empty() || args.models.idle_ns > 0) return serve_models(args, http);
  if (const Status useless = args.refuse(args.models.fields(), "does nothing without --models-dir");
      !useless.ok()) {
    fmt::print(stderr, "hcache: {}\n", useless.message());
  }
  HCACHE_ASSIGN_OR_RETURN(const std::string path, resolve_model(args.runtime.model.path));
  HCACHE_ASSIGN_OR_RETURN(const EncoderChoice choice, encoder_choice(args, path));
  if (choice.encodes) return serve_encoder(args, http, path, choice);
  HCACHE_ASSIGN_OR_RETURN(server::ServerOptions options, server_options(args));
  options.http = http;
  ProgressLine line;
  options.runtime.progress = [&line](const std::string& what, double fraction) {
    return line.update(what, fraction);
  };
  tell_places(line, &options.runtime);
  options.on_listening = [&](uint16_t port) {
    fmt::print(stderr, "hcache: listening on {}; requests get 503 until the model is loaded\n",
               urls_of(args.host, port));
  };
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const Link link, parse_link(args.runtime.link));
  slow_to(link, env, &options.runtime);
  HCACHE_ASSIGN_OR_RETURN(const auto server, server::Server::start(env, options));
  line.finish();
  wait_for_signal(args, server->port());
  drain(*server, args.drain_ns);
  tell_stopping(args);
  return server->stop(args.grace_ns);
}

}  // namespace

void add_serve(CLI::App& app, Verb* verb) {
  add_verb<ServeArgs>(
      app, verb, "serve",
      "Serve the model over HTTP: OpenAI's, Anthropic's, llama-server's and Ollama's protocols",
      serve)
      ->set_version_flag("--version", HCACHE_VERSION);
}

}  // namespace hcache::cli
