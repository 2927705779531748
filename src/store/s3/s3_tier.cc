#include "s3/s3_tier.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/log.h"
#include "base/sync.h"
#include "bytes.h"
#include "s3/s3_client.h"

namespace hcache::store {
namespace {

constexpr std::int64_t kWriteNs = 120'000'000'000;  // for an object to be written
constexpr std::int64_t kEraseNs = 60'000'000'000;
constexpr std::int64_t kGatherNs = 500'000'000;    // chunks of one chain wait for each other
constexpr std::int64_t kCollectNs = 1'000'000;     // reads do
constexpr std::uint64_t kObjectBytes = 64U << 20;  // of data in one object
constexpr std::uint64_t kRangeBytes = 8U << 20;    // of one read
constexpr std::uint64_t kMaxGap = 64U << 10;       // between two pages that are read along
constexpr std::size_t kMaxPlaces = 16384;          // chunks whose index is remembered

constexpr std::string_view kIndexMagic = "HCS3IDX1";
constexpr std::size_t kEntryBytes = 2 + 1 + 1 + 4 + 8 + 8 + 16;
constexpr std::size_t kCheckBytes = 8;

using ObjectName = Id128<struct ObjectNameTag>;

// Where a page lies.
struct Entry {
  PageInfo page;
  std::uint64_t checksum = 0;
  ObjectName object;
  std::uint64_t offset = 0;
};

struct Index {
  ChunkRecord record;  // without pages
  std::vector<Entry> entries;
};

bool page_before(const Entry& a, const Entry& b) {
  return std::pair(a.page.layer, a.page.encoding) < std::pair(b.page.layer, b.page.encoding);
}

std::string index_key(const ChunkId& id) { return "c/" + to_hex(id); }
std::string data_key(const ObjectName& name) { return "d/" + to_hex(name); }

std::span<const std::byte> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string encode_index(const Index& index) {
  const std::string record = encode_chunk(index.record);
  Writer w;
  w.text(kIndexMagic).number(static_cast<std::uint32_t>(record.size())).text(record);
  w.number(static_cast<std::uint32_t>(index.entries.size()));
  for (const Entry& entry : index.entries) {
    w.number(entry.page.layer).number(static_cast<std::uint8_t>(entry.page.encoding));
    w.number(std::uint8_t{0}).number(entry.page.bytes).number(entry.checksum);
    w.number(entry.offset).id(entry.object);
  }
  const std::uint64_t check = checksum(bytes_of(w.out()));
  w.number(check);
  return std::move(w.out());
}

Result<Index> decode_index(const ChunkId& id, std::string_view body) {
  const auto bad = [&](const char* why) {
    return data_loss(fmt::format("index of chunk {}: {}", to_hex(id), why));
  };
  if (body.size() < kIndexMagic.size() + 8 + kCheckBytes || !body.starts_with(kIndexMagic)) {
    return bad("it is none");
  }
  Parser check(body.substr(body.size() - kCheckBytes));
  body.remove_suffix(kCheckBytes);
  if (check.number<std::uint64_t>() != checksum(bytes_of(body))) return bad("checksum mismatch");
  body.remove_prefix(kIndexMagic.size());
  Parser in(body);
  const auto n_record = in.number<std::uint32_t>();
  if (n_record > body.size() - 8) return bad("inconsistent sizes");
  Index index;
  HCACHE_ASSIGN_OR_RETURN(index.record, decode_chunk(id, in.text(n_record)));
  index.record.info.pages.clear();
  index.record.places.clear();
  const auto n = in.number<std::uint32_t>();
  if (body.size() != 8 + n_record + n * kEntryBytes) return bad("inconsistent sizes");
  for (std::uint32_t i = 0; i < n; ++i) {
    Entry entry;
    entry.page.layer = in.number<std::uint16_t>();
    const auto encoding = in.number<std::uint8_t>();
    in.number<std::uint8_t>();
    entry.page.bytes = in.number<std::uint32_t>();
    entry.checksum = in.number<std::uint64_t>();
    entry.offset = in.number<std::uint64_t>();
    entry.object = in.id<ObjectName>();
    if (!valid_encoding(encoding) || entry.page.bytes == 0 || entry.page.bytes > kMaxPageBytes ||
        entry.page.bytes % index.record.info.tokens.size() != 0 ||
        entry.offset > kObjectBytes + kMaxPageBytes) {
      return bad("impossible page");
    }
    entry.page.encoding = static_cast<Encoding>(encoding);
    index.entries.push_back(entry);
  }
  if (!std::is_sorted(index.entries.begin(), index.entries.end(), page_before)) {
    return bad("pages out of order");
  }
  return index;
}

// The record with its pages, as match() offers it.
ChunkRecord record_of(const Index& index) {
  ChunkRecord record = index.record;
  for (const Entry& entry : index.entries) {
    if (record.info.find_page(entry.page.layer, entry.page.encoding) != nullptr) continue;
    record.info.pages.push_back(entry.page);
    record.places.push_back({.disk = kRemoteDisk, .checksum = entry.checksum});
  }
  return record;
}

class S3Tier : public Tier {
 public:
  S3Tier(Env& env, const RemoteOptions& options, std::string name, std::unique_ptr<S3Client> client)
      : env_(env),
        options_(options),
        name_(std::move(name)),
        api_(*client),
        client_(std::move(client)) {
    worker_ = std::thread([this] { work(); });
  }
  S3Tier(const S3Tier&) = delete;
  S3Tier& operator=(const S3Tier&) = delete;
  ~S3Tier() override;

