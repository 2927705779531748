// Which rows of a conversation are held once it has outgrown the context window: truncation of the
// KV cache itself (AttentionStore §3.4), not of the prompt.
//
// A chain of tokens is computed from its first token on, whatever its length. Where its sequence is
// full it is cut: rows behind the first ones leave, those behind them move down, and it goes on.
// Of what stays the last rows stay as they are, and before them those that attention used most (the
// paper's important tokens). Which cuts there are, and how many rows of each kind are held then,
// follows from the tokens and the limits alone, so that a chain that was computed in one go, turn
// by turn, or again after it was lost holds as many rows; which ones were chosen is saved with
// them. Positions are those of the whole chain, rows those of the sequence. Pure. Threading: no
// state.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "base/status.h"
#include "policy/compression.h"

namespace hcache::policy {

// Cuts are at multiples of this, as chunks in the store are.
inline constexpr int64_t kCutTokens = 64;
inline constexpr int64_t kNeverCut = std::numeric_limits<int64_t>::max();
// Whose attention chooses rows: the last ones before the cut, so many. They are chosen by blocks
// that begin at multiples of this in the chain, so that what stays of a page is read, moved and
// rotated in few pieces.
inline constexpr int64_t kChoosingRows = 16;
inline constexpr int64_t kChosenBlock = 16;

struct TruncationLimits {
  int64_t context = 0;  // rows that a sequence holds at most; 0: it is never cut
  // Of what may leave, the part that leaves at once; in (0, 1). A cut takes as long as two steps,
  // so that little need leave: ADR 59.
  double share = 0.25;
  // Rows that never leave: attention sinks, and what the conversation began with; the first
  // message, if it is short, stays as well. Four were enough for the sinks, but what is predicted
  // behind a cut is better with more (docs/quality.md).
  int64_t keep_first = 128;
  // Of the rows that stay behind those, the part that is chosen by attention; in [0, 0.9]. The
  // others are the last ones.
  double important = 0.5;
  friend bool operator==(const TruncationLimits&, const TruncationLimits&) = default;
};

// kInvalidArgument names the limit that can't be kept to, and what can.
[[nodiscard]] Status validate(const TruncationLimits& limits);

// The rows that are held of a chain: those of positions [0, kept) and [resumed, …), and between
// them so many that were chosen, whole blocks.
struct HeldRows {
  int64_t kept = 0;
  int64_t resumed = 0;
  int64_t cut_at = 0;  // the chain's length at the last cut; 0: there was none
  int64_t chosen = 0;
  [[nodiscard]] int64_t dropped() const { return resumed - kept - chosen; }
  [[nodiscard]] int64_t rows(int64_t length) const { return length - dropped(); }
  friend bool operator==(const HeldRows&, const HeldRows&) = default;
};

// The first position from `from` on, below the tokens' end, at which a message begins; -1: there is
// none.
using NextMessage = std::function<int64_t(std::span<const int32_t> tokens, int64_t from)>;

// The length at which a chain of which this is held is cut next, before anything more is computed.
[[nodiscard]] int64_t next_cut(const HeldRows& held, const TruncationLimits& limits);
// What is held of it then. `chain`: its first next_cut() tokens.
[[nodiscard]] HeldRows cut(const HeldRows& held, std::span<const int32_t> chain,
                           const TruncationLimits& limits, const NextMessage& next_message);
// What is held behind each cut of a chain, its end not yet cut.
[[nodiscard]] std::vector<HeldRows> cuts_of(std::span<const int32_t> chain,
                                            const TruncationLimits& limits,
                                            const NextMessage& next_message);
// Of a chain with these cuts, of its first `length` tokens before they are cut.
[[nodiscard]] HeldRows held_at(std::span<const HeldRows> cuts, int64_t length);

// Blocks of rows that a cut may leave or let leave, told by the first row of each in ascending
// order.
struct ChoosableBlocks {
  std::vector<int64_t> earlier;  // those that were chosen before: rows in front of all others
  std::vector<int64_t> since;    // those that were among the last rows then
};

// The n of them that stay, likewise: of those since the last cut the ones that attention used most,
// and of earlier ones only if these are too few. What was chosen once is attended to because it is
// there, and would take the place of what the text has been about since (docs/quality.md). Each
// head of each layer gives the rows of `since` one vote, and those of `earlier` another, shared out
// as the attention that it paid them (RowScores::sum); of equals the later blocks. n: no more than
// there are.
[[nodiscard]] std::vector<int64_t> most_attended(const RowScores& scores,
                                                 const ChoosableBlocks& blocks, int64_t n);

// How many leading positions of what a sequence holds a request may go on from, whose first
// `shared` tokens are the sequence's. What was cut otherwise than the request would be is of no use
// to it.
[[nodiscard]] int64_t usable_positions(const HeldRows& held, const TruncationLimits& held_limits,
                                       int64_t shared, const TruncationLimits& wanted_limits);

}  // namespace hcache::policy
