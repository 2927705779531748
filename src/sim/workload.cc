#include "sim/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <unordered_set>

#include "sim/random.h"
#include "sim/trace.h"

namespace hcache::sim {
namespace {

// What a seed's random streams are for.
enum Stream : uint64_t { kArrivals, kLengths, kThinking, kRounds, kSizes, kDocuments };

// As a round's number.
constexpr size_t kDocument = (size_t{1} << 24U) - 1;
constexpr size_t kSystem = kDocument - 1;

// The key of a message that shares nothing with others.
uint64_t own_key(size_t session, size_t round) {
  return (uint64_t{1} << 63U) | (uint64_t{session} << 24U) | round;
}

int64_t scaled(double length, double factor) {
  return std::max<int64_t>(1, std::llround(length * factor));
}

// Chooses among the documents that conversations share.
class DocumentPicker {
 public:
  explicit DocumentPicker(const LoadOptions& options) : options_(options) {
    for (int64_t k = 1; k <= options.documents; k++) {
      const double before = below_.empty() ? 0 : below_.back();
      below_.push_back(before + std::pow(static_cast<double>(k), -options.document_skew));
    }
  }

  // Makes a conversation begin with one of them.
  void give(size_t session, Round* first) {
    if (below_.empty() || options_.document == 0) return;
    Random random({options_.seed, kDocuments, session});
    const auto chosen =
        std::lower_bound(below_.begin(), below_.end(), random.uniform() * below_.back());
    const uint64_t key = own_key(static_cast<size_t>(chosen - below_.begin()), kDocument);
    first->message[options_.system_tokens > 0 ? 1 : 0].key = key;
    if (seen_.insert(key).second) return;
    first->known_tokens = options_.document;
    first->returning = 2 * first->known_tokens >= first->input_tokens;
  }

 private:
  const LoadOptions& options_;
  std::vector<double> below_;  // cumulative weights
  std::unordered_set<uint64_t> seen_;
};

std::vector<Round> draw_rounds(const LoadOptions& options, size_t session) {
  Random lengths({options.seed, kLengths, session});
  Random thinking({options.seed, kThinking, session});
  auto n = static_cast<size_t>(options.rounds);
  if (options.mean_rounds > 0) {
    Random rounds({options.seed, kRounds, session});
    do {
      n = static_cast<size_t>(
          scaled(rounds.log_normal(options.mean_rounds, options.rounds_sigma), 1));
    } while (options.most_rounds > 0 && n > static_cast<size_t>(options.most_rounds));
  }
  const double size =
      options.conversation_sigma > 0
          ? Random({options.seed, kSizes, session}).log_normal(1, options.conversation_sigma)
          : 1;
  std::vector<double> drawn;  // input and output of one round after the other
  for (size_t i = 0; i < n; i++) {
    drawn.push_back(size * lengths.log_normal(options.mean_input, options.input_sigma));
    drawn.push_back(size * lengths.log_normal(options.mean_output, options.output_sigma));
  }
  const double total = std::accumulate(drawn.begin(), drawn.end(), 0.0);
  const double factor = options.context == 0 ? 1 : static_cast<double>(options.context) / total;
  std::vector<Round> rounds(n);
  int64_t known = 0;
  for (size_t i = 0; i < n; i++) {
    Round& round = rounds[i];
    round.input_tokens = scaled(drawn[2 * i], factor);
    round.output_tokens = scaled(drawn[2 * i + 1], factor);
    round.input_tokens += options.message_tokens;
    if (i == 0 && options.system_tokens > 0) {
      round.message.push_back({own_key(0, kSystem), options.system_tokens});
    }
    if (i == 0 && options.document > 0) {
      round.message.push_back({own_key(session, kDocument), options.document});
    }
    round.message.push_back({own_key(session, i), round.input_tokens});
    if (i == 0) round.input_tokens += options.system_tokens + options.document;
    round.known_tokens = known;
    known += round.input_tokens + round.output_tokens;
    if (i == 0) continue;
    round.returning = true;
    round.think_s =
        options.think_exponential ? thinking.exponential(options.think_s) : options.think_s;
  }
  return rounds;
}

// Turns rows into rounds and knows what the rows before them held.
class Replay {
 public:
  explicit Replay(const LoadOptions& options) : options_(options) {}

