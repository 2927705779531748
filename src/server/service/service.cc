#include "service.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "api/request.h"
#include "base/log.h"
#include "base/tokens.h"
#include "batch_answerer.h"
#include "state/identity.h"
#include "state/kept_state.h"

namespace hcache::server {
namespace {

constexpr int64_t kNsPerSecond = 1'000'000'000;
constexpr int64_t kExpiryNs = 60 * kNsPerSecond;
constexpr int64_t kStatNs = 5 * kNsPerSecond;
constexpr int32_t kPreparedRestores = 4;
constexpr size_t kShownName = 128;  // of a name that a client sends
// Separates the parts of a salt, none of which can contain it.
constexpr char kSaltSeparator = '\x1f';

Result<model::Pooling> pooling_of(const std::string& path) {
  HCACHE_ASSIGN_OR_RETURN(const std::optional<model::Pooling> known, model::pooling_of_file(path));
  if (known == model::Pooling::kRank) {
    return unimplemented(fmt::format("{}: the model ranks texts and makes no vectors", path));
  }
  return known.value_or(model::Pooling::kMean);
}

}  // namespace

Result<std::unique_ptr<Service>> Service::open(Env& env, const ServerOptions& options) {
  std::unique_ptr<Service> service(new Service(env, options));
  HCACHE_RETURN_IF_ERROR(service->init());
  return service;
}

Status Service::init() {
  started_s_ = env_.wall_ns() / kNsPerSecond;
  const std::string& path = options_.runtime.model_path;
  model_name_ = options_.aliases.empty() ? std::filesystem::path(path).stem().string()
                                         : *options_.aliases.begin();
  if (!options_.template_args.empty()) {
    auto defaults = api::parse_template_args(options_.template_args);
    if (!defaults.ok()) return defaults.status().with_context("--chat-template-kwargs");
    template_defaults_ = std::move(*defaults);
  }
  if (options_.thinking) {
    template_defaults_.thinking = *options_.thinking;
    template_defaults_.template_args["enable_thinking"] = *options_.thinking ? "true" : "false";
  }
  HCACHE_ASSIGN_OR_RETURN(tokenizer_, model::Tokenizer::load(path));
  HCACHE_ASSIGN_OR_RETURN(chat_template_,
                          model::ChatTemplate::create(*tokenizer_, options_.chat_template));
  pooling_ = options_.pooling ? *options_.pooling : pooling_of(path);
  serving::ServingOptions serving;
  serving.runtime = options_.runtime;
  serving.scheduler = options_.scheduler;
  serving.draft = options_.draft;
  if (serving.draft) {
    const std::string& drafter = serving.draft->runtime.model_path;
    const auto common = model::common_vocabulary(*tokenizer_, drafter);
    if (!common.ok()) return common.status().with_context("--model-draft " + drafter);
    serving.draft->n_vocab = *common;
  }
  serving.max_sequences = options_.max_sequences;
  serving.prepared_restores = std::min(kPreparedRestores, options_.scheduler.batch.max_sequences);
  serving.max_context = options_.max_context;
  serving.tick = [this] { tick(); };
  HCACHE_ASSIGN_OR_RETURN(serving_, serving::Serving::open(env_, serving));
  adapters_ = std::make_unique<AdapterScales>(runtime().card().adapters);
  // Asked for by an option, it is to work; asked for by a request, it is a wish.
  if (options_.truncate) {
    HCACHE_RETURN_IF_ERROR(check_cuts());
    if (options_.truncation.important > 0 && !serving_->why_no_choice().empty()) {
      log::info(
          "of conversations that outgrow the context the last tokens stay, whatever attention "
          "falls on: {}",
          serving_->why_no_choice());
    }
  }
  conversations_ =
      std::make_unique<Conversations>(env_, *tokenizer_, runtime().store(), runtime().fingerprint(),
                                      std::bind_front(&Service::saved, this));
  HCACHE_RETURN_IF_ERROR(conversations_->load());
  keeper_ = std::make_unique<WorkQueue>(1);
  writer_ = std::make_unique<WorkQueue>(1);
  intake_ = std::make_unique<WorkQueue>(options_.intake_threads);
  events_ = std::make_unique<Events>([this] { return event_text(); });
  next_expiry_ns_ = env_.monotonic_ns() + kExpiryNs;
  return {};
}

Status Service::check_cuts() const {
  if (!serving_->why_no_cuts().empty()) {
    return unimplemented(fmt::format("--context-overflow truncate: {}", serving_->why_no_cuts()));
  }
  return policy::validate(truncation_limits());
}

policy::TruncationLimits Service::truncation_limits() const {
  policy::TruncationLimits limits = options_.truncation;
  limits.context = context();
  if (!serving_->why_no_choice().empty()) limits.important = 0;
  return limits;
}

policy::NextMessage Service::next_message() const {
  return std::bind_front(model::next_message, std::cref(tokenizer()));
}

Result<store::Match> Service::saved(std::span<const int32_t> tokens, const SaltId& salt) {
  const Fingerprint& exact = runtime().fingerprint();
  HCACHE_ASSIGN_OR_RETURN(store::Match whole, store()->match(exact, salt, tokens));
  const std::vector<policy::HeldRows> cuts = cuts_of(tokens);
  if (cuts.empty()) return whole;
  HCACHE_ASSIGN_OR_RETURN(store::Match cut,
                          store()->match(state::chain_fingerprints(exact, cuts), salt, tokens));
  return cut.n_tokens > whole.n_tokens ? std::move(cut) : std::move(whole);
}

std::vector<policy::HeldRows> Service::cuts_of(std::span<const int32_t> tokens) const {
  if (!check_cuts().ok()) return {};
  return policy::cuts_of(tokens, truncation_limits(), next_message());
}

Result<model::ChatPrompt> Service::render(model::ChatInput chat) const {
  api::apply_template_args(template_defaults_, &chat);
  ignored_lines_.drop_from(&chat);
  return chat_template_->prompt(chat);
}

std::vector<model::Medium> Service::media_of(const model::ChatInput& chat) {
  std::vector<model::Medium> media;
  for (const model::ChatMessage& message : chat.messages) {
    media.insert(media.end(), message.media.begin(), message.media.end());
  }
  return media;
}

Result<std::string> Service::read_medium(const std::string& name) const {
  const std::filesystem::path path(name);
  const bool below =
      !name.empty() && path.is_relative() &&
      std::none_of(path.begin(), path.end(), [](const auto& p) { return p == ".."; });
  if (options_.media_dir.empty() || !below) {
    return invalid_argument(fmt::format(
        "file://{}: {}", name.substr(0, kShownName),
        options_.media_dir.empty() ? "this server names no folder of media (--media-path DIR)"
                                   : "expected the name of a file in the folder of media"));
  }
  auto bytes = read_whole_file(env_, join_path(options_.media_dir, name));
  if (!bytes.ok()) {
    return invalid_argument(
        fmt::format("file://{}: no file that can be read", name.substr(0, kShownName)));
  }
  return bytes;
}

Result<libllama::MediaPrompt> Service::tokenise(const std::string& text,
                                                std::span<const model::Medium> media,
                                                bool add_special) {
  const libllama::MediaReader* reader = serving_->media();
  if (reader == nullptr) {
    return invalid_argument(
        "pictures and sounds need a model with a projector: start the server with --mmproj FILE");
  }
  std::vector<std::string> files;
  for (const model::Medium& medium : media) {
    if (medium.bytes) {
      files.push_back(*medium.bytes);
      continue;
    }
    HCACHE_ASSIGN_OR_RETURN(std::string bytes, read_medium(medium.name));
    files.push_back(std::move(bytes));
  }
  return reader->tokenise(text, files, add_special);
}

void Service::open_batches() {
  if (options_.batches_dir.empty()) return;
  BatchesOptions batches;
  batches.dir = options_.batches_dir;
  batches.quota_bytes = options_.batch_quota_bytes;
  batches.ttl_ns = options_.batch_ttl_ns;
  batches.in_flight = options_.batch_parallel > 0 ? options_.batch_parallel
                                                  : options_.scheduler.batch.max_sequences;
  auto opened = Batches::open(env_, batches,
                              [this](const std::string& owner) { return answerer_for(owner); });
  if (!opened.ok()) {
    log::warn("this server takes no batches: {}", opened.status().to_string());
    return;
  }
  batches_ = std::move(*opened);
  batches_->start();
}

std::unique_ptr<Answerer> Service::answerer_for(const std::string& owner) {
  BatchClient client;
  client.background = true;
  const auto n_keys = static_cast<int>(options_.http.api_keys.size());
  // Without keys, or where all share their state, there is one owner.
  const int first = n_keys == 0 || !options_.salt_per_key ? -1 : 0;
  for (int key = first; key < n_keys; ++key) {
    http::Request from;
    from.key_index = key;
    if (to_hex(salt_of(from, "").owner) != owner) continue;
    client.key_index = key;
    if (key >= 0) client.key_name = options_.http.api_keys[static_cast<size_t>(key)].name;
    return std::make_unique<ServiceAnswerer>(*this, client);
  }
  return nullptr;
}

void Service::stop_batches() {
  if (batches_) batches_->stop();
}

void Service::tick() {
  const int64_t now_ns = env_.monotonic_ns();
  if (now_ns < next_expiry_ns_) return;
  next_expiry_ns_ = now_ns + kExpiryNs;
  keeper_->post([this] {
    const Result<int64_t> removed = conversations_->expire(
        [this](const SaltId& salt, const std::string& name) { return remove_session(salt, name); });
    if (!removed.ok()) log::warn("sessions can't expire: {}", removed.status().to_string());
  });
}

Status Service::stop(int64_t grace_ns) {
  if (!serving_) return {};
  stop_batches();
  events_.reset();
  intake_.reset();  // what was received is submitted
  serving_->stop(grace_ns);
  writer_.reset();
  keeper_.reset();
  conversations_.reset();  // its pins
  const Status closed = serving_->close();
  serving_.reset();
  return closed;
}

Service::~Service() { stop(0).ignore("a destructor has nobody to tell; errors were logged"); }

Salt Service::salt_of(const http::Request& request, const std::string& cache_salt) const {
  const Salt salt =
      state::adapted(key_salt(request, cache_salt), adapters_->adapters(), adapters_->current());
  return state::budgeted(salt, serving_->runtime().salt().kv_budget);
}

Result<Salt> Service::salt_of(const http::Request& request,
                              const api::GenerationRequest& asked) const {
  std::vector<float> scales = adapters_->current();
  if (asked.adapters) {
    HCACHE_ASSIGN_OR_RETURN(scales, adapters_->of(*asked.adapters));
  }
  const bool may = options_.runtime.kv_budget || options_.runtime.kv_quality;
  if (asked.kv_budget && !may && *asked.kv_budget < 1) {
    return invalid_argument(
        "kv_budget: this server's layers keep all rows; start it with --kv-budget 1 to let "
        "requests choose, or with a smaller one for all");
  }
  const Salt salt =
      state::adapted(key_salt(request, asked.cache_salt), adapters_->adapters(), std::move(scales));
  return state::budgeted(salt, asked.kv_budget.value_or(serving_->runtime().salt().kv_budget));
}

Fingerprint Service::file_fingerprint(const Salt& salt) {
  return state::budgeted(
      state::adapted(runtime().fingerprint(), adapters_->adapters(), salt.adapters),
      salt.kv_budget);
}

Salt Service::key_salt(const http::Request& request, const std::string& cache_salt) const {
  std::string salt = options_.runtime.salt;
  if (request.key_index >= 0 && options_.salt_per_key) {
    salt += kSaltSeparator;
    salt += to_hex(options_.http.api_keys[static_cast<size_t>(request.key_index)].hash);
  }
  Salt out = own_salt(salt);
  if (!cache_salt.empty()) out.id = salt_id(salt + kSaltSeparator + cache_salt);
  return out;
}

// Counting a large store takes a while: a few seconds old is new enough to watch.
store::StoreStat Service::store_stat() {
  MutexLock lock(stat_mutex_);
  const int64_t now = env_.monotonic_ns();
  if (store() != nullptr && (stat_ns_ == 0 || now - stat_ns_ > kStatNs)) {
    if (auto stat = store()->stat(); stat.ok()) stat_ = std::move(*stat);
    stat_ns_ = now;
  }
  return stat_;
}

std::string Service::event_text() {
  const scheduler::Snapshot s = scheduler().stats();
  nlohmann::json json = {
      {"arena", {{"cells", s.arena_cells}, {"active", s.active_cells}, {"idle", s.idle_cells}}},
      {"requests",
       {{"queued", s.queued},
        {"fetching", s.fetching},
        {"restoring", s.restoring},
        {"prefill", s.prefill},
        {"decoding", s.decoding},
        {"done", s.done},
        {"failed", s.failed}}}};
  if (store() != nullptr) {
    const store::StoreStat stat = store_stat();
    json["tiers"] = {{"dram", {{"used", stat.dram_bytes}, {"capacity", stat.dram_capacity_bytes}}},
                     {"disk", {{"used", stat.allocated_bytes}, {"capacity", stat.quota_bytes}}}};
    json["sessions"] = stat.sessions;
  }
  return json.dump();
}

std::string Service::metrics_text() {
  MetricsSnapshot snapshot;
  snapshot.scheduler = scheduler().stats();
  snapshot.store = store_stat();
  if (const auto saver = runtime().saver_stats()) snapshot.saver = *saver;
  if (const http::Server* http = http_.load(std::memory_order_acquire); http != nullptr) {
    snapshot.http = http->counters();
  }
  if (batches_) snapshot.batches = batches_->stat();
  snapshot.weights = runtime().weight_stats();
  snapshot.bytes_read_ahead = serving_->bytes_read_ahead();
  if (serving_->media() != nullptr) snapshot.media_encoded = serving_->media()->encoded();
  return metrics_.text(snapshot);
}

Status Service::remove_session(const SaltId& id, const std::string& name) {
  HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, conversations_->tokens(id, name));
  HCACHE_RETURN_IF_ERROR(conversations_->remove(id, name));
  // What other conversations begin with stays.
  int64_t shared = 0;
  for (const Conversation& other : conversations_->list(id)) {
    const auto theirs = conversations_->tokens(id, other.name);
    if (!theirs.ok()) continue;  // gone meanwhile
    shared = std::max(shared, common_prefix(tokens, *theirs));
  }
  scheduler().forget(id, std::move(tokens), shared);
  return {};
}

std::string Service::new_id() {
  return fmt::format("{:016x}{:016x}", env_.random_u64(), env_.random_u64());
}

}  // namespace hcache::server