  void find(std::vector<ChunkId> ids, std::int64_t deadline_ns, FindDone done) override;
  void read(const PageKey& page, std::uint32_t bytes, std::int64_t deadline_ns,
            ReadDone done) override HCACHE_EXCLUDES(mutex_);
  // What is used is not known there: its lifecycle rules go by age.
  void touch(std::span<const ChunkId> /*ids*/) override {}
  bool write(TierWrite write) override HCACHE_EXCLUDES(mutex_);
  void erase(std::span<const ChunkId> ids) override HCACHE_EXCLUDES(mutex_);
  Status flush(std::int64_t deadline_ns) override HCACHE_EXCLUDES(mutex_);
  RemoteStat stat() const override HCACHE_EXCLUDES(mutex_);

 private:
  struct Read {
    Entry entry;
    std::int64_t deadline_ns = 0;
    ReadDone done;
  };
  // Consecutive chunks of one chain, to be one object.
  struct Group {
    std::vector<TierWrite> chunks;
    std::uint64_t bytes = 0;
    std::int64_t since_ns = 0;
  };

  void work() HCACHE_EXCLUDES(mutex_);
  void start_reads(std::vector<Read> reads) HCACHE_EXCLUDES(mutex_);
  void finish_reads(const std::vector<Read>& reads, std::uint64_t first,
                    const Result<std::string>& body) HCACHE_EXCLUDES(mutex_);
  void upload(Group group) HCACHE_EXCLUDES(mutex_);
  void write_index(Index index, bool has_more) HCACHE_EXCLUDES(mutex_);
  void put_index(const Index& index) HCACHE_EXCLUDES(mutex_);
  void remember(const Index& index) HCACHE_EXCLUDES(mutex_);
  // A step of something in the background begins or ends.
  void begin_step() HCACHE_EXCLUDES(mutex_);
  void end_step(bool ok) HCACHE_EXCLUDES(mutex_);

