// What of a store stands encrypted on disks and in remote tiers, and how: AES-256-GCM with keys
// that are derived from one key file. docs/format.md, "Encrypted stores", has the bytes.
//
// A Seal without a key changes nothing, so that those who use one need not ask.
// Threading: any thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "format.h"
#include "store/store.h"

namespace hcache::store {

// Which page it is, so that none can stand in for another.
struct PageName {
  SaltId salt;
  ChunkId chunk;
  PageInfo page;
};

class Seal {
 public:
  Seal() = default;  // seals nothing
  explicit Seal(const StoreKey& key);

  [[nodiscard]] bool on() const { return keys_ != nullptr; }

  // ---- Which key a store has

  // An id for a new store, of these random bytes: with a key it says by itself which one.
  [[nodiscard]] StoreId new_store_id(const StoreId& random) const;
  // failed_precondition unless a store with this id, which is `sealed` or not, has this key; names
  // `where` it lies and what to do.
  [[nodiscard]] Status fits(const StoreId& store, bool sealed, std::string_view where) const;

  // ---- Names: the same for the same, and nothing else can be told from them

  template <typename Tag>
  [[nodiscard]] Id128<Tag> hide(const Id128<Tag>& id) const {
    return keys_ == nullptr ? id : Id128<Tag>{hidden(id.bytes)};
  }
  // The id that was hidden.
  template <typename Tag>
  [[nodiscard]] Id128<Tag> show(const Id128<Tag>& id) const {
    return keys_ == nullptr ? id : Id128<Tag>{shown(id.bytes)};
  }
  // Of a chunk whose siblings have this key.
  [[nodiscard]] std::int32_t hide_first_token(const ChunkId& sibling_key, std::int32_t token) const;
  [[nodiscard]] std::uint64_t hide_checksum(std::uint64_t checksum) const;
  [[nodiscard]] std::string hide_name(std::string_view session) const;

  // ---- Rows: a text that belongs to an id or a name

  [[nodiscard]] std::string seal_row(std::string row, std::string_view of) const;
  // nullopt: it was not sealed with this key for this id or name, or was changed since.
  [[nodiscard]] std::optional<std::string> open_row(std::string_view sealed,
                                                    std::string_view of) const;

  // ---- Pages, with a key for each salt

  // `in` has page.page.bytes, and so has `out`; what else opening needs goes into `*seal`.
  void seal_page(const PageName& page, std::span<const std::byte> in, std::byte* out,
                 PageSeal* seal) const;
  // In place. False: it is not what was sealed.
  [[nodiscard]] bool open_page(const PageName& page, const PageSeal& seal,
                               std::span<std::byte> bytes) const;

  // The same where a page stands by itself: with its seal behind it.
  [[nodiscard]] std::size_t value_bytes(std::uint32_t page_bytes) const {
    return page_bytes + (on() ? kSealBytes : 0);
  }
  [[nodiscard]] std::shared_ptr<const AlignedBuffer> seal_value(
      const PageName& page, std::shared_ptr<const AlignedBuffer> bytes) const;
  // Null: it is not what was sealed. Without a key the caller checks the page.
  [[nodiscard]] std::shared_ptr<const AlignedBuffer> open_value(const PageName& page,
                                                                std::string_view value) const;

 private:
  struct Keys;
  using Block = std::array<std::uint8_t, 16>;

  [[nodiscard]] Block hidden(const Block& block) const;
  [[nodiscard]] Block shown(const Block& block) const;

  std::shared_ptr<const Keys> keys_;
};

}  // namespace hcache::store
