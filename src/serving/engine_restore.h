// What EngineExecutor keeps of a restore: of its own files alone.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine_executor.h"
#include "policy/restore_record.h"
#include "policy/truncation.h"
#include "state/restorer.h"
#include "state/runtime.h"
#include "store/store.h"

namespace hcache::serving {

// A match travels with its request from the first look-up to the end of its restore.
struct EngineExecutor::Prefix : scheduler::SavedPrefix {
  explicit Prefix(store::Match found)
      : SavedPrefix(static_cast<int64_t>(found.n_tokens)), match(std::move(found)) {}
  const store::Match match;  // of the chain, whatever of it is held
};

// A restore in flight. Its tokens and plan stay where they are: the restoration points to them.
struct EngineExecutor::Restore {
  std::vector<int32_t> tokens;         // of the whole request
  std::vector<policy::HeldRows> cuts;  // of it
  std::shared_ptr<const Prefix> prefix;
  scheduler::RestoreJob job;  // without the prefix
  // What is tried: the tokens up to here, what is held of them, and that alone, with the tokens
  // that follow up to the next cut.
  int64_t upto = 0;
  policy::HeldRows held;
  store::Match match;
  std::vector<int32_t> rows;
  state::PlannedRestore planned;
  std::unique_ptr<state::Restoration> work;  // null: there is nothing to restore
  bool kept_damaged = false;                 // what it restored were rows that layers keep
  int attempts = 0;
  bool undroppable = false;      // the store will offer again what is damaged
  policy::RestoreRecord damage;  // of attempts that failed: what they found
};

}  // namespace hcache::serving
