#include "space.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "base/log.h"

namespace hcache::store {
namespace {
// Blocks beyond its pages that a file system may count for a segment (its own extent tree, say).
constexpr std::uint64_t kAllocationSlack = 64ULL << 10;
}  // namespace

Space::Space(Env& env, Segments& segments, std::uint64_t segment_bytes)
    : env_(env),
      segments_(segments),
      segment_bytes_(segment_bytes),
      disks_(segments.disks(), Allocator(segment_bytes)) {}

Status Space::list_segments() {
  for (std::uint32_t disk = 0; disk < disks_.size(); ++disk) {
    HCACHE_ASSIGN_OR_RETURN(const auto numbers, segments_.list(disk));
    for (const std::uint32_t number : numbers) disks_[disk].add_segment(number);
  }
  return {};
}

bool Space::add_page(const PagePlace& place, std::uint32_t bytes) {
  return place.disk < disks_.size() &&
         disks_[place.disk].add_page(place.segment, place.offset, bytes);
}

void Space::free_page(const PagePlace& place, std::uint32_t bytes, std::vector<DiskExtent>* freed) {
  if (place.disk >= disks_.size() || !disks_[place.disk].has_segment(place.segment)) {
    return;  // a damaged row that was never counted
  }
  std::vector<Extent> extents;
  disks_[place.disk].remove_page(place.segment, place.offset, bytes, &extents);
  for (const Extent& extent : extents) freed->push_back({place.disk, extent});
}

void Space::free_pages(std::span<const ChunkRecord> chunks) {
  std::vector<DiskExtent> freed;
  for (const ChunkRecord& chunk : chunks) {
    for (std::size_t i = 0; i < chunk.places.size(); ++i) {
      free_page(chunk.places[i], chunk.info.pages[i].bytes, &freed);
    }
  }
  punch(std::move(freed));
}

Extent Space::reserve(std::uint32_t disk, std::uint64_t bytes, bool* new_segment) {
  return disks_[disk].reserve(bytes, new_segment);
}

void Space::settle(const DiskExtent& reserved) { disks_[reserved.disk].cancel(reserved.extent); }

void Space::cancel(const DiskExtent& reserved) {
  std::vector<DiskExtent> freed;
  free_page({static_cast<std::uint8_t>(reserved.disk), reserved.extent.segment,
             reserved.extent.offset, 0},
            static_cast<std::uint32_t>(reserved.extent.bytes), &freed);
  punch(std::move(freed));
}

void Space::release_uncertain() {
  for (const DiskExtent& extent : std::exchange(uncertain_, {})) cancel(extent);
}

void Space::free_unpinned(const Pins& pins) {
  std::vector<DroppedPage> waiting;
  std::vector<DiskExtent> freed;
  for (const DroppedPage& page : dropped_) {
    if (pins.pinned(page.chunk)) {
      waiting.push_back(page);
    } else {
      free_page(page.place, page.bytes, &freed);
    }
  }
  dropped_ = std::move(waiting);
  punch(std::move(freed));
}

// A failure costs space until the next open, and nothing else.
void Space::punch(std::vector<DiskExtent> freed) {
  auto start = [](const DiskExtent& e) {
    return std::tuple(e.disk, e.extent.segment, e.extent.offset);
  };
  std::sort(freed.begin(), freed.end(),
            [&](const DiskExtent& a, const DiskExtent& b) { return start(a) < start(b); });
  for (std::size_t i = 0; i < freed.size();) {
    DiskExtent whole = freed[i];
    for (++i; i < freed.size(); ++i) {
      const auto end =
          std::tuple(whole.disk, whole.extent.segment, whole.extent.offset + whole.extent.bytes);
      if (start(freed[i]) != end) break;
      whole.extent.bytes += freed[i].extent.bytes;
    }
    const auto file = segments_.open(whole.disk, whole.extent.segment);
    Status status = file.status();
    if (file.ok()) status = (*file)->punch_hole(whole.extent.offset, whole.extent.bytes);
    if (!status.ok() && status.code() != Code::kNotFound) {
      log::warn("cannot give space back: {}", status.to_string());
    }
  }
}

Status Space::reclaim(bool always, std::uint64_t* segments_removed) {
  for (std::uint32_t disk = 0; disk < disks_.size(); ++disk) {
    for (const std::uint32_t number : disks_[disk].segments()) {
      HCACHE_RETURN_IF_ERROR(reclaim_segment(disk, number, always, segments_removed));
    }
  }
  return {};
}

Status Space::reclaim_segment(std::uint32_t disk, std::uint32_t number, bool always,
                              std::uint64_t* segments_removed) {
  Allocator& space = disks_[disk];
  if (space.used_bytes(number) == 0) {
    const Status status = segments_.remove(disk, number);
    if (!status.ok() && status.code() != Code::kNotFound) return status;
    space.remove_segment(number);
    ++*segments_removed;
    return {};
  }
  const auto info = env_.file_info(segments_.path(disk, number));
  if (!info.ok() || !info->exists) return {};  // its pages will be found missing when read
  const std::uint64_t end = space.end_of_use(number);
  const std::uint64_t expected = space.used_bytes(number) + kSegmentHeaderBytes;
  if (!always && info->allocated_bytes <= expected + kAllocationSlack && info->size <= end) {
    return {};
  }
  const auto file = segments_.open(disk, number);
  if (!file.ok()) {
    log::warn("cannot reclaim space: {}", file.status().to_string());
    return {};
  }
  if (info->size > end) HCACHE_RETURN_IF_ERROR((*file)->truncate(end));
  for (const Extent& hole : space.holes(number)) {
    HCACHE_RETURN_IF_ERROR((*file)->punch_hole(hole.offset, hole.bytes));
  }
  return {};
}

std::uint64_t Space::used_bytes() const {
  std::uint64_t sum = 0;
  for (const Allocator& disk : disks_) {
    sum += disk.used_bytes() + disk.segments().size() * kSegmentHeaderBytes;
  }
  return sum;
}

std::uint64_t Space::allocated_bytes() const {
  std::uint64_t sum = 0;
  for (std::uint32_t disk = 0; disk < disks_.size(); ++disk) {
    for (const std::uint32_t number : disks_[disk].segments()) {
      const auto info = env_.file_info(segments_.path(disk, number));
      if (info.ok()) sum += info->allocated_bytes;
    }
  }
  return sum;
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> Space::sparse_segments() const {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> out;
  for (std::uint32_t disk = 0; disk < disks_.size(); ++disk) {
    const Allocator& space = disks_[disk];
    for (const std::uint32_t number : space.segments()) {
      const std::uint64_t span = space.end_of_use(number) - kSegmentHeaderBytes;
      if (space.used_bytes(number) * 2 < span) out.emplace_back(disk, number);
    }
  }
  return out;
}

Status Space::check(std::span<const ChunkRecord> chunks) const {
  std::vector<Allocator> expected(disks_.size(), Allocator(segment_bytes_));
  bool inside = true;
  const auto add = [&](const PagePlace& place, std::uint64_t bytes) {
    inside = inside && place.disk < expected.size() &&
             expected[place.disk].add_page(place.segment, place.offset, bytes);
  };
  for (const ChunkRecord& chunk : chunks) {
    for (std::size_t i = 0; i < chunk.places.size(); ++i) {
      add(chunk.places[i], chunk.info.pages[i].bytes);
    }
  }
  for (const DroppedPage& page : dropped_) add(page.place, page.bytes);
  for (const DiskExtent& e : uncertain_) {
    add({static_cast<std::uint8_t>(e.disk), e.extent.segment, e.extent.offset, 0}, e.extent.bytes);
  }
  if (!inside) return internal_error("a page lies outside of its segment");
  for (std::uint32_t disk = 0; disk < expected.size(); ++disk) {
    if (expected[disk].used_bytes() != disks_[disk].used_bytes()) {
      return internal_error(fmt::format("disk {} has {} bytes in use, its pages need {}", disk,
                                        disks_[disk].used_bytes(), expected[disk].used_bytes()));
    }
  }
  return {};
}

}  // namespace hcache::store
