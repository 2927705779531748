// The load that `hcache bench serve` sends: who says how much, and when. A pure function of the
// options and of the trace's content. Lengths in tokens, times in seconds from the start.
// Threading: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::load {

struct LoadOptions {
  int64_t sessions = 0;  // counted conversations, or requests of a trace; 0: all of the trace
  int64_t warmup = 0;    // so many more before them, which are not counted
  uint32_t seed = 0;
  // Conversations drawn by draw_conversations().
  double rate = 0;  // arrivals per second, a Poisson process
  int64_t rounds = 0;
  double think_s = 0;  // mean pause between an answer and the next message
  bool think_exponential = false;
  // What a conversation comes to when it ends, its messages and answers together; 0: the mean
  // lengths of ShareGPT4. Of a trace: requests longer than this are left out; 0: none is.
  int64_t context = 0;
  // Traces.
  double time_scale = 1;    // of their times
  double length_scale = 1;  // of their lengths
};

// A passage of a text; equal keys mean equal text (bench_serve_text.h).
struct Piece {
  uint64_t key = 0;
  int64_t tokens = 0;
};

struct Round {
  double think_s = 0;  // after the answer before; 0 in the first round
  std::vector<Piece> message;
  int64_t input_tokens = 0;  // of the message
  int64_t output_tokens = 0;
  int64_t known_tokens = 0;  // how much of the prompt earlier requests hold
  // Comes back to a context that the server has seen: a later round of a conversation; a request of
  // a trace of which earlier ones hold at least half.
  bool returning = false;
};

struct Session {
  double start_s = 0;
  bool warmup = false;
  std::vector<Round> rounds;
};

struct Schedule {
  std::vector<Session> sessions;  // in the order of their start
  int64_t left_out = 0;           // of the trace, by LoadOptions::context
};

// Conversations as in ShareGPT4 (hcache.txt section 2.3: 66.8 tokens of input and 358.8 of output
// per round on average): log-normal lengths.
[[nodiscard]] Schedule draw_conversations(const LoadOptions& options);

// Requests of a trace, one session of one round each: Mooncake's JSON lines (timestamp in ms,
// input_length, output_length, hash_ids of blocks of 512 tokens; equal ids become equal text, so
// that prefixes are shared as they were), or Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens;
// nothing is shared). kInvalidArgument names the line; also when nothing is left.
[[nodiscard]] Result<Schedule> replay_trace(const LoadOptions& options, std::string_view content);

}  // namespace hcache::load
