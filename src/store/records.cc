#include "records.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"

namespace hcache::store {
namespace {
constexpr std::uint64_t kReserveBytes = 16ULL << 10;  // for the records of several small batches
constexpr std::int64_t kSyncEveryNs = 5'000'000'000;
}  // namespace

Records::Records(Env& env, const StoreId& store, bool sealed, std::vector<std::string> dirs)
    : env_(env),
      store_(store),
      sealed_(sealed),
      dirs_(std::move(dirs)),
      space_(dirs_.size(), Allocator(kRecordFileBytes)),
      last_sync_ns_(env.monotonic_ns()) {}

std::string Records::path(const Key& key) const {
  return join_path(dirs_[key.first], record_file_name(key.second));
}

Status Records::list_files() {
  for (std::uint32_t disk = 0; disk < dirs_.size(); ++disk) {
    HCACHE_ASSIGN_OR_RETURN(const auto names, env_.list_dir(dirs_[disk]));
    for (const std::string& name : names) {
      std::uint32_t file = 0;
      if (parse_record_file_name(name, &file)) space_[disk].add_segment(file);
    }
  }
  return {};
}

bool Records::add(const RecordPlace& place, std::uint64_t bytes) {
  return place.disk < space_.size() && place.offset + bytes <= kRecordFileBytes &&
         space_[place.disk].has_segment(place.file) &&
         space_[place.disk].add_page(place.file, place.offset, bytes);
}

Status Records::reclaim() {
  for (std::uint32_t disk = 0; disk < space_.size(); ++disk) {
    Allocator& space = space_[disk];
    for (const std::uint32_t number : space.segments()) {
      const Key key(disk, number);
      if (space.used_bytes(number) == 0) {
        const Status status = env_.remove_path(path(key));
        if (!status.ok() && status.code() != Code::kNotFound) return status;
        space.remove_segment(number);
        files_.erase(key);
        continue;
      }
      HCACHE_ASSIGN_OR_RETURN(const auto file, open(key, false));
      HCACHE_ASSIGN_OR_RETURN(const std::uint64_t size, file->size());
      const std::uint64_t end = space.end_of_use(number);
      if (size > end) HCACHE_RETURN_IF_ERROR(file->truncate(end));
      for (const Extent& hole : space.holes(number)) {
        HCACHE_RETURN_IF_ERROR(file->punch_hole(hole.offset, hole.bytes));
      }
    }
  }
  return {};
}

Result<std::shared_ptr<File>> Records::open(const Key& key, bool fresh) {
  if (const auto at = files_.find(key); at != files_.end() && !fresh) return at->second;
  OpenOptions options;
  options.write = true;
  options.create = fresh;
  options.truncate = fresh;
  HCACHE_ASSIGN_OR_RETURN(std::shared_ptr<File> file, env_.open_file(path(key), options));
  if (fresh) {
    AlignedBuffer header(kSegmentHeaderBytes);
    encode_record_file_header(store_, sealed_, key.first, key.second, header.span());
    HCACHE_RETURN_IF_ERROR(file->write_at(0, header.span()));
    HCACHE_RETURN_IF_ERROR(file->sync());
    HCACHE_RETURN_IF_ERROR(env_.sync_dir(dirs_[key.first]));
  }
  files_[key] = file;
  return file;
}

void Records::close_open() {
  if (open_.extent.bytes > 0) space_[open_.disk].cancel(open_.extent);
  open_ = {};
}

Result<RecordPlace> Records::make_room(std::uint64_t bytes) {
  if (open_.used + bytes > open_.extent.bytes) {
    close_open();
    const std::uint32_t disk = next_disk_;
    next_disk_ = (next_disk_ + 1) % static_cast<std::uint32_t>(space_.size());
    const std::uint64_t wanted = std::max(bytes, kReserveBytes);
    if (wanted > space_[disk].max_extent_bytes()) {
      return resource_exhausted(fmt::format("a record of {} bytes is too large", bytes));
    }
    bool fresh = false;
    const Extent extent = space_[disk].reserve(wanted, &fresh);
    const auto file = open({disk, extent.segment}, fresh);
    if (!file.ok()) {
      space_[disk].cancel(extent);
      if (fresh) space_[disk].remove_segment(extent.segment);
      return file.status();
    }
    open_ = {disk, extent, 0};
  }
  const RecordPlace place{open_.disk, open_.extent.segment, open_.extent.offset + open_.used};
  open_.used += bytes;
  return place;
}

Result<std::vector<RecordRef>> Records::write(std::vector<Draft> records) {
  const auto now = static_cast<std::uint64_t>(std::max<std::int64_t>(env_.wall_ns(), 1));
  last_batch_ = std::max(last_batch_ + 1, now);
  std::vector<RecordRef> written;
  Status status;
  for (std::size_t at = 0; at < records.size() && status.ok();) {
    // As many as make a write of a good size.
    std::string text;
    std::vector<std::uint64_t> offsets;
    const std::size_t first = at;
    for (; at < records.size() && (text.empty() || text.size() < kReserveBytes); ++at) {
      Draft& record = records[at];
      record.head.batch = last_batch_;
      record.head.batch_size = static_cast<std::uint32_t>(records.size());
      offsets.push_back(text.size());
      text += encode_record(store_, record.head, record.name, record.body);
      text.resize(round_up(text.size(), kRecordUnit), '\0');
    }
    const auto room = make_room(text.size());
    if (!room.ok()) {
      status = room.status();
      break;
    }
    const Key key(room->disk, room->file);
    unsynced_.insert(key);
    status = files_.at(key)->write_at(room->offset, std::as_bytes(std::span(text)));
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      const Draft& record = records[first + i];
      const std::uint64_t bytes = record_bytes(record.name.size(), record.body.size());
      const RecordPlace place{room->disk, room->file, room->offset + offsets[i]};
      if (!space_[place.disk].add_page(place.file, place.offset, bytes)) {
        die("a record was written outside of its file");
      }
      written.push_back({record.head.key, place, bytes});
    }
  }
  if (status.ok()) return written;
  erase(written, false);
  return status;
}

