#include "record_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "base/xxh3.h"
#include "bytes.h"

namespace hcache::store {
namespace {

constexpr std::string_view kRecordMagic = "HCRECORD";
constexpr std::uint64_t kCheckBytes = 8;
constexpr std::uint64_t kMaxRecordBytes = 1ULL << 30;
constexpr std::size_t kScanBytes = 1 << 20;  // of one read
// Of a packed place: offset, check, file, disk.
constexpr int kUnitBits = 20;
constexpr int kPlaceCheckBits = 11;
constexpr int kFileBits = 24;
static_assert(kRecordFileBytes / kRecordUnit <= 1ULL << kUnitBits);

// A column has no checksum: a place that only damage has made is none.
std::uint64_t place_check(std::uint64_t place) {
  return (place * 0x9e3779b97f4a7c15ULL) >> (64 - kPlaceCheckBits);
}

// Covers the store's id, so that a record of another store is none.
std::uint64_t record_check(const StoreId& store, std::string_view text) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, store.bytes.data(), store.bytes.size());
  XXH3_64bits_update(&state, text.data(), text.size());
  return XXH3_64bits_digest(&state);
}

// A window on a file that moves forward.
class Window {
 public:
  Window(File& file, std::uint64_t size) : file_(file), size_(size), buffer_(kScanBytes) {}

  // At least `bytes` from `at` on, or fewer at the end of the file.
  Result<std::string_view> get(std::uint64_t at, std::uint64_t bytes) {
    bytes = std::min(bytes, size_ - at);
    if (at < from_ || at + bytes > from_ + filled_) {
      if (bytes > buffer_.size()) buffer_ = AlignedBuffer(round_up(bytes, kBlock));
      const std::uint64_t most = std::min<std::uint64_t>(buffer_.size(), size_ - at);
      HCACHE_ASSIGN_OR_RETURN(filled_, file_.read_at(at, buffer_.span().first(most)));
      from_ = at;
    }
    const auto* data = reinterpret_cast<const char*>(buffer_.data());
    return std::string_view(data + (at - from_), from_ + filled_ - at);
  }

 private:
  File& file_;
  const std::uint64_t size_;
  AlignedBuffer buffer_;
  std::uint64_t from_ = 0;
  std::uint64_t filled_ = 0;
};

struct ScanFile {
  std::string path;
  std::uint32_t disk = 0;
  std::uint32_t file = 0;
  std::uint64_t size = 0;
};

Result<std::vector<ScanFile>> record_files(Env& env, std::span<const std::string> dirs) {
  std::vector<ScanFile> out;
  for (std::uint32_t disk = 0; disk < dirs.size(); ++disk) {
    HCACHE_ASSIGN_OR_RETURN(const auto names, env.list_dir(dirs[disk]));
    for (const std::string& name : names) {
      ScanFile file{join_path(dirs[disk], name), disk, 0, 0};
      if (!parse_record_file_name(name, &file.file)) continue;
      HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env.file_info(file.path));
      file.size = info.size;
      out.push_back(std::move(file));
    }
  }
  return out;
}

}  // namespace

std::int64_t RecordPlace::pack() const {
  if (file == 0) return 0;
  const std::uint64_t place = (std::uint64_t{disk} << (kFileBits + kPlaceCheckBits + kUnitBits)) |
                              (std::uint64_t{file} << (kPlaceCheckBits + kUnitBits)) |
                              (offset / kRecordUnit);
  return static_cast<std::int64_t>(place | (place_check(place) << kUnitBits));
}

RecordPlace RecordPlace::unpack(std::int64_t number) {
  const auto bits = static_cast<std::uint64_t>(number);
  const std::uint64_t check = (bits >> kUnitBits) & ((1ULL << kPlaceCheckBits) - 1);
  if (check != place_check(bits & ~(check << kUnitBits))) return {};
  RecordPlace place;
  place.disk = static_cast<std::uint32_t>(bits >> (kFileBits + kPlaceCheckBits + kUnitBits));
  place.file =
      static_cast<std::uint32_t>((bits >> (kPlaceCheckBits + kUnitBits)) & ((1U << kFileBits) - 1));
  place.offset = (bits & ((1ULL << kUnitBits) - 1)) * kRecordUnit;
  return place;
}

RecordKey record_key(const ChunkId& id) {
  RecordKey key;
  key.bytes = id.bytes;
  return key;
}

RecordKey record_key(std::string_view session) {
  return Hasher("hcache session 1").add(session).finish<RecordKey>();
}

std::string encode_record(const StoreId& store, const RecordHead& head, std::string_view name,
                          std::string_view body) {
  Writer w;
  w.text(kRecordMagic);
  w.number(static_cast<std::uint32_t>(record_bytes(name.size(), body.size())));
  w.number(static_cast<std::uint32_t>(head.kind)).number(head.batch).number(head.batch_size);
  w.number(static_cast<std::uint32_t>(name.size())).id(head.key).id(head.owner);
  w.text(name).text(body);
  const std::uint64_t check = record_check(store, w.out());
  w.number(check);
  return std::move(w.out());
}

