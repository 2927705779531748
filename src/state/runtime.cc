#include "state/runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/direct_storage.h"
#include "base/log.h"
#include "base/units.h"
#include "device_ring.h"
#include "model/check.h"
#include "model/file_digest.h"
#include "packed_kv.h"
#include "planned_pages.h"
#include "policy/snapshots.h"
#include "state/budget_quality.h"
#include "state/identity.h"
#include "state/kept_state.h"
#include "state/rounding.h"

namespace hcache::state {
namespace {

// Restores shorter than this say little about a disk's speed.
constexpr uint64_t kMinObservedBytes = 8U << 20;

// Host memory that the device copies from fastest; empty where it has no more.
AlignedBuffer pinned_memory(const model::Device& device, size_t n_bytes) {
  ggml_backend_buffer_t buffer = device.alloc_host(n_bytes + kDirectAlignment);
  if (buffer == nullptr) return {};
  void* base = ggml_backend_buffer_get_base(buffer);
  size_t room = ggml_backend_buffer_get_size(buffer);
  std::align(kDirectAlignment, n_bytes, base, room);
  return {{static_cast<std::byte*>(base), n_bytes}, [buffer] { ggml_backend_buffer_free(buffer); }};
}

class RuntimeImpl : public Runtime {
 public:
  RuntimeImpl(Env& env, const RuntimeOptions& options) : env_(env), options_(options) {}
  ~RuntimeImpl() override { close().ignore("errors were logged; a destructor has nobody to tell"); }

  Status init();

  void look_up(std::span<const int32_t> tokens, const SaltId& salt,
               std::span<const policy::HeldRows> cuts) override {
    if (store_) store_->look_up(chain_fingerprints(fingerprint_, cuts), salt, tokens);
  }
  store::Match match(std::span<const int32_t> tokens, const SaltId& salt,
                     std::span<const policy::HeldRows> cuts) override;
  Result<PlannedRestore> plan(std::span<const int32_t> tokens, const store::Match& match,
                              const PlanOptions& options) override;
  bool discard(const PageFailure& failure) override;
  void observe(const policy::RestoreRecord& record) override;
  Status flush() override {
    if (engine_) HCACHE_RETURN_IF_ERROR(engine_->synchronize());
    if (llama_.saver) return llama_.saver->flush();
    return saver_ ? saver_->flush() : Status();
  }
  Status close() override;

  engine::Engine& engine() override { return *engine_; }
  OpenBatchEngine* batch() override { return batch_.engine ? &batch_ : nullptr; }
  OpenLlama* llama() override { return llama_.engine ? &llama_ : nullptr; }
  engine::WeightStats weight_stats() const override {
    if (llama_.engine) return {};
    return batch_.engine ? batch_.engine->weights().stats() : engine_->weights().stats();
  }
  const ModelCard& card() const override { return card_; }
  const model::Model& model() const override { return *model_; }
  store::Store* store() override { return store_.get(); }
  Saver* saver() override { return saver_.get(); }
  std::optional<SaverStats> saver_stats() const override {
    if (saver_) return saver_->stats();
    return llama_.saver ? std::optional(llama_.saver->stats()) : std::nullopt;
  }
  const CostProfile& profile() const override { return profile_; }
  Status refresh_profile() override;
  const policy::SavePlan& save_plan() const override { return save_plan_; }
  const Fingerprint& fingerprint() const override { return fingerprint_; }
  const Salt& salt() const override { return salt_; }
  policy::Compression kv_policy() const override { return options_.kv_policy; }
  policy::RestoreCosts costs() const override {
    if (!engine_) return {};
    return packed(prices(env_.nominal_read_bytes_per_s()), packed_by_plan());
  }

