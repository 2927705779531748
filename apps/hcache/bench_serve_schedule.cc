#include "bench_serve_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <unordered_set>

#include "bench_serve_random.h"

namespace hcache::load {
namespace {

constexpr double kMeanInput = 66.8;
constexpr double kMeanOutput = 358.8;
// The paper gives the means alone. People's messages scatter more than answers do.
constexpr double kInputSigma = 1.0;
constexpr double kOutputSigma = 0.6;
constexpr int64_t kBlockTokens = 512;  // of Mooncake's hash ids

// What a seed's random streams are for.
enum Stream : uint64_t { kArrivals, kLengths, kThinking };

// The key of a message that shares nothing with others.
uint64_t own_key(size_t session, size_t round) {
  return (uint64_t{1} << 63U) | (uint64_t{session} << 24U) | round;
}

int64_t scaled(double length, double factor) {
  return std::max<int64_t>(1, std::llround(length * factor));
}

std::vector<Round> draw_rounds(const LoadOptions& options, size_t session) {
  Random lengths({options.seed, kLengths, session});
  Random thinking({options.seed, kThinking, session});
  const auto n = static_cast<size_t>(options.rounds);
  std::vector<double> drawn;  // input and output of one round after the other
  for (size_t i = 0; i < n; i++) {
    drawn.push_back(lengths.log_normal(kMeanInput, kInputSigma));
    drawn.push_back(lengths.log_normal(kMeanOutput, kOutputSigma));
  }
  const double total = std::accumulate(drawn.begin(), drawn.end(), 0.0);
  const double factor = options.context == 0 ? 1 : static_cast<double>(options.context) / total;
  std::vector<Round> rounds(n);
  int64_t known = 0;
  for (size_t i = 0; i < n; i++) {
    Round& round = rounds[i];
    round.input_tokens = scaled(drawn[2 * i], factor);
    round.output_tokens = scaled(drawn[2 * i + 1], factor);
    round.message = {{own_key(session, i), round.input_tokens}};
    round.known_tokens = known;
    known += round.input_tokens + round.output_tokens;
    if (i == 0) continue;
    round.returning = true;
    round.think_s =
        options.think_exponential ? thinking.exponential(options.think_s) : options.think_s;
  }
  return rounds;
}

// A request as a trace tells it.
struct TraceRow {
  double time_s = 0;  // from any origin
  int64_t input = 0;
  int64_t output = 0;
  std::vector<uint64_t> blocks;
};

// A whole number in [0, 2^40].
bool read_count(const nlohmann::json& value, int64_t* out) {
  if (!value.is_number_integer()) return false;
  *out = value.get<int64_t>();
  return *out >= 0 && *out <= int64_t{1} << 40U;
}

Result<TraceRow> parse_mooncake(std::string_view line) {
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object()) return invalid_argument("not a JSON object");
  const auto field = [&](const char* name) { return json.value(name, nlohmann::json()); };
  TraceRow row;
  const nlohmann::json timestamp = field("timestamp");
  if (!timestamp.is_number()) return invalid_argument("timestamp is not a number of ms");
  row.time_s = timestamp.get<double>() * 1e-3;
  if (!read_count(field("input_length"), &row.input) ||
      !read_count(field("output_length"), &row.output)) {
    return invalid_argument("input_length and output_length are not numbers of tokens");
  }
  for (const nlohmann::json& id : field("hash_ids")) {
    int64_t block = 0;
    if (!read_count(id, &block)) return invalid_argument("hash_ids holds something else than ids");
    row.blocks.push_back(static_cast<uint64_t>(block));
  }
  const int64_t blocks = (row.input + kBlockTokens - 1) / kBlockTokens;
  if (static_cast<int64_t>(row.blocks.size()) != blocks) {
    return invalid_argument(fmt::format("{} tokens are {} blocks of {}, but hash_ids holds {}",
                                        row.input, blocks, kBlockTokens, row.blocks.size()));
  }
  return row;
}

bool parse_count(std::string_view text, int64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && *out >= 0;
}

Result<TraceRow> parse_azure(std::string_view line) {
  const size_t first = line.find(',');
  const size_t second = line.find(',', first == std::string_view::npos ? first : first + 1);
  if (second == std::string_view::npos) return invalid_argument("not three columns");
  const std::string time(line.substr(0, first));
  std::tm date{};
  double seconds = 0;
  int end = 0;
  const int fields = std::sscanf(time.c_str(), "%d-%d-%d %d:%d:%lf%n", &date.tm_year, &date.tm_mon,
                                 &date.tm_mday, &date.tm_hour, &date.tm_min, &seconds, &end);
  if (fields != 6 || static_cast<size_t>(end) != time.size()) {
    return invalid_argument("TIMESTAMP is not like 2023-11-16 18:15:46.6805900");
  }
  date.tm_year -= 1900;
  date.tm_mon -= 1;
  TraceRow row;
  row.time_s = static_cast<double>(timegm(&date)) + seconds;
  if (!parse_count(line.substr(first + 1, second - first - 1), &row.input) ||
      !parse_count(line.substr(second + 1), &row.output)) {
    return invalid_argument("ContextTokens and GeneratedTokens are not numbers of tokens");
  }
  return row;
}

// Turns rows into rounds and knows what the rows before them held.
class Replay {
 public:
  explicit Replay(const LoadOptions& options) : options_(options) {}

