// What becomes of conversations that outgrow the context: options of the verbs that hold some.
#pragma once

#include <cstdint>
#include <string>

#include "options.h"
#include "policy/truncation.h"

namespace hcache::cli {

struct OverflowArgs : Options {
  // `usual`: what is done if nobody says.
  OverflowArgs(Options* parent, const std::string& usual) : Options(parent) {
    overflow = choice(&overflow, "--context-overflow", usual,
                      {{"refuse", "a prompt that is too long is refused, an answer ends there"},
                       {"truncate", "what is oldest leaves it, and the conversation goes on"}},
                      "when a conversation outgrows the context");
    share = number(&share, "--overflow-share", "X", share, {0.01, 0.99},
                   "how much of what may leave the context then leaves it at once");
    keep_first = integer(&keep_first, "--keep-first,--keep", "TOKENS", keep_first, {0},
                         "so many first tokens never leave it; nor does the first message, if it "
                         "takes no more than a quarter of it");
  }

  std::string overflow;
  double share = policy::TruncationLimits().share;
  int64_t keep_first = policy::TruncationLimits().keep_first;

  [[nodiscard]] bool truncates() const { return overflow == "truncate"; }
  [[nodiscard]] policy::TruncationLimits limits() const {
    policy::TruncationLimits limits;
    limits.share = share;
    limits.keep_first = keep_first;
    return limits;
  }
};

}  // namespace hcache::cli