  Env& env_;
  const RemoteOptions options_;
  const std::string name_;
  mutable Mutex mutex_;
  CondVar wake_;
  CondVar idle_;
  std::vector<Read> reads_ HCACHE_GUARDED_BY(mutex_);
  std::deque<Group> groups_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_map<ChunkId, std::vector<Entry>> places_ HCACHE_GUARDED_BY(mutex_);
  std::deque<ChunkId> places_order_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t steps_ HCACHE_GUARDED_BY(mutex_) = 0;  // in the background, under way
  std::uint64_t reading_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::int64_t busy_since_ns_ HCACHE_GUARDED_BY(mutex_) = 0;
  bool flush_ HCACHE_GUARDED_BY(mutex_) = false;
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  RemoteStat stat_ HCACHE_GUARDED_BY(mutex_);
  std::thread worker_;
  S3Client& api_;
  const std::unique_ptr<S3Client> client_;  // the last: its thread uses all of the above
};

S3Tier::~S3Tier() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
    wake_.notify_all();
  }
  worker_.join();
  std::vector<Read> left;
  {
    MutexLock lock(mutex_);
    left.swap(reads_);
  }
  for (const Read& read : left) read.done(cancelled("the S3 tier is gone"));
}

void S3Tier::begin_step() {
  MutexLock lock(mutex_);
  ++steps_;
}

void S3Tier::end_step(bool ok) {
  MutexLock lock(mutex_);
  if (!ok) ++stat_.failures;
  if (--steps_ == 0) idle_.notify_all();
}

// ---- Finding and reading ------------------------------------------------------------------------

void S3Tier::find(std::vector<ChunkId> ids, std::int64_t deadline_ns, FindDone done) {
  struct Search {
    std::vector<std::optional<ChunkRecord>> found;
    std::size_t left = 0;
    Status status;
    FindDone done;
  };
  auto search = std::make_shared<Search>();
  search->found.resize(ids.size());
  search->left = ids.size();
  search->done = std::move(done);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    S3Call call;
    call.key = index_key(ids[i]);
    call.deadline_ns = deadline_ns;
    call.done = [this, search, i, id = ids[i]](const Result<std::string>& body) {
      if (body.ok()) {
        const auto index = decode_index(id, *body);
        if (index.ok()) {
          remember(*index);
          search->found[i] = record_of(*index);
        } else {
          log::warn("in S3: {}", index.status().to_string());
        }
      } else if (body.code() != Code::kNotFound) {
        search->status = body.status();
      }
      if (--search->left > 0) return;
      if (search->status.ok()) {
        search->done(std::move(search->found));
      } else {
        search->done(search->status);
      }
    };
    api_.call(std::move(call));
  }
}

void S3Tier::remember(const Index& index) {
  MutexLock lock(mutex_);
  const ChunkId id = index.record.info.id;
  const bool is_new = !places_.contains(id);
  places_[id] = index.entries;
  if (!is_new) return;
  places_order_.push_back(id);
  if (places_order_.size() <= kMaxPlaces) return;
  places_.erase(places_order_.front());
  places_order_.pop_front();
}

void S3Tier::read(const PageKey& page, std::uint32_t bytes, std::int64_t deadline_ns,
                  ReadDone done) {
  Read read;
  read.deadline_ns = deadline_ns;
  read.done = std::move(done);
  MutexLock lock(mutex_);
  if (reading_++ == 0) busy_since_ns_ = env_.monotonic_ns();
  if (const auto known = places_.find(page.chunk); known != places_.end()) {
    for (const Entry& entry : known->second) {
      if (entry.page.layer == page.layer && entry.page.encoding == page.encoding &&
          entry.page.bytes == bytes && entry.checksum == page.checksum) {
        read.entry = entry;
      }
    }
  }
  reads_.push_back(std::move(read));  // without a place it is refused by the worker
  wake_.notify_all();
}

