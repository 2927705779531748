#include "sim/serving.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <queue>
#include <tuple>
#include <utility>

#include "base/names.h"
#include "saved_chains.h"
#include "sim/random.h"
#include "sim_executor.h"

namespace hcache::sim {
namespace {

constexpr NameTable<ServingMethod, 5> kMethods = {{
    {ServingMethod::kPlan, "plan"},
    {ServingMethod::kHidden, "hidden"},
    {ServingMethod::kKv, "kv"},
    {ServingMethod::kRecompute, "recompute"},
    {ServingMethod::kIdeal, "ideal"},
}};

constexpr NameTable<Overflow, 3> kOverflows = {{
    {Overflow::kEnd, "end"},
    {Overflow::kInvalidate, "invalidate"},
    {Overflow::kKeep, "keep"},
}};

// Between two calls of `proceed`.
constexpr uint64_t kTurnsPerReport = 1 << 14;

Status check(const ServingSetup& setup) {
  const auto positive = [](std::string_view name, double value) {
    return std::isfinite(value) && value > 0
               ? Status()
               : invalid_argument(fmt::format("{} is {}; it takes a number above 0", name, value));
  };
  HCACHE_RETURN_IF_ERROR(positive("context", static_cast<double>(setup.context)));
  HCACHE_RETURN_IF_ERROR(positive("memory_share", setup.memory_share));
  HCACHE_RETURN_IF_ERROR(positive("memory_efficiency", setup.memory_efficiency));
  if (setup.measured && setup.arena_tokens == 0) {
    return invalid_argument("arena_tokens must be set where costs are measured");
  }
  if (setup.arena_tokens < 0) return invalid_argument("arena_tokens can't be negative");
  HCACHE_RETURN_IF_ERROR(positive("overflow_share", setup.overflow_share));
  if (!(setup.step_overhead_s >= 0)) return invalid_argument("step_overhead_s is negative");
  if (setup.tiers.size() > 8) return invalid_argument("more than eight tiers");
  for (const TierSetup& tier : setup.tiers) {
    HCACHE_RETURN_IF_ERROR(positive(tier.name + ": read_bytes_per_s", tier.read_bytes_per_s));
    if (!(tier.capacity_bytes >= 0)) {
      return invalid_argument(fmt::format("{}: its capacity is negative", tier.name));
    }
  }
  return {};
}

// Tokens of a text or a reply: equal keys mean equal tokens.
int32_t token_of(uint64_t key, int64_t index) {
  return static_cast<int32_t>(mixed(key + kSplitMixStep * (static_cast<uint64_t>(index) + 1)) &
                              0x7FFFFFFFU);
}

uint64_t reply_key(size_t session, size_t round) {
  return (uint64_t{3} << 62U) | (uint64_t{session} << 24U) | round;
}

class Serving {
 public:
  Serving(const ServingSetup& setup, const Schedule& load, SimExecutor& executor,
          scheduler::Scheduler& scheduler)
      : setup_(setup), load_(load), executor_(executor), scheduler_(scheduler) {
    for (size_t s = 0; s < load.sessions.size(); ++s) {
      if (load.sessions[s].rounds.empty()) continue;
      events_.push({load.sessions[s].start_s + setup.request_overhead_s, s, 0});
    }
    histories_.resize(load.sessions.size());
  }

  Status run(const std::function<bool(double)>& proceed) {
    for (uint64_t turn = 0;; ++turn) {
      if (proceed && turn % kTurnsPerReport == 0 && !proceed(begun_share())) {
        return cancelled("interrupted");
      }
      while (!events_.empty() && events_.top().at_s <= executor_.now_s()) {
        const Event event = events_.top();
        events_.pop();
        HCACHE_RETURN_IF_ERROR(submit(event));
      }
      if (events_.empty() && in_flight_ == 0) return {};
      if (scheduler_.run_once() == scheduler::Activity::kWorked) continue;
      std::optional<double> next = executor_.next_event_s();
      if (!events_.empty()) next = std::min(next.value_or(events_.top().at_s), events_.top().at_s);
      if (!next) return internal_error("simulated requests wait for nothing");
      executor_.wait_until(*next);
    }
  }

  ServingReport report;

 private:
  struct Event {
    double at_s = 0;
    size_t session = 0;
    size_t round = 0;
    friend bool operator<(const Event& a, const Event& b) {  // the queue's top is the largest
      return std::tie(a.at_s, a.session) > std::tie(b.at_s, b.session);
    }
  };

  [[nodiscard]] double begun_share() const {
    return load_.sessions.empty()
               ? 1
               : static_cast<double>(begun_) / static_cast<double>(load_.sessions.size());
  }

