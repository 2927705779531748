// A Drafter over the Executor of a second model with the same vocabulary: it keeps a sequence of
// its own for every request that decodes, says greedily what follows, and takes back what did not
// come true. Sequences of requests that have ended stay, as in the scheduler's arena, for the next
// turn of their conversation; the least recently used go when there is no room.
//
// A chain that is longer than its context is followed from its middle on: what a draft has seen
// changes how often it comes true, never what is answered.
//
// Threading: the owner thread of the Executor.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/drafter.h"
#include "scheduler/executor.h"

namespace hcache::scheduler {

struct ModelDrafterOptions {
  int32_t n_vocab = 0;  // of the smaller vocabulary: no other token can be computed or given
  // A draft ends before a token that its model gives less probability than this.
  float p_min = 0;
  int32_t catch_up_rows = 256;    // of what is lacking, so many are computed in a call
  double restore_turn_s = 0.005;  // or a restore gets so much of it
};

class ModelDrafter : public Drafter {
 public:
  // The Executor must outlive it, and serves nobody else.
  ModelDrafter(Executor& executor, const ModelDrafterOptions& options)
      : executor_(executor), options_(options) {}
  ~ModelDrafter() override;

  std::vector<std::vector<int32_t>> draft(std::span<const Wanted> wanted) override;
  [[nodiscard]] bool ready(RequestId request) const override;
  [[nodiscard]] double step_s(int64_t rows) const override { return executor_.step_s(rows); }
  void ended(RequestId request) override;
  void forget(const SaltId& salt, std::span<const int32_t> tokens, int64_t keep) override;

 private:
  // What a sequence holds: tokens [from, from + tokens.size()) of a chain.
  struct Chain {
    RequestId request = 0;  // 0: it has ended
    SeqId seq = kNoSeq;     // kNoSeq: nothing can be drafted for the request
    Salt salt;
    bool saves = false;
    int64_t from = 0;
    std::vector<int32_t> tokens;
    bool restoring = false;
    bool ready = false;
    uint64_t used = 0;
  };
  // A chain's part in the call's steps.
  struct Part {
    size_t wanted = 0;
    Chain* chain = nullptr;
    std::vector<int32_t> next;  // tokens of its next step; none: it is over
    int32_t most = 0;           // tokens to give; 0: what it lacks is computed, no more
  };

  [[nodiscard]] Chain* find(RequestId request);
  // The request's chain, begun if there is none; null: nothing can be drafted for it.
  Chain* chain_of(const Wanted& wanted);
  void begin(const Wanted& wanted, Chain* chain);
  // From what a request that has ended left, if that is of use.
  bool take_over(const Wanted& wanted, Chain* chain);
  Status begin_new(const Wanted& wanted, Chain* chain);
  // Whether a restore is over, by now.
  Result<bool> restored(Chain* chain, std::span<const int32_t> tokens);
  // What the chain lacks, and what was guessed wrongly is taken back.
  Result<Part> part_of(const Wanted& wanted, Chain* chain);
  // The chain's sequence begins anew in the middle of what it follows, which has grown too long.
  Status move_on(const Wanted& wanted, Chain* chain);
  // One step of all parts that have a next; what they give goes behind their drafts.
  Status step(std::vector<Part>* parts, std::vector<std::vector<int32_t>>* drafts);
  // The likeliest token, or -1 where it is not likely enough, or not one that can be given.
  [[nodiscard]] int32_t likeliest(std::span<const float> logits) const;
  // Room for so many rows more, and for a sequence.
  bool make_room(int64_t rows, bool sequence);
  // No more of it; its request gets no drafts.
  void give_up(Chain* chain, const Status& why);
  void release(Chain* chain);
  // Drops what stands for nothing any more.
  void sweep();

  Executor& executor_;
  const ModelDrafterOptions options_;
  std::vector<Chain> chains_;
  uint64_t uses_ = 0;
};

}  // namespace hcache::scheduler
