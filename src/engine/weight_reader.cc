#include "weight_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace hcache::engine {
namespace {

// Requests of about 1 MiB that keep a disk busy; more would only delay a layer that is wanted
// before those that were read ahead.
constexpr size_t kDepth = 6;
constexpr uint64_t kTagImage = uint64_t{1} << 32;  // tags are image * kTagImage + piece

}  // namespace

using model::LayerPart;
using model::StreamedUnit;
using model::StreamedWeights;
using model::WeightPiece;

Result<std::unique_ptr<WeightReader>> WeightReader::open(const StreamedWeights& weights,
                                                         std::array<std::byte*, 2> images) {
  std::vector<std::unique_ptr<File>> files;
  for (const model::StreamedFile& expected : weights.files) {
    HCACHE_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                            weights.env->open_file(expected.path, {.direct = true}));
    HCACHE_ASSIGN_OR_RETURN(const FileIdentity identity, file->identity());
    if (identity != expected.identity) {
      return failed_precondition(
          fmt::format("{} was replaced or changed while the model was being loaded; start again",
                      expected.path));
    }
    files.push_back(std::move(file));
  }
  HCACHE_ASSIGN_OR_RETURN(std::unique_ptr<IoQueue> queue, weights.env->new_io_queue(kDepth));
  return std::unique_ptr<WeightReader>(
      new WeightReader(weights, std::move(files), std::move(queue), images));
}

WeightReader::WeightReader(const StreamedWeights& weights, std::vector<std::unique_ptr<File>> files,
                           std::unique_ptr<IoQueue> queue, std::array<std::byte*, 2> images)
    : weights_(weights), files_(std::move(files)), queue_(std::move(queue)) {
  for (size_t i = 0; i < images.size(); ++i) images_.at(i).memory = images.at(i);
  thread_ = std::thread([this] { run(); });
}

WeightReader::~WeightReader() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
    work_.notify_one();
  }
  queue_->cancel();
  thread_.join();
}

void WeightReader::fetch(size_t index, LayerPart part) {
  MutexLock lock(mutex_);
  Image& image = images_.at(index % 2);
  const StreamedUnit& unit = weights_.units[index];
  if (image.unit != static_cast<int64_t>(index) || !image.error.ok()) {
    drop(image);
    image.unit = static_cast<int64_t>(index);
    image.have.assign(unit.pieces.size(), 0);
    image.order = ++n_asked_;
  }
  image.wanted = std::max(image.wanted, pieces_of(unit, part));
  work_.notify_one();
}

Status WeightReader::wait(size_t index, LayerPart part) {
  MutexLock lock(mutex_);
  Image& image = images_.at(index % 2);
  urgent_ = &image;
  while (!is_ready(image, index, part)) {
    const bool failed = !image.error.ok() || !queue_error_.ok();
    if (failed || image.unit != static_cast<int64_t>(index)) {
      Status status = queue_error_.ok() ? image.error : queue_error_;
      if (!failed) status = internal_error("weights are waited for that nobody asked for");
      drop(image);
      urgent_ = nullptr;
      return status;
    }
    ready_.wait(mutex_);
  }
  urgent_ = nullptr;
  return {};
}

bool WeightReader::is_ready(const Image& image, size_t index, LayerPart part) const {
  const StreamedUnit& unit = weights_.units[index];
  if (image.unit != static_cast<int64_t>(index)) return false;
  return part == LayerPart::kKv ? image.done_kv == unit.n_kv_pieces
                                : image.done == unit.pieces.size();
}

bool WeightReader::ready(size_t index, LayerPart part) const {
  MutexLock lock(mutex_);
  return is_ready(images_.at(index % 2), index, part);
}

int64_t WeightReader::target(size_t index) const {
  MutexLock lock(mutex_);
  return images_.at(index % 2).unit;
}

WeightReader::Counters WeightReader::counters() const {
  MutexLock lock(mutex_);
  Counters now = counters_;
  if (in_flight_ > 0) now.busy_ns += weights_.env->monotonic_ns() - busy_since_ns_;
  return now;
}

// Nothing more of its unit is read; what is under way arrives all the same.
void WeightReader::drop(Image& image) {
  const size_t under_way = image.stale + image.in_flight;
  image = {.memory = image.memory, .stale = under_way};
}

