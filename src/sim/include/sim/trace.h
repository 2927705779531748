// Recorded requests, as others publish them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::sim {

inline constexpr int64_t kTraceBlockTokens = 512;  // of Mooncake's hash ids

struct TraceRequest {
  double arrival_s = 0;  // from any origin
  int64_t prompt_tokens = 0;
  int64_t reply_tokens = 0;
  // Of the prompt's blocks of 512 tokens (the last may be shorter), each standing for everything up
  // to its end: equal ids are equal prefixes. Empty where the trace does not say.
  std::vector<uint64_t> blocks;
};

// Takes the next request off the front of a trace in Mooncake's JSON lines (timestamp in ms,
// input_length, output_length, hash_ids) or Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens).
class TraceReader {
 public:
  explicit TraceReader(std::string_view text) : rest_(text) {}
  // False at the end. kInvalidArgument names the line.
  [[nodiscard]] Result<bool> next(TraceRequest* request);

 private:
  std::string_view rest_;
  size_t line_ = 0;
};

// All of a trace, in order of arrival.
[[nodiscard]] Result<std::vector<TraceRequest>> read_trace(std::string_view text);

}  // namespace hcache::sim