void S3Tier::start_reads(std::vector<Read> reads) {
  std::stable_sort(reads.begin(), reads.end(), [](const Read& a, const Read& b) {
    return std::pair(a.entry.object, a.entry.offset) < std::pair(b.entry.object, b.entry.offset);
  });
  for (std::size_t i = 0; i < reads.size();) {
    const Entry& first = reads[i].entry;
    std::uint64_t end = first.offset + first.page.bytes;
    std::int64_t deadline_ns = reads[i].deadline_ns;
    std::vector<Read> together;
    const std::uint64_t from = first.offset;
    const ObjectName object = first.object;
    together.push_back(std::move(reads[i]));
    for (++i; i < reads.size(); ++i) {
      const Entry& next = reads[i].entry;
      if (next.object != object || next.offset > end + kMaxGap ||
          next.offset + next.page.bytes > from + kRangeBytes || object.is_zero()) {
        break;
      }
      end = std::max(end, next.offset + next.page.bytes);
      deadline_ns = std::max(deadline_ns, reads[i].deadline_ns);
      together.push_back(std::move(reads[i]));
    }
    if (object.is_zero()) {
      finish_reads(together, from, not_found(name_ + " is not known to have the page"));
      continue;
    }
    S3Call call;
    call.key = data_key(object);
    call.offset = from;
    call.bytes = end - from;
    call.deadline_ns = deadline_ns;
    call.done = [this, from, together = std::make_shared<std::vector<Read>>(std::move(together))](
                    const Result<std::string>& body) { finish_reads(*together, from, body); };
    api_.call(std::move(call));
  }
}

void S3Tier::finish_reads(const std::vector<Read>& reads, std::uint64_t first,
                          const Result<std::string>& body) {
  for (const Read& read : reads) {
    const PageInfo& page = read.entry.page;
    Result<std::shared_ptr<const AlignedBuffer>> result = body.status();
    if (body.ok()) {
      auto buffer = std::make_shared<AlignedBuffer>(page.bytes);
      std::memcpy(buffer->data(), body->data() + (read.entry.offset - first), page.bytes);
      if (checksum(buffer->span()) == read.entry.checksum) {
        result = std::shared_ptr<const AlignedBuffer>(std::move(buffer));
      } else {
        result = data_loss(fmt::format("checksum mismatch at offset {} of {} in {}",
                                       read.entry.offset, data_key(read.entry.object), name_));
      }
    }
    {
      MutexLock lock(mutex_);
      if (result.ok()) {
        ++stat_.pages_read;
        stat_.bytes_read += page.bytes;
      } else if (result.code() != Code::kCancelled) {
        ++stat_.failures;
      }
      if (--reading_ == 0) {
        stat_.read_busy_s += static_cast<double>(env_.monotonic_ns() - busy_since_ns_) * 1e-9;
      }
    }
    read.done(std::move(result));
  }
}

// ---- The worker ---------------------------------------------------------------------------------

void S3Tier::work() {
  MutexLock lock(mutex_);
  while (!stop_) {
    if (!reads_.empty()) {
      // Those that come together are read together.
      lock.unlock();
      env_.sleep_ns(kCollectNs);
      lock.lock();
      std::vector<Read> reads;
      reads.swap(reads_);
      lock.unlock();
      start_reads(std::move(reads));
      lock.lock();
      continue;
    }
    const std::int64_t now = env_.monotonic_ns();
    const bool due = !groups_.empty() && (flush_ || groups_.front().bytes >= kObjectBytes / 2 ||
                                          now - groups_.front().since_ns >= kGatherNs);
    if (due) {
      Group group = std::move(groups_.front());
      groups_.pop_front();
      ++steps_;
      lock.unlock();
      upload(std::move(group));
      end_step(true);
      lock.lock();
      continue;
    }
    if (groups_.empty()) {
      flush_ = false;
      if (steps_ == 0) idle_.notify_all();
      wake_.wait(mutex_);
    } else {
      wake_.wait_for_ns(mutex_, kGatherNs / 5);
    }
  }
}

bool S3Tier::write(TierWrite write) {
  std::uint64_t bytes = 0;
  for (const TierPage& page : write.pages) bytes += page.bytes->size();
  MutexLock lock(mutex_);
  if (!api_.available() || stat_.backlog_bytes + bytes > options_.queue_bytes) {
    stat_.pages_skipped += write.pages.size();
    return false;
  }
  stat_.backlog_bytes += bytes;
  // Behind the chunk that it continues, if that still waits. A tail is alone: it goes alone.
  const bool whole = write.info.tokens.size() == kChunkTokens;
  for (Group& group : groups_) {
    if (!whole || group.bytes + bytes > kObjectBytes ||
        group.chunks.back().info.id != write.info.parent) {
      continue;
    }
    group.chunks.push_back(std::move(write));
    group.bytes += bytes;
    return true;
  }
  Group& group = groups_.emplace_back();
  group.chunks.push_back(std::move(write));
  group.bytes = bytes;
  group.since_ns = env_.monotonic_ns();
  wake_.notify_all();
  return true;
}