void WeightReader::run() {
  std::vector<IoCompletion> completions;
  MutexLock lock(mutex_);
  while (!stop_ && queue_error_.ok()) {
    submit_more();
    if (in_flight_ == 0) {
      work_.wait(mutex_);
      continue;
    }
    lock.unlock();
    completions.clear();
    const Status reaped = queue_->reap(true, &completions);
    lock.lock();
    if (!reaped.ok()) queue_error_ = reaped;
    for (const IoCompletion& completion : completions) complete(completion);
    ready_.notify_all();
  }
}

WeightReader::Image* WeightReader::next_image() {
  Image* next = nullptr;
  for (Image& image : images_) {
    if (image.begun == image.wanted || image.stale > 0 || !image.error.ok()) continue;
    if (next == nullptr || &image == urgent_ || (next != urgent_ && image.order < next->order)) {
      next = &image;
    }
  }
  return next;
}

void WeightReader::submit_more() {
  while (in_flight_ < queue_->depth()) {
    Image* image = next_image();
    if (image == nullptr) return;
    ++image->in_flight;
    submit(*image, image->begun++);
  }
}

// The rest of a piece: reads may come back short.
void WeightReader::submit(Image& image, size_t piece) {
  const WeightPiece& p = weights_.units[static_cast<size_t>(image.unit)].pieces[piece];
  const size_t from = image.have[piece] / kDirectAlignment * kDirectAlignment;
  IoRequest request;
  request.file = files_[p.file].get();
  request.offset = p.file_offset + from;
  request.buffer = {image.memory + p.image_offset + from, p.n_bytes - from};
  request.tag = (&image == images_.data() ? 0 : kTagImage) + piece;
  image.have[piece] = from;
  if (Status status = queue_->submit(request); !status.ok()) {
    --image.in_flight;
    fail(image, std::move(status));
    ready_.notify_all();
    return;
  }
  if (in_flight_++ == 0) busy_since_ns_ = weights_.env->monotonic_ns();
}

void WeightReader::complete(const IoCompletion& completion) {
  if (completion.partial) return;
  if (--in_flight_ == 0) counters_.busy_ns += weights_.env->monotonic_ns() - busy_since_ns_;
  Image& image = images_.at(completion.tag / kTagImage);
  const size_t piece = completion.tag % kTagImage;
  counters_.bytes_read += completion.bytes;
  if (image.stale > 0) {
    --image.stale;
    return;
  }
  if (!completion.status.ok()) {
    --image.in_flight;
    fail(image, completion.status);
    return;
  }
  const WeightPiece& p = weights_.units[static_cast<size_t>(image.unit)].pieces[piece];
  image.have[piece] += completion.bytes;
  if (image.have[piece] >= p.file_bytes) {
    finish_piece(image, piece);
  } else if (completion.bytes == 0) {
    --image.in_flight;
    fail(image,
         data_loss(fmt::format("{}: the file ends at byte {}, where weights should be",
                               weights_.files[p.file].path, p.file_offset + image.have[piece])));
  } else {
    submit(image, piece);
  }
}

void WeightReader::finish_piece(Image& image, size_t piece) {
  --image.in_flight;
  const StreamedUnit& unit = weights_.units[static_cast<size_t>(image.unit)];
  const bool is_kv = piece < unit.n_kv_pieces;
  const bool ends_part =
      (is_kv && image.done_kv + 1 == unit.n_kv_pieces) || image.done + 1 == unit.pieces.size();
  if (ends_part) {
    if (Status status = check_unchanged(); !status.ok()) return fail(image, std::move(status));
  }
  if (is_kv) ++image.done_kv;
  ++image.done;
}

void WeightReader::fail(Image& image, Status status) {
  if (image.error.ok()) image.error = std::move(status);
  ++counters_.errors;
}

Status WeightReader::check_unchanged() const {
  for (size_t i = 0; i < files_.size(); ++i) {
    HCACHE_ASSIGN_OR_RETURN(const FileIdentity now, files_[i]->identity());
    if (now == weights_.files[i].identity) continue;
    return data_loss(fmt::format(
        "{} was changed while its weights were in use; restart with the file as it is now",
        weights_.files[i].path));
  }
  return {};
}

}  // namespace hcache::engine
