#include "sim_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "policy/miss_cost.h"

namespace hcache::sim {
namespace {

using policy::Method;
using scheduler::RestoreStatus;
using scheduler::StepItem;
using scheduler::StepOutput;

// A plan is searched for lengths rounded up to this, and cut to the exact one.
constexpr int64_t kPlanTokens = 256;
// Chunks that are read ahead in one piece.
constexpr size_t kFetchChunks = 8;
// Of one step, and sequences that exist: the scheduler's own limits are meant to be smaller.
constexpr int32_t kMaxStepRows = 1 << 20;
constexpr int32_t kMaxSequences = 1 << 20;

policy::Mode mode_of(ServingMethod method) {
  switch (method) {
    case ServingMethod::kHidden: return policy::Mode::kHidden;
    case ServingMethod::kKv: return policy::Mode::kKv;
    case ServingMethod::kRecompute: return policy::Mode::kRecompute;
    case ServingMethod::kPlan:
    case ServingMethod::kIdeal: break;
  }
  return policy::Mode::kPlan;
}

Result<policy::SavePlan> what_is_saved(const ServingSetup& setup,
                                       const policy::RestoreCosts& costs) {
  policy::SaveRequest request;
  request.history = setup.hardware.history;
  request.new_tokens = setup.hardware.new_tokens;
  switch (setup.method) {
    case ServingMethod::kPlan: break;
    case ServingMethod::kHidden: request.mode = policy::SaveMode::kHidden; break;
    case ServingMethod::kKv:
    case ServingMethod::kIdeal: request.mode = policy::SaveMode::kKv; break;
    case ServingMethod::kRecompute: return policy::SavePlan{};
  }
  return plan_save(costs, request, nullptr);
}

policy::RestoreCosts behind(policy::RestoreCosts costs, double link_bytes_per_s) {
  costs.link.bytes_per_s = link_bytes_per_s;
  return costs;
}

std::vector<SavedTier> saved_tiers(const ServingSetup& setup) {
  std::vector<SavedTier> tiers;
  for (const TierSetup& tier : setup.tiers) {
    tiers.push_back({tier.capacity_bytes, tier.policy, tier.chain_tokens});
  }
  return tiers;
}

// Of each tier, over reading from the next slower one, or computing again behind the last.
SavedChains::MissCost miss_cost(const ServingSetup& setup, const policy::RestoreCosts& costs,
                                const policy::SavePlan& saved) {
  std::vector<policy::TierCosts> tiers;
  for (size_t t = 0; t < setup.tiers.size(); ++t) {
    const bool last = t + 1 == setup.tiers.size();
    tiers.push_back({.costs = costs,
                     .bytes_per_s = setup.tiers[t].read_bytes_per_s,
                     .below_bytes_per_s = last ? 0 : setup.tiers[t + 1].read_bytes_per_s});
  }
  return [tiers = std::move(tiers), saved](size_t tier, int64_t first, int64_t tokens) {
    return tiers[tier].miss_s(policy::saved_rows(saved, first, tokens));
  };
}

double kv_bytes_per_token(const policy::RestoreCosts& costs) {
  return static_cast<double>(costs.layers[0].kv_bytes) * costs.n_layer;
}

}  // namespace

Result<policy::RestoreCosts> serving_costs(const ServingSetup& setup) {
  if (!setup.measured) return hardware_costs(setup.hardware);
  HCACHE_RETURN_IF_ERROR(validate(setup.measured->restore));
  return setup.measured->restore;
}

Result<std::unique_ptr<SimExecutor>> SimExecutor::create(const ServingSetup& setup) {
  HCACHE_ASSIGN_OR_RETURN(const policy::RestoreCosts costs, serving_costs(setup));
  HCACHE_ASSIGN_OR_RETURN(policy::SavePlan saved,
                          what_is_saved(setup, behind(costs, setup.tiers.back().read_bytes_per_s)));
  std::unique_ptr<SimExecutor> executor(new SimExecutor(setup, costs, std::move(saved)));
  if (executor->limits_.arena_cells < 1) {
    return invalid_argument(
        fmt::format("{} leaves no memory for KV on {} x {}: its layers take {:.1f} GB",
                    setup.hardware.model.title, setup.hardware.n_gpu, setup.hardware.device.title,
                    policy::layer_weight_bytes(setup.hardware.model) / 1e9));
  }
  return executor;
}

SimExecutor::SimExecutor(const ServingSetup& setup, policy::RestoreCosts costs,
                         policy::SavePlan saved)
    : setup_(setup),
      costs_(std::move(costs)),
      saved_(std::move(saved)),
      memory_bytes_per_s_(setup.hardware.device.memory_bytes_per_s * setup.hardware.n_gpu *
                          setup.memory_efficiency),
      chains_(saved_tiers(setup), static_cast<double>(saved_.bytes_per_token),
              miss_cost(setup, costs_, saved_)) {
  const double memory = static_cast<double>(setup.hardware.device.memory_bytes) *
                        setup.hardware.n_gpu * setup.memory_share;
  const double for_kv = memory - policy::layer_weight_bytes(setup.hardware.model);
  limits_.arena_cells = setup.arena_tokens > 0
                            ? setup.arena_tokens
                            : static_cast<int64_t>(for_kv / kv_bytes_per_token(costs_));
  limits_.context = setup.context;
  limits_.max_step_rows = kMaxStepRows;
  limits_.max_sequences = kMaxSequences;
  limits_.why_no_cuts = "simulated conversations end with the context";
  for (const TierSetup& tier : setup.tiers) links_.emplace_back(tier.read_bytes_per_s);
}

int64_t SimExecutor::now_ns() const { return std::llround(now_s_ * 1e9); }

void SimExecutor::wait_until(double until_s) {
  now_s_ = std::max(now_s_, until_s);
  fetch();
}

std::optional<double> SimExecutor::next_event_s() {
  std::optional<double> next;
  for (SharedLink& link : links_) {
    const std::optional<double> arrival = link.next_arrival_s(now_s_);
    if (arrival) next = next ? std::min(*next, *arrival) : arrival;
  }
  return next;
}

void SimExecutor::describe(ServingReport* report) const {
  report->duration_s = now_s_;
  report->arena_tokens = limits_.arena_cells;
  report->step_s = total_step_s_;
  report->restore_s = total_restore_s_;
  report->save_schedule = saved_.schedule;
  report->saved_bytes_per_token = static_cast<double>(saved_.bytes_per_token);
  for (size_t t = 0; t < links_.size(); ++t) {
    report->tiers.push_back({setup_.tiers[t].name, links_[t].busy_s(), chains_.evictions(t)});
  }
}

// ---- Sequences

Result<SimExecutor::SeqId> SimExecutor::create(const Salt& /*salt*/, bool /*save*/) {
  sequences_.emplace(++last_seq_, Sequence{});
  return last_seq_;
}

Result<SimExecutor::SeqId> SimExecutor::fork(SeqId src, int64_t n_tokens, bool /*save*/) {
  const Sequence& source = at(src);
  Sequence copy;
  copy.tokens.assign(source.tokens.begin(), source.tokens.begin() + n_tokens);
  copy.durable = std::min(n_tokens, source.durable);
  used_cells_ += n_tokens;
  sequences_.emplace(++last_seq_, std::move(copy));
  return last_seq_;
}

Status SimExecutor::trim(SeqId seq, int64_t n_tokens) {
  Sequence& sequence = at(seq);
  used_cells_ -= static_cast<int64_t>(sequence.tokens.size()) - n_tokens;
  sequence.tokens.resize(static_cast<size_t>(n_tokens));
  sequence.durable = std::min(sequence.durable, n_tokens);
  return {};
}

Status SimExecutor::cut(SeqId /*seq*/, std::span<const int32_t> /*chain*/,
                        const policy::HeldRows& /*held*/) {
  return unimplemented(limits_.why_no_cuts);
}

void SimExecutor::release(SeqId seq) {
  Sequence& sequence = at(seq);
  end_restore(sequence);
  used_cells_ -= static_cast<int64_t>(sequence.tokens.size());
  sequences_.erase(seq);
}

// ---- Saved state

Result<scheduler::SavedPrefixRef> SimExecutor::saved_prefix(
    const Salt& /*salt*/, std::span<const int32_t> tokens,
    std::span<const policy::HeldRows> /*cuts*/, const scheduler::SavedPrefixRef& /*known*/) {
  scheduler::SavedPrefixRef prefix;
  const int64_t n = chains_.find(tokens).tokens;
  if (n > 0) prefix = std::make_shared<scheduler::SavedPrefix>(n);
  return prefix;
}

// ---- The queue

void SimExecutor::enqueued(const scheduler::Waiting& request) {
  if (request.restore == 0) return;
  const auto tokens = request.tokens.first(static_cast<size_t>(request.restore));
  chains_.want(request.ticket, tokens);
  ahead_[request.ticket] = tokens;
  window_.add(request.ticket, static_cast<double>(saved_.bytes_per_token * request.restore));
  fetch();
}

void SimExecutor::dequeued(uint64_t ticket, bool admitted) {
  admitted ? chains_.dispatch(ticket) : chains_.unwant(ticket);
  ahead_.erase(ticket);
  window_.remove(ticket);
  if (fetch_ && fetch_->ticket == ticket) end_fetch();
}

void SimExecutor::completed(uint64_t ticket) { chains_.unwant(ticket); }

void SimExecutor::fetch() {
  if (fetch_) {
    size_t arrived = fetch_->ends.size();
    for (size_t t = 1; t < links_.size(); ++t) {
      arrived = std::min(arrived, links_[t].arrived(fetch_->streams[t], now_s_));
    }
    if (arrived > fetch_->next) {
      fetch_->next = arrived;
      chains_.lift(ahead_.at(fetch_->ticket), fetch_->ends[arrived - 1], now_s_);
    }
    if (arrived < fetch_->ends.size()) return;
    end_fetch();
  }
  while (const std::optional<uint64_t> ticket = window_.next()) {
    if (begin_fetch(*ticket)) return;
  }
}

bool SimExecutor::begin_fetch(uint64_t ticket) {
  const std::vector<SavedChains::Chunk> chunks = chains_.chunks(ahead_.at(ticket));
  Fetch fetch;
  fetch.ticket = ticket;
  std::vector<std::vector<double>> pieces(links_.size());
  int64_t end = 0;
  bool missing = false;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (i % kFetchChunks == 0) {
      fetch.ends.push_back(end);
      for (auto& of_tier : pieces) of_tier.push_back(0);
    }
    end += chunks[i].tokens;
    fetch.ends.back() = end;
    missing = missing || chunks[i].tier > 0;
    pieces[chunks[i].tier].back() += static_cast<double>(chunks[i].tokens * saved_.bytes_per_token);
  }
  if (!missing) return false;
  fetch.streams.push_back(0);
  for (size_t t = 1; t < links_.size(); ++t) {
    fetch.streams.push_back(links_[t].open(now_s_, pieces[t], /*background=*/true));
  }
  fetch_ = std::move(fetch);
  return true;
}

