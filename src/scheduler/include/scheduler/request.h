// A generation request as the scheduler sees it – tokens in, tokens out, no text – and the record
// of what became of it.
//
// Threading: plain values. The functions of a Request are called on the scheduler's owner thread,
// never while a lock is held: they may submit and cancel. They must not throw.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "policy/truncation.h"
#include "scheduler/executor.h"

namespace hcache::scheduler {

using RequestId = uint64_t;

// The life of a request. A preempted one is queued again.
enum class Phase : uint8_t {
  kQueued,
  kFetching,   // its saved state is being read, nothing can be computed yet
  kRestoring,  // slices of the restore are computed
  kPrefill,
  kDecoding,
  kDone,
  kCancelled,
  kFailed,
};
[[nodiscard]] std::string_view phase_name(Phase phase);  // "queued", …

struct NextToken {
  int32_t token = 0;
  bool stop = false;          // this was the last one
  std::string finish_reason;  // with stop: for the Outcome
};

// Where the tokens of the prompt came from, what it cost, and how it ended.
struct Outcome {
  RequestId id = 0;
  Phase phase = Phase::kQueued;  // kDone, kCancelled or kFailed
  Status status;                 // ok, kCancelled, or what failed
  std::string finish_reason;     // as next() said, or "length"; empty unless done

  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  // The prompt by source; the sum and dropped_before is prompt_tokens once a first token has come.
  int64_t resident_tokens = 0;    // were in the arena
  int64_t hidden_tokens = 0;      // restored from hidden states
  int64_t kv_tokens = 0;          // loaded as KV
  int64_t recomputed_tokens = 0;  // by the restore, as part of its schedule
  int64_t new_tokens = 0;         // prefilled
  int64_t saving_tokens = 0;      // of new_tokens: on their way to the store, or there
  // Tokens of the answer that were guessed and computed along, and those that came true.
  int64_t drafted_tokens = 0;
  int64_t accepted_tokens = 0;
  // Of the prompt, that no rows were there of when the request was admitted, nor came back: they
  // had been dropped. And of prompt and answer, that none is held of so far.
  int64_t dropped_before = 0;
  int64_t dropped_tokens = 0;

  // Restores, those after a preemption included.
  std::vector<policy::RestoreRecord> restores;
  policy::TierBytes bytes;    // read by them
  double restore_s = 0;       // that they took
  double restore_busy_s = 0;  // compute that they took
  double prefill_s = 0;       // of steps that held rows of its prompt

  SeqId seq = kNoSeq;                  // that it ran on, and that may stay resident as an idle one
  double queue_s = 0;                  // until it was first admitted
  double ttft_s = 0;                   // until its first token; 0: none came
  double total_s = 0;                  // until it ended
  std::vector<double> preempted_at_s;  // seconds after it was submitted
};

// What a request may go on from.
enum class CacheUse : uint8_t {
  kNone,   // nothing: all of its prompt is computed
  kSaved,  // saved state, as in a process that holds nothing yet
  kAll,    // rows in the arena, and saved state
};

// Of max_new_tokens.
inline constexpr int64_t kAsManyAsFit = std::numeric_limits<int64_t>::max();

struct Request {
  std::vector<int32_t> tokens;  // the prompt; at least one
  MediaRef media;               // of it; null: it has none
  // Tokens to generate at most; cut to what fits, unless `truncation` makes room: then kAsManyAsFit
  // are as many as the context has. 0: the prompt is computed and kept, no more.
  int64_t max_new_tokens = kAsManyAsFit;
  Salt salt;         // cache salt: state is shared only between equal ones
  bool save = true;  // whether its state may be saved
  CacheUse cache = CacheUse::kAll;
  RestoreMethod restore;
  // Set: what outgrows the context is cut, wherever that is, in the prompt or in the answer, as far
  // as the Executor can; a context given here counts as far as it is less than the Executor's.
  // Otherwise a prompt that is too long is refused, and an answer ends with the context.
  std::optional<policy::TruncationLimits> truncation = {};
  policy::NextMessage next_message = {};  // where messages of the chain begin; may be empty
  std::string key;                        // whom limits per key count
  int32_t priority = 0;                   // higher is more urgent
  // Nobody waits for it: it comes after all others, whatever its priority and however long it
  // waits, and is preempted when one of them wants its place.
  bool background = false;

  // At most so many tokens are guessed for a step, SchedulerOptions::draft's if that is less.
  int32_t max_draft = std::numeric_limits<int32_t>::max();

  // Samples from the logits of the last token (valid during the call) and consumes the token. An
  // error ends the request with that status.
  std::function<Result<NextToken>(std::span<const float> logits)> next;
  // May be empty. Gets the logits of the prompt's tokens from `logits_from` on, each once and in
  // order, valid during the call: how likely the prompt itself was. What the request goes on from
  // ends before that token.
  std::function<void(int64_t position, std::span<const float> logits)> on_prompt_logits;
  int64_t logits_from = 0;
  // It gets the rows behind the final norm instead, which stand for the text where a vector is
  // wanted of it. Takes max_new_tokens 0.
  bool tells_hidden = false;
  // May be empty. Once, before the first next(): the prompt is computed, and where it came from is
  // known.
  std::function<void(const Outcome&)> on_first;
  // Exactly once for every request that submit() accepted, whatever becomes of it.
  std::function<void(const Outcome&)> on_done;
  // May be empty. Called when the phase changes, and as restore and prefill go on with the fraction
  // of that phase that is done. Not for every token.
  std::function<void(Phase phase, double fraction)> on_state;
};

}  // namespace hcache::scheduler
