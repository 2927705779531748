#include "page_reader.h"

#include <fmt/format.h>

#include <algorithm>

namespace hcache::store {
namespace {

// Unused bytes between two pages that are read along rather than skipped.
constexpr std::uint64_t kMaxGap = 2 * kBlock;
// Interval at which a background reader checks whether it may go on.
constexpr std::int64_t kYieldNs = 1'000'000;
// What is checked together when its first page is taken: at least so much, which the caches still
// have when it is used, and so many pages, so that there are some for several threads.
constexpr std::size_t kCheckedBytes = std::size_t{1} << 20;
constexpr std::size_t kCheckedPages = 8;

// What a page costs in the ring at worst, read alone.
std::size_t ring_cost(std::uint64_t bytes) { return round_up(bytes, kBlock) + kBlock; }

const PageInfo& page_of(const PageJob& job) { return job.chunk->record.info.pages[job.page]; }
const PagePlace& place_of(const PageJob& job) { return job.chunk->record.places[job.page]; }
PageKey key_of(const PageJob& job) {
  const PageInfo& page = page_of(job);
  return {job.chunk->record.info.id, page.layer, page.encoding, place_of(job).checksum};
}

}  // namespace

Result<ReaderParts> ReaderPool::take(Env& env, std::size_t ring_bytes, std::size_t depth) {
  {
    MutexLock lock(mutex_);
    // The newest: its memory has been touched for sure.
    const auto found = std::find_if(idle_.rbegin(), idle_.rend(), [&](const ReaderParts& parts) {
      return parts.ring.size() == ring_bytes && parts.queue->depth() == depth;
    });
    if (found != idle_.rend()) {
      ReaderParts parts = std::move(*found);
      idle_.erase(std::next(found).base());
      return parts;
    }
  }
  ReaderParts parts;
  parts.ring = options_.new_ring ? options_.new_ring(ring_bytes) : AlignedBuffer(ring_bytes);
  if (options_.new_mirror) {
    HCACHE_ASSIGN_OR_RETURN(parts.mirror, options_.new_mirror(parts.ring.span()));
  }
  if (parts.mirror != nullptr) {
    parts.queue = new_thread_queue(depth, [mirror = parts.mirror.get()](const IoRequest& request) {
      return mirror->read(*request.file, request.offset, request.buffer);
    });
  } else {
    HCACHE_ASSIGN_OR_RETURN(parts.queue, env.new_io_queue(depth));
  }
  return parts;
}

void ReaderPool::prepare(Env& env, std::size_t n, std::size_t ring_bytes, std::size_t depth) {
  std::vector<ReaderParts> made;
  n = std::min({n, kMaxIdle, kMaxIdleBytes / ring_bytes});
  while (made.size() < n) {
    auto parts = take(env, ring_bytes, depth);
    if (!parts.ok()) break;  // who needs a reader hears why
    std::memset(parts->ring.data(), 0, ring_bytes);
    made.push_back(std::move(*parts));
  }
  for (ReaderParts& parts : made) give_back(std::move(parts));
}

void ReaderPool::give_back(ReaderParts parts) {
  if (parts.ring.size() > kMaxIdleBytes) return;
  std::vector<ReaderParts> oldest;  // end outside the lock
  MutexLock lock(mutex_);
  idle_.push_back(std::move(parts));
  std::size_t bytes = 0;
  for (const ReaderParts& each : idle_) bytes += each.ring.size();
  while (idle_.size() > kMaxIdle || bytes > kMaxIdleBytes) {
    bytes -= idle_.front().ring.size();
    oldest.push_back(std::move(idle_.front()));
    idle_.erase(idle_.begin());
  }
}

// Why the ring can't lock up: it is given out in order of planning and comes back in that order, so
// the oldest request must be deliverable with what fits beside it. Its last page is at most
// window_bytes_ of pages after its first; those in between are in requests that overrun that window
// by less than one request per disk. Oldest (1/4) + window (1/8) + overrun (less than 1/4) + what
// is lost at the wrap (1/4) is less than the ring.
PageReaderImpl::PageReaderImpl(Env& env, PageSource& source, ReaderPool& pool, std::uint32_t disks,
                               const ReaderOptions& options, ReaderParts parts)
    : env_(env),
      source_(source),
      pool_(pool),
      options_(options),
      disks_(disks),
      request_bytes_(std::min<std::size_t>(options.request_bytes,
                                           options.ring_bytes / (4 * (disks + std::size_t{1})))),
      window_bytes_(options.ring_bytes / 8),
      check_when_taken_(options.check_with != nullptr && parts.mirror == nullptr),
      parts_(std::move(parts)),
      ring_(parts_.ring.data()),
      queue_(parts_.queue.get()),
      ahead_bytes_(options.ahead_bytes) {
  {
    MutexLock lock(link_->mutex);
    link_->reader = this;
  }
  thread_ = std::thread([this] { run(); });
}

PageReaderImpl::~PageReaderImpl() {
  {
    MutexLock lock(link_->mutex);
    link_->reader = nullptr;
  }
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  cancel();
  thread_.join();
  MutexLock lock(mutex_);
  if (!queue_failed_) pool_.give_back(std::move(parts_));
}

Status PageReaderImpl::submit(std::span<const PageRequest> pages) {
  std::vector<PageJob> jobs;
  jobs.reserve(pages.size());
  for (const PageRequest& page : pages) {
    HCACHE_ASSIGN_OR_RETURN(PageJob job, source_.job(page));
    jobs.push_back(std::move(job));
  }
  return submit_jobs(std::move(jobs));
}

Status PageReaderImpl::submit_jobs(std::vector<PageJob> jobs) {
  for (const PageJob& job : jobs) {
    if (!job.status.ok()) continue;
    const std::uint32_t bytes = page_of(job).bytes;
    if (ring_cost(bytes) > options_.ring_bytes / 4) {
      return invalid_argument(fmt::format("a page of {} bytes needs a ring of at least {} bytes",
                                          bytes, 4 * ring_cost(bytes)));
    }
  }
  MutexLock lock(mutex_);
  if (cancelled_) return cancelled("the reader was cancelled");
  const std::int64_t patience_ns = remote_busy_.until(env_.monotonic_ns()) +
                                   static_cast<std::int64_t>(options_.remote_timeout_s * 1e9);
  for (PageJob& job : jobs) {
    Item& added = items_.emplace_back();
    added.job = std::move(job);
    added.patience_ns = patience_ns;
    if (!added.job.status.ok()) {
      added.planned = true;
      added.ready = true;
    }
  }
  wake();
  ready_.notify_all();
  return {};
}

// The oldest requests are at the front and their memory begins there; a request never wraps.
bool PageReaderImpl::take_ring(std::size_t length, std::size_t* at) {
  if (requests_.empty()) ring_tail_ = 0;
  const std::size_t head = requests_.empty() ? 0 : requests_.front()->ring_at;
  const bool full_turn =
      !requests_.empty() && ring_tail_ <= head;  // in use: [head, end), [0, tail)
  if (full_turn) {
    if (head - ring_tail_ < length) return false;
    *at = ring_tail_;
  } else if (options_.ring_bytes - ring_tail_ >= length) {
    *at = ring_tail_;
  } else if (!requests_.empty() && head >= length) {
    *at = 0;
  } else {
    return false;
  }
  ring_tail_ = *at + length;
  return true;
}

void PageReaderImpl::take_from_cache() {
  next_plan_ = std::max(next_plan_, first_item_);  // a request's pages may all be gone again
  for (; next_plan_ < first_item_ + items_.size(); ++next_plan_) {
    Item& next = item(next_plan_);
    if (next.planned) continue;
    if (!next.missed) {
      next.cached = source_.cache().find(key_of(next.job));
      next.missed = next.cached.bytes.size() != page_of(next.job).bytes;
    }
    if (next.missed) {
      if (place_of(next.job).disk != kRemoteDisk || !start_remote(&next)) return;
      continue;
    }
    next.bytes = next.cached.bytes;
    next.planned = true;
    next.ready = true;
    ready_.notify_all();
  }
}

bool PageReaderImpl::start_remote(Item* wanted) {
  const PageInfo& page = page_of(wanted->job);
  // As much as it may hold beside the ring.
  if (remote_bytes_ > 0 && remote_bytes_ + page.bytes > options_.ring_bytes) return false;
  remote_bytes_ += page.bytes;
  ++remote_in_flight_;
  note_transfers();
  wanted->cached = {};
  wanted->remote = true;
  wanted->planned = true;
  wanted->begin_ns = env_.monotonic_ns();
  source_.remote()->read(
      key_of(wanted->job), wanted->job.chunk->record.info.salt, page.bytes,
      wanted->begin_ns + wanted->patience_ns - remote_busy_.until(wanted->begin_ns),
      [link = link_, index = next_plan_](Result<std::shared_ptr<const AlignedBuffer>> bytes) {
        MutexLock lock(link->mutex);
        if (link->reader == nullptr) return;
        link->reader->finish_remote(index, std::move(bytes));
      });
  return true;
}

// On the tier's thread.
void PageReaderImpl::finish_remote(std::size_t index,
                                   Result<std::shared_ptr<const AlignedBuffer>> bytes) {
  MutexLock lock(mutex_);
  --remote_in_flight_;
  note_transfers();
  Item& come = item(index);
  const ChunkRecord& record = come.job.chunk->record;
  const PageInfo& page = page_of(come.job);
  if (bytes.ok()) {
    come.bytes = {(*bytes)->data(), (*bytes)->size()};
    come.cached = {*bytes, come.bytes};
    keep_in_memory(come);
    source_.remote()->keep(record, {page, place_of(come.job).checksum, std::move(*bytes)});
  } else {
    source_.remote()->page_failed(record.info.id, page, bytes.status());
    if (bytes.code() == Code::kDataLoss) source_.count_checksum_failure();
    come.job.status = unavailable(bytes.status().message());
  }
  come.end_ns = env_.monotonic_ns();
  come.ready = true;
  ready_.notify_all();
}

void PageReaderImpl::note_transfers() {
  const std::int64_t now = env_.monotonic_ns();
  busy_.set(in_flight_ + remote_in_flight_ > 0, now);
  remote_busy_.set(remote_in_flight_ > 0, now);
}

void PageReaderImpl::set_ahead(std::uint64_t bytes) {
  if (ahead_bytes_.exchange(bytes) < bytes) wake();
}

bool PageReaderImpl::far_ahead() {
  const std::uint64_t limit = ahead_bytes_;
  far_ahead_ = ahead_ >= limit || (far_ahead_ && ahead_ > limit / 2);
  return far_ahead_ && next_plan_ > next_out_;
}

bool PageReaderImpl::start_request() {
  take_from_cache();
  if (next_plan_ == first_item_ + items_.size() || in_flight_ == queue_->depth()) return false;
  if (far_ahead()) return false;

  Item& first = item(next_plan_);
  const PagePlace& start = place_of(first.job);
  if (start.disk == kRemoteDisk) return false;  // waits for room
  auto request = std::make_unique<Request>();
  auto opened = source_.segment(start);
  if (!opened.ok()) {
    mark_failed(&first, opened.status());
    return true;
  }
  request->file = std::move(*opened);
  request->offset = start.offset / kBlock * kBlock;
  std::uint64_t end = start.offset + page_of(first.job).bytes;
  request->items.push_back(&first);
  std::size_t window = ring_cost(page_of(first.job).bytes);
  for (std::size_t i = next_plan_ + 1; i < first_item_ + items_.size(); ++i) {
    Item& other = item(i);
    if (other.planned) continue;
    const PagePlace& place = place_of(other.job);
    const std::uint32_t bytes = page_of(other.job).bytes;
    window += ring_cost(bytes);
    if (window > window_bytes_) break;
    if (place.disk != start.disk) continue;
    if (place.segment != start.segment || place.offset < end || place.offset - end > kMaxGap ||
        round_up(place.offset + bytes, kBlock) - request->offset > request_bytes_) {
      break;
    }
    end = place.offset + bytes;
    request->items.push_back(&other);
  }
  request->needed = end - request->offset;
  request->length = round_up(request->needed, kBlock);
  if (!take_ring(request->length, &request->ring_at)) return false;

  request->submitted_ns = env_.monotonic_ns();
  request->unreleased = request->items.size();
  for (Item* member : request->items) {
    member->planned = true;
    member->request = request.get();
    const std::size_t within = place_of(member->job).offset - request->offset;
    member->bytes = {ring_ + request->ring_at + within, page_of(member->job).bytes};
    ahead_ += member->bytes.size();
  }
  ++in_flight_;
  note_transfers();
  if (!options_.background) source_.traffic().begin_urgent();
  ++stats_.requests;
  requests_.push_back(std::move(request));
  submit_to_queue(requests_.back().get());
  return true;
}

void PageReaderImpl::submit_to_queue(Request* request) {
  IoRequest io;
  io.file = request->file.get();
  io.offset = request->offset + request->asked_from;
  io.buffer = {ring_ + request->ring_at + request->asked_from,
               request->length - request->asked_from};
  io.tag = reinterpret_cast<std::uintptr_t>(request);
  // The kernel may take its time, and pages that have come are wanted meanwhile.
  mutex_.unlock();
  const bool begun = queue_->submit(io).ok();
  mutex_.lock();
  if (begun) {
    if (cancelled_) queue_->cancel();
    return;
  }
  // The queue is broken: the pages of this request are read one by one.
  queue_failed_ = true;
  mutex_.unlock();
  finish(request);
  mutex_.lock();
}

void PageReaderImpl::mark_failed(Item* failed, Status status) {
  failed->job.status = std::move(status);
  failed->planned = true;
  failed->ready = true;
  ready_.notify_all();
}

bool PageReaderImpl::must_yield() {
  if (!options_.background || next_plan_ == first_item_ + items_.size()) return false;
  return in_flight_ >= disks_ || source_.traffic().urgent();
}

void PageReaderImpl::run() {
  std::vector<IoCompletion> completions;
  mutex_.lock();
  while (true) {
    take_released();
    // Asked once: if the answer changed between two looks, this thread would not be woken.
    bool waits = must_yield();
    while (!cancelled_ && !waits && start_request()) waits = must_yield();
    if (queue_->in_flight() == 0) {
      if (stop_) break;
      mutex_.unlock();
      wait_for_work(waits ? kYieldNs : -1);
      mutex_.lock();
      continue;
    }
    mutex_.unlock();
    completions.clear();
    const Status status = queue_->reap(true, &completions);
    if (!status.ok()) die("the I/O queue failed: " + status.to_string());
    for (const IoCompletion& completion : completions) on_completion(completion);
    mutex_.lock();
  }
  mutex_.unlock();
}

void PageReaderImpl::on_completion(const IoCompletion& completion) {
  auto* request = reinterpret_cast<Request*>(static_cast<std::uintptr_t>(completion.tag));
  if (completion.status.ok()) {
    request->done = std::min(request->asked_from + completion.bytes, request->length);
    if (completion.partial) {
      // What comes next may begin at the last block again, and a delivered page is decrypted.
      deliver(request, request->done / kBlock * kBlock);
      return;
    }
    const std::size_t resume = request->done / kBlock * kBlock;
    MutexLock lock(mutex_);
    stats_.disk_bytes += completion.bytes;
    if (!cancelled_ && request->done < request->needed && resume > request->asked_from) {
      request->asked_from = resume;  // short: ask for the rest
      submit_to_queue(request);
      return;
    }
  }
  finish(request);
}

// The I/O thread owns the request's pages until they are marked ready.
void PageReaderImpl::deliver(Request* request, std::size_t done) {
  const std::size_t first = request->delivered;
  while (request->delivered < request->items.size()) {
    Item* member = request->items[request->delivered];
    const std::uint64_t within = place_of(member->job).offset - request->offset;
    if (done < within + member->bytes.size()) break;
    member->unchecked = check_when_taken_;
    if (!check_when_taken_) check_page(member);
    ++request->delivered;
  }
  MutexLock lock(mutex_);
  for (std::size_t i = first; i < request->delivered; ++i) {
    Item* member = request->items[i];
    member->begin_ns = request->submitted_ns;
    member->end_ns = env_.monotonic_ns();
    member->ready = true;
  }
  if (request->delivered > first) ready_.notify_all();
}

std::uint64_t PageReaderImpl::read_again(const Request& request, Item* item) const {
  const PagePlace& place = place_of(item->job);
  const std::uint64_t within = place.offset - request.offset;
  const std::uint64_t end = within + item->bytes.size();
  const std::uint64_t from = within / kBlock * kBlock;
  const std::uint64_t length = round_up(end, kBlock) - from;
  // Not into the ring: the page before may be in use, and decrypted.
  AlignedBuffer blocks(length);
  const auto got = request.file->read_at(request.offset + from, blocks.span());
  if (!got.ok()) {
    item->job.status = got.status();
    return 0;
  }
  const std::span<std::byte> page(ring_ + request.ring_at + within, item->bytes.size());
  std::memcpy(page.data(), blocks.data() + (within - from),
              std::min(page.size(), *got - std::min(*got, within - from)));
  if (parts_.mirror != nullptr) item->job.status = parts_.mirror->update(page);
  if (from + *got < end) {
    item->job.status = data_loss(
        fmt::format("{} ends before the page at offset {}", request.file->path(), place.offset));
  }
  return *got;
}

void PageReaderImpl::finish(Request* request) {
  deliver(request, request->done);
  bool cancelled = false;
  {
    MutexLock lock(mutex_);
    cancelled = cancelled_;
  }
  // After an error or the end of the file somewhere in the request. A cancelled reader
  // delivers no pages.
  std::uint64_t bytes = 0;
  for (std::size_t i = request->delivered; !cancelled && i < request->items.size(); ++i) {
    bytes += read_again(*request, request->items[i]);
    check_page(request->items[i]);
  }
  MutexLock lock(mutex_);
  stats_.disk_bytes += bytes;
  for (std::size_t i = request->delivered; i < request->items.size(); ++i) {
    Item* member = request->items[i];
    member->begin_ns = request->submitted_ns;
    member->end_ns = env_.monotonic_ns();
    member->ready = true;
  }
  request->complete = true;
  --in_flight_;
  if (!options_.background) source_.traffic().end_urgent();
  note_transfers();
  free_requests();
  ready_.notify_all();
}

bool PageReaderImpl::take_in(const Item& item) const {
  const Seal& seal = source_.seal();
  const std::span<std::byte> bytes(ring_ + (item.bytes.data() - ring_), item.bytes.size());
  if (!page_intact(item.job.chunk->record, item.job.page, seal, bytes)) return false;
  return !seal.on() || parts_.mirror == nullptr || parts_.mirror->update(bytes).ok();
}

void PageReaderImpl::check_page(Item* checked) const {
  const PageJob& job = checked->job;
  const ChunkRecord& record = job.chunk->record;
  const PageInfo& page = page_of(job);
  const PagePlace& place = place_of(job);
  if (job.status.ok() && take_in(*checked)) {
    keep_in_memory(*checked);
    return;
  }
  const std::string what = fmt::format("chunk {} layer {} {}", to_hex(record.info.id), page.layer,
                                       encoding_name(page.encoding));
  if (job.status.ok()) {
    checked->job.status = data_loss(fmt::format("{}: checksum mismatch in {} at offset {}", what,
                                                source_.segment_path(place), place.offset));
  } else {
    checked->job.status = job.status.with_context(what);
  }
  if (source_.page_moved(record, job.page)) {
    checked->job.status = unavailable(what + ": another process has evicted or moved the page");
  }
  if (checked->job.status.code() == Code::kDataLoss) source_.count_checksum_failure();
}

std::vector<PageReaderImpl::Item*> PageReaderImpl::unchecked_pages() {
  std::vector<Item*> pages;
  std::size_t bytes = 0;
  for (std::size_t i = next_out_; i < first_item_ + items_.size(); ++i) {
    Item& page = item(i);
    if (!page.ready || (pages.empty() && !page.unchecked)) break;
    if (bytes >= kCheckedBytes && pages.size() >= kCheckedPages) break;
    if (!page.unchecked) continue;
    pages.push_back(&page);
    bytes += page.bytes.size();
  }
  return pages;
}

void PageReaderImpl::check_pages(std::span<Item* const> pages) const {
  options_.check_with(pages.size(), [&](std::size_t i) {
    check_page(pages[i]);
    pages[i]->unchecked = false;
  });
}

void PageReaderImpl::check_next() {
  const std::vector<Item*> pages = unchecked_pages();
  if (pages.empty()) return;
  mutex_.unlock();
  check_pages(pages);
  mutex_.lock();
}

void PageReaderImpl::keep_in_memory(const Item& item) const {
  if (!source_.cache().enabled()) return;
  source_.cache().insert(key_of(item.job), item.job.chunk->record.info, item.bytes);
}

Result<bool> PageReaderImpl::has_next() {
  if (cancelled_) return cancelled("the reader was cancelled");
  if (next_out_ == first_item_ + items_.size()) {
    return out_of_range("every submitted page has been delivered");
  }
  return item(next_out_).ready;
}

PageView PageReaderImpl::take_next() {
  PageView view;
  view.index = next_out_++;
  Item& taken = item(view.index);
  if (taken.request != nullptr) ahead_ -= page_of(taken.job).bytes;
  if (far_ahead_ && !far_ahead()) wake();
  view.status = taken.job.status;
  if (view.status.ok()) {
    view.bytes = taken.bytes;
    view.read_begin_ns = taken.begin_ns;
    view.read_end_ns = taken.end_ns;
    ++stats_.pages;
    stats_.page_bytes += view.bytes.size();
    if (taken.remote) {
      view.origin = PageOrigin::kRemote;
      stats_.remote_bytes += view.bytes.size();
    } else if (taken.cached) {
      view.origin = PageOrigin::kMemory;
      stats_.dram_bytes += view.bytes.size();
    }
  } else {
    ++stats_.failed_pages;
  }
  return view;
}

Result<PageView> PageReaderImpl::next() {
  MutexLock lock(mutex_);
  while (true) {
    check_next();
    HCACHE_ASSIGN_OR_RETURN(const bool ready, has_next());
    if (ready) return take_next();
    ready_.wait(mutex_);
  }
}

Result<std::optional<PageView>> PageReaderImpl::next_if_ready() {
  HCACHE_ASSIGN_OR_RETURN(const bool ready, has_next());
  if (!ready) return std::optional<PageView>();
  return std::optional<PageView>(take_next());
}

Result<std::optional<PageView>> PageReaderImpl::try_next() {
  if (!mutex_.try_lock()) return std::optional<PageView>();
  const std::vector<Item*> unchecked = unchecked_pages();
  if (!unchecked.empty()) {
    mutex_.unlock();
    check_pages(unchecked);
    if (!mutex_.try_lock()) return std::optional<PageView>();
  }
  Result<std::optional<PageView>> page = next_if_ready();
  mutex_.unlock();
  return page;
}

Result<std::optional<PageView>> PageReaderImpl::next_within(std::int64_t timeout_ns) {
  const std::int64_t end_ns = env_.monotonic_ns() + timeout_ns;
  MutexLock lock(mutex_);
  while (true) {
    check_next();
    HCACHE_ASSIGN_OR_RETURN(std::optional<PageView> page, next_if_ready());
    const std::int64_t left_ns = end_ns - env_.monotonic_ns();
    if (page || left_ns <= 0) return page;
    ready_.wait_for_ns(mutex_, left_ns);
  }
}

void PageReaderImpl::release(std::size_t index) {
  {
    MutexLock lock(wake_mutex_);
    released_.push_back(index);
  }
  if (!mutex_.try_lock()) return wake();  // the I/O thread takes it in
  take_released();
  mutex_.unlock();
}

void PageReaderImpl::take_released() {
  std::vector<std::size_t> released;
  {
    MutexLock lock(wake_mutex_);
    released.swap(released_);
  }
  for (const std::size_t index : released) set_free(index);
}

void PageReaderImpl::set_free(std::size_t index) {
  if (index < first_item_ || index >= next_out_) die("release() of a page that is not out");
  Item& given = item(index);
  if (given.released) die("release() of a page twice");
  given.released = true;
  if (given.request != nullptr) --given.request->unreleased;
  if (given.remote) {
    remote_bytes_ -= page_of(given.job).bytes;
    wake();
  }
  given.job.chunk.reset();
  given.cached = {};
  free_requests();
  while (!items_.empty() && items_.front().released) {
    items_.pop_front();
    ++first_item_;
  }
}

void PageReaderImpl::free_requests() {
  while (!requests_.empty() && requests_.front()->complete && requests_.front()->unreleased == 0) {
    requests_.pop_front();
    wake();
  }
}

void PageReaderImpl::wake() {
  {
    MutexLock lock(wake_mutex_);
    woken_ = true;
  }
  work_.notify_one();
}

void PageReaderImpl::wait_for_work(std::int64_t at_most_ns) {
  MutexLock lock(wake_mutex_);
  if (!woken_ && at_most_ns >= 0) work_.wait_for_ns(wake_mutex_, at_most_ns);
  while (!woken_ && at_most_ns < 0) work_.wait(wake_mutex_);
  woken_ = false;
}

void PageReaderImpl::cancel() {
  MutexLock lock(mutex_);
  cancelled_ = true;
  queue_->cancel();
  wake();
  ready_.notify_all();
}

ReaderStats PageReaderImpl::stats() const {
  MutexLock lock(mutex_);
  ReaderStats out = stats_;
  out.busy_s = static_cast<double>(busy_.until(env_.monotonic_ns())) / 1e9;
  return out;
}

}  // namespace hcache::store
