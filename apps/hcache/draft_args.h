// What guesses the next tokens of a reply: the conversation itself, or a second model.
#pragma once

#include <optional>
#include <string>

#include "common_options.h"
#include "policy/drafting.h"
#include "serving/draft_model.h"
#include "session.h"

namespace hcache::cli {

struct DraftArgs : Options {
  using Options::Options;

  int most = integer(
      &most, "--draft-max,--draft,--draft-n", "TOKENS", -1, {-1, 512},
      "guess so many tokens of a reply at most, from what stands in its conversation and with "
      "--model-draft, and compute them along with the next one: the same answer, sooner where "
      "guesses come true; 0: none; -1: 16 with --model-draft, else none");
  int least = integer(&least, "--draft-min,--draft-n-min", "TOKENS", 0, {0, 512},
                      "where any are guessed, at least so many, even if that seems to take longer "
                      "than it saves");
  std::string model =
      text(&model, "--model-draft", "PATH", "",
           "a small model (GGUF) with the same vocabulary that guesses the next tokens; its state "
           "is saved beside the store's, in the folder `draft`");
  std::string device =
      text(&device, "--device-draft", "DEVICE,...", "",
           "where that model computes; default: where the other does", {.needs = "--model-draft"});
  double p_min =
      number(&p_min, "--draft-p-min", "P", 0.5, {0, 1},
             "it guesses no token that it gives less probability", {.needs = "--model-draft"});

  [[nodiscard]] policy::DraftLimits limits() const;
  // The model that guesses for the one that is opened with `answering`, whose options it follows;
  // nullopt: none does.
  [[nodiscard]] std::optional<serving::DraftOptions> drafter(
      const RuntimeArgs& runtime, const state::RuntimeOptions& answering) const;
};

}  // namespace hcache::cli
