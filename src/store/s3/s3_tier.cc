#include "s3/s3_tier.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/log.h"
#include "base/sync.h"
#include "net/tier_account.h"
#include "s3/s3_format.h"
#include "s3/s3_writer.h"

namespace hcache::store {
namespace {

constexpr std::int64_t kCollectNs = 1'000'000;   // reads wait for each other
constexpr std::uint64_t kRangeBytes = 8U << 20;  // of one read
constexpr std::uint64_t kMaxGap = 64U << 10;     // between two pages that are read along
constexpr std::size_t kMaxPlaces = 16384;        // chunks whose index is remembered

class S3Tier : public Tier {
 public:
  S3Tier(Env& env, const RemoteOptions& options, const Seal& seal, std::string name,
         std::unique_ptr<S3Client> client)
      : env_(env),
        seal_(seal),
        account_(env, std::move(name), options.queue_bytes),
        api_(*client),
        writer_(env, seal, *client, account_),
        client_(std::move(client)) {
    reader_ = std::thread([this] { read_together(); });
  }
  S3Tier(const S3Tier&) = delete;
  S3Tier& operator=(const S3Tier&) = delete;
  ~S3Tier() override;

  void find(std::vector<ChunkId> ids, std::int64_t deadline_ns, FindDone done) override;
  void read(const PageKey& page, const SaltId& salt, std::uint32_t bytes, std::int64_t deadline_ns,
            ReadDone done) override HCACHE_EXCLUDES(mutex_);
  // What is used is not known there: its lifecycle rules go by age.
  void touch(std::span<const ChunkId> /*ids*/) override {}
  bool write(TierWrite write) override { return writer_.write(std::move(write)); }
  void erase(std::span<const ChunkId> ids) override HCACHE_EXCLUDES(mutex_);
  Status flush(std::int64_t deadline_ns) override {
    writer_.hurry();
    return account_.flush(deadline_ns);
  }
  RemoteStat stat() const override { return account_.stat(api_.available()); }

 private:
  struct Read {
    PageName name;
    S3Entry entry;
    std::int64_t deadline_ns = 0;
    ReadDone done;
  };

  void read_together() HCACHE_EXCLUDES(mutex_);
  void start_reads(std::vector<Read> reads);
  void finish_reads(const std::vector<Read>& reads, std::uint64_t first,
                    const Result<std::string>& body);
  [[nodiscard]] Result<std::shared_ptr<const AlignedBuffer>> page_in(const Read& read,
                                                                     std::string_view value) const;
  [[nodiscard]] std::uint64_t end_of(const S3Entry& entry) const {
    return entry.offset + seal_.value_bytes(entry.page.bytes);
  }
  void remember(const S3Index& index) HCACHE_EXCLUDES(mutex_);

  Env& env_;
  const Seal seal_;
  mutable Mutex mutex_;
  CondVar wake_;
  std::vector<Read> reads_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_map<ChunkId, std::vector<S3Entry>> places_ HCACHE_GUARDED_BY(mutex_);
  std::deque<ChunkId> places_order_ HCACHE_GUARDED_BY(mutex_);  // may name what is gone
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  std::thread reader_;
  TierAccount account_;
  S3Client& api_;
  S3Writer writer_;
  const std::unique_ptr<S3Client> client_;  // the last: its thread uses all of the above
};

S3Tier::~S3Tier() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
    wake_.notify_all();
  }
  reader_.join();
  writer_.stop();
  std::vector<Read> left;
  {
    MutexLock lock(mutex_);
    left.swap(reads_);
  }
  for (const Read& read : left) read.done(cancelled("the S3 tier is gone"));
}

