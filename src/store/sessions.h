// Named conversations in the catalog, and which chunks go with one that is deleted.
//
// Threading: get and list from any thread, the others from one at a time (the store's writer).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "catalog.h"
#include "chains.h"
#include "pins.h"
#include "records.h"
#include "remote.h"
#include "removal.h"

namespace hcache::store {

class Sessions {
 public:
  // `remote` may be null.
  Sessions(Env& env, Catalog& catalog, Chains& chains, Pins& pins, Records& records,
           Removal& removal, Remote* remote)
      : env_(env),
        catalog_(catalog),
        chains_(chains),
        pins_(pins),
        records_(records),
        removal_(removal),
        remote_(remote) {}

  // As the functions of the same names in Store.
  [[nodiscard]] Status put(const Session& session);
  [[nodiscard]] Result<Session> get(std::string_view name);
  [[nodiscard]] Result<std::vector<SessionSummary>> list();
  [[nodiscard]] Result<std::uint64_t> erase(std::string_view name);

 private:
  // What of a session's chain only it needs.
  struct OwnPart {
    std::vector<ChunkRecord> chunks;   // on the disks
    std::vector<ChunkId> ids;          // of the whole chain: the remote tier may have more of it
    std::vector<ChunkId> remote_only;  // of those: not on the disks
  };
  // Tokens of the session up to which some other session needs the chain.
  [[nodiscard]] Result<std::uint64_t> shared_tokens(const Session& session);
  // What follows the chain where its sequence was cut (policy/truncation.h): the same tokens behind
  // `shared` with other fingerprints, each before what follows it.
  [[nodiscard]] Result<std::vector<ChunkRecord>> cut_parts(const Session& session,
                                                           const Chain& chain,
                                                           std::uint64_t shared);
  [[nodiscard]] Result<OwnPart> own_part(const Session& session);

  Env& env_;
  Catalog& catalog_;
  Chains& chains_;
  Pins& pins_;
  Records& records_;
  Removal& removal_;
  Remote* const remote_;
};

}  // namespace hcache::store
