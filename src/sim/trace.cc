#include "sim/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <string>

namespace hcache::sim {
namespace {

// A whole number in [0, 2^40].
bool read_count(const nlohmann::json& value, int64_t* out) {
  if (!value.is_number_integer()) return false;
  *out = value.get<int64_t>();
  return *out >= 0 && *out <= int64_t{1} << 40U;
}

Result<TraceRequest> parse_mooncake(std::string_view line) {
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object()) return invalid_argument("not a JSON object");
  const auto field = [&](const char* name) { return json.value(name, nlohmann::json()); };
  TraceRequest row;
  const nlohmann::json timestamp = field("timestamp");
  if (!timestamp.is_number()) return invalid_argument("timestamp is not a number of ms");
  row.arrival_s = timestamp.get<double>() * 1e-3;
  if (!read_count(field("input_length"), &row.prompt_tokens) ||
      !read_count(field("output_length"), &row.reply_tokens)) {
    return invalid_argument("input_length and output_length are not numbers of tokens");
  }
  for (const nlohmann::json& id : field("hash_ids")) {
    int64_t block = 0;
    if (!read_count(id, &block)) return invalid_argument("hash_ids holds something else than ids");
    row.blocks.push_back(static_cast<uint64_t>(block));
  }
  const int64_t blocks = (row.prompt_tokens + kTraceBlockTokens - 1) / kTraceBlockTokens;
  if (static_cast<int64_t>(row.blocks.size()) != blocks) {
    return invalid_argument(fmt::format("{} tokens are {} blocks of {}, but hash_ids holds {}",
                                        row.prompt_tokens, blocks, kTraceBlockTokens,
                                        row.blocks.size()));
  }
  return row;
}

bool parse_count(std::string_view text, int64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && *out >= 0;
}

Result<TraceRequest> parse_azure(std::string_view line) {
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
  TraceRequest row;
  row.arrival_s = static_cast<double>(timegm(&date)) + seconds;
  if (!parse_count(line.substr(first + 1, second - first - 1), &row.prompt_tokens) ||
      !parse_count(line.substr(second + 1), &row.reply_tokens)) {
    return invalid_argument("ContextTokens and GeneratedTokens are not numbers of tokens");
  }
  return row;
}

}  // namespace

Result<bool> TraceReader::next(TraceRequest* request) {
  while (!rest_.empty()) {
    std::string_view line = rest_.substr(0, rest_.find('\n'));
    rest_.remove_prefix(std::min(line.size() + 1, rest_.size()));
    ++line_;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line.starts_with("TIMESTAMP")) continue;
    Result<TraceRequest> row = line.starts_with('{') ? parse_mooncake(line) : parse_azure(line);
    if (!row.ok()) return row.status().with_context(fmt::format("line {}", line_));
    *request = std::move(*row);
    return true;
  }
  return false;
}

Result<std::vector<TraceRequest>> read_trace(std::string_view text) {
  std::vector<TraceRequest> requests;
  TraceReader reader(text);
  TraceRequest request;
  while (true) {
    HCACHE_ASSIGN_OR_RETURN(const bool more, reader.next(&request));
    if (!more) break;
    requests.push_back(std::move(request));
  }
  std::stable_sort(
      requests.begin(), requests.end(),
      [](const TraceRequest& a, const TraceRequest& b) { return a.arrival_s < b.arrival_s; });
  return requests;
}

}  // namespace hcache::sim
