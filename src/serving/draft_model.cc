#include "serving/draft_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine_executor.h"
#include "llama_executor.h"
#include "scheduler/model_drafter.h"

namespace hcache::serving {
namespace {

using scheduler::Executor;
using scheduler::RequestId;

class DraftModelImpl : public DraftModel {
 public:
  explicit DraftModelImpl(std::unique_ptr<state::Runtime> runtime) : runtime_(std::move(runtime)) {}
  DraftModelImpl(const DraftModelImpl&) = delete;
  DraftModelImpl& operator=(const DraftModelImpl&) = delete;
  ~DraftModelImpl() override { close().ignore("a destructor has nobody to tell"); }

  void begin(std::unique_ptr<Executor> executor, const scheduler::ModelDrafterOptions& options) {
    executor_ = std::move(executor);
    drafter_ = std::make_unique<scheduler::ModelDrafter>(*executor_, options);
  }

  std::vector<std::vector<int32_t>> draft(std::span<const Wanted> wanted) override {
    return drafter_->draft(wanted);
  }
  bool ready(RequestId request) const override { return drafter_->ready(request); }
  double step_s(int64_t rows) const override { return drafter_->step_s(rows); }
  void ended(RequestId request) override { drafter_->ended(request); }
  void forget(const SaltId& salt, std::span<const int32_t> tokens, int64_t keep) override;
  Status close() override;

 private:
  std::unique_ptr<state::Runtime> runtime_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<scheduler::ModelDrafter> drafter_;
};

void DraftModelImpl::forget(const SaltId& salt, std::span<const int32_t> tokens, int64_t keep) {
  drafter_->forget(salt, tokens, keep);
  store::Store* const store = runtime_->store();
  if (store == nullptr) return;
  // What of it is on its way to the store must be there to be removed.
  runtime_->flush().ignore("the store's errors are logged");
  store::RemoveFilter filter;
  {
    const store::Match match = runtime_->match(tokens, salt);
    int64_t end = 0;
    const auto found = std::ranges::find_if(match.chunks, [&](const store::MatchedChunk& matched) {
      end += static_cast<int64_t>(matched.usable_rows);
      return end > keep;
    });
    if (found == match.chunks.end()) return;
    filter.chunk = found->chunk.info().id;
  }  // pinned chunks are not removed
  const auto removed = store->remove(filter);
  if (!removed.ok()) {
    log::warn("the drafting model's state of a conversation stays: {}",
              removed.status().to_string());
  }
}

Status DraftModelImpl::close() {
  drafter_.reset();
  executor_.reset();
  if (!runtime_) return {};
  return std::exchange(runtime_, nullptr)->close();
}

}  // namespace

Result<std::unique_ptr<DraftModel>> DraftModel::open(Env& env, const DraftOptions& options) {
  HCACHE_ASSIGN_OR_RETURN(auto runtime, state::Runtime::open(env, options.runtime));
  scheduler::ModelDrafterOptions drafter{.p_min = options.p_min};
  std::unique_ptr<Executor> executor;
  int32_t n_vocab = 0;
  if (const state::OpenLlama* llama = runtime->llama(); llama != nullptr) {
    if (llama->engine->layout().snapshots) {
      return unimplemented(fmt::format(
          "{} can't draft: the state of a {} model can't be taken back to before a guess",
          runtime->card().path, runtime->card().architecture));
    }
    n_vocab = llama->engine->info().n_vocab;
    executor = std::make_unique<LlamaExecutor>(env, *runtime, 0);
  } else {
    n_vocab = static_cast<int32_t>(runtime->model().hparams().n_vocab);
    EngineExecutorOptions executor_options;
    executor_options.max_sequences = options.runtime.max_sequences;
    executor = std::make_unique<EngineExecutor>(env, *runtime, executor_options);
  }
  drafter.n_vocab = options.n_vocab > 0 ? std::min(options.n_vocab, n_vocab) : n_vocab;
  auto model = std::make_unique<DraftModelImpl>(std::move(runtime));
  model->begin(std::move(executor), drafter);
  return std::unique_ptr<DraftModel>(std::move(model));
}

}  // namespace hcache::serving
