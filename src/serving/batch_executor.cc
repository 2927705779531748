#include "batch_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace hcache::serving {
namespace {

using scheduler::RestoreStatus;
using scheduler::SeqId;

constexpr int64_t kReplanSteps = 8;

state::BatchPolicyOptions policy_options(const state::OpenBatchEngine& batch,
                                         const state::BatchEngineOptions& options) {
  const engine::HybridOptions& engine = batch.engine->options();
  return {.costs = batch.measured.costs,
          .sizes = batch.measured.sizes,
          .cache_bytes =
              static_cast<int64_t>(engine.device_bytes + engine.host_bytes + engine.disk_bytes),
          .buffer_tokens = engine.buffer_tokens,
          .mode = options.mode,
          .share = options.share,
          .most_recomputed_layers = 0};
}

}  // namespace

// A match travels with its request from the first look-up to the end of its restore.
struct BatchExecutor::Prefix : scheduler::SavedPrefix {
  Prefix(store::Match found, int64_t rows) : SavedPrefix(rows), match(std::move(found)) {}
  const store::Match match;
};

BatchExecutor::BatchExecutor(Env& env, state::Runtime& runtime,
                             const state::BatchEngineOptions& options, int32_t max_sequences)
    : env_(env),
      runtime_(runtime),
      engine_(*runtime.batch()->engine),
      // Rows of blocks that hold nothing can't be saved, nor what follows them.
      saves_(runtime.saver() != nullptr && options.mode != policy::HybridMode::kTokens),
      policy_(policy_options(*runtime.batch(), options)),
      replans_(options.mode == policy::HybridMode::kSearch),
      expected_(static_cast<size_t>(options.sequences)) {
  const engine::HybridOptions& engine = engine_.options();
  limits_.arena_cells = engine_.capacity_tokens();
  limits_.context = std::min({static_cast<int64_t>(runtime.model().hparams().n_ctx_train),
                              engine.buffer_tokens, limits_.arena_cells});
  limits_.max_step_rows = static_cast<int32_t>(std::min<int64_t>(engine.max_step_rows, INT32_MAX));
  limits_.max_sequences = max_sequences;
  limits_.why_no_cuts = "the batch engine keeps whole conversations, in blocks";
  if (saves_) engine_.set_capture(this);
  const state::OpenBatchEngine& batch = *runtime.batch();
  MutexLock lock(mutex_);
  report_.mode = options.mode;
  report_.from_profile = batch.from_profile;
  report_.kv_gen = batch.measured.costs.kv_gen;
  report_.load_kv = batch.measured.costs.load_kv;
  report_.load_act = batch.measured.costs.load_act;
  report_.forward = batch.measured.costs.forward;
  const model::StreamedWeights* streamed = runtime.model().streamed();
  report_.streamed_bytes = streamed == nullptr ? 0 : streamed->n_bytes();
}

BatchExecutor::~BatchExecutor() {
  while (!sequences_.empty()) release(sequences_.begin()->first);
  engine_.set_capture(nullptr);
}

Result<BatchExecutor::Sequence*> BatchExecutor::find(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end()) return not_found(fmt::format("there is no sequence {}", seq));
  return &it->second;
}

// ---- What is captured

std::byte* BatchExecutor::reserve(size_t n_bytes) {
  std::byte* block = runtime_.saver()->reserve(n_bytes);
  if (block != nullptr) return block;
  runtime_.saver()->flush().ignore("the saver has told of it; what is lost is computed again");
  return runtime_.saver()->reserve(n_bytes);
}

void BatchExecutor::publish(std::byte* block, const engine::StepCapture& capture) {
  runtime_.saver()->publish(block, capture);
}

void BatchExecutor::drop(std::byte* block) { runtime_.saver()->drop(block); }

void BatchExecutor::begin_saving(SeqId seq, const Sequence& sequence,
                                 std::span<const int32_t> tokens) {
  if (!sequence.save) return;
  runtime_.saver()->begin(seq, runtime_.fingerprint(), sequence.salt, tokens, {});
}

// ---- Sequences

Result<SeqId> BatchExecutor::create(const Salt& salt, bool save) {
  save = save && saves_;
  HCACHE_ASSIGN_OR_RETURN(const engine::RequestId id, engine_.open(limits_.context, save));
  const auto seq = static_cast<SeqId>(id);
  Sequence& sequence = sequences_[seq];
  sequence.salt = salt;
  sequence.save = save;
  begin_saving(seq, sequence, {});
  return seq;
}

Result<SeqId> BatchExecutor::fork(SeqId /*src*/, int64_t /*n_tokens*/, bool /*save*/) {
  return unimplemented("sequences of a batch are not forked");
}