void SimExecutor::end_fetch() {
  for (size_t t = 1; t < links_.size(); ++t) links_[t].close(fetch_->streams[t], now_s_);
  fetch_.reset();
}

// ---- Restores

// Layer by layer, each from the first row on: what production's restorer does.
std::vector<SimExecutor::Slice> SimExecutor::cut(const std::vector<Method>& layers,
                                                 int64_t tokens) const {
  std::vector<Slice> slices;
  for (size_t l = 0; l < layers.size(); ++l) {
    const policy::LayerCosts& layer = costs_.layer(static_cast<int32_t>(l));
    const bool recomputed = layers[l] == Method::kRecompute;
    const bool tail = recomputed && (l + 1 == layers.size() || layers[l + 1] != Method::kRecompute);
    if (recomputed && !(tail && costs_.re_tail_projects)) {
      slices.push_back({0, prefill_layer_s(layer, tokens, 0, costs_.batch_rows)});
      continue;
    }
    // Of a recomputed layer that no other one follows only K and V are wanted.
    const bool hidden = layers[l] == Method::kHidden || tail;
    for (int64_t begin = 0; begin < tokens; begin += costs_.slice_rows) {
      const int64_t rows = std::min(costs_.slice_rows, tokens - begin);
      const int64_t row_bytes = tail ? 0 : hidden ? layer.hidden_bytes : layer.kv_bytes;
      slices.push_back({static_cast<double>(rows * row_bytes),
                        hidden ? layer.project.at(rows) : layer.load_kv.at(rows)});
    }
  }
  return slices;
}

