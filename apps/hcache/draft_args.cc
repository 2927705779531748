#include "draft_args.h"

#include "base/env.h"

namespace hcache::cli {
namespace {

// Where a model guesses, unless that is said.
constexpr int kMostGuessed = 16;
// Of the store's quota, what the small model's has.
constexpr uint64_t kQuotaShare = 8;

}  // namespace

void DraftArgs::apply(const RuntimeArgs& runtime, server::ServerOptions* options) const {
  options->scheduler.draft.most = most >= 0 ? most : model.empty() ? 0 : kMostGuessed;
  options->scheduler.draft.least = least;
  if (model.empty() || options->scheduler.draft.most == 0) return;
  serving::DraftOptions draft;
  draft.p_min = static_cast<float>(p_min);
  // As the model that answers, but for what is about that one.
  draft.runtime = options->runtime;
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
  options->draft = std::move(draft);
}

}  // namespace hcache::cli
