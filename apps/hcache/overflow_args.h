// What becomes of text and conversations that outgrow the context: options of the verbs that hold
// some.
#pragma once

#include <cstdint>
#include <string>

#include "options.h"
#include "policy/truncation.h"

namespace hcache::cli {

// How they are cut.
struct CutArgs : Options {
  using Options::Options;

  double share = number(&share, "--overflow-share", "X", policy::TruncationLimits().share,
                        {0.01, 0.99}, "how much of what may leave the context leaves it at once");
  double important = number(
      &important, "--keep-important", "X", policy::TruncationLimits().important, {0, 0.9},
      "of what stays behind the first tokens, the part that is chosen by the attention of the "
      "last ones; the rest are the last ones themselves");
  int64_t keep_first = integer(
      &keep_first, "--keep-first,--keep", "TOKENS", policy::TruncationLimits().keep_first, {0},
      "so many first tokens never leave it; nor does the first message, if it takes no more "
      "than a quarter of it");

  // Of a context; 0: whatever there is.
  [[nodiscard]] policy::TruncationLimits limits(int64_t context = 0) const {
    return {.context = context, .share = share, .keep_first = keep_first, .important = important};
  }
};

// And whether.
struct OverflowArgs : CutArgs {
  // `usual`: what is done if nobody says.
  OverflowArgs(Options* parent, const std::string& usual) : CutArgs(parent) {
    overflow = choice(&overflow, "--context-overflow", usual,
                      {{"refuse", "a prompt that is too long is refused, an answer ends there"},
                       {"truncate", "what is oldest leaves it, and the conversation goes on"}},
                      "when a conversation outgrows the context");
  }

  std::string overflow;

  [[nodiscard]] bool truncates() const { return overflow == "truncate"; }
};

}  // namespace hcache::cli