std::uint64_t claimed_record_bytes(std::string_view text) {
  if (!text.starts_with(kRecordMagic)) return 0;
  const std::uint64_t bytes = number_at<std::uint32_t>(text, kRecordMagic.size());
  return bytes >= kMinRecordBytes && bytes <= kMaxRecordBytes ? bytes : 0;
}

Result<FoundRecord> decode_record(const StoreId& store, std::string_view text) {
  FoundRecord out;
  out.bytes = text.size() < kMinRecordBytes ? 0 : claimed_record_bytes(text);
  if (out.bytes == 0 || out.bytes > text.size()) return data_loss("there is no record");
  text = text.substr(0, out.bytes);
  const std::string_view content = text.substr(0, text.size() - kCheckBytes);
  if (number_at<std::uint64_t>(text, content.size()) != record_check(store, content)) {
    return data_loss("the record is damaged");
  }
  Parser in(content.substr(kRecordMagic.size() + 4));
  out.head.kind = static_cast<RecordKind>(in.number<std::uint32_t>());
  out.head.batch = in.number<std::uint64_t>();
  out.head.batch_size = in.number<std::uint32_t>();
  const auto name_bytes = in.number<std::uint32_t>();
  out.head.key = in.id<RecordKey>();
  out.head.owner = in.id<SaltId>();
  const std::string_view rest = content.substr(kRecordHeadBytes);
  if (name_bytes > rest.size()) return data_loss("the record has inconsistent sizes");
  out.name = rest.substr(0, name_bytes);
  out.body = rest.substr(name_bytes);
  return out;
}

std::string record_file_name(std::uint32_t file) { return fmt::format("records-{:08}.hcr", file); }

bool parse_record_file_name(std::string_view name, std::uint32_t* file) {
  constexpr std::string_view kPrefix = "records-";
  constexpr std::string_view kSuffix = ".hcr";
  if (name.size() != kPrefix.size() + 8 + kSuffix.size() || !name.starts_with(kPrefix) ||
      !name.ends_with(kSuffix)) {
    return false;
  }
  return parse_number(name.substr(kPrefix.size(), 8), 10, file) && *file > 0 &&
         *file < (1U << kFileBits);
}

Result<FoundRecord> read_record(Env& env, const StoreId& store, std::span<const std::string> dirs,
                                const RecordPlace& place, std::string* buffer) {
  if (place.disk >= dirs.size()) return not_found("the record's disk is not there");
  const std::string path = join_path(dirs[place.disk], record_file_name(place.file));
  HCACHE_ASSIGN_OR_RETURN(const auto file, env.open_file(path, {}));
  const auto read = [&](std::uint64_t bytes) -> Status {
    buffer->resize(bytes);
    HCACHE_ASSIGN_OR_RETURN(
        const std::size_t got,
        file->read_at(place.offset, std::as_writable_bytes(std::span<char>(*buffer))));
    buffer->resize(got);
    return {};
  };
  HCACHE_RETURN_IF_ERROR(read(kRecordHeadBytes));
  if (buffer->size() < kRecordHeadBytes) return data_loss("there is no record");
  const std::uint64_t bytes = claimed_record_bytes(*buffer);
  if (bytes == 0) return data_loss("there is no record");
  HCACHE_RETURN_IF_ERROR(read(bytes));
  HCACHE_ASSIGN_OR_RETURN(FoundRecord record, decode_record(store, *buffer));
  record.place = place;
  return record;
}

Status scan_records(Env& env, const StoreId& store, std::span<const std::string> dirs,
                    const std::function<Status(const FoundRecord&)>& visit,
                    const ScanProgress& progress) {
  HCACHE_ASSIGN_OR_RETURN(const auto files, record_files(env, dirs));
  std::uint64_t all = 0;
  for (const ScanFile& file : files) all += file.size;
  std::uint64_t before = 0;
  for (const ScanFile& scanned : files) {
    const auto file = env.open_file(scanned.path, {});
    if (!file.ok()) {
      log::warn("{}: {}", scanned.path, file.status().to_string());
      continue;
    }
    Window window(**file, scanned.size);
    std::uint64_t reported = 0;
    for (std::uint64_t at = kSegmentHeaderBytes; at + kMinRecordBytes <= scanned.size;) {
      if (progress && at / kScanBytes != reported) {
        reported = at / kScanBytes;
        if (!progress(before + at, all)) return cancelled("reading the records was stopped");
      }
      auto text = window.get(at, kRecordHeadBytes);
      if (!text.ok()) {  // an unreadable place of the disk
        log::warn("{}: {}", scanned.path, text.status().to_string());
        at += kScanBytes;
        continue;
      }
      const std::uint64_t bytes = text->size() < kRecordHeadBytes ? 0 : claimed_record_bytes(*text);
      if (bytes > 0) text = window.get(at, bytes);
      auto record = bytes > 0 && text.ok() ? decode_record(store, *text)
                                           : Result<FoundRecord>(data_loss("no record"));
      if (record.ok()) {
        record->place = {scanned.disk, scanned.file, at};
        HCACHE_RETURN_IF_ERROR(visit(*record));
        at += round_up(bytes, kRecordUnit);
      } else {
        at += kRecordUnit;
      }
    }
    before += scanned.size;
  }
  if (progress) progress(all, all);
  return {};
}

}  // namespace hcache::store