  Round round_of(const TraceRow& row, size_t session) {
    Round round;
    round.output_tokens = scaled(static_cast<double>(row.output), options_.length_scale);
    if (row.blocks.empty()) {
      round.message = {
          {own_key(session, 0), scaled(static_cast<double>(row.input), options_.length_scale)}};
    }
    bool known = true;
    for (size_t i = 0; i < row.blocks.size(); i++) {
      const int64_t left = row.input - static_cast<int64_t>(i) * kBlockTokens;
      const auto tokens = static_cast<double>(std::min(left, kBlockTokens));
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

bool too_long(const LoadOptions& options, const TraceRow& row) {
  return options.context > 0 && static_cast<double>(row.input + row.output) * options.length_scale >
                                    static_cast<double>(options.context);
}

}  // namespace

Schedule draw_conversations(const LoadOptions& options) {
  Schedule schedule;
  Random arrivals({options.seed, kArrivals});
  double now_s = 0;
  for (int64_t i = 0; i < options.warmup + options.sessions; i++) {
    schedule.sessions.push_back(
        {now_s, i < options.warmup, draw_rounds(options, static_cast<size_t>(i))});
    now_s += arrivals.exponential(1 / options.rate);
  }
  return schedule;
}

Result<Schedule> replay_trace(const LoadOptions& options, std::string_view content) {
  Schedule schedule;
  Replay replay(options);
  double origin_s = 0;
  const auto wanted = static_cast<size_t>(options.warmup + options.sessions);
  size_t number = 0;
  while (!content.empty() && (options.sessions == 0 || schedule.sessions.size() < wanted)) {
    std::string_view line = content.substr(0, content.find('\n'));
    content.remove_prefix(std::min(line.size() + 1, content.size()));
    number++;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line.starts_with("TIMESTAMP")) continue;
    const Result<TraceRow> row = line.starts_with('{') ? parse_mooncake(line) : parse_azure(line);
    if (!row.ok()) return row.status().with_context(fmt::format("line {}", number));
    if (too_long(options, *row)) {
      schedule.left_out++;
      continue;
    }
    const size_t session = schedule.sessions.size();
    if (session == 0) origin_s = row->time_s;
    schedule.sessions.push_back({std::max(0.0, row->time_s - origin_s) * options.time_scale,
                                 static_cast<int64_t>(session) < options.warmup,
                                 {replay.round_of(*row, session)}});
  }
  if (static_cast<int64_t>(schedule.sessions.size()) <= options.warmup) {
    return invalid_argument(fmt::format(
        "the trace has nothing to count: {} requests to warm up, {} left out as too long",
        schedule.sessions.size(), schedule.left_out));
  }
  return schedule;
}

}  // namespace hcache::load
