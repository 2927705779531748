#include "segments.h"

#include <fmt/format.h>

#include <cstring>

#include "base/log.h"

namespace hcache::store {
namespace {
// Handles kept open at most; far below the usual limit of 1,024 per process.
constexpr std::size_t kMaxOpen = 256;
}  // namespace

Segments::Segments(Env& env, StoreId store, Seal seal, std::vector<std::string> dirs,
                   bool read_only, bool direct)
    : env_(env),
      store_(store),
      seal_(std::move(seal)),
      dirs_(std::move(dirs)),
      read_only_(read_only),
      direct_(direct) {}

std::string Segments::path(std::uint32_t disk, std::uint32_t segment) const {
  if (disk >= dirs_.size()) return fmt::format("disk {} (not there)", disk);
  return join_path(dirs_[disk], segment_name(segment));
}

Result<std::vector<std::uint32_t>> Segments::list(std::uint32_t disk) const {
  HCACHE_ASSIGN_OR_RETURN(const auto names, env_.list_dir(dirs_[disk]));
  std::vector<std::uint32_t> out;
  for (const std::string& name : names) {
    std::uint32_t number = 0;
    if (parse_segment_name(name, &number)) out.push_back(number);
  }
  return out;
}

void Segments::remember(const Key& key, std::shared_ptr<File> file) {
  if (open_.size() >= kMaxOpen) {
    // Any that is not in use.
    for (auto at = open_.begin(); at != open_.end();) {
      at = at->second.use_count() == 1 ? open_.erase(at) : std::next(at);
    }
  }
  open_[key] = std::move(file);
}

Result<std::shared_ptr<File>> Segments::open(std::uint32_t disk, std::uint32_t segment) {
  if (disk >= dirs_.size()) {
    return unavailable(fmt::format("the store has no directory for disk {}", disk));
  }
  MutexLock lock(mutex_);
  const Key key(disk, segment);
  if (const auto at = open_.find(key); at != open_.end()) return at->second;
  OpenOptions options;
  options.write = !read_only_;
  options.direct = direct_;
  HCACHE_ASSIGN_OR_RETURN(std::shared_ptr<File> file, env_.open_file(path(disk, segment), options));
  AlignedBuffer header(kSegmentHeaderBytes);
  HCACHE_ASSIGN_OR_RETURN(const std::size_t got, file->read_at(0, header.span()));
  const Status status = check_segment_header(header.span().first(got), store_, disk, segment);
  if (!status.ok()) {
    if (read_only_ || status.code() != Code::kDataLoss) return status.with_context(file->path());
    // The catalog says what lies here and every page has its own checksum, so the writer mends it.
    log::warn("{}: {}; writing the header anew", file->path(), status.message());
    encode_segment_header(store_, seal_.on(), disk, segment, header.span());
    HCACHE_RETURN_IF_ERROR(file->write_at(0, header.span()));
    HCACHE_RETURN_IF_ERROR(file->sync());
  }
  remember(key, file);
  return file;
}

Result<std::shared_ptr<File>> Segments::create(std::uint32_t disk, std::uint32_t segment) {
  OpenOptions options;
  options.write = true;
  options.create = true;
  options.truncate = true;
  options.direct = direct_;
  HCACHE_ASSIGN_OR_RETURN(std::shared_ptr<File> file, env_.open_file(path(disk, segment), options));
  AlignedBuffer header(kSegmentHeaderBytes);
  encode_segment_header(store_, seal_.on(), disk, segment, header.span());
  HCACHE_RETURN_IF_ERROR(file->write_at(0, header.span()));
  HCACHE_RETURN_IF_ERROR(file->sync());
  HCACHE_RETURN_IF_ERROR(env_.sync_dir(dirs_[disk]));
  MutexLock lock(mutex_);
  remember({disk, segment}, file);
  return file;
}

std::shared_ptr<const AlignedBuffer> Segments::read_page(const ChunkRecord& record,
                                                         std::size_t page) {
  const PagePlace& place = record.places[page];
  const std::uint32_t bytes = record.info.pages[page].bytes;
  const auto file = open(place.disk, place.segment);
  if (!file.ok()) return nullptr;
  const std::uint64_t from = place.offset / kBlock * kBlock;
  AlignedBuffer blocks(round_up(place.offset + bytes - from, kBlock));
  const auto got = (*file)->read_at(from, blocks.span());
  const std::uint64_t within = place.offset - from;
  if (!got.ok() || *got < within + bytes) return nullptr;
  auto out = std::make_shared<AlignedBuffer>(bytes);
  std::memcpy(out->data(), blocks.span().data() + within, bytes);
  return page_intact(record, page, seal_, out->span()) ? out : nullptr;
}

Status Segments::remove(std::uint32_t disk, std::uint32_t segment) {
  {
    MutexLock lock(mutex_);
    open_.erase({disk, segment});
  }
  return env_.remove_path(path(disk, segment));
}

}  // namespace hcache::store