// Which method each layer uses, for a history of about so many tokens that come from this tier.
Result<const SimExecutor::Methods*> SimExecutor::plan(int64_t tokens, size_t tier,
                                                      double compute_share) {
  const int64_t rounded = (tokens + kPlanTokens - 1) / kPlanTokens * kPlanTokens;
  const auto [place, is_new] = plans_.try_emplace({rounded, tier, compute_share});
  if (!is_new) return &place->second;
  policy::RestoreRequest request;
  request.available.runs = {{rounded, saved_.layers}};
  request.mode = mode_of(setup_.method);
  policy::RestoreCosts costs = behind(costs_, setup_.tiers[tier].read_bytes_per_s);
  costs.compute_share = compute_share;
  HCACHE_ASSIGN_OR_RETURN(const policy::Plan plan, plan_restore(costs, request));
  if (!plan.runs.empty()) place->second = {plan.runs[0].layers, plan.schedule};
  return &place->second;
}

double SimExecutor::restore_s(int64_t tokens) const {
  const policy::TierCosts arena{.costs = costs_,
                                .below_bytes_per_s = setup_.tiers[0].read_bytes_per_s};
  return arena.without_s(policy::saved_rows(saved_, 0, tokens));
}

Status SimExecutor::begin_restore(SeqId seq, const scheduler::RestoreJob& job) {
  Sequence& sequence = at(seq);
  Restore restore;
  restore.begin_s = now_s_;
  restore.tokens.assign(job.tokens.begin(), job.tokens.begin() + job.upto);
  restore.found = chains_.use(restore.tokens, now_s_);
  const int64_t n = restore.found.tokens;
  if (n > 0 && setup_.method != ServingMethod::kIdeal) {
    size_t slowest = 0;
    for (size_t t = 0; t < links_.size(); ++t) {
      if (restore.found.by_tier[t] > 0) slowest = t;
    }
    HCACHE_ASSIGN_OR_RETURN(const Methods* methods, plan(n, slowest, job.compute_share));
    // A plan without runs: prefilling all of it is faster.
    if (methods->layers.empty()) restore.found.tokens = 0;
    restore.schedule = methods->schedule;
    restore.slices = cut(methods->layers, n);
    for (size_t t = 0; t < links_.size(); ++t) {
      const double share = static_cast<double>(restore.found.by_tier[t]) / static_cast<double>(n);
      std::vector<double> pieces;
      for (const Slice& slice : restore.slices) pieces.push_back(slice.bytes * share);
      restore.streams.push_back(links_[t].open(now_s_, pieces));
    }
  }
  restore.reserved = job.upto;
  used_cells_ += job.upto;
  sequence.restore = std::move(restore);
  return {};
}