// Layer by layer over all chunks: what a restore reads together lies together.
void S3Tier::upload(Group group) {
  ObjectName name;
  for (std::size_t i = 0; i < 16; i += 8) {
    const std::uint64_t random = env_.random_u64();
    std::memcpy(name.bytes.data() + i, &random, 8);
  }
  struct Piece {
    std::size_t chunk = 0;
    const TierPage* page = nullptr;
  };
  std::vector<Piece> pieces;
  for (std::size_t c = 0; c < group.chunks.size(); ++c) {
    for (const TierPage& page : group.chunks[c].pages) pieces.push_back({c, &page});
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.page->info.encoding, a.page->info.layer) <
           std::pair(b.page->info.encoding, b.page->info.layer);
  });
  auto indexes = std::make_shared<std::vector<Index>>(group.chunks.size());
  auto more = std::make_shared<std::vector<bool>>();
  auto body = std::make_shared<std::string>();
  body->reserve(group.bytes);
  for (const Piece& piece : pieces) {
    (*indexes)[piece.chunk].entries.push_back(
        {piece.page->info, piece.page->checksum, name, body->size()});
    body->append(reinterpret_cast<const char*>(piece.page->bytes->data()),
                 piece.page->bytes->size());
  }
  for (std::size_t c = 0; c < group.chunks.size(); ++c) {
    more->push_back(group.chunks[c].info.pages.size() > group.chunks[c].pages.size());
    (*indexes)[c].record.info = std::move(group.chunks[c].info);
    (*indexes)[c].record.info.pages.clear();
  }
  const std::uint64_t n_pages = pieces.size();
  const std::uint64_t bytes = group.bytes;
  begin_step();
  const auto indexing = [this, indexes, more, n_pages, bytes](const Result<std::string>& done) {
    {
      MutexLock lock(mutex_);
      stat_.backlog_bytes -= bytes;
      if (done.ok()) {
        stat_.pages_written += n_pages;
        stat_.bytes_written += bytes;
      }
    }
    // The data is there: now it may be found.
    for (std::size_t c = 0; done.ok() && c < indexes->size(); ++c) {
      write_index(std::move((*indexes)[c]), (*more)[c]);
    }
    end_step(done.ok() || done.code() == Code::kCancelled);
  };
  if (body->empty()) return indexing(std::string());
  S3Call call;
  call.method = "PUT";
  call.key = data_key(name);
  call.body = std::move(body);
  call.deadline_ns = env_.monotonic_ns() + kWriteNs;
  call.bulk = true;
  call.done = indexing;
  api_.call(std::move(call));
}

void S3Tier::write_index(Index index, bool has_more) {
  std::sort(index.entries.begin(), index.entries.end(), page_before);
  if (!has_more) return put_index(index);
  // Its other pages may be there already.
  begin_step();
  S3Call call;
  call.key = index_key(index.record.info.id);
  call.deadline_ns = env_.monotonic_ns() + kWriteNs;
  call.bulk = true;
  call.done = [this, index = std::move(index)](const Result<std::string>& body) {
    Index merged = index;
    if (body.ok()) {
      const auto there = decode_index(index.record.info.id, *body);
      for (std::size_t i = 0; there.ok() && i < there->entries.size(); ++i) {
        const Entry& entry = there->entries[i];
        const bool known =
            std::any_of(index.entries.begin(), index.entries.end(), [&](const Entry& mine) {
              return mine.page.layer == entry.page.layer &&
                     mine.page.encoding == entry.page.encoding;
            });
        if (!known) merged.entries.push_back(entry);
      }
      std::sort(merged.entries.begin(), merged.entries.end(), page_before);
    }
    const bool ok = body.ok() || body.code() == Code::kNotFound;
    if (ok) put_index(merged);
    end_step(ok || body.code() == Code::kCancelled);
  };
  api_.call(std::move(call));
}

