// Everything one process needs to hold conversations that outlive it: model, engine, store, saver,
// cost profile and planner behind one object. What runs requests on it is serving/serving.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "engine/engine.h"
#include "model/model.h"
#include "model/offload.h"
#include "model/rope.h"
#include "policy/compression.h"
#include "policy/packing.h"
#include "policy/restore_plan.h"
#include "policy/save_plan.h"
#include "policy/truncation.h"
#include "state/batch_engine.h"
#include "state/cost_profile.h"
#include "state/llama_runtime.h"
#include "state/restorer.h"
#include "state/saver.h"
#include "store/store.h"

namespace hcache::state {

struct RuntimeOptions {
  std::string model_path;
  std::string device = "cpu";  // one, or several with commas; see model::open_devices()
  model::Offload offload;      // which of them has which layers
  int n_threads = 0;           // 0: all cores
  engine::EngineOptions engine;
  BatchEngineOptions batch;  // instead of `engine`
  EngineChoice forward = EngineChoice::kOwn;
  model::RopeOverride rope;           // of rotary positions, instead of the file's
  std::vector<AdapterFile> adapters;  // low-rank adapters that sequences may have
  // Beside the model, for pictures and sounds; needs libllama. Its digest is found out.
  libllama::ProjectorOptions projector;
  int32_t max_sequences = 64;  // of a model on libllama, idle ones included
  model::WeightPlace weights = model::WeightPlace::kAuto;
  uint64_t device_memory = 0;           // for weights, KV cache and buffers; 0: what is free
  std::string state_dir;                // profiles, digests; created (0700)
  std::vector<std::string> store_dirs;  // empty: state_dir/store
  uint64_t store_quota_bytes = 0;       // 0: no quota
  // Of it, for snapshots; 0: no quota. Unset: policy::default_snapshot_quota().
  std::optional<uint64_t> snapshot_quota_bytes;
  uint64_t key_quota_bytes = 0;  // of each owner of a salt; 0: none
  uint64_t dram_bytes = 0;       // saved state kept in host memory as well
  policy::TierPolicy evict;      // what leaves host memory and the disks when they are full
  std::string dram_place;        // where host memory lies: HostMemory::map()
  bool gpu_direct = false;       // disks are read into the device's memory (DirectStorage)
  std::optional<store::StoreKey> store_key;  // encrypts what is saved
  store::RemoteOptions remote;               // a store that other processes share
  bool use_store = true;                     // false: nothing is saved or matched
  bool read_only_store = false;
  // Conversations may be cut when they outgrow the context: rows behind a cut can't be recomputed
  // from tokens but in layer 0, so all other layers are saved.
  bool truncates = false;
  policy::SaveMode save = policy::SaveMode::kPlan;
  std::string state_type = "native";                // see parse_state_type
  policy::PackMode pack = policy::PackMode::kAuto;  // K and V that are saved
  // With kAuto, K and V may be rounded where restores come earlier by it and predictions diverge by
  // so much at most, in the mean (KL, nats); 0: never.
  double quality = 0;
  // State that other products of quantised weights have made (an earlier version's, a GPU's), and
  // that differs by rounding from what would be computed here, is not taken.
  bool same_products = false;
  // Tokens of sample_text(), which `quality` and kv_quality are measured on; required with them.
  std::function<Result<std::vector<int32_t>>()> sample;
  SaverOptions saver;
  std::string salt;  // cache salt: isolates tenants
  // Chains may have a budget of rows (state/kept_state.h), and those with salt() have this one.
  // Unset: none may. kUnimplemented where the model's layers can't do without rows.
  std::optional<double> kv_budget;
  // Instead of kv_budget, the mean KL divergence of predictions (nats, measured once on the sample)
  // that its share of the rows may cost.
  std::optional<double> kv_quality;
  // By what the rows of those with a budget are chosen: kSelf, when there is time for it, or kSnap,
  // at once.
  policy::Compression kv_policy = policy::Compression::kSelf;
  // Planned with instead of a measured profile (experiments, tests); it is neither kept nor
  // corrected.
  std::optional<CostProfile> profile;
  ProgressFn progress;
  // Told the model as soon as it is loaded.
  std::function<void(const ModelCard&)> on_model;
  // Told the profile as soon as it is known, before anything is restored.
  std::function<void(const CostProfile&)> on_profile;
};

struct PlanOptions {
  policy::Mode mode = policy::Mode::kPlan;
  int64_t token_rounding = 1;     // of Mode::kTokenPartition
  int64_t most_rows = INT64_MAX;  // that are restored
  // Whether the tokens behind the restored rows follow them layer by layer, or are computed later.
  bool with_prefill = true;
  bool save = true;          // the sequence is captured
  bool ahead = false;        // planned as if all of it lay in host memory, where it will be read to
  double compute_share = 1;  // policy::RestoreCosts'
  // Tokens of the chain that its sequence does not hold: the match is held_match()'s, and the
  // tokens are those that are held. All of it is restored, or nothing.
  int64_t dropped = 0;
};

// How a part of a match is going to be restored.
struct PlannedRestore {
  policy::Plan plan;
  // The partial last chunk that the saver completes; empty where the plan ends on a whole one.
  store::ChunkRef tail;
  // How long the remote tier may take: what computing all of it again would.
  double remote_timeout_s = 0;
};

// Threading: one thread.
class Runtime {
 public:
  // Opens everything; measures the cost profile on first use. Another process writing the store:
  // kFailedPrecondition (open with read_only_store, or without).
  static Result<std::unique_ptr<Runtime>> open(Env& env, const RuntimeOptions& options);
  virtual ~Runtime() = default;

