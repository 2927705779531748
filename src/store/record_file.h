// Records: what the catalog says of a chunk or a session, written beside the pages so that the
// catalog can be made anew from them. docs/format.md has the bytes.
//
// Threading: pure functions on values; scan_records reads files and may run on any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "format.h"

namespace hcache::store {

inline constexpr std::uint64_t kRecordUnit = 64;                // records begin at multiples
inline constexpr std::uint64_t kRecordFileBytes = 64ULL << 20;  // at which a new file is begun
inline constexpr std::uint64_t kRecordHeadBytes = 64;           // before name and body
inline constexpr std::uint64_t kMinRecordBytes = kRecordHeadBytes + 8;

// Numbers are on disk: frozen.
enum class RecordKind : std::uint32_t { kChunk = 1, kSession = 2 };

// Where a record lies. As a number in the catalog; 0: there is none.
struct RecordPlace {
  std::uint32_t disk = 0;
  std::uint32_t file = 0;
  std::uint64_t offset = 0;  // a multiple of kRecordUnit

  [[nodiscard]] std::int64_t pack() const;
  [[nodiscard]] static RecordPlace unpack(std::int64_t number);
  [[nodiscard]] explicit operator bool() const { return file != 0; }
  friend bool operator==(const RecordPlace&, const RecordPlace&) = default;
};

using RecordKey = Id128<struct RecordKeyTag>;
// What a record is found by: a chunk's id, or the hash of a session's name.
[[nodiscard]] RecordKey record_key(const ChunkId& id);
[[nodiscard]] RecordKey record_key(std::string_view session);

// A record that is in a file, as the catalog knows it.
struct RecordRef {
  RecordKey key;
  RecordPlace place;
  std::uint64_t bytes = 0;
};

struct RecordHead {
  RecordKind kind = RecordKind::kChunk;
  RecordKey key;
  // Of the records that were written together: a number that grows with time (ns of the wall clock,
  // unless that went back), and how many they are.
  std::uint64_t batch = 0;
  std::uint32_t batch_size = 0;
  SaltId owner;  // of a chunk: whose quota counts its salt; zero: the salt's own
};

// An intact record as found in a file. The texts point into the reader's buffer.
struct FoundRecord {
  RecordHead head;
  RecordPlace place;
  std::uint64_t bytes = 0;  // the whole record
  std::string_view name;    // of a session
  std::string_view body;    // as in the catalog
};

// Of a record with a name and a body of these lengths.
[[nodiscard]] constexpr std::uint64_t record_bytes(std::uint64_t name, std::uint64_t body) {
  return kMinRecordBytes + name + body;
}
[[nodiscard]] std::string encode_record(const StoreId& store, const RecordHead& head,
                                        std::string_view name, std::string_view body);
// The length that the record at the start of `text` claims; 0: there is none. `text` needs
// kRecordHeadBytes.
[[nodiscard]] std::uint64_t claimed_record_bytes(std::string_view text);
// data_loss: it is damaged or of another store. Fills all but the place.
[[nodiscard]] Result<FoundRecord> decode_record(const StoreId& store, std::string_view text);

// Reads one record; `*buffer` is what the result points into.
[[nodiscard]] Result<FoundRecord> read_record(Env& env, const StoreId& store,
                                              std::span<const std::string> dirs,
                                              const RecordPlace& place, std::string* buffer);

[[nodiscard]] std::string record_file_name(std::uint32_t file);
// False if the name is not a record file's.
[[nodiscard]] bool parse_record_file_name(std::string_view name, std::uint32_t* file);
// (bytes read, bytes of all files); returning false stops with cancelled.
using ScanProgress = std::function<bool(std::uint64_t, std::uint64_t)>;
// Calls `visit` for every intact record in the record files of all disks, and passes over what is
// damaged. dirs[i] is the directory of disk i. A status that visit returns ends the scan.
[[nodiscard]] Status scan_records(Env& env, const StoreId& store, std::span<const std::string> dirs,
                                  const std::function<Status(const FoundRecord&)>& visit,
                                  const ScanProgress& progress);

}  // namespace hcache::store