// ---- Finding ------------------------------------------------------------------------------------

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
    call.key = index_key(seal_.hide(ids[i]));
    call.deadline_ns = deadline_ns;
    call.done = [this, search, i, id = ids[i]](const Result<std::string>& body) {
      if (body.ok()) {
        const auto index = decode_index(id, *body, seal_);
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

void S3Tier::remember(const S3Index& index) {
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

void S3Tier::erase(std::span<const ChunkId> ids) {
  {
    MutexLock lock(mutex_);
    for (const ChunkId& id : ids) places_.erase(id);
  }
  writer_.erase(ids);
}

// ---- Reading ------------------------------------------------------------------------------------

void S3Tier::read(const PageKey& page, const SaltId& salt, std::uint32_t bytes,
                  std::int64_t deadline_ns, ReadDone done) {
  Read read;
  read.name = {salt, page.chunk, {page.layer, page.encoding, bytes}};
  read.deadline_ns = deadline_ns;
  read.done = std::move(done);
  account_.begin_read();
  MutexLock lock(mutex_);
  if (const auto known = places_.find(page.chunk); known != places_.end()) {
    for (const S3Entry& entry : known->second) {
      if (entry.page.layer == page.layer && entry.page.encoding == page.encoding &&
          entry.page.bytes == bytes && entry.checksum == page.checksum) {
        read.entry = entry;
      }
    }
  }
  reads_.push_back(std::move(read));  // without a place it is refused by the thread
  wake_.notify_all();
}

// Those that come together are read together.
void S3Tier::read_together() {
  MutexLock lock(mutex_);
  while (!stop_) {
    if (reads_.empty()) {
      wake_.wait(mutex_);
      continue;
    }
    lock.unlock();
    env_.sleep_ns(kCollectNs);
    lock.lock();
    std::vector<Read> reads;
    reads.swap(reads_);
    lock.unlock();
    start_reads(std::move(reads));
    lock.lock();
  }
}

void S3Tier::start_reads(std::vector<Read> reads) {
  std::stable_sort(reads.begin(), reads.end(), [](const Read& a, const Read& b) {
    return std::pair(a.entry.object, a.entry.offset) < std::pair(b.entry.object, b.entry.offset);
  });
  for (std::size_t i = 0; i < reads.size();) {
    const S3Entry& first = reads[i].entry;
    std::uint64_t end = end_of(first);
    std::int64_t deadline_ns = reads[i].deadline_ns;
    std::vector<Read> together;
    const std::uint64_t from = first.offset;
    const ObjectName object = first.object;
    together.push_back(std::move(reads[i]));
    for (++i; i < reads.size(); ++i) {
      const S3Entry& next = reads[i].entry;
      if (next.object != object || next.offset > end + kMaxGap ||
          end_of(next) > from + kRangeBytes || object.is_zero()) {
        break;
      }
      end = std::max(end, end_of(next));
      deadline_ns = std::max(deadline_ns, reads[i].deadline_ns);
      together.push_back(std::move(reads[i]));
    }
    if (object.is_zero()) {
      finish_reads(together, from, not_found(account_.name() + " is not known to have the page"));
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
    Result<std::shared_ptr<const AlignedBuffer>> result = body.status();
    if (body.ok()) {
      const std::string_view bytes = *body;
      result = page_in(
          read, bytes.substr(read.entry.offset - first, seal_.value_bytes(read.entry.page.bytes)));
    }
    account_.end_read(result.status(), read.entry.page.bytes);
    read.done(std::move(result));
  }
}

Result<std::shared_ptr<const AlignedBuffer>> S3Tier::page_in(const Read& read,
                                                             std::string_view value) const {
  const S3Entry& entry = read.entry;
  auto bytes = seal_.open_value(read.name, value);
  if (bytes != nullptr && checksum({bytes->data(), bytes->size()}) == entry.checksum) return bytes;
  const std::string where =
      fmt::format("offset {} of {} in {}", entry.offset, data_key(entry.object), account_.name());
  if (value.find_first_not_of('\0') == std::string_view::npos) {
    return not_found("the page was erased at " + where);
  }
  return data_loss("checksum mismatch at " + where);
}

}  // namespace

std::unique_ptr<Tier> make_s3_tier(Env& env, const RemoteOptions& options, const Seal& seal,
                                   std::string name, std::unique_ptr<S3Client> client) {
  return std::make_unique<S3Tier>(env, options, seal, std::move(name), std::move(client));
}

Result<std::unique_ptr<Tier>> open_s3_tier(Env& env, const RemoteOptions& options,
                                           const Seal& seal) {
  HCACHE_ASSIGN_OR_RETURN(S3Url url, parse_s3_url(options.url));
  const std::string name = url.display();
  HCACHE_ASSIGN_OR_RETURN(auto client, S3Client::open(env, std::move(url),
                                                      {.access_key = options.access_key,
                                                       .secret_key = options.secret_key,
                                                       .session_token = options.session_token}));
  return make_s3_tier(env, options, seal, name, std::move(client));
}

}  // namespace hcache::store
