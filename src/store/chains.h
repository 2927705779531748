// Walks along chains of chunks: what the catalog, and the remote tier's directory, have of some
// tokens.
//
// Threading: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "catalog.h"
#include "remote.h"

namespace hcache::store {

// Which places a walk looks at.
enum class Where { kDisks, kEverywhere };

struct Chain {
  std::vector<ChunkRecord> chunks;
  std::vector<std::uint32_t> rows;  // of each chunk, how many leading ones are usable
};

class Chains {
 public:
  // `remote` may be null.
  Chains(Catalog& catalog, Remote* remote) : catalog_(catalog), remote_(remote) {}

  // The longest chain that is stored for these tokens, from the first one on. Nothing is pinned.
  [[nodiscard]] Result<Chain> walk(const ChainFingerprints& fingerprints, const SaltId& salt,
                                   std::span<const std::int32_t> tokens, Where where);
  // Asks the remote tier for what the disks lack of these tokens.
  void look_up_remote(const ChainFingerprints& fingerprints, const SaltId& salt,
                      std::span<const std::int32_t> tokens);

 private:
  // A chunk as the catalog and the remote tier's directory have it together.
  [[nodiscard]] Result<std::optional<ChunkRecord>> find(const ChunkId& id, Where where);
  // Those behind the same parent that begin with this token. data_loss: the catalog is damaged.
  [[nodiscard]] Result<std::vector<ChunkRecord>> siblings(const ChunkId& key,
                                                          std::int32_t first_token, Where where);

  Catalog& catalog_;
  Remote* const remote_;
};

}  // namespace hcache::store