  // Asks the remote tier, if there is one, for what the store lacks of these tokens; plan() knows
  // it then. Waits RemoteOptions::timeout_s at most. Any thread.
  virtual void look_up(std::span<const int32_t> tokens, const SaltId& salt,
                       std::span<const policy::HeldRows> cuts = {}) = 0;
  // What the store has of `tokens`, pinned, where their sequence was cut so. What can't be searched
  // counts as absent.
  virtual store::Match match(std::span<const int32_t> tokens, const SaltId& salt,
                             std::span<const policy::HeldRows> cuts = {}) = 0;
  // Plans the restoration of a match of `tokens`, of all but the last one, which is always
  // computed. What this engine can't use counts as absent.
  virtual Result<PlannedRestore> plan(std::span<const int32_t> tokens, const store::Match& match,
                                      const PlanOptions& options) = 0;
  // Drops a page that could not be used. False when it can't be dropped: it will be offered again.
  virtual bool discard(const PageFailure& failure) = 0;
  // Corrects the profile by what a restore observed of the device's speed, and of the store's
  // unless the Env limits it.
  virtual void observe(const policy::RestoreRecord& record) = 0;
  // Everything captured so far is durable when it returns.
  virtual Status flush() = 0;
  // flush, then close the store. Errors of the store are reported here at the latest.
  virtual Status close() = 0;

  // There is one engine of three. Without the ordinary one nothing can be planned, and profile,
  // save plan and costs are empty.
  [[nodiscard]] virtual engine::Engine& engine() = 0;
  [[nodiscard]] virtual OpenBatchEngine* batch() = 0;  // nullptr: another engine runs
  [[nodiscard]] virtual OpenLlama* llama() = 0;        // nullptr: an engine of ours runs
  // Of the engine that there is; any thread.
  [[nodiscard]] virtual engine::WeightStats weight_stats() const = 0;
  [[nodiscard]] virtual const ModelCard& card() const = 0;
  [[nodiscard]] virtual const model::Model& model() const = 0;  // of an engine of ours alone
  [[nodiscard]] virtual store::Store* store() = 0;              // nullptr without one
  [[nodiscard]] virtual Saver* saver() = 0;  // nullptr without one, and on libllama
  // Of whichever saver there is; nullopt without one. Any thread.
  [[nodiscard]] virtual std::optional<SaverStats> saver_stats() const = 0;
  [[nodiscard]] virtual const CostProfile& profile() const = 0;
  // Measures anew and keeps the result.
  virtual Status refresh_profile() = 0;
  [[nodiscard]] virtual const policy::SavePlan& save_plan() const = 0;
  [[nodiscard]] virtual const Fingerprint& fingerprint() const = 0;
  // RuntimeOptions', with the adapters counting as much as they say and its budget of rows.
  [[nodiscard]] virtual const Salt& salt() const = 0;
  [[nodiscard]] virtual policy::Compression kv_policy() const = 0;  // see RuntimeOptions
  // By the profile and the Env's nominal speed.
  [[nodiscard]] virtual policy::RestoreCosts costs() const = 0;
};

}  // namespace hcache::state
