// What reading a text once more, behind itself, needs of its rows of the KV cache: what
// Compression::kSelf scores them by (after KVzip, arXiv 2505.23416).
//
// The text is read in parts, each behind the whole text and nothing else, so that a part can be
// read whenever there is time for it, and text that comes later costs its own parts alone.
//
// Threading: the engine's thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

#include "base/status.h"
#include "engine/engine.h"
#include "policy/compression.h"

namespace hcache::state {

class SecondReading {
 public:
  SecondReading() = default;
  // Goes on behind the rows of these scores, all of which have been read.
  explicit SecondReading(policy::RowScores scores)
      : scores_(std::move(scores)), read_(scores_.n_rows) {}

  // Tokens of a part, where a step takes as many, and those before it that lead into it.
  static constexpr int64_t kPart = 64;
  static constexpr int64_t kLead = 8;
  // Rows of the arena, and of the model's context behind the text, that reading a part takes.
  static constexpr int64_t kRows = kPart + kLead;

  // Reads the next part of `text`, the first tokens of a sequence that has all its rows and keeps
  // them as they are. Of a text that has been read before, and has become longer since, that is the
  // first part behind. kOutOfRange where the model's context ends, kResourceExhausted where the
  // arena is full, and what Engine::observe() refuses. Steps must take more than kLead rows.
  Status read_part(engine::Engine& engine, engine::SeqId seq, std::span<const int32_t> text);
  // What reading all of a text, one part after the other, scores its rows by.
  static Result<policy::RowScores> all_of(engine::Engine& engine, engine::SeqId seq,
                                          std::span<const int32_t> text);
  // Of so many tokens, those that have not been read.
  [[nodiscard]] int64_t unread(int64_t n_tokens) const {
    return std::max<int64_t>(0, n_tokens - read_);
  }
  // The text goes on differently from here.
  void forget_from(int64_t n_tokens);
  // Of the rows of the longest text of which a part was read.
  [[nodiscard]] const policy::RowScores& scores() const { return scores_; }

 private:
  void resize(int64_t n_rows);

  policy::RowScores scores_;
  int64_t read_ = 0;
};

}  // namespace hcache::state