Status BatchExecutor::trim(SeqId seq, int64_t n_tokens) {
  HCACHE_ASSIGN_OR_RETURN(const Sequence* sequence, find(seq));
  if (n_tokens == sequence->rows) return {};
  return unimplemented("sequences of a batch are not cut");
}

Status BatchExecutor::cut(SeqId /*seq*/, std::span<const int32_t> /*chain*/,
                          const policy::HeldRows& /*held*/) {
  return unimplemented(limits_.why_no_cuts);
}

void BatchExecutor::release(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end()) return;
  it->second.restore.reset();
  if (it->second.save) runtime_.saver()->end(seq);
  cells_ -= it->second.rows + it->second.reserved;
  sequences_.erase(it);
  engine_.remove(seq).ignore("it exists: it was in the map");
}

// ---- Saved state

Result<scheduler::SavedPrefixRef> BatchExecutor::saved_prefix(
    const Salt& salt, std::span<const int32_t> tokens, std::span<const policy::HeldRows> /*cuts*/,
    const scheduler::SavedPrefixRef& known) {
  store::Match match = runtime_.match(tokens, salt.id);
  const int64_t rows = state::restorable_rows(engine_, match);
  if (rows <= (known ? known->tokens() : 0)) return known;
  return scheduler::SavedPrefixRef(std::make_shared<Prefix>(std::move(match), rows));
}

Status BatchExecutor::begin_restore(SeqId seq, const scheduler::RestoreJob& job) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  if (job.upto < 1 || job.upto > static_cast<int64_t>(job.tokens.size()) || !job.prefix) {
    return out_of_range(fmt::format("can't restore {} tokens of {}", job.upto, job.tokens.size()));
  }
  auto restore = std::make_unique<Restore>();
  restore->tokens.assign(job.tokens.begin(), job.tokens.end());
  restore->prefix = std::static_pointer_cast<const Prefix>(job.prefix);
  state::BlockRestoreRun run;
  run.id = seq;
  run.tokens = restore->tokens;
  run.match = &restore->prefix->match;
  run.upto = job.upto;
  run.on_damage = [this](const state::PageFailure& failure) {
    if (!runtime_.discard(failure)) log::warn("a damaged page stays in the store");
  };
  HCACHE_ASSIGN_OR_RETURN(restore->work,
                          state::BlockRestore::begin(env_, engine_, *runtime_.store(), run));
  sequence->restore = std::move(restore);
  sequence->reserved = job.upto;
  cells_ += job.upto;
  return {};
}

Result<RestoreStatus> BatchExecutor::advance_restore(SeqId seq,
                                                     const scheduler::RestoreTurn& turn) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  if (!sequence->restore) {
    return failed_precondition(fmt::format("sequence {} is not being restored", seq));
  }
  state::BlockRestore& work = *sequence->restore->work;
  Result<bool> done = work.advance(/*wait=*/false);
  while (done.ok() && !*done && turn.proceed && turn.proceed(work.fraction())) {
    done = work.advance(/*wait=*/true);
  }
  RestoreStatus status;
  if (done.ok() && !*done) {
    status.phase = RestoreStatus::Phase::kWaitingForIo;
    status.fraction = work.fraction();
    status.reserved = sequence->reserved;
    return status;
  }
  if (!done.ok()) log::warn("a restore ends early: {}", done.status().to_string());
  end_restore(seq, *sequence, &status);
  return status;
}

// Whatever was restored until then is the sequence's, after an error as well.
void BatchExecutor::end_restore(SeqId seq, Sequence& sequence, RestoreStatus* status) {
  const std::unique_ptr<Restore> restore = std::exchange(sequence.restore, nullptr);
  cells_ -= sequence.reserved;
  sequence.reserved = 0;
  sequence.rows = restore->work->rows();
  cells_ += sequence.rows;
  status->phase = RestoreStatus::Phase::kDone;
  status->fraction = 1;
  status->tokens = sequence.rows;
  status->record = restore->work->record();
  begin_saving(seq, sequence, std::span(restore->tokens).first(static_cast<size_t>(sequence.rows)));
}

void BatchExecutor::request_flush(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end() || !it->second.save) return;
  engine_.capture_tail(seq).ignore("it exists: it was in the map");
  runtime_.saver()->request_flush(seq);
}

int64_t BatchExecutor::durable_tokens(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end() || !it->second.save) return scheduler::kNotSaving;
  const int64_t n = runtime_.saver()->durable_tokens(seq);
  return n == state::Saver::kNotSaved ? scheduler::kNotSaving : n;
}