bool SimExecutor::arrived(const Restore& restore) {
  for (size_t t = 0; t < restore.streams.size(); ++t) {
    if (links_[t].arrived(restore.streams[t], now_s_) <= restore.next) return false;
  }
  return true;
}

Result<RestoreStatus> SimExecutor::advance_restore(SeqId seq, const scheduler::RestoreTurn& turn) {
  const double budget_s = std::min(turn.budget_s, setup_.scheduler.restore.idle_slice_s);
  Sequence& sequence = at(seq);
  Restore& restore = *sequence.restore;
  RestoreStatus status;
  status.phase = RestoreStatus::Phase::kWorking;
  while (restore.next < restore.slices.size()) {
    const double slice_s = restore.slices[restore.next].compute_s;
    if (status.seconds > 0 && status.seconds + slice_s > budget_s) break;
    if (!arrived(restore)) {
      status.phase = RestoreStatus::Phase::kWaitingForIo;
      break;
    }
    ++restore.next;
    now_s_ += slice_s;
    total_restore_s_ += slice_s;
    status.seconds += slice_s;
  }
  if (restore.next < restore.slices.size()) {
    status.reserved = restore.reserved;
    status.fraction =
        static_cast<double>(restore.next) / static_cast<double>(restore.slices.size());
    return status;
  }
  status.phase = RestoreStatus::Phase::kDone;
  status.fraction = 1;
  status.tokens = restore.found.tokens;
  status.record.schedule = restore.schedule;
  status.record.restored_tokens = status.record.kv_tokens = status.tokens;
  status.record.restore_s = now_s_ - restore.begin_s;
  for (size_t t = 0; t < links_.size(); ++t) {
    const auto bytes = static_cast<uint64_t>(restore.found.by_tier[t]) *
                       static_cast<uint64_t>(saved_.bytes_per_token);
    (setup_.tiers[t].name == "dram" ? status.record.read.dram : status.record.read.disk) += bytes;
  }
  std::vector<int32_t> tokens = std::move(restore.tokens);
  tokens.resize(static_cast<size_t>(status.tokens));
  end_restore(sequence);
  used_cells_ += status.tokens;
  sequence.durable = status.tokens;
  sequence.tokens = std::move(tokens);
  return status;
}

