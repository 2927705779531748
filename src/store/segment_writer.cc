#include "segment_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "base/pace.h"

namespace hcache::store {
namespace {

constexpr std::size_t kWriteBytes = 1 << 20;  // of one write
constexpr std::size_t kWriteDepth = 8;        // writes in flight
// A run is what is contiguous for sure; large enough for any read-ahead, small enough to find room.
constexpr std::uint64_t kMaxRunBytes = 32ULL << 20;

// Bytes that follow each other in a file, as full buffers of which several are in flight.
class WriteStream {
 public:
  WriteStream(IoQueue& queue, AlignedBuffer& buffer)
      : queue_(queue), buffer_(buffer), writes_(kWriteDepth) {
    for (std::size_t i = 0; i < kWriteDepth; ++i) idle_.push_back(i);
  }

  void begin(File* file, std::uint64_t offset) {
    file_ = file;
    offset_ = offset;
  }
  // No data: zeros.
  void emit(const std::byte* data, std::uint64_t size) {
    while (size > 0 && status_.ok()) {
      if (slot_ == kWriteDepth) {
        while (idle_.empty()) reap(true);
        slot_ = idle_.back();
        idle_.pop_back();
      }
      const std::size_t n = std::min<std::uint64_t>(size, kWriteBytes - filled_);
      if (data != nullptr) {
        std::memcpy(slot(slot_).data() + filled_, data, n);
        data += n;
      } else {
        std::memset(slot(slot_).data() + filled_, 0, n);
      }
      filled_ += n;
      size -= n;
      if (filled_ == kWriteBytes) flush();
    }
  }
  // Writes what is left of the file's bytes, padded with zeros to a whole block.
  void end() {
    flush();
    if (slot_ != kWriteDepth) idle_.push_back(slot_);
    slot_ = kWriteDepth;
    filled_ = 0;
    reap(false);
  }
  [[nodiscard]] Status wait() {
    while (queue_.in_flight() > 0) reap(true);
    return status_;
  }
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  struct InFlight {
    File* file = nullptr;
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
  };

  std::span<std::byte> slot(std::size_t i) {
    return buffer_.span().subspan(i * kWriteBytes, kWriteBytes);
  }
  void flush() {
    if (filled_ == 0 || !status_.ok()) return;
    const std::size_t padded = round_up(filled_, kBlock);
    std::memset(slot(slot_).data() + filled_, 0, padded - filled_);
    writes_[slot_] = {file_, offset_, padded};
    IoRequest io;
    io.op = IoOp::kWrite;
    io.file = file_;
    io.offset = offset_;
    io.buffer = slot(slot_).first(padded);
    io.tag = slot_;
    if (Status submitted = queue_.submit(io); !submitted.ok()) {
      status_ = std::move(submitted);
      idle_.push_back(slot_);
    }
    offset_ += padded;
    filled_ = 0;
    slot_ = kWriteDepth;
  }
  void reap(bool block) {
    completions_.clear();
    const Status reaped = queue_.reap(block, &completions_);
    if (!reaped.ok()) die("the I/O queue failed: " + reaped.to_string());
    for (const IoCompletion& done : completions_) {
      const InFlight& write = writes_[done.tag];
      Status result = done.status;
      if (result.ok() && done.bytes < write.bytes) {  // the rest, from a block's start
        const std::size_t from = done.bytes / kBlock * kBlock;
        result = write.file->write_at(write.offset + from,
                                      slot(done.tag).subspan(from, write.bytes - from));
      }
      if (status_.ok()) status_ = result;
      idle_.push_back(done.tag);
    }
  }

