#include "scheduler/model_drafter.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/log.h"
#include "base/tokens.h"

namespace hcache::scheduler {

namespace {

// What shares fewer tokens is not worth a fork.
constexpr int64_t kLeastShared = 64;
// Of the context, what a chain that has outgrown it is followed from.
constexpr int64_t kKeptShare = 2;
// Logits so far below the largest add nothing to the sum of all.
constexpr float kNegligible = 17;

}  // namespace

ModelDrafter::~ModelDrafter() {
  for (Chain& chain : chains_) release(&chain);
}

std::vector<std::vector<int32_t>> ModelDrafter::draft(std::span<const Wanted> wanted) {
  std::vector<std::vector<int32_t>> drafts(wanted.size());
  std::vector<Part> parts;
  chains_.reserve(chains_.size() + wanted.size());  // parts point into them
  for (size_t i = 0; i < wanted.size(); ++i) {
    Chain* chain = chain_of(wanted[i]);
    if (chain == nullptr) continue;
    Result<Part> part = part_of(wanted[i], chain);
    if (!part.ok()) {
      give_up(chain, part.status());
      continue;
    }
    if (part->next.empty()) continue;  // it is being restored
    part->wanted = i;
    parts.push_back(std::move(*part));
  }
  while (!parts.empty()) {
    if (const Status status = step(&parts, &drafts); !status.ok()) {
      for (const Part& part : parts) give_up(part.chain, status);
      break;
    }
    std::erase_if(parts, [](const Part& part) { return part.next.empty(); });
  }
  sweep();
  return drafts;
}

bool ModelDrafter::ready(RequestId request) const {
  return std::ranges::any_of(chains_, [&](const Chain& chain) {
    return chain.request == request && (chain.ready || chain.seq == kNoSeq);
  });
}

void ModelDrafter::ended(RequestId request) {
  Chain* const chain = find(request);
  if (chain == nullptr) return;
  chain->request = 0;
  if (chain->seq != kNoSeq && !chain->restoring && !chain->tokens.empty()) {
    executor_.request_flush(chain->seq);
    return;
  }
  release(chain);
  sweep();
}

void ModelDrafter::forget(const SaltId& salt, std::span<const int32_t> tokens, int64_t keep) {
  for (Chain& chain : chains_) {
    if (chain.request != 0 || chain.salt.id != salt) continue;
    // One that begins later in its text than it is known to is not worth finding out.
    const int64_t shared = chain.from > 0 ? keep + 1 : common_prefix(chain.tokens, tokens);
    if (shared > keep) release(&chain);
  }
  sweep();
}

void ModelDrafter::sweep() {
  std::erase_if(chains_, [](const Chain& c) { return c.request == 0 && c.seq == kNoSeq; });
}

ModelDrafter::Chain* ModelDrafter::find(RequestId request) {
  const auto found = std::ranges::find(chains_, request, &Chain::request);
  return found == chains_.end() ? nullptr : &*found;
}

ModelDrafter::Chain* ModelDrafter::chain_of(const Wanted& wanted) {
  Chain* chain = find(wanted.request);
  if (chain == nullptr) {
    Chain begun;
    begun.request = wanted.request;
    begun.salt = wanted.salt;
    begun.salt.adapters.clear();  // they change the other model
    begun.salt.kv_budget = 1;     // and so do its rows
    begin(wanted, &begun);
    chain = &chains_.emplace_back(std::move(begun));
  }
  chain->used = ++uses_;
  return chain->seq == kNoSeq ? nullptr : chain;
}

void ModelDrafter::begin(const Wanted& wanted, Chain* chain) {
  const auto length = static_cast<int64_t>(wanted.chain.size());
  const int64_t context = executor_.limits().context;
  if (length + wanted.most >= context) chain->from = length - context / kKeptShare;
  // What begins in the middle of a conversation would not be found again under its tokens, neither
  // to go on from nor to be forgotten.
  chain->saves = wanted.save && chain->from == 0;
  if (take_over(wanted, chain)) return;
  if (const Status status = begin_new(wanted, chain); !status.ok()) give_up(chain, status);
}

bool ModelDrafter::take_over(const Wanted& wanted, Chain* chain) {
  const auto rest = wanted.chain.subspan(static_cast<size_t>(chain->from));
  Chain* best = nullptr;
  int64_t shared = 0;
  for (Chain& idle : chains_) {
    if (idle.request != 0 || idle.seq == kNoSeq || idle.from != chain->from ||
        idle.salt.id != chain->salt.id || (chain->saves && !idle.saves)) {
      continue;
    }
    const int64_t same = common_prefix(idle.tokens, rest);
    if (same <= shared || same < executor_.shortest(idle.seq)) continue;
    best = &idle;
    shared = same;
  }
  if (best == nullptr || shared < kLeastShared) return false;
  // One whose tokens are not to be saved must not go on in a sequence that is. And where another
  // conversation begins alike, its own may still come back.
  const bool only_fork = best->saves != chain->saves;
  const bool fork = only_fork || static_cast<int64_t>(best->tokens.size()) - shared > kLeastShared;
  if (fork && make_room(static_cast<int64_t>(rest.size()), /*sequence=*/true)) {
    if (best->seq == kNoSeq) return false;  // it made room
    Result<SeqId> seq = executor_.fork(best->seq, shared, chain->saves);
    if (!seq.ok()) return false;
    chain->seq = *seq;
    chain->tokens.assign(best->tokens.begin(), best->tokens.begin() + shared);
    return true;
  }
  if (only_fork || best->seq == kNoSeq) return false;
  chain->seq = std::exchange(best->seq, kNoSeq);
  chain->tokens = std::move(best->tokens);
  return true;
}

Status ModelDrafter::begin_new(const Wanted& wanted, Chain* chain) {
  const auto rest = wanted.chain.subspan(static_cast<size_t>(chain->from));
  if (!make_room(static_cast<int64_t>(rest.size()), /*sequence=*/true)) {
    return resource_exhausted("the drafting model's cache is full of requests that run");
  }
  HCACHE_ASSIGN_OR_RETURN(chain->seq, executor_.create(chain->salt, chain->saves));
  HCACHE_ASSIGN_OR_RETURN(const SavedPrefixRef saved,
                          executor_.saved_prefix(chain->salt, rest, {}, nullptr));
  if (saved == nullptr || saved->tokens() < kLeastShared) return {};
  RestoreJob job;
  job.prefix = saved;
  job.tokens = rest;
  job.upto = std::min(saved->tokens(), static_cast<int64_t>(rest.size()) - 1);
  // What can't be restored is computed.
  chain->restoring = executor_.begin_restore(chain->seq, job).ok();
  return {};
}

Result<bool> ModelDrafter::restored(Chain* chain, std::span<const int32_t> tokens) {
  if (!chain->restoring) return true;
  HCACHE_ASSIGN_OR_RETURN(
      const RestoreStatus status,
      executor_.advance_restore(chain->seq, {.budget_s = options_.restore_turn_s,
                                             .whole_budget_s = options_.restore_turn_s,
                                             .proceed = {}}));
  if (status.phase != RestoreStatus::Phase::kDone) return false;
  chain->restoring = false;
  chain->tokens.assign(tokens.begin(), tokens.begin() + status.tokens);
  return true;
}

Result<ModelDrafter::Part> ModelDrafter::part_of(const Wanted& wanted, Chain* chain) {
  Part part;
  part.chain = chain;
  const auto length = static_cast<int64_t>(wanted.chain.size());
  if (length - chain->from + wanted.most >= executor_.limits().context) {
    HCACHE_RETURN_IF_ERROR(move_on(wanted, chain));
  }
  auto rest = wanted.chain.subspan(static_cast<size_t>(chain->from));
  HCACHE_ASSIGN_OR_RETURN(const bool there, restored(chain, rest));
  if (!there) return part;
  // The last token is computed in any case: what follows it is what is asked for.
  const int64_t shared =
      std::min(common_prefix(chain->tokens, rest), static_cast<int64_t>(rest.size()) - 1);
  if (shared < static_cast<int64_t>(chain->tokens.size())) {
    if (shared < executor_.shortest(chain->seq)) {
      return failed_precondition("the drafting model's state can't be taken back so far");
    }
    HCACHE_RETURN_IF_ERROR(executor_.trim(chain->seq, shared));
    chain->tokens.resize(static_cast<size_t>(shared));
  }
  rest = rest.subspan(static_cast<size_t>(shared));
  const auto most = std::min(
      static_cast<size_t>(std::min(options_.catch_up_rows, executor_.limits().max_step_rows)),
      rest.size());
  part.next.assign(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(most));
  if (std::ranges::any_of(part.next, [&](int32_t t) { return t < 0 || t >= options_.n_vocab; })) {
    return out_of_range("a token of the conversation is not in the drafting model's vocabulary");
  }
  const bool to_the_end = most == rest.size();
  part.most = to_the_end ? wanted.most : 0;
  chain->ready = chain->ready || to_the_end;
  if (!make_room(static_cast<int64_t>(most) + part.most, /*sequence=*/false)) {
    return resource_exhausted("the drafting model's cache is full of requests that run");
  }
  return part;
}

Status ModelDrafter::move_on(const Wanted& wanted, Chain* chain) {
  release(chain);
  chain->restoring = false;
  chain->ready = false;
  chain->tokens.clear();
  chain->from = static_cast<int64_t>(wanted.chain.size()) - executor_.limits().context / kKeptShare;
  return begin_new(wanted, chain);
}

Status ModelDrafter::step(std::vector<Part>* parts, std::vector<std::vector<int32_t>>* drafts) {
  // Each has made room for itself alone.
  int64_t room = std::min<int64_t>(executor_.free_cells(), executor_.limits().max_step_rows);
  std::erase_if(*parts, [&](const Part& part) {
    const auto rows = static_cast<int64_t>(part.next.size());
    if (rows > room) return true;  // next time, perhaps
    room -= rows;
    return false;
  });
  if (parts->empty()) return {};
  std::vector<StepItem> items;
  for (const Part& part : *parts) {
    items.push_back({.seq = part.chain->seq,
                     .tokens = part.next,
                     .logits = part.most > 0 ? LogitsOf::kLast : LogitsOf::kNone});
  }
  HCACHE_ASSIGN_OR_RETURN(const StepOutput output, executor_.step(items));
  size_t row = 0;
  for (Part& part : *parts) {
    Chain& chain = *part.chain;
    chain.tokens.insert(chain.tokens.end(), part.next.begin(), part.next.end());
    part.next.clear();
    if (part.most == 0) continue;
    const int32_t token = likeliest(output.logits[row++]);
    std::vector<int32_t>& draft = (*drafts)[part.wanted];
    if (token < 0) continue;
    draft.push_back(token);
    // The last one's row is computed when it has come true.
    if (static_cast<int32_t>(draft.size()) < part.most) part.next.push_back(token);
  }
  return {};
}

int32_t ModelDrafter::likeliest(std::span<const float> logits) const {
  const auto best = std::ranges::max_element(logits);
  const auto token = static_cast<int32_t>(best - logits.begin());
  if (token >= options_.n_vocab || !std::isfinite(*best)) return -1;
  if (options_.p_min <= 0) return token;
  // 1 / probability.
  float sum = 0;
  const float most = 1 / options_.p_min;
  for (const float logit : logits) {
    if (logit < *best - kNegligible) continue;
    sum += std::exp(logit - *best);
    if (sum > most) return -1;
  }
  return token;
}

bool ModelDrafter::make_room(int64_t rows, bool sequence) {
  const auto in_use = [&] {
    return std::ranges::count_if(chains_, [](const Chain& c) { return c.seq != kNoSeq; });
  };
  while (executor_.free_cells() < rows ||
         (sequence && in_use() >= executor_.limits().max_sequences)) {
    Chain* oldest = nullptr;
    for (Chain& chain : chains_) {
      if (chain.request != 0 || chain.seq == kNoSeq) continue;
      if (oldest == nullptr || chain.used < oldest->used) oldest = &chain;
    }
    if (oldest == nullptr) return false;
    release(oldest);
  }
  return true;
}

void ModelDrafter::give_up(Chain* chain, const Status& why) {
  log::debug("request {} gets no drafts any more: {}", chain->request, why.to_string());
  release(chain);
}

void ModelDrafter::release(Chain* chain) {
  if (chain->seq != kNoSeq) executor_.release(std::exchange(chain->seq, kNoSeq));
}

}  // namespace hcache::scheduler