void SimExecutor::end_restore(Sequence& sequence) {
  if (!sequence.restore) return;
  const Restore& restore = *sequence.restore;
  for (size_t t = 0; t < restore.streams.size(); ++t) links_[t].close(restore.streams[t], now_s_);
  used_cells_ -= restore.reserved;
  sequence.restore.reset();
}

void SimExecutor::request_flush(SeqId seq) {
  if (setup_.method == ServingMethod::kRecompute) return;
  Sequence& sequence = at(seq);
  chains_.put(sequence.tokens, now_s_);
  sequence.durable = static_cast<int64_t>(sequence.tokens.size());
}

int64_t SimExecutor::durable_tokens(SeqId seq) {
  if (setup_.method == ServingMethod::kRecompute) return scheduler::kNotSaving;
  return at(seq).durable;
}

// ---- Steps

// The weights' products take their arithmetic or reading the weights, attention of a sequence its
// arithmetic or reading its KV, whichever is longer. Measured costs have both in them.
double SimExecutor::modelled_step_s(std::span<const StepShape> items) const {
  const policy::LayerCosts& layer = costs_.layers[0];
  const bool measured = setup_.measured.has_value();
  int64_t rows = 0;
  int64_t logits = 0;
  double attention_s = 0;
  for (const StepShape& item : items) {
    rows += item.rows;
    logits += item.logits ? 1 : 0;
    const auto n = static_cast<double>(item.rows);
    const auto depth = static_cast<double>(item.depth);
    const double arithmetic =
        layer.attn_per_key.at(item.rows) * (depth + (n + 1) / 2) * costs_.n_layer;
    const double reading =
        measured ? 0 : (depth + n) * kv_bytes_per_token(costs_) / memory_bytes_per_s_;
    attention_s += std::max(arithmetic, reading);
  }
  const double products_s = layer.dense.at(rows) * costs_.n_layer;
  if (measured) {
    // The output matrix is one more product; of each item one row goes through it.
    const double finish_s = setup_.measured->step_finish_s * layer.dense.at(logits) /
                            std::max(layer.dense.at(1), 1e-12);
    return setup_.step_overhead_s + products_s + attention_s + (logits > 0 ? finish_s : 0);
  }
  const double weights_s = policy::layer_weight_bytes(setup_.hardware.model) / memory_bytes_per_s_;
  return setup_.step_overhead_s + std::max(products_s, weights_s) + attention_s;
}

Result<StepOutput> SimExecutor::step(std::span<const StepItem> items) {
  std::vector<StepShape> shapes;
  StepOutput output;
  for (const StepItem& item : items) {
    Sequence& sequence = at(item.seq);
    const auto rows = static_cast<int64_t>(item.tokens.size());
    const int64_t n_logits = scheduler::logits_count(item.logits, rows);
    shapes.push_back({rows, static_cast<int64_t>(sequence.tokens.size()), n_logits > 0});
    sequence.tokens.insert(sequence.tokens.end(), item.tokens.begin(), item.tokens.end());
    used_cells_ += rows;
    output.logits.resize(output.logits.size() + static_cast<size_t>(n_logits));
  }
  output.seconds = modelled_step_s(shapes);
  now_s_ += output.seconds;
  total_step_s_ += output.seconds;
  fetch();
  return output;
}

}  // namespace hcache::sim
