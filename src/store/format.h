// Bytes on disk: headers, disk files, catalog bodies. docs/format.md is the reference.
//
// Threading: pure functions on values.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "store/store.h"

namespace hcache::store {

inline constexpr std::uint32_t kFormatVersion = 8;        // of the store
inline constexpr std::uint32_t kSealedFormatVersion = 9;  // of one that is encrypted
inline constexpr std::uint32_t kFirstFormatWithRecords = 2;
// Older ones differ in which encodings they may have.
[[nodiscard]] constexpr bool is_sealed_format(std::uint32_t version) {
  return version == 3 || version == 5 || version == 7 || version == kSealedFormatVersion;
}
// Of the layouts of segment headers and disk files, which the store's second format has kept.
inline constexpr std::uint32_t kFileFormat = 1;
inline constexpr std::uint32_t kSealedFileFormat = 2;
inline constexpr std::uint32_t kApplicationId = 0x48434143;
inline constexpr std::uint64_t kBlock = 4096;  // unit of disk space and of direct I/O
inline constexpr std::uint64_t kSegmentHeaderBytes = kBlock;
inline constexpr std::uint32_t kMaxPageBytes = 64U << 20;
inline constexpr std::uint32_t kMaxDisks = 255;

using StoreId = Id128<struct StoreIdTag>;
using RootKey = Id128<struct RootKeyTag>;

class Seal;  // seal.h

// What opening an encrypted text needs beside the key.
struct PageSeal {
  std::array<std::uint8_t, 12> nonce{};
  std::array<std::uint8_t, 16> tag{};
  friend bool operator==(const PageSeal&, const PageSeal&) = default;
};
inline constexpr std::size_t kSealBytes = 12 + 16;

[[nodiscard]] constexpr std::uint64_t round_up(std::uint64_t n, std::uint64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// Where a page lies and what its bytes hash to.
struct PagePlace {
  std::uint8_t disk = 0;
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;    // bytes from the start of the file; a multiple of kPageAlignment
  std::uint64_t checksum = 0;  // of the page itself, encrypted or not
  PageSeal seal{};             // in an encrypted store
  friend bool operator==(const PagePlace&, const PagePlace&) = default;
};

// A chunk as the catalog has it. places[i] belongs to info.pages[i].
struct ChunkRecord {
  ChunkInfo info;
  std::vector<PagePlace> places;
};

[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes);
[[nodiscard]] std::uint64_t page_bytes(const ChunkRecord& record);
// Whether what was read is the page; where the store is encrypted it is decrypted first, in place.
[[nodiscard]] bool page_intact(const ChunkRecord& record, std::size_t page, const Seal& seal,
                               std::span<std::byte> bytes);
// The order of a chunk's pages: by layer, then by encoding.
[[nodiscard]] bool page_before(const PageInfo& a, const PageInfo& b);
// Whether both continue the same chunk, for the same model and salt.
[[nodiscard]] bool same_family(const ChunkInfo& a, const ChunkInfo& b);
[[nodiscard]] std::vector<ChunkId> ids_of(std::span<const ChunkRecord> records);

// The `parent` column: what siblings share.
[[nodiscard]] ChunkId sibling_key(const Fingerprint& fingerprint, const SaltId& salt,
                                  const ChunkId& parent);

// kSegmentHeaderBytes bytes. `sealed`: the store is encrypted.
void encode_segment_header(const StoreId& store, bool sealed, std::uint32_t disk,
                           std::uint32_t segment, std::span<std::byte> out);
// data_loss if the header is damaged, failed_precondition if it is another one's, unimplemented for
// another format.
[[nodiscard]] Status check_segment_header(std::span<const std::byte> header, const StoreId& store,
                                          std::uint32_t disk, std::uint32_t segment);

// What the header of a segment or a record file says of it.
struct FileHeader {
  StoreId store;
  bool sealed = false;
  std::uint32_t disk = 0;
  std::uint32_t number = 0;
};
// data_loss, unimplemented.
[[nodiscard]] Result<FileHeader> decode_file_header(std::span<const std::byte> header);
// As encode_segment_header, for a record file.
void encode_record_file_header(const StoreId& store, bool sealed, std::uint32_t disk,
                               std::uint32_t file, std::span<std::byte> out);

struct DiskFile {
  StoreId store;
  std::uint32_t disk = 0;
  bool sealed = false;
};
[[nodiscard]] std::string encode_disk_file(const DiskFile& file);
[[nodiscard]] Result<DiskFile> decode_disk_file(std::string_view text);

// data_loss if the body is not what encode made with this seal, including a failed checksum or an
// id that is not the hash of the content. Ids are those of chunks, as everywhere but on disk; the
// name of a session is the one under which it stands there (Seal::hide_name).
[[nodiscard]] std::string encode_chunk(const ChunkRecord& record, const Seal& seal);
[[nodiscard]] Result<ChunkRecord> decode_chunk(const ChunkId& id, std::string_view body,
                                               const Seal& seal);
[[nodiscard]] std::string encode_session(const Session& session, const Seal& seal);
[[nodiscard]] Result<Session> decode_session(std::string_view name, std::string_view body,
                                             const Seal& seal);

[[nodiscard]] std::string segment_name(std::uint32_t segment);
// False if the name is not a segment's.
[[nodiscard]] bool parse_segment_name(std::string_view name, std::uint32_t* segment);

[[nodiscard]] bool valid_encoding(std::uint8_t value);
[[nodiscard]] bool valid_element_type(std::uint8_t value);

}  // namespace hcache::store