 private:
  [[nodiscard]] uint64_t other_bytes(const model::HParams& hparams) const;
  [[nodiscard]] Fingerprint own_fingerprint() const;
  [[nodiscard]] bool wants_batch() const;
  // Loads the model into our engine's memory; where it can't run there, and may run elsewhere,
  // model_ stays null.
  Status load_model();
  Status open_llama();
  // Of the model that has been opened.
  Status know_adapters();
  Status open_batch();
  Status open_saver();
  Status open_store();
  // What restores cost over a link of so many bytes/s at most; 0: the disks alone bound it.
  [[nodiscard]] policy::RestoreCosts prices(double max_read_bytes_per_s) const;
  // The same where so much of K and V is packed.
  [[nodiscard]] policy::RestoreCosts packed(const policy::RestoreCosts& prices,
                                            const policy::PackedShare& share) const {
    return policy::with_packed(prices, share, packing().unpack_row_s);
  }
  [[nodiscard]] const policy::KvPacking& packing() const {
    return profile_.packings.of(options_.pack);
  }
  // What the save plan packs, if it does.
  [[nodiscard]] policy::PackedShare packed_by_plan() const {
    if (!save_plan_.packed) return {};
    return {.share = 1, .ratio = packing().ratio > 0 ? packing().ratio : 1};
  }
  Status open_direct_storage(store::StoreOptions* options);
  Status open_profile();
  Status measure_profile();
  Status choose_save_plan();
  [[nodiscard]] policy::SaveRequest save_request() const;
  Status choose_kv_budget();
  Status choose_rounding();
  Status choose_packing(const policy::SaveRequest& request, bool was_packed);
  void keep_hidden_where_lossless();
  model::Progress report(const char* what);
  [[nodiscard]] std::string digest_dir() const { return join_path(options_.state_dir, "digests"); }
  [[nodiscard]] std::string profile_dir() const {
    return join_path(options_.state_dir, "profiles");
  }
  Env& env_;
  RuntimeOptions options_;
  model::OpenDevices devices_;
  std::unique_ptr<model::Model> model_;
  ModelCard card_;
  std::unique_ptr<engine::Engine> engine_;  // or
  OpenBatchEngine batch_;                   // or
  OpenLlama llama_;
  AlignedBuffer dram_;                             // pinned; empty: the store maps its own
  std::unique_ptr<DirectStorage> direct_storage_;  // null: disks are read into host memory
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<Saver> saver_;
  std::string digest_;
  std::string profile_key_;
  Fingerprint fingerprint_;
  Salt salt_;
  CostProfile profile_;
  bool profile_dirty_ = false;
  double decrypt_bytes_per_s_ = 0;  // of an encrypted store
  policy::SavePlan save_plan_;
  std::vector<uint8_t> tap_;
  StateTypes state_types_;
};

model::Progress RuntimeImpl::report(const char* what) {
  return [this, what](float fraction) {
    return !options_.progress || options_.progress(what, fraction);
  };
}

Status RuntimeImpl::load_model() {
  model::LoadOptions load;
  load.placement = devices_.placement;
  load.progress = report("loading the model");
  load.env = &env_;
  load.weights = options_.weights;
  load.device_memory = options_.device_memory;
  load.rope = options_.rope;
  for (const AdapterFile& file : options_.adapters) load.adapters.push_back(file.path);
  load.other_bytes = [this](const model::HParams& hparams) { return other_bytes(hparams); };
  auto loaded = model::Model::load(options_.model_path, *devices_.devices.front(), load);
  if (loaded.code() == Code::kUnimplemented && options_.forward == EngineChoice::kAuto) {
    // The model itself, or just what was asked for beside it?
    const Status why = model::check_model(options_.model_path, *devices_.devices.front(), env_);
    if (why.code() != Code::kUnimplemented) return loaded.status();
    log::info("the model runs on libllama: {}", why.message());
    return {};
  }
  HCACHE_ASSIGN_OR_RETURN(model_, std::move(loaded));
  card_ = model_card(*model_);
  return {};
}

Status RuntimeImpl::open_llama() {
  const bool streamed = options_.weights == model::WeightPlace::kHost ||
                        options_.weights == model::WeightPlace::kDisk;
  if (streamed || options_.batch.use == BatchEngineUse::kAlways || options_.gpu_direct ||
      options_.kv_budget || options_.kv_quality) {
    return unimplemented(
        "--weights host and disk, --engine hybrid, --gpu-direct, --kv-budget and --kv-quality need "
        "our own engine, which does not run this model; leave them out");
  }
  // Before libllama sees the file: it trusts what it reads.
  HCACHE_ASSIGN_OR_RETURN(digest_, model::file_digest(env_, options_.model_path, digest_dir(),
                                                      report("checking the weights")));
  HCACHE_ASSIGN_OR_RETURN(libllama::LlamaOptions llama,
                          llama_placement(devices_, options_.offload));
  llama.cells = options_.engine.arena_tokens;
  llama.max_batch_rows = options_.engine.max_batch_rows;
  llama.max_sequences = options_.max_sequences;
  llama.kv_type = options_.engine.kv_type;
  llama.rope = options_.rope;
  for (const AdapterFile& file : options_.adapters) llama.adapters.push_back(file.path);
  llama.progress = report("loading the model");
  llama.projector = options_.projector;
  if (!llama.projector.path.empty()) {
    HCACHE_ASSIGN_OR_RETURN(llama.projector.digest,
                            model::file_digest(env_, llama.projector.path, digest_dir(),
                                               report("checking the projector")));
  }
  HCACHE_ASSIGN_OR_RETURN(llama_.engine, libllama::LlamaEngine::load(options_.model_path, llama));
  card_ = model_card(options_.model_path, *llama_.engine);
  HCACHE_RETURN_IF_ERROR(know_adapters());
  if (options_.on_model) options_.on_model(card_);
  fingerprint_ = llama_fingerprint(digest_, *llama_.engine);
  if (!options_.use_store) return {};
  HCACHE_RETURN_IF_ERROR(open_store());
  if (options_.read_only_store) return {};
  llama_.saver =
      LlamaSaver::create(*store_, fingerprint_, llama_.engine->layout(), options_.saver.ring_bytes);
  return {};
}

Status RuntimeImpl::init() {
  HCACHE_RETURN_IF_ERROR(env_.make_dirs(options_.state_dir));
  HCACHE_ASSIGN_OR_RETURN(
      devices_, model::open_devices(options_.device, options_.n_threads, options_.offload));
  if (!options_.projector.path.empty()) {
    if (options_.forward == EngineChoice::kOwn) {
      return unimplemented(
          "a projector (--mmproj) needs the model on libllama: leave out --engine own");
    }
    options_.forward = EngineChoice::kLlama;
  }
  if (options_.forward != EngineChoice::kLlama) HCACHE_RETURN_IF_ERROR(load_model());
  if (!model_) return open_llama();
  HCACHE_RETURN_IF_ERROR(know_adapters());
  if (options_.on_model) options_.on_model(card_);
  HCACHE_ASSIGN_OR_RETURN(digest_,
                          model_->content_digest(digest_dir(), report("checking the weights")));
  fingerprint_ = own_fingerprint();

  if (options_.use_store) HCACHE_RETURN_IF_ERROR(open_store());
  if (wants_batch()) {
    const Status opened = open_batch();
    const bool instead =
        opened.code() == Code::kUnimplemented && options_.batch.use != BatchEngineUse::kAlways;
    if (!instead) return opened;
    log::info("the batch runs on the ordinary engine: {}", opened.message());
  }
  options_.engine.separate_layers = options_.kv_budget || options_.kv_quality;
  HCACHE_ASSIGN_OR_RETURN(engine_, engine::Engine::create(*model_, options_.engine));
  if (options_.engine.separate_layers) {
    HCACHE_RETURN_IF_ERROR(check_keeps_rows(*engine_).with_context("--kv-budget"));
    HCACHE_RETURN_IF_ERROR(choose_kv_budget());
  }
  HCACHE_ASSIGN_OR_RETURN(state_types_, parse_state_type(options_.state_type, *engine_));
  HCACHE_RETURN_IF_ERROR(open_profile());
  if (options_.on_profile) options_.on_profile(profile_);
  HCACHE_RETURN_IF_ERROR(choose_rounding());
  if (store_) HCACHE_RETURN_IF_ERROR(store_->set_costs(costs(), profile_.read_bytes_per_s));
  if (store_ && !options_.read_only_store) {
    HCACHE_RETURN_IF_ERROR(choose_save_plan());
    HCACHE_RETURN_IF_ERROR(open_saver());
    HCACHE_RETURN_IF_ERROR(
        engine_->set_capture(saver_.get(), {.layers = tap_, .hidden_types = state_types_}));
  }
  return {};
}

Status RuntimeImpl::choose_kv_budget() {
  if (options_.kv_quality) {
    if (options_.progress && !options_.progress("measuring what fewer rows cost", 0)) {
      return cancelled("interrupted");
    }
    HCACHE_ASSIGN_OR_RETURN(const auto kls,
                            budget_kls(env_, *engine_, options_.kv_policy, profile_dir(),
                                       to_hex(fingerprint_), options_.sample));
    options_.kv_budget = budget_within(kls, *options_.kv_quality);
  }
  salt_ = budgeted(salt_, *options_.kv_budget);
  return {};
}

Status RuntimeImpl::know_adapters() {
  HCACHE_ASSIGN_OR_RETURN(card_.adapters, describe_adapters(env_, options_.adapters, digest_dir(),
                                                            report("checking the adapters")));
  salt_ = adapted(own_salt(options_.salt), card_.adapters, default_scales(card_.adapters));
  return {};
}

Fingerprint RuntimeImpl::own_fingerprint() const {
  return state_fingerprint(digest_, model_->hparams(), options_.engine.kv_type, options_.pack,
                           options_.same_products ? model_->product_generation() : 0);
}

uint64_t RuntimeImpl::other_bytes(const model::HParams& hparams) const {
  const bool streamed = options_.weights == model::WeightPlace::kHost ||
                        options_.weights == model::WeightPlace::kDisk;
  const BatchEngineUse use = options_.batch.use;
  const bool batch =
      use == BatchEngineUse::kWhereStreamed ? streamed : use != BatchEngineUse::kNever;
  if (!batch) return engine::estimate_device_bytes(hparams, options_.engine);
  engine::EngineOptions options = options_.engine;
  // Its buffers hold one layer each, the estimate's arena all of them.
  const auto n_layer = std::max<int64_t>(hparams.n_layer, 1);
  options.arena_tokens =
      options_.batch.engine.buffer_tokens * options_.batch.engine.n_buffers / n_layer;
  return engine::estimate_device_bytes(hparams, options) + options_.batch.engine.device_bytes;
}

bool RuntimeImpl::wants_batch() const {
  switch (options_.batch.use) {
    case BatchEngineUse::kNever: return false;
    case BatchEngineUse::kWhereStreamed: return model_->streamed() != nullptr;
    case BatchEngineUse::kWherePossible:
    case BatchEngineUse::kAlways: return true;
  }
  return false;
}

Status RuntimeImpl::open_saver() {
  SaverOptions options = options_.saver;
  // The batch engine has no profile to choose by.
  const bool packs = engine_ ? save_plan_.packed : options_.pack != policy::PackMode::kAuto;
  options.pack = packs ? options_.pack : policy::PackMode::kOff;
  HCACHE_ASSIGN_OR_RETURN(saver_,
                          Saver::create(env_, *store_, *model_, options_.engine.kv_type, options));
  return {};
}

Status RuntimeImpl::open_batch() {
  if (!options_.adapters.empty()) {
    return unimplemented("the batch engine applies no adapters");
  }
  BatchEngineOptions batch = options_.batch;
  batch.engine.kv_type = options_.engine.kv_type;
  batch.engine.attention = options_.engine.attention;
  batch.engine.max_batch_rows = options_.engine.max_batch_rows;
  batch.engine.env = &env_;
  HCACHE_ASSIGN_OR_RETURN(
      batch_, open_batch_engine(env_, *model_, digest_, batch, profile_dir(), options_.progress));
  return store_ && !options_.read_only_store ? open_saver() : Status();
}

// Rings are read into the device's memory; one for which it has none left is an ordinary one.
Status RuntimeImpl::open_direct_storage(store::StoreOptions* options) {
  const model::Device& device = model_->pinning_device();
  const auto n_gpus = std::count_if(devices_.devices.begin(), devices_.devices.end(),
                                    [](const auto& each) { return !each->is_cpu(); });
  if (n_gpus != 1 || !device.name().starts_with("cuda:")) {
    return invalid_argument(
        fmt::format("--gpu-direct reads into the memory of one CUDA device, and this runs on {}; "
                    "leave it out, or choose --device cuda:0",
                    options_.device));
  }
  HCACHE_ASSIGN_OR_RETURN(direct_storage_, DirectStorage::open());
  options->new_mirror =
      [this,
       device = &device](std::span<std::byte> ring) -> Result<std::unique_ptr<store::RingMirror>> {
    auto mirror = DeviceRing::create(*direct_storage_, *device, ring);
    if (mirror.ok()) return std::unique_ptr<store::RingMirror>(std::move(*mirror));
    log::warn("a restore reads through host memory: {}", mirror.status().to_string());
    return std::unique_ptr<store::RingMirror>();
  };
  return {};
}

Status RuntimeImpl::open_store() {
  store::StoreOptions options;
  options.dirs = options_.store_dirs;
  if (options.dirs.empty()) options.dirs = {join_path(options_.state_dir, "store")};
  options.quota_bytes = options_.store_quota_bytes;
  const bool nothing_else = llama_.engine && llama_.engine->layout().row_bytes.empty();
  options.snapshot_quota_bytes = options_.snapshot_quota_bytes.value_or(
      policy::default_snapshot_quota(options_.store_quota_bytes, nothing_else));
  options.owner_quota_bytes = options_.key_quota_bytes;
  options.dram_bytes = options_.dram_bytes;
  options.dram_policy = options_.evict;
  options.disk_policy = options_.evict;
  options.dram_place = options_.dram_place;
  const model::Device& device = model_ ? model_->pinning_device() : *devices_.devices.front();
  if (device.pins_host_memory()) {
    if (options.dram_bytes > 0 && options.dram_place.empty()) {
      dram_ = pinned_memory(device, options.dram_bytes);
      if (dram_.size() == 0) {
        return resource_exhausted(
            fmt::format("no {} of host memory for saved state", format_bytes(options.dram_bytes)));
      }
      options.dram_memory = dram_.span();
    }
    options.new_ring = [device = &device](size_t n_bytes) {
      AlignedBuffer ring = pinned_memory(*device, n_bytes);
      return ring.size() > 0 ? std::move(ring) : AlignedBuffer(n_bytes);
    };
  }
  if (options_.gpu_direct) HCACHE_RETURN_IF_ERROR(open_direct_storage(&options));
  options.key = options_.store_key;
  if (options.key) decrypt_bytes_per_s_ = store::measure_decryption(env_, *options.key);
  options.remote = options_.remote;
  options.read_only = options_.read_only_store;
  HCACHE_ASSIGN_OR_RETURN(store_, store::Store::open(env_, options));
  return {};
}

Status RuntimeImpl::measure_profile() {
  HCACHE_ASSIGN_OR_RETURN(profile_, measure_cost_profile(env_, *engine_, profile_key_, state_types_,
                                                         options_.progress));
  if (store_ && !options_.read_only_store && env_.nominal_read_bytes_per_s() == 0) {
    double total = 0;
    const std::vector<std::string> dirs =
        options_.store_dirs.empty()
            ? std::vector<std::string>{join_path(options_.state_dir, "store")}
            : options_.store_dirs;
    for (const std::string& dir : dirs) {
      HCACHE_ASSIGN_OR_RETURN(const double speed, store::measure_read_speed(env_, dir));
      total += speed;
    }
    profile_.read_bytes_per_s = total;
  }
  return save_cost_profile(env_, profile_dir(), profile_);
}

Status RuntimeImpl::open_profile() {
  HCACHE_RETURN_IF_ERROR(env_.make_dirs(profile_dir()));
  if (options_.profile) {
    profile_ = *options_.profile;
    return {};
  }
  profile_key_ = profile_key(*engine_, digest_, state_types_);
  Result<CostProfile> known = load_cost_profile(env_, profile_dir(), profile_key_);
  if (known.ok() && (known->read_bytes_per_s > 0 || !store_)) {
    profile_ = std::move(*known);
    return {};
  }
  return measure_profile();
}

Status RuntimeImpl::refresh_profile() {
  if (options_.profile) return failed_precondition("the cost profile was given, not measured");
  if (!engine_) return failed_precondition("this engine has no cost profile");
  return measure_profile();
}

policy::RestoreCosts RuntimeImpl::prices(double max_read_bytes_per_s) const {
  policy::RestoreCosts out = restore_costs(profile_, *engine_, max_read_bytes_per_s);
  // A reader decrypts while its disks read on: the slower of both paces it.
  if (decrypt_bytes_per_s_ > 0) {
    out.link.bytes_per_s = std::min(out.link.bytes_per_s, decrypt_bytes_per_s_);
  }
  return out;
}

policy::SaveRequest RuntimeImpl::save_request() const {
  policy::SaveRequest request;
  request.mode = options_.save;
  // What was cut out, or lies before a window, can't be computed again.
  if (options_.truncates || model_->hparams().n_window > 0) request.max_unsaved_layers = 1;
  request.history = std::max(1, std::min(4096, model_->hparams().n_ctx_train / 2));
  request.overhead_bytes_per_token = store::catalog_bytes_per_token(model_->hparams().n_layer);
  return request;
}

// By the link that restores will have, --link included.
Status RuntimeImpl::choose_rounding() {
  if (options_.pack != policy::PackMode::kAuto || options_.quality <= 0 || !store_) return {};
  if (options_.progress && !options_.progress("measuring what rounding costs", 0)) {
    return cancelled("interrupted");
  }
  const auto file = [&](std::string_view name) {
    return join_path(profile_dir(), fmt::format("{}-{}", name, to_hex(fingerprint_)));
  };
  HCACHE_ASSIGN_OR_RETURN(const policy::RoundingKl kl,
                          rounding_kl(env_, *engine_, file("rounding"), options_.sample));
  const std::string path = file("rounded");
  policy::PackMode in_force = policy::PackMode::kAuto;
  if (const Result<std::string> before = read_whole_file(env_, path); before.ok()) {
    if (const auto mode = policy::parse_pack_mode(*before); mode.ok()) in_force = *mode;
  }
  HCACHE_ASSIGN_OR_RETURN(
      options_.pack,
      policy::choose_rounding(prices(env_.nominal_read_bytes_per_s()), save_request(),
                              profile_.packings, kl, options_.quality, in_force));
  if (!options_.read_only_store) {
    HCACHE_RETURN_IF_ERROR(
        write_whole_file(env_, path, std::string(policy::pack_mode_name(options_.pack))));
  }
  log::info(
      "K and V are saved {}: rounding costs a mean KL of {:.2g} (q8_0) or {:.2g} (q4_0), and "
      "--quality allows {:.2g}",
      policy::loses(options_.pack) ? policy::pack_mode_name(options_.pack) : "without loss",
      kl.q8_0, kl.q4_0, options_.quality);
  fingerprint_ = own_fingerprint();
  return {};
}

Status RuntimeImpl::choose_save_plan() {
  // The plan in force lives beside the profile, so that hysteresis spans processes.
  const std::string path =
      join_path(profile_dir(), fmt::format("save-{}.json", to_hex(fingerprint_)));
  std::optional<policy::SavePlan> previous;
  bool was_packed = false;
  if (const Result<std::string> text = read_whole_file(env_, path); text.ok()) {
    const auto json = nlohmann::json::parse(*text, nullptr, false);
    if (json.is_object() && json.contains("layers") && json["layers"].is_array()) {
      previous.emplace();
      for (const auto& layer : json["layers"]) {
        const int mask = layer.is_number_integer() ? layer.get<int>() : policy::kNoEncoding;
        previous->layers.push_back(static_cast<policy::Encoding>(mask & policy::kHasBoth));
      }
      const auto packed = json.find("packed");
      was_packed = packed != json.end() && packed->is_boolean() && packed->get<bool>();
    }
  }
  const policy::SaveRequest request = save_request();
  // Which layers are saved as K and V depends on how few bytes those are, if that is settled.
  policy::RestoreCosts saved = prices(0);
  if (policy::loses(options_.pack) && packing().ratio > 0) {
    saved = packed(saved, {.share = 1, .ratio = packing().ratio});
  }
  HCACHE_ASSIGN_OR_RETURN(save_plan_,
                          policy::plan_save(saved, request, previous ? &*previous : nullptr));
  keep_hidden_where_lossless();
  HCACHE_RETURN_IF_ERROR(choose_packing(request, was_packed));
  tap_.clear();
  nlohmann::json layers = nlohmann::json::array();
  for (const policy::Encoding encoding : save_plan_.layers) {
    uint8_t mask = 0;
    if ((encoding & policy::kHasHidden) != 0) mask |= engine::kTapHidden;
    if ((encoding & policy::kHasKv) != 0) mask |= engine::kTapKv;
    tap_.push_back(mask);
    layers.push_back(static_cast<int>(encoding));
  }
  if (options_.save != policy::SaveMode::kPlan) return {};
  const nlohmann::json chosen = {{"layers", layers}, {"packed", save_plan_.packed}};
  return write_whole_file(env_, path, chosen.dump());
}

// By the link that restores will have, --link included.
Status RuntimeImpl::choose_packing(const policy::SaveRequest& request, bool was_packed) {
  const bool can_pack = packable_bytes(options_.engine.kv_type) > 0;
  const bool wanted = options_.pack == policy::PackMode::kOn || policy::loses(options_.pack);
  bool pack = can_pack && wanted;
  if (options_.pack == policy::PackMode::kAuto) {
    HCACHE_ASSIGN_OR_RETURN(pack,
                            policy::packing_pays(prices(env_.nominal_read_bytes_per_s()), request,
                                                 save_plan_.layers, packing(), was_packed));
  }
  if (wanted && !can_pack) {
    log::warn("K and V are saved as they are: {} can't be packed",
              ggml_type_name(options_.engine.kv_type));
  }
  if (!pack) return {};
  save_plan_.packed = true;
  const policy::RestoreCosts plain = prices(0);
  const policy::RestoreCosts smaller = packed(plain, packed_by_plan());
  for (int32_t l = 0; l < plain.n_layer; ++l) {
    if ((save_plan_.layers[static_cast<size_t>(l)] & policy::kHasKv) == 0) continue;
    save_plan_.bytes_per_token -= plain.layer(l).kv_bytes - smaller.layer(l).kv_bytes;
  }
  return {};
}

// A layer whose K and V weights have no type of hidden states in common is saved as K and V.
void RuntimeImpl::keep_hidden_where_lossless() {
  int n_changed = 0;
  for (size_t i = 0; i < state_types_.size(); ++i) {
    policy::Encoding& encoding = save_plan_.layers[i];
    if (state_types_[i] != GGML_TYPE_COUNT || (encoding & policy::kHasHidden) == 0) continue;
    encoding = policy::kHasKv;
    ++n_changed;
  }
  if (n_changed == 0) return;
  log::info(
      "{} of {} layers are saved as K and V: no type of hidden states that is smaller serves the "
      "weights of both without loss (--state-type f16 saves them with a loss)",
      n_changed, state_types_.size());
}

store::Match RuntimeImpl::match(std::span<const int32_t> tokens, const SaltId& salt,
                                std::span<const policy::HeldRows> cuts) {
  if (!store_) return {};
  Result<store::Match> found = store_->match(chain_fingerprints(fingerprint_, cuts), salt, tokens);
  if (found.ok()) return std::move(*found);
  log::warn("the store can't be searched: {}", found.status().to_string());
  return {};
}

Result<PlannedRestore> RuntimeImpl::plan(std::span<const int32_t> tokens, const store::Match& match,
                                         const PlanOptions& options) {
  if (!engine_) return failed_precondition("this engine plans no restores");
  PlannedRestore planned;
  const auto n_tokens = static_cast<int64_t>(tokens.size());
  int64_t max_rows =
      options.mode == policy::Mode::kRecompute
          ? 0
          : std::min({static_cast<int64_t>(match.n_tokens), n_tokens - 1, options.most_rows});
  const auto chunk_before = [&](int64_t row) {
    auto chunk = match.chunks.begin();
    for (int64_t end = chunk->usable_rows; end < row; end += chunk->usable_rows) ++chunk;
    return chunk->chunk;
  };
  // A partial chunk that the saver could not complete is computed again from its first row.
  const bool save = options.save && saver_ != nullptr;
  const int64_t partial = max_rows == 0 ? 0 : (max_rows + options.dropped) % store::kChunkTokens;
  if (save && partial != 0 && !holds_all(chunk_before(max_rows).info(), tap_, state_types_)) {
    max_rows -= partial;
  }

  max_rows = restorable_rows(*engine_, match, max_rows);

  policy::RestoreRequest request;
  const policy::RestoreCosts plain = prices(env_.nominal_read_bytes_per_s());
  TierSlowness slowness;
  if (store_ && (options_.dram_bytes > 0 || !options_.remote.url.empty())) {
    slowness.store = store_.get();
    slowness.remote = plain.link.bytes_per_s / store_->remote_bytes_per_s();
  }
  Offer offer = offer_of(*engine_, match, max_rows, slowness);
  policy::RestoreCosts prices = packed(plain, offer.packed);
  prices.compute_share = options.compute_share;
  request.available = std::move(offer.available);
  if (options.ahead) {
    for (policy::AvailableRun& run : request.available.runs) {
      run.slowness.assign(run.layers.size(), slowness.memory);
    }
  }
  const int64_t n_planned =
      options.with_prefill ? n_tokens : std::min(n_tokens, options.most_rows + 1);
  request.new_tokens = n_planned - request.available.tokens();
  request.mode = options.mode;
  request.token_rounding = options.token_rounding;
  request.whole = options.dropped > 0 || offer.windowed;
  request.or_nothing = options.dropped == 0;
  HCACHE_ASSIGN_OR_RETURN(planned.plan, policy::plan_restore(prices, request));
  if (!options_.remote.url.empty()) {
    request.mode = policy::Mode::kRecompute;
    request.whole = false;
    HCACHE_ASSIGN_OR_RETURN(const policy::Plan anew, policy::plan_restore(prices, request));
    planned.remote_timeout_s = anew.predicted.makespan_s;
  }
  const int64_t rows = planned.plan.restored_tokens;
  if (save && rows > 0 && (rows + options.dropped) % store::kChunkTokens != 0) {
    planned.tail = chunk_before(rows);
  }
  return planned;
}

bool RuntimeImpl::discard(const PageFailure& failure) {
  log::warn("saved state is not used, it is computed again: {}", failure.status.to_string());
  if (failure.remote) return true;  // the store has
  const bool droppable = failure.status.code() == Code::kDataLoss && !options_.read_only_store;
  return droppable && store_->quarantine(failure.chunk, failure.layer, failure.encoding).ok();
}

void RuntimeImpl::observe(const policy::RestoreRecord& record) {
  if (options_.profile) return;
  // The disks' speed alone, of restores that read nothing else.
  if (env_.nominal_read_bytes_per_s() == 0 && record.read.remote == 0 &&
      record.read.disk >= kMinObservedBytes) {
    observe_read_speed(profile_, static_cast<double>(record.read.disk) / record.io_busy_s);
    profile_dirty_ = true;
  }
  // Where uploads run beside compute, calls return before their work is done.
  if (profile_.is_synchronous() && record.predicted_project_s > 0) {
    observe_project_time(profile_, record.project_busy_s, record.predicted_project_s);
    profile_dirty_ = true;
  }
}

Status RuntimeImpl::close() {
  if (!engine_ && !batch_.engine && !llama_.engine) return {};
  Status status = flush();
  if (engine_) engine_->set_capture(nullptr, {}).ignore("switching the tap off can't fail");
  if (batch_.engine) batch_.engine->set_capture(nullptr);
  saver_.reset();
  llama_.saver.reset();
  if (profile_dirty_) {
    profile_dirty_ = false;
    const Status saved = save_cost_profile(env_, profile_dir(), profile_);
    if (status.ok()) status = saved;
  }
  if (store_) {
    const Status closed = store_->close();
    if (status.ok()) status = closed;
    store_.reset();
  }
  return status;
}

}  // namespace

Result<std::unique_ptr<Runtime>> Runtime::open(Env& env, const RuntimeOptions& options) {
  auto runtime = std::make_unique<RuntimeImpl>(env, options);
  HCACHE_RETURN_IF_ERROR(runtime->init());
  return std::unique_ptr<Runtime>(std::move(runtime));
}

}  // namespace hcache::state