  Status submit(const Event& event) {
    const Round& round = load_.sessions[event.session].rounds[event.round];
    std::vector<int32_t>& history = histories_[event.session];
    begun_ += event.round == 0 ? 1 : 0;
    const int64_t most = std::min(setup_.context, executor_.limits().arena_cells);
    int64_t output = std::max<int64_t>(round.output_tokens, 1);
    std::vector<int32_t> message;
    for (const Piece& piece : round.message) {
      for (int64_t i = 0; i < piece.tokens; ++i) message.push_back(token_of(piece.key, i));
    }
    if (setup_.overflow != Overflow::kEnd) {
      output = std::min(output, std::max<int64_t>(most / 2, 1));
      cut(history, most - static_cast<int64_t>(message.size()) - output);
      const int64_t beyond = static_cast<int64_t>(message.size()) + output - most;
      if (beyond > 0 && most > 1) message.erase(message.begin(), message.begin() + beyond);
    }
    const auto known = static_cast<int64_t>(history.size());
    history.insert(history.end(), message.begin(), message.end());
    if (static_cast<int64_t>(history.size()) + output > most) {
      ++report.too_long;
      history = {};
      return {};
    }
    scheduler::Request request;
    request.tokens = history;
    request.max_new_tokens = output;
    const double waited_s = executor_.now_s() - event.at_s + setup_.request_overhead_s;
    request.next = [this, event](std::span<const float> /*logits*/) {
      std::vector<int32_t>& chain = histories_[event.session];
      const auto index = static_cast<int64_t>(chain.size());
      chain.push_back(token_of(reply_key(event.session, event.round), index));
      scheduler::NextToken next;
      next.token = chain.back();
      return next;
    };
    request.on_done = [this, event, waited_s, known](const scheduler::Outcome& outcome) {
      done(event, waited_s, known, outcome);
    };
    ++in_flight_;
    return scheduler_.submit(std::move(request)).status();
  }

  // Until no more than `most` tokens are left.
  void cut(std::vector<int32_t>& history, int64_t most) {
    const auto length = static_cast<int64_t>(history.size());
    if (length <= most) return;
    int64_t drop = 0;
    while (length - drop > std::max<int64_t>(most, 0)) {
      const double share = setup_.overflow_share * static_cast<double>(length - drop);
      drop += std::max<int64_t>(std::llround(share / kChunk), 1) * kChunk;
    }
    drop = std::min(drop, length);
    executor_.cut_front(history, setup_.overflow == Overflow::kKeep ? drop : length);
    history.erase(history.begin(), history.begin() + drop);
    ++report.cut;
  }

  void done(const Event& event, double waited_s, int64_t known, const scheduler::Outcome& outcome) {
    --in_flight_;
    const Session& session = load_.sessions[event.session];
    std::vector<int32_t>& history = histories_[event.session];
    if (!outcome.status.ok()) {
      ++report.failed;
      history = {};
      return;
    }
    ServedRequest served;
    served.session = event.session;
    served.round = event.round;
    served.returning = session.rounds[event.round].returning;
    served.warmup = session.warmup;
    served.restore_s = outcome.restore_s;
    served.ttft_s = waited_s + outcome.ttft_s;
    served.queue_s = waited_s + outcome.queue_s;
    if (outcome.generated_tokens > 1) {
      served.tpot_s =
          (outcome.total_s - outcome.ttft_s) / static_cast<double>(outcome.generated_tokens - 1);
    }
    served.prompt_tokens = outcome.prompt_tokens;
    served.history_tokens = known;
    if (const uint64_t bytes = outcome.bytes.total(); bytes > 0) {
      served.memory_share = static_cast<double>(outcome.bytes.dram) / static_cast<double>(bytes);
    }
    served.resident_tokens = outcome.resident_tokens;
    served.restored_tokens = outcome.hidden_tokens + outcome.kv_tokens + outcome.recomputed_tokens;
    served.output_tokens = outcome.generated_tokens;
    report.requests.push_back(served);
    if (event.round + 1 < session.rounds.size()) {
      const double think_s = session.rounds[event.round + 1].think_s;
      events_.push({executor_.now_s() + think_s + setup_.request_overhead_s, event.session,
                    event.round + 1});
    } else {
      history = {};
    }
  }

  const ServingSetup& setup_;
  const Schedule& load_;
  SimExecutor& executor_;
  scheduler::Scheduler& scheduler_;
  std::priority_queue<Event> events_;
  std::vector<std::vector<int32_t>> histories_;  // by session: everything that was said
  int64_t in_flight_ = 0;
  size_t begun_ = 0;
};

}  // namespace

std::string_view serving_method_name(ServingMethod method) {
  return kMethods.at(static_cast<size_t>(method)).second;
}

Result<ServingMethod> parse_serving_method(std::string_view name) {
  return parse_name(kMethods, "method", name);
}

Result<Overflow> parse_overflow(std::string_view name) {
  return parse_name(kOverflows, "overflow", name);
}

Result<ServingReport> simulate_serving(const ServingSetup& given, const Schedule& load,
                                       const std::function<bool(double)>& proceed) {
  HCACHE_RETURN_IF_ERROR(check(given));
  ServingSetup setup = given;
  if (!setup.keep_resident) setup.scheduler.offload_above = 0;
  // Clients wait; the queue has no end.
  setup.scheduler.max_queued = std::numeric_limits<int64_t>::max();
  if (setup.tiers.empty()) {
    HCACHE_ASSIGN_OR_RETURN(const policy::RestoreCosts costs, serving_costs(setup));
    setup.tiers = {{.name = setup.measured || setup.hardware.n_ssd > 0 ? "disk" : "dram",
                    .read_bytes_per_s = costs.link.bytes_per_s}};
  }
  HCACHE_ASSIGN_OR_RETURN(const auto executor, SimExecutor::create(setup));
  HCACHE_ASSIGN_OR_RETURN(const auto scheduler,
                          scheduler::Scheduler::create(*executor, setup.scheduler));
  Serving serving(setup, load, *executor, *scheduler);
  HCACHE_RETURN_IF_ERROR(serving.run(proceed));
  ServingReport report = std::move(serving.report);
  executor->describe(&report);
  report.preemptions = scheduler->stats().preemptions;
  return report;
}

}  // namespace hcache::sim
