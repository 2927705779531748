#include "bench_serve_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "eval/statistics.h"

namespace hcache::load {
namespace {

constexpr double kMsPerSecond = 1e3;
// The rows of the table: where they stand in the summary, and what they are called.
constexpr std::pair<const char*, const char*> kTable[] = {
    {"/ttft_ms/all", "TTFT, all"},
    {"/ttft_ms/first", "TTFT, first"},
    {"/ttft_ms/returning", "TTFT, returning"},
    {"/tbt_ms", "TBT, gaps"},
    {"/tpot_ms", "TBT, mean of a request"},
    {"/total_ms", "whole request"},
};
constexpr const char* kColumns[] = {"mean", "p50", "p90", "p95", "p99", "max"};

// Null where there is no value.
template <typename T>
Json maybe(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

std::vector<double> gaps_of(const Record& record) {
  const std::vector<double>& times = record.answer.token_times_s;
  std::vector<double> gaps;
  for (size_t i = 1; i < times.size(); i++) gaps.push_back(times[i] - times[i - 1]);
  return gaps;
}

std::optional<double> ttft_of(const Record& record) {
  const std::vector<double>& times = record.answer.token_times_s;
  if (times.empty()) return std::nullopt;
  return times.front() - record.start_s;
}

// A server that counts nothing is taken to send a token at a time.
int64_t completion_tokens(const Record& record) {
  return record.answer.completion_tokens.value_or(
      static_cast<int64_t>(record.answer.token_times_s.size()));
}

// The mean time per token after the first: the paper's time between tokens.
std::optional<double> tpot_of(const Record& record) {
  const std::vector<double>& times = record.answer.token_times_s;
  const int64_t tokens = completion_tokens(record);
  if (times.size() < 2 || tokens < 2) return std::nullopt;
  return (times.back() - times.front()) / static_cast<double>(tokens - 1);
}

// Samples over the counted requests of one kind.
struct Group {
  std::vector<double> ttft;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  bool cache_known = false;

  void add(const Record& record) {
    if (const auto t = ttft_of(record)) ttft.push_back(*t);
    prompt_tokens += record.answer.prompt_tokens.value_or(0);
    cached_tokens += record.answer.cached_tokens.value_or(0);
    cache_known = cache_known || record.answer.cached_tokens.has_value();
  }
  [[nodiscard]] Json cached_share() const {
    if (!cache_known || prompt_tokens == 0) return {};
    return static_cast<double>(cached_tokens) / static_cast<double>(prompt_tokens);
  }
};

std::string cell(const Json& values, const char* column) {
  return values.contains(column) ? fmt::format("{:.1f}", values[column].get<double>()) : "-";
}

}  // namespace

double percentile(const std::vector<double>& sorted, double p) {
  return eval::quantile_of_sorted(sorted, p / 100);
}

Json distribution(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  Json out = {{"n", seconds.size()}};
  if (seconds.empty()) return out;
  const double sum = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  out["mean"] = kMsPerSecond * sum / static_cast<double>(seconds.size());
  for (const int p : {50, 90, 95, 99}) {
    out[fmt::format("p{}", p)] = kMsPerSecond * percentile(seconds, p);
  }
  out["max"] = kMsPerSecond * seconds.back();
  return out;
}

Json record_json(const Record& record) {
  const auto ms = [](std::optional<double> seconds) {
    if (seconds) *seconds *= kMsPerSecond;
    return maybe(seconds);
  };
  Json out = {{"session", record.session},
              {"round", record.round},
              {"warmup", record.warmup},
              {"returning", record.returning},
              {"start_s", record.start_s},
              {"ttft_ms", ms(ttft_of(record))},
              {"tpot_ms", ms(tpot_of(record))},
              {"tbt_ms", distribution(gaps_of(record))},
              {"total_ms", kMsPerSecond * (record.end_s - record.start_s)},
              {"max_tokens", record.max_tokens},
              {"prompt_tokens", maybe(record.answer.prompt_tokens)},
              {"cached_tokens", maybe(record.answer.cached_tokens)},
              {"completion_tokens", completion_tokens(record)},
              {"retries", record.retries},
              {"finish_reason", Json()},
              {"error", Json()}};
  if (!record.answer.finish_reason.empty()) out["finish_reason"] = record.answer.finish_reason;
  if (!record.error.empty()) {
    out["error"] = record.error;
    out["message"] = record.message;
  }
  if (!record.answer.server.empty()) out["server"] = record.answer.server;
  return out;
}

Json summarise(const Outcome& outcome) {
  Group all;
  Group first;
  Group returning;
  std::vector<double> gaps;
  std::vector<double> tpot;
  std::vector<double> total;
  Json errors = Json::object();
  int64_t n = 0;
  int64_t interrupted = 0;
  int64_t retries = 0;
  int64_t tokens = 0;
  double begin_s = 0;
  double end_s = 0;
  for (const Record& record : outcome.records) {
    if (record.warmup) continue;
    begin_s = n == 0 ? record.start_s : std::min(begin_s, record.start_s);
    end_s = n == 0 ? record.end_s : std::max(end_s, record.end_s);
    n++;
    retries += record.retries;
    if (record.error == kInterrupted) {
      interrupted++;
      continue;
    }
    if (!record.error.empty()) {
      errors[record.error] = errors.value(record.error, 0) + 1;
      continue;
    }
    all.add(record);
    (record.returning ? returning : first).add(record);
    for (const double gap : gaps_of(record)) gaps.push_back(gap);
    if (const auto t = tpot_of(record)) tpot.push_back(*t);
    total.push_back(record.end_s - record.start_s);
    tokens += completion_tokens(record);
  }
  const auto ok = static_cast<int64_t>(total.size());
  const double duration_s = end_s - begin_s;
  const auto per_s = [&](int64_t count) {
    return duration_s > 0 ? static_cast<double>(count) / duration_s : 0;
  };
  return {{"requests", n},
          {"ok", ok},
          {"failed", n - ok - interrupted},
          {"errors", errors},
          {"interrupted", interrupted},
          {"not_sent", outcome.not_sent},
          {"retries", retries},
          {"duration_s", duration_s},
          {"requests_per_s", per_s(ok)},
          {"completion_tokens", tokens},
          {"tokens_per_s", per_s(tokens)},
          {"prompt_tokens", all.prompt_tokens},
          {"cached_tokens", all.cached_tokens},
          {"cached_share",
           {{"all", all.cached_share()},
            {"first", first.cached_share()},
            {"returning", returning.cached_share()}}},
          {"ttft_ms",
           {{"all", distribution(all.ttft)},
            {"first", distribution(first.ttft)},
            {"returning", distribution(returning.ttft)}}},
          {"tbt_ms", distribution(std::move(gaps))},
          {"tpot_ms", distribution(std::move(tpot))},
          {"total_ms", distribution(std::move(total))}};
}

std::vector<std::vector<std::string>> summary_table(const Json& summary) {
  std::vector<std::vector<std::string>> table = {{"ms", "n"}};
  for (const char* column : kColumns) table.front().emplace_back(column);
  for (const auto& [pointer, name] : kTable) {
    const Json& values = summary.at(Json::json_pointer(pointer));
    table.push_back({name, fmt::format("{}", values["n"].get<size_t>())});
    for (const char* column : kColumns) table.back().push_back(cell(values, column));
  }
  return table;
}

std::string summary_lines(const Json& summary) {
  std::string out =
      fmt::format("{} requests in {:.1f} s: {} answered ({:.2f}/s, {:.1f} tokens/s), {} failed",
                  summary["requests"].get<int64_t>(), summary["duration_s"].get<double>(),
                  summary["ok"].get<int64_t>(), summary["requests_per_s"].get<double>(),
                  summary["tokens_per_s"].get<double>(), summary["failed"].get<int64_t>());
  const char* separator = ": ";
  for (const auto& [kind, count] : summary["errors"].items()) {
    out += fmt::format("{}{} {}", separator, count.get<int64_t>(), kind);
    separator = ", ";
  }
  for (const auto& [name, what] : {std::pair{"interrupted", "interrupted"},
                                   {"not_sent", "not sent"},
                                   {"retries", "retries"}}) {
    const auto count = summary[name].get<int64_t>();
    if (count > 0) out += fmt::format("; {} {}", count, what);
  }
  out += '\n';
  if (const Json& share = summary["cached_share"]; !share["all"].is_null()) {
    out += "cached share of the prompts:";
    for (const auto& [name, value] : share.items()) {
      if (value.is_number()) out += fmt::format(" {} {:.1f} %", name, 100 * value.get<double>());
    }
    out += '\n';
  }
  return out;
}

}  // namespace hcache::load
