#include "draft_args.h"

#include "base/env.h"

namespace hcache::cli {
namespace {

// Where a model guesses, unless that is said.
constexpr int kMostGuessed = 16;
// Of the store's quota, what the small model's has.
constexpr uint64_t kQuotaShare = 8;

}  // namespace

policy::DraftLimits DraftArgs::limits() const {
  policy::DraftLimits limits;
  limits.most = most >= 0 ? most : model.empty() ? 0 : kMostGuessed;
  limits.least = least;
  return limits;
}

std::optional<serving::DraftOptions> DraftArgs::drafter(
    const RuntimeArgs& runtime, const state::RuntimeOptions& answering) const {
  if (model.empty() || limits().most == 0) return std::nullopt;
  serving::DraftOptions draft;
  draft.p_min = static_cast<float>(p_min);
  // As the model that answers, but for what is about that one.
  draft.runtime = answering;
  draft.runtime.model_path = model;
  draft.runtime.forward = state::EngineChoice::kAuto;
  draft.runtime.offload = {};
  if (!device.empty()) draft.runtime.device = device;
  draft.runtime.rope = {};
  draft.runtime.adapters.clear();
  draft.runtime.projector = {};
  draft.runtime.weights = model::WeightPlace::kAuto;
  draft.runtime.device_memory = 0;
  draft.runtime.quality = 0;
  draft.runtime.kv_quality.reset();
  draft.runtime.gpu_direct = false;
  draft.runtime.remote = {};
  draft.runtime.dram_bytes = 0;
  draft.runtime.dram_place.clear();
  draft.runtime.truncates = false;
  draft.runtime.key_quota_bytes = 0;
  draft.runtime.store_quota_bytes /= kQuotaShare;
  draft.runtime.on_model = {};
  draft.runtime.on_profile = {};
  draft.runtime.store_dirs.clear();
  for (const std::string& dir : runtime.state.stores) {
    draft.runtime.store_dirs.push_back(join_path(dir, "draft"));
  }
  return draft;
}

}  // namespace hcache::cli
