// A second, small model that drafts for the one that answers (speculative decoding): a runtime of
// its own, whose state is saved and restored like any other, in a store of its own. What it says
// never changes an answer (scheduler/drafter.h).
//
// Threading: the thread that opened it.
#pragma once

#include <memory>

#include "base/env.h"
#include "base/status.h"
#include "scheduler/drafter.h"
#include "state/runtime.h"

namespace hcache::serving {

struct DraftOptions {
  state::RuntimeOptions runtime;
  // Tokens that both vocabularies have; they must agree on them. 0: as many as this model has.
  int32_t n_vocab = 0;
  float p_min = 0;  // a draft ends before a token of less probability
};

class DraftModel : public scheduler::Drafter {
 public:
  // Errors of Runtime::open(), and kUnimplemented for a model whose state can't be taken back to
  // before a guess.
  static Result<std::unique_ptr<DraftModel>> open(Env& env, const DraftOptions& options);
  // All that it has saved is durable, its store closed. Errors of the store.
  virtual Status close() = 0;
};

}  // namespace hcache::serving
