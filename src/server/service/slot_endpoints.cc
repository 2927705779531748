#include "slot_endpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <future>
#include <set>
#include <utility>

#include "api/answers.h"
#include "api/request.h"
#include "state/kept_state.h"

namespace hcache::server {
namespace {

using api::Json;
using scheduler::IdleSequence;
using scheduler::SeqId;

constexpr int64_t kWaitNs = 60'000'000'000;  // for a slot's request, and for the disk
constexpr int64_t kPollNs = 10'000'000;

Status no_slot(int id) {
  return invalid_argument(fmt::format("Invalid slot ID: there is no slot {}", id));
}

double ms_since(Env& env, int64_t begin_ns) {
  return static_cast<double>(env.monotonic_ns() - begin_ns) / 1e6;
}

Result<store::Match> match_of(Service& service, const SaltId& salt,
                              std::span<const int32_t> tokens) {
  HCACHE_ASSIGN_OR_RETURN(store::Store * store, store_of(service));
  return store->match(service.runtime().fingerprint(), salt, tokens);
}

}  // namespace

void SlotEndpoints::number(const std::vector<scheduler::ResidentSequence>& resident) {
  std::set<SeqId> present;
  for (const scheduler::ResidentSequence& sequence : resident) present.insert(sequence.seq);
  std::erase_if(numbers_, [&](const auto& entry) { return !present.contains(entry.first); });
  std::set<int> taken;
  for (const auto& [seq, id] : numbers_) taken.insert(id);
  int next = 0;
  for (const SeqId seq : present) {
    if (seq == scheduler::kNoSeq || numbers_.contains(seq)) continue;
    while (taken.contains(next)) ++next;
    taken.insert(next);
    numbers_[seq] = next;
  }
}

std::optional<SeqId> SlotEndpoints::sequence_of(int id) {
  const auto resident = service_.scheduler().stats().resident;
  MutexLock lock(mutex_);
  number(resident);
  for (const auto& [seq, number] : numbers_) {
    if (number == id) return seq;
  }
  return std::nullopt;
}

Result<Json> SlotEndpoints::list() {
  if (!service_.options().slots) {
    return unimplemented(
        "This server does not support slots endpoint. It was started with `--no-slots`");
  }
  const auto resident = service_.scheduler().stats().resident;
  std::vector<api::SlotState> slots;
  {
    MutexLock lock(mutex_);
    number(resident);
    for (const scheduler::ResidentSequence& sequence : resident) {
      if (sequence.seq == scheduler::kNoSeq) continue;
      api::SlotState& slot = slots.emplace_back();
      slot.id = numbers_[sequence.seq];
      slot.context = service_.context();
      slot.processing = !sequence.idle;
      slot.prompt_tokens = sequence.tokens;
    }
  }
  // Clients count on as many as may run at once.
  std::set<int> taken;
  for (const api::SlotState& slot : slots) taken.insert(slot.id);
  const auto most = static_cast<size_t>(service_.options().scheduler.batch.max_sequences);
  for (int id = 0; slots.size() < most; ++id) {
    if (taken.contains(id)) continue;
    api::SlotState& slot = slots.emplace_back();
    slot.id = id;
    slot.context = service_.context();
  }
  std::sort(slots.begin(), slots.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return api::slots_answer(slots);
}

Result<IdleSequence> SlotEndpoints::visit(SeqId seq, bool release) {
  const auto answer = std::make_shared<std::promise<Result<IdleSequence>>>();
  std::future<Result<IdleSequence>> held = answer->get_future();
  service_.scheduler().visit_idle(seq, release, [answer](Result<IdleSequence> sequence) {
    answer->set_value(std::move(sequence));
  });
  return held.get();
}

Result<SlotEndpoints::Slot> SlotEndpoints::wait_for(const Call& call, int id, bool release) {
  const int64_t end_ns = service_.env().monotonic_ns() + kWaitNs;
  const Salt salt = salt_of(service_, call.request);
  while (true) {
    const std::optional<SeqId> seq = sequence_of(id);
    if (!seq) return no_slot(id);
    Result<IdleSequence> held = visit(*seq, false);
    if (held.ok()) {
      // A client that may not use its state does not see that it exists.
      if (held->salt != salt) return no_slot(id);
      if (release) held = visit(*seq, true);
    }
    if (held.ok()) return Slot{id, *seq, std::move(*held)};
    if (held.code() != Code::kUnavailable) return no_slot(id);
    HCACHE_RETURN_IF_ERROR(wait(end_ns, id, "still processing"));
  }
}

Status SlotEndpoints::wait(int64_t end_ns, int id, const char* what) {
  if (service_.env().monotonic_ns() >= end_ns || stopping_.load(std::memory_order_relaxed)) {
    return unavailable(fmt::format("slot {} is {}; try again later", id, what));
  }
  service_.env().sleep_ns(kPollNs);
  return {};
}

Result<Json> SlotEndpoints::save(const Call& call, int id) {
  HCACHE_ASSIGN_OR_RETURN(const std::string filename, api::parse_slot_file(call.body));
  HCACHE_RETURN_IF_ERROR(store_of(service_).status());
  Env& env = service_.env();
  const int64_t begin_ns = env.monotonic_ns();
  HCACHE_ASSIGN_OR_RETURN(Slot slot, wait_for(call, id, false));
  while (slot.held.durable_tokens < static_cast<int64_t>(slot.held.tokens.size())) {
    if (slot.held.durable_tokens == scheduler::kNotSaving) {
      return failed_precondition(fmt::format(
          "slot {} can't be saved: its requests asked for nothing to be kept, or saving failed "
          "(see the log)",
          id));
    }
    HCACHE_RETURN_IF_ERROR(wait(begin_ns + kWaitNs, id, "not on disk yet"));
    HCACHE_ASSIGN_OR_RETURN(slot, wait_for(call, id, false));
  }
  const Salt salt = salt_of(service_, call.request);
  uint64_t bytes = 0;
  {
    HCACHE_ASSIGN_OR_RETURN(const store::Match match,
                            match_of(service_, salt.id, slot.held.tokens));
    bytes = page_bytes(match);
  }
  const auto n_tokens = static_cast<int64_t>(slot.held.tokens.size());
  FinishedChain chain;
  chain.salt = salt.id;
  chain.adapted = state::differs(salt);
  chain.name = filename;
  chain.tokens = std::move(slot.held.tokens);
  chain.snapshot = true;
  service_.conversations().remember(std::move(chain));
  HCACHE_RETURN_IF_ERROR(service_.conversations().persist(salt.id, filename));
  return api::slot_saved_answer({.slot = id,
                                 .filename = filename,
                                 .tokens = n_tokens,
                                 .bytes = bytes,
                                 .ms = ms_since(env, begin_ns)});
}

Result<Json> SlotEndpoints::restore(const Call& call, int id) {
  HCACHE_ASSIGN_OR_RETURN(const std::string filename, api::parse_slot_file(call.body));
  if (id < 0 || id >= service_.options().max_sequences) return no_slot(id);
  const int64_t begin_ns = service_.env().monotonic_ns();
  const SaltId salt = salt_of(service_, call.request).id;
  const auto tokens = service_.conversations().tokens(salt, filename);
  if (!tokens.ok()) {
    return invalid_argument(
        fmt::format("Unable to restore slot: nothing was saved as '{}'", filename));
  }
  if (static_cast<int64_t>(tokens->size()) > service_.context()) {
    return invalid_argument("Unable to restore slot: its tokens do not fit the context");
  }
  HCACHE_ASSIGN_OR_RETURN(const store::Match match, match_of(service_, salt, *tokens));
  HCACHE_RETURN_IF_ERROR(service_.conversations().recall(salt, filename));
  return api::slot_restored_answer({.slot = id,
                                    .filename = filename,
                                    .tokens = static_cast<int64_t>(match.n_tokens),
                                    .bytes = page_bytes(match),
                                    .ms = ms_since(service_.env(), begin_ns)});
}

Result<Json> SlotEndpoints::erase(const Call& call, int id) {
  HCACHE_ASSIGN_OR_RETURN(const Slot slot, wait_for(call, id, true));
  return api::slot_erased_answer(id, static_cast<int64_t>(slot.held.tokens.size()));
}

Result<Json> SlotEndpoints::act(const Call& call) {
  if (!service_.options().slot_actions) {
    return unimplemented(
        "This server does not support slots action. Start it with `--slot-save-path`");
  }
  const std::string& number = *call.request.param("id_slot");
  int id = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), id);
  if (error != std::errc() || end != number.data() + number.size()) {
    return invalid_argument("Invalid slot ID");
  }
  const std::string* action = call.request.query_value("action");
  if (action != nullptr && *action == "save") return save(call, id);
  if (action != nullptr && *action == "restore") return restore(call, id);
  if (action != nullptr && *action == "erase") return erase(call, id);
  return invalid_argument("Invalid action");
}

void SlotEndpoints::add_to(http::Router* router) {
  router->add("GET", "/slots", answer_on(service_.intake(), [this](Call&) { return list(); }));
  router->add("POST", "/slots/{id_slot}",
              answer_on(transfers_, [this](Call& call) { return act(call); }));
}

}  // namespace hcache::server