  IoQueue& queue_;
  AlignedBuffer& buffer_;
  std::vector<InFlight> writes_;
  std::vector<std::size_t> idle_;
  std::vector<IoCompletion> completions_;
  File* file_ = nullptr;
  std::uint64_t offset_ = 0;        // of the buffer that is being filled
  std::size_t slot_ = kWriteDepth;  // that buffer; kWriteDepth: none
  std::size_t filled_ = 0;
  Status status_;
};

}  // namespace

// Layer first: what a layer-wise restore reads together lies together.
std::vector<Run> SegmentWriter::lay_out(std::vector<Draft>* chunks) const {
  struct Placed {
    std::uint32_t disk;
    std::size_t chunk;
    std::size_t page;
  };
  std::vector<Placed> order;
  const std::uint32_t disks = segments_.disks();
  for (std::size_t c = 0; c < chunks->size(); ++c) {
    const Draft& draft = (*chunks)[c];
    const std::uint64_t in_chain = draft.record.info.first_position / kChunkTokens;
    for (std::size_t p = 0; p < draft.sources.size(); ++p) {
      if (draft.sources[p].empty()) continue;
      const auto disk =
          static_cast<std::uint32_t>((in_chain + draft.record.info.pages[p].layer) % disks);
      order.push_back({disk, c, p});
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](const Placed& a, const Placed& b) {
    const PageInfo& x = (*chunks)[a.chunk].record.info.pages[a.page];
    const PageInfo& y = (*chunks)[b.chunk].record.info.pages[b.page];
    return std::tuple(a.disk, x.encoding, x.layer) < std::tuple(b.disk, y.encoding, y.layer);
  });
  const std::uint64_t most = std::min(kMaxRunBytes, space_.max_extent_bytes());
  std::vector<Run> runs;
  for (const Placed& placed : order) {
    Draft& draft = (*chunks)[placed.chunk];
    const std::uint64_t bytes = draft.sources[placed.page].size();
    const bool fits = !runs.empty() && runs.back().extent.disk == placed.disk &&
                      round_up(runs.back().bytes, kPageAlignment) + bytes <= most;
    if (!fits) {
      runs.emplace_back();
      runs.back().extent.disk = placed.disk;
    }
    Run& run = runs.back();
    const std::uint64_t at = round_up(run.bytes, kPageAlignment);
    run.pages.push_back({&draft, placed.page, at});
    run.bytes = at + bytes;
  }
  return runs;
}

Result<std::shared_ptr<File>> SegmentWriter::file_for(std::uint32_t disk, std::uint32_t segment,
                                                      bool fresh) {
  if (!fresh) {
    auto file = segments_.open(disk, segment);
    // A file that was deleted under us is made anew; its pages will be found missing when read.
    if (file.ok() || file.code() != Code::kNotFound) return file;
  }
  auto file = segments_.create(disk, segment);
  if (file.code() == Code::kNotFound) {
    return unavailable(fmt::format("the directory {} has vanished", segments_.dir(disk)));
  }
  return file;
}

Status SegmentWriter::write(std::vector<Run>* runs) {
  const Status status = write_runs(runs);
  if (!status.ok()) cancel(runs);
  return status;
}

// A page as it stands on disk.
const std::byte* SegmentWriter::sealed(const Run::Page& page, std::span<const std::byte> source) {
  const Seal& seal = segments_.seal();
  if (!seal.on()) return source.data();
  ChunkRecord& record = page.draft->record;
  sealed_.resize(std::max(sealed_.size(), source.size()));
  const ChunkInfo& info = record.info;
  seal.seal_page({info.salt, info.id, info.pages[page.page]}, source, sealed_.data(),
                 &record.places[page.page].seal);
  return sealed_.data();
}

Status SegmentWriter::write_runs(std::vector<Run>* runs) {
  if (queue_ == nullptr) {
    HCACHE_ASSIGN_OR_RETURN(queue_, env_.new_io_queue(kWriteDepth));
    buffer_ = AlignedBuffer(kWriteBytes * kWriteDepth);
  }
  std::vector<std::shared_ptr<File>> files;  // with data to sync; keeps them open
  WriteStream stream(*queue_, buffer_);
  Status status;
  for (Run& run : *runs) {
    bool fresh = false;
    run.extent.extent = space_.reserve(run.extent.disk, run.bytes, &fresh);
    run.reserved = true;
    const Extent& extent = run.extent.extent;
    auto file = file_for(run.extent.disk, extent.segment, fresh);
    status = file.status();
    if (!status.ok()) break;
    if (std::find(files.begin(), files.end(), *file) == files.end()) files.push_back(*file);
    status = (*file)->allocate(extent.offset, extent.bytes);
    if (!status.ok()) break;
    stream.begin(file->get(), extent.offset);
    std::uint64_t at = 0;
    for (const Run::Page& page : run.pages) {
      Pace::point();
      const std::span<const std::byte> source = page.draft->sources[page.page];
      PagePlace& place = page.draft->record.places[page.page];
      place.disk = static_cast<std::uint8_t>(run.extent.disk);
      place.segment = extent.segment;
      place.offset = extent.offset + page.at;
      place.checksum = checksum(source);
      stream.emit(nullptr, page.at - at);
      stream.emit(sealed(page, source), source.size());
      at = page.at + source.size();
    }
    stream.end();
    if (!stream.status().ok()) break;
  }
  const Status written = stream.wait();
  if (status.ok()) status = written;
  for (const auto& file : files) {
    if (status.ok()) status = file->sync();
  }
  return status;
}

void SegmentWriter::cancel(std::vector<Run>* runs) {
  for (Run& run : *runs) {
    if (run.reserved) space_.cancel(run.extent);
    run.reserved = false;
  }
}

void SegmentWriter::abandon(std::vector<Run>* runs, const Status& why) {
  // A log that ran out of space holds no commit. After any other failure, of a sync say, nobody
  // knows what a power cut would leave: until a later commit has settled it, the space stays taken.
  if (why.code() == Code::kResourceExhausted) return cancel(runs);
  for (const Run& run : *runs) space_.keep_uncertain(run.extent);
}

void SegmentWriter::settle(std::vector<Run>* runs) {
  for (Run& run : *runs) {
    for (const Run::Page& page : run.pages) {
      const ChunkRecord& record = page.draft->record;
      if (!space_.add_page(record.places[page.page], record.info.pages[page.page].bytes)) {
        die("a page was written outside of its segment");
      }
    }
    space_.settle(run.extent);
    run.reserved = false;
  }
}

}  // namespace hcache::store