  Round round_of(const TraceRequest& row, size_t session) {
    Round round;
    round.output_tokens = scaled(static_cast<double>(row.reply_tokens), options_.length_scale);
    if (row.blocks.empty()) {
      round.message = {{own_key(session, 0),
                        scaled(static_cast<double>(row.prompt_tokens), options_.length_scale)}};
    }
    bool known = true;
    for (size_t i = 0; i < row.blocks.size(); i++) {
      const int64_t left = row.prompt_tokens - static_cast<int64_t>(i) * kTraceBlockTokens;
      const auto tokens = static_cast<double>(std::min(left, kTraceBlockTokens));
      round.message.push_back({row.blocks[i], scaled(tokens, options_.length_scale)});
      // An id stands for the whole prefix up to its block, so the first unknown one ends it.
      const bool seen = !seen_.insert(row.blocks[i]).second;
      known = known && seen;
      if (known) round.known_tokens += round.message.back().tokens;
    }
    for (const Piece& piece : round.message) round.input_tokens += piece.tokens;
    round.returning = 2 * round.known_tokens >= round.input_tokens;
    return round;
  }

 private:
  const LoadOptions& options_;
  std::unordered_set<uint64_t> seen_;
};

bool too_long(const LoadOptions& options, const TraceRequest& row) {
  return options.context > 0 &&
         static_cast<double>(row.prompt_tokens + row.reply_tokens) * options.length_scale >
             static_cast<double>(options.context);
}

}  // namespace

Schedule draw_conversations(const LoadOptions& options) {
  Schedule schedule;
  Random arrivals({options.seed, kArrivals});
  DocumentPicker documents(options);
  double now_s = 0;
  for (int64_t i = 0; i < options.warmup + options.sessions; i++) {
    schedule.sessions.push_back(
        {now_s, i < options.warmup, draw_rounds(options, static_cast<size_t>(i))});
    documents.give(static_cast<size_t>(i), &schedule.sessions.back().rounds.front());
    now_s += arrivals.exponential(1 / options.rate);
  }
  return schedule;
}

Result<Schedule> replay_trace(const LoadOptions& options, std::string_view content) {
  Schedule schedule;
  Replay replay(options);
  double origin_s = 0;
  const auto wanted = static_cast<size_t>(options.warmup + options.sessions);
  TraceReader reader(content);
  TraceRequest row;
  while (options.sessions == 0 || schedule.sessions.size() < wanted) {
    HCACHE_ASSIGN_OR_RETURN(const bool more, reader.next(&row));
    if (!more) break;
    if (too_long(options, row)) {
      schedule.left_out++;
      continue;
    }
    const size_t session = schedule.sessions.size();
    if (session == 0) origin_s = row.arrival_s;
    schedule.sessions.push_back({std::max(0.0, row.arrival_s - origin_s) * options.time_scale,
                                 static_cast<int64_t>(session) < options.warmup,
                                 {replay.round_of(row, session)}});
  }
  if (static_cast<int64_t>(schedule.sessions.size()) <= options.warmup) {
    return invalid_argument(fmt::format(
        "the trace has nothing to count: {} requests to warm up, {} left out as too long",
        schedule.sessions.size(), schedule.left_out));
  }
  return schedule;
}

Result<Schedule> replay_trace_file(Env& env, const LoadOptions& options, const std::string& file) {
  HCACHE_ASSIGN_OR_RETURN(const std::string content, read_whole_file(env, file));
  auto schedule = replay_trace(options, content);
  if (!schedule.ok()) return schedule.status().with_context(file);
  return schedule;
}

}  // namespace hcache::sim