void S3Tier::put_index(const Index& index) {
  begin_step();
  S3Call call;
  call.method = "PUT";
  call.key = index_key(index.record.info.id);
  call.body = std::make_shared<std::string>(encode_index(index));
  call.deadline_ns = env_.monotonic_ns() + kWriteNs;
  call.bulk = true;
  call.done = [this](const Result<std::string>& done) {
    end_step(done.ok() || done.code() == Code::kCancelled);
  };
  api_.call(std::move(call));
}

// The index first, so that nothing points to what is gone; then the objects with its pages,
// whatever else they hold.
void S3Tier::erase(std::span<const ChunkId> ids) {
  {
    MutexLock lock(mutex_);
    for (const ChunkId& id : ids) {
      places_.erase(id);
      for (Group& group : groups_) {
        std::erase_if(group.chunks, [&](const TierWrite& chunk) HCACHE_REQUIRES(mutex_) {
          if (chunk.info.id != id) return false;
          for (const TierPage& page : chunk.pages) {
            group.bytes -= page.bytes->size();
            stat_.backlog_bytes -= page.bytes->size();
          }
          return true;
        });
      }
    }
    std::erase_if(groups_, [](const Group& group) { return group.chunks.empty(); });
  }
  for (const ChunkId& id : ids) {
    begin_step();
    S3Call call;
    call.key = index_key(id);
    call.deadline_ns = env_.monotonic_ns() + kEraseNs;
    call.bulk = true;
    call.done = [this, id](const Result<std::string>& body) {
      const auto remove = [this](const std::string& key) {
        begin_step();
        S3Call gone;
        gone.method = "DELETE";
        gone.key = key;
        gone.deadline_ns = env_.monotonic_ns() + kEraseNs;
        gone.bulk = true;
        gone.done = [this](const Result<std::string>& done) {
          end_step(done.ok() || done.code() == Code::kNotFound || done.code() == Code::kCancelled);
        };
        api_.call(std::move(gone));
      };
      if (body.ok()) {
        remove(index_key(id));
        std::set<ObjectName> objects;
        const auto index = decode_index(id, *body);
        for (std::size_t i = 0; index.ok() && i < index->entries.size(); ++i) {
          objects.insert(index->entries[i].object);
        }
        for (const ObjectName& object : objects) remove(data_key(object));
      }
      end_step(body.ok() || body.code() == Code::kNotFound || body.code() == Code::kCancelled);
    };
    api_.call(std::move(call));
  }
}

Status S3Tier::flush(std::int64_t deadline_ns) {
  MutexLock lock(mutex_);
  flush_ = true;
  wake_.notify_all();
  while (!groups_.empty() || steps_ > 0) {
    const std::int64_t left = deadline_ns - env_.monotonic_ns();
    if (left <= 0) {
      return unavailable(fmt::format("{} bytes are not yet in {}", stat_.backlog_bytes, name_));
    }
    idle_.wait_for_ns(mutex_, left);
  }
  return {};
}

RemoteStat S3Tier::stat() const {
  MutexLock lock(mutex_);
  RemoteStat stat = stat_;
  stat.name = name_;
  stat.backlog_requests = steps_ + groups_.size();
  stat.available = api_.available();
  return stat;
}

}  // namespace

Result<std::unique_ptr<Tier>> open_s3_tier(Env& env, const RemoteOptions& options) {
  HCACHE_ASSIGN_OR_RETURN(S3Url url, parse_s3_url(options.url));
  const std::string name = url.display();
  HCACHE_ASSIGN_OR_RETURN(auto client, S3Client::open(env, std::move(url),
                                                      {.access_key = options.access_key,
                                                       .secret_key = options.secret_key,
                                                       .session_token = options.session_token}));
  return std::unique_ptr<Tier>(std::make_unique<S3Tier>(env, options, name, std::move(client)));
}

}  // namespace hcache::store