// ---- Steps

Status BatchExecutor::append(std::span<const scheduler::StepItem> items) {
  for (const scheduler::StepItem& item : items) {
    HCACHE_ASSIGN_OR_RETURN(const Sequence* sequence, find(item.seq));
    HCACHE_RETURN_IF_ERROR(engine_.append(item.seq, item.tokens));
    if (sequence->save) runtime_.saver()->set_tokens(item.seq, sequence->rows, item.tokens);
  }
  return {};
}

std::vector<int64_t> BatchExecutor::contexts(std::span<const scheduler::StepItem> items) {
  std::unordered_map<SeqId, int64_t> lengths;
  for (const auto& [seq, sequence] : sequences_) {
    if (sequence.rows > 0) lengths[seq] = sequence.rows;
  }
  for (const scheduler::StepItem& item : items) {
    lengths[item.seq] += static_cast<int64_t>(item.tokens.size());
  }
  std::vector<int64_t> contexts;
  int64_t sum = 0;
  for (const auto& [seq, length] : lengths) {
    contexts.push_back(length);
    sum += length;
  }
  // The first prompts' blocks stay as they are while the others come: those are taken to be like
  // them.
  most_begun_ = std::max(most_begun_, contexts.size());
  for (size_t i = 0; most_begun_ < expected_ && contexts.size() < expected_; ++i) {
    sum += contexts[i];
    if (sum > limits_.arena_cells) break;
    contexts.push_back(contexts[i]);
  }
  return contexts;
}

void BatchExecutor::plan(std::span<const scheduler::StepItem> items) {
  const bool again = planned_ && replans_ && steps_ % kReplanSteps == 0;
  if (planned_ && !again) return;
  const Status status = again ? policy_.replan(contexts(items)) : policy_.plan(contexts(items));
  if (!status.ok()) {
    // Blocks of K and V, mini-batches in order, is what the engine does without a plan.
    if (!again) log::warn("the batch runs without a plan: {}", status.to_string());
    return;
  }
  planned_ = true;
  engine_.set_decisions(policy_.decisions());
}

Result<scheduler::StepOutput> BatchExecutor::step(std::span<const scheduler::StepItem> items) {
  const int64_t start_ns = env_.monotonic_ns();
  if (std::any_of(items.begin(), items.end(), [](const scheduler::StepItem& item) {
        return item.logits == scheduler::LogitsOf::kAll || item.hidden;
      })) {
    return unimplemented(
        "the batch engine tells nothing of the tokens of prompts; take the ordinary engine");
  }
  plan(items);
  Status status = append(items);
  Result<engine::HybridStep> done = status.ok() ? engine_.step() : std::move(status);
  if (!done.ok()) {
    for (const scheduler::StepItem& item : items) {
      engine_.drop_pending(item.seq).ignore("one that does not exist has nothing");
    }
    return done.status();
  }
  ++steps_;
  scheduler::StepOutput output;
  for (const scheduler::StepItem& item : items) {
    const auto n = static_cast<int64_t>(item.tokens.size());
    sequences_.at(item.seq).rows += n;
    cells_ += n;
    if (item.logits == scheduler::LogitsOf::kNone) continue;
    const auto row = std::find_if(done->rows.begin(), done->rows.end(),
                                  [&](const auto& r) { return r.id == item.seq; });
    if (row == done->rows.end()) return internal_error("a step left out a sequence's logits");
    output.logits.push_back(row->logits);
  }
  output.seconds = static_cast<double>(env_.monotonic_ns() - start_ns) * 1e-9;
  note(done->times);
  return output;
}

void BatchExecutor::note(const engine::StepTimes& times) {
  const engine::HybridCacheUse use = engine_.cache_use();
  const MutexLock lock(mutex_);
  ++report_.steps;
  report_.cache = use;
  report_.read_bytes += times.link_bytes;
  report_.wait_s += times.wait_s;
  report_.weights_wait_s += times.weights_s;
  report_.step_s += times.total_s;
  report_.rows += times.rows;
  report_.mini_batches = times.n_batches;
  if (!planned_) return;
  const state::StepComparison compared = policy_.observe(times);
  report_.act_share = policy_.plan().ratio.act_share();
  if (!times.decode_only) return;
  ++report_.decode_steps;
  report_.decode_step_s += compared.measured_s;
  report_.predicted_step_s += compared.predicted_s;
  report_.link_idle += compared.link_idle;
  report_.compute_idle += compared.compute_idle;
}

BatchReport BatchExecutor::report() const {
  const MutexLock lock(mutex_);
  return report_;
}

}  // namespace hcache::serving