Status Records::erase_one(const RecordRef& ref) {
  const Key key(ref.place.disk, ref.place.file);
  HCACHE_ASSIGN_OR_RETURN(const auto file, open(key, false));
  std::string text(kRecordHeadBytes, '\0');
  HCACHE_ASSIGN_OR_RETURN(
      const std::size_t got,
      file->read_at(ref.place.offset, std::as_writable_bytes(std::span<char>(text))));
  // The place comes from a row's column without a check of its own: look before anything is lost.
  const std::string_view key_text(reinterpret_cast<const char*>(ref.key.bytes.data()),
                                  ref.key.bytes.size());
  constexpr std::size_t kKeyAt = 32;
  if (got == text.size() && claimed_record_bytes(text) == ref.bytes &&
      std::string_view(text).substr(kKeyAt, key_text.size()) == key_text) {
    const std::string zeros(ref.bytes, '\0');
    unsynced_.insert(key);
    HCACHE_RETURN_IF_ERROR(
        file->write_at(ref.place.offset, std::as_bytes(std::span<const char>(zeros))));
  } else {
    complete_ = false;  // the record itself may be elsewhere
  }
  std::vector<Extent> freed;
  space_[ref.place.disk].remove_page(ref.place.file, ref.place.offset, ref.bytes, &freed);
  for (const Extent& extent : freed) {
    HCACHE_RETURN_IF_ERROR(file->punch_hole(extent.offset, extent.bytes));
  }
  return {};
}

void Records::erase(std::span<const RecordRef> refs, bool durably) {
  for (const RecordRef& ref : refs) {
    const bool known = ref.place.disk < space_.size() &&
                       space_[ref.place.disk].has_segment(ref.place.file) &&
                       ref.place.offset >= kSegmentHeaderBytes;
    if (!known) continue;
    if (const Status status = erase_one(ref); !status.ok()) {
      log::warn("cannot erase a record in {}: {}", dirs_[ref.place.disk], status.to_string());
    }
  }
  if (!durably || refs.empty()) return;
  if (const Status status = sync(true); !status.ok()) log::warn("{}", status.to_string());
}

Status Records::sync(bool now) {
  if (unsynced_.empty()) return {};
  if (!now && env_.monotonic_ns() - last_sync_ns_ < kSyncEveryNs) return {};
  last_sync_ns_ = env_.monotonic_ns();
  for (const Key& key : unsynced_) {
    const auto at = files_.find(key);
    if (at != files_.end()) HCACHE_RETURN_IF_ERROR(at->second->sync());
  }
  unsynced_.clear();
  return {};
}

std::uint64_t Records::used_bytes() const {
  std::uint64_t sum = 0;
  for (const Allocator& disk : space_) {
    sum += disk.used_bytes() + disk.segments().size() * kSegmentHeaderBytes;
  }
  return sum;
}

Status Records::check(std::span<const RecordRef> refs) const {
  std::vector<Allocator> expected(space_.size(), Allocator(kRecordFileBytes));
  for (const RecordRef& ref : refs) {
    if (ref.place.disk >= expected.size() ||
        !expected[ref.place.disk].add_page(ref.place.file, ref.place.offset, ref.bytes)) {
      return internal_error("a record lies outside of its file");
    }
  }
  if (open_.extent.bytes > 0 &&
      !expected[open_.disk].add_page(open_.extent.segment, open_.extent.offset,
                                     open_.extent.bytes)) {
    return internal_error("the space for the next records lies outside of its file");
  }
  for (std::uint32_t disk = 0; disk < expected.size(); ++disk) {
    if (expected[disk].used_bytes() != space_[disk].used_bytes()) {
      return internal_error(fmt::format("disk {} has {} bytes of records, the catalog names {}",
                                        disk, space_[disk].used_bytes(),
                                        expected[disk].used_bytes()));
    }
  }
  return {};
}

}  // namespace hcache::store
