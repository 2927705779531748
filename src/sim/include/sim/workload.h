// A load: who says how much, and when. `hcache bench serve` sends it, the simulator serves it. A
// pure function of the options and of the trace's content. Lengths in tokens, times in seconds from
// the start. Threading: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/status.h"

namespace hcache::sim {

struct LoadOptions {
  int64_t sessions = 0;  // counted conversations, or requests of a trace; 0: all of the trace
  int64_t warmup = 0;    // so many more before them, which are not counted
  uint32_t seed = 0;
  // Conversations drawn by draw_conversations().
  double rate = 0;  // arrivals per second, a Poisson process
  int64_t rounds = 0;
  // Above 0: instead log-normal numbers of this mean, rounded, at least one. Those above
  // most_rounds (0: none) are drawn again, which lowers the mean.
  double mean_rounds = 0;
  double rounds_sigma = 0;
  int64_t most_rounds = 0;
  // Lengths are log-normal. Means in tokens as in ShareGPT4 (HCache §2.3); the paper
  // gives no spread. People's messages scatter more than answers do.
  double mean_input = 66.8;
  double mean_output = 358.8;
  double input_sigma = 1.0;
  double output_sigma = 0.6;
  double conversation_sigma =
      0;                 // all lengths of one are longer or shorter by one log-normal factor
  int64_t document = 0;  // tokens in front of the first message, a conversation's own
  // Above 0: one of so many instead, which conversations share; the k-th is chosen as often as
  // 1 / k^document_skew says (Zipf; 0: all alike).
  int64_t documents = 0;
  double document_skew = 0;
  // What the server makes of messages with its chat template: tokens that it puts before all
  // conversations, the same for each, and around every message and its answer.
  int64_t system_tokens = 0;
  int64_t message_tokens = 0;
  double think_s = 0;  // mean pause between an answer and the next message
  bool think_exponential = false;
  // What a conversation comes to when it ends, its messages and answers together: the lengths
  // drawn are scaled. 0: they are not. Of a trace: requests longer than this are left out; 0: none
  // is.
  int64_t context = 0;
  // Traces.
  double time_scale = 1;    // of their times
  double length_scale = 1;  // of their lengths
};

// A passage of a text; equal keys mean equal text.
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

[[nodiscard]] Schedule draw_conversations(const LoadOptions& options);

// Requests of a trace, one session of one round each: Mooncake's JSON lines (timestamp in ms,
// input_length, output_length, hash_ids of blocks of 512 tokens; equal ids become equal text, so
// that prefixes are shared as they were), or Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens;
// nothing is shared). kInvalidArgument names the line; also when nothing is left.
[[nodiscard]] Result<Schedule> replay_trace(const LoadOptions& options, std::string_view content);
// The same of a file, which errors name.
[[nodiscard]] Result<Schedule> replay_trace_file(Env& env, const LoadOptions& options,
                                                 const std::string& file);

}  // namespace hcache::sim
