// A place for chunks beyond this machine, shared by several processes: one narrow interface, one
// row for each kind in tiers.cc.
//
// A tier holds chunks under their ids, and of each some pages. It promises nothing: what was
// written may be gone later, and what is read proves itself by its id and checksum. All calls but
// flush() return at once; what they ask for happens in the background, bounded in memory, and ends
// by its deadline.
//
// Threading: any thread. Callbacks come on the tier's own thread, each exactly once, never from
// within the call (but the destructor's); they must not wait.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "format.h"
#include "page_cache.h"
#include "seal.h"
#include "store/store.h"

namespace hcache::store {

// The `disk` of pages that only the remote tier has; of such a place the checksum alone counts.
inline constexpr std::uint8_t kRemoteDisk = kMaxDisks;

struct TierPage {
  PageInfo info;
  std::uint64_t checksum = 0;
  std::shared_ptr<const AlignedBuffer> bytes;
};

// Pages of one chunk. The chunk's other pages, where the tier has some, stay.
struct TierWrite {
  ChunkInfo info;  // its pages are all that this store has of the chunk
  std::vector<TierPage> pages;
};

class Tier {
 public:
  // One for each id; nullopt: not there. Records are whole and verified; places are kRemoteDisk's.
  using FindDone = std::function<void(Result<std::vector<std::optional<ChunkRecord>>>)>;
  // not_found, data_loss (did not pass its check, and is gone now), unavailable.
  using ReadDone = std::function<void(Result<std::shared_ptr<const AlignedBuffer>>)>;

  Tier() = default;
  Tier(const Tier&) = delete;
  Tier& operator=(const Tier&) = delete;
  // Calls that still wait end as cancelled.
  virtual ~Tier() = default;

  // Deadlines are on the monotonic clock, in nanoseconds. At least one id.
  virtual void find(std::vector<ChunkId> ids, std::int64_t deadline_ns, FindDone done) = 0;
  // The page of a chunk with this salt.
  virtual void read(const PageKey& page, const SaltId& salt, std::uint32_t bytes,
                    std::int64_t deadline_ns, ReadDone done) = 0;
  // These are being used: they should stay.
  virtual void touch(std::span<const ChunkId> ids) = 0;
  // False: too much waits to be written, this does not join it.
  [[nodiscard]] virtual bool write(TierWrite write) = 0;
  virtual void erase(std::span<const ChunkId> ids) = 0;
  // Waits until nothing waits to be written or erased. unavailable at the deadline.
  [[nodiscard]] virtual Status flush(std::int64_t deadline_ns) = 0;
  [[nodiscard]] virtual RemoteStat stat() const = 0;
};

// The tier that options.url names. invalid_argument for a URL that can't be read or whose kind is
// unknown. That it does not answer is no error: it may change.
// What stands there is sealed with `seal`.
[[nodiscard]] Result<std::unique_ptr<Tier>> open_tier(Env& env, const RemoteOptions& options,
                                                      const Seal& seal);

}  // namespace hcache::store
