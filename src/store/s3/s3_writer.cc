#include "s3/s3_writer.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace hcache::store {
namespace {

constexpr std::int64_t kWriteNs = 120'000'000'000;  // for an object to be written
constexpr std::int64_t kGatherNs = 500'000'000;     // chunks of one chain wait for each other

ObjectName random_name(Env& env) {
  ObjectName name;
  for (std::size_t i = 0; i < name.bytes.size(); i += 8) {
    const std::uint64_t random = env.random_u64();
    std::memcpy(name.bytes.data() + i, &random, 8);
  }
  return name;
}

}  // namespace

S3Writer::S3Writer(Env& env, const Seal& seal, S3Client& client, TierAccount& account)
    : env_(env), seal_(seal), client_(client), account_(account), eraser_(env, seal, client) {
  gather_thread_ = std::thread([this] { gather(); });
  eraser_thread_ = std::thread([this] { erase_in_turn(); });
}

std::uint64_t S3Writer::bytes_of(const TierWrite& write) const {
  std::uint64_t bytes = 0;
  for (const TierPage& page : write.pages) bytes += seal_.value_bytes(page.info.bytes);
  return bytes;
}

void S3Writer::stop() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
    wake_.notify_all();
  }
  eraser_.stop();
  if (gather_thread_.joinable()) gather_thread_.join();
  if (eraser_thread_.joinable()) eraser_thread_.join();
}

void S3Writer::hurry() {
  MutexLock lock(mutex_);
  hurry_ = true;
  wake_.notify_all();
}

// ---- Gathering ----------------------------------------------------------------------------------

bool S3Writer::write(TierWrite write) {
  const std::uint64_t bytes = bytes_of(write);
  if (!account_.accept(write.pages.size(), bytes, client_.available())) return false;
  MutexLock lock(mutex_);
  // Behind the chunk that it continues, if that still waits. A tail goes alone.
  if (!lies_alone(write.info)) {
    for (Group& group : groups_) {
      if (group.bytes + bytes > kObjectBytes || group.chunks.size() == kMaxObjectChunks ||
          group.chunks.back().info.id != write.info.parent) {
        continue;
      }
      group.chunks.push_back(std::move(write));
      group.bytes += bytes;
      return true;
    }
  }
  account_.begin();
  Group& group = groups_.emplace_back();
  group.chunks.push_back(std::move(write));
  group.bytes = bytes;
  group.since_ns = env_.monotonic_ns();
  wake_.notify_all();
  return true;
}

std::deque<S3Writer::Group>::iterator S3Writer::due_group() {
  const std::int64_t now = env_.monotonic_ns();
  return std::find_if(
      groups_.begin(), groups_.end(), [&](const Group& group) HCACHE_REQUIRES(mutex_) {
        const bool due =
            hurry_ || group.bytes >= kObjectBytes / 2 || now - group.since_ns >= kGatherNs;
        return due && std::none_of(group.chunks.begin(), group.chunks.end(),
                                   [&](const TierWrite& chunk) HCACHE_REQUIRES(mutex_) {
                                     return uploading_.contains(chunk.info.id) ||
                                            erasing_.contains(chunk.info.id);
                                   });
      });
}

void S3Writer::gather() {
  MutexLock lock(mutex_);
  while (!stop_) {
    if (const auto due = due_group(); due != groups_.end()) {
      Group group = std::move(*due);
      groups_.erase(due);
      for (const TierWrite& chunk : group.chunks) uploading_.insert(chunk.info.id);
      lock.unlock();
      upload(std::move(group));
      lock.lock();
    } else if (groups_.empty()) {
      hurry_ = false;
      wake_.wait(mutex_);
    } else {
      wake_.wait_for_ns(mutex_, kGatherNs / 5);
    }
  }
}

// ---- Uploads ------------------------------------------------------------------------------------

void S3Writer::begin(const UploadPtr& upload) {
  account_.begin();
  MutexLock lock(mutex_);
  ++upload->requests;
}

void S3Writer::end(const UploadPtr& upload, const Status& status) {
  {
    MutexLock lock(mutex_);
    if (--upload->requests == 0) {
      for (const ChunkId& id : upload->ids) uploading_.erase(id);
      wake_.notify_all();
    }
  }
  account_.end(status);
}

// A head, then the pages layer by layer over all chunks: what a restore reads together lies
// together.
void S3Writer::upload(Group group) {
  struct Piece {
    std::size_t chunk = 0;
    const TierPage* page = nullptr;
  };
  const ObjectName name = random_name(env_);
  const auto upload = std::make_shared<Upload>();
  upload->requests = 1;  // the group's, which has begun
  upload->bytes = group.bytes;
  std::vector<S3Member> members;
  std::vector<Piece> pieces;
  for (std::size_t c = 0; c < group.chunks.size(); ++c) {
    const TierWrite& chunk = group.chunks[c];
    upload->ids.push_back(chunk.info.id);
    members.push_back({seal_.hide(chunk.info.id)});
    for (const TierPage& page : chunk.pages) pieces.push_back({c, &page});
  }
  upload->pages = pieces.size();
  upload->indexes.resize(group.chunks.size());
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.page->info.encoding, a.page->info.layer) <
           std::pair(b.page->info.encoding, b.page->info.layer);
  });
  auto body = std::make_shared<std::string>(encode_head(members));
  body->reserve(body->size() + group.bytes);
  for (const Piece& piece : pieces) {
    upload->indexes[piece.chunk].entries.push_back(
        {piece.page->info, piece.page->checksum, name, body->size()});
    const ChunkInfo& info = group.chunks[piece.chunk].info;
    const auto value = seal_.seal_value({info.salt, info.id, piece.page->info}, piece.page->bytes);
    body->append(reinterpret_cast<const char*>(value->data()), value->size());
  }
  for (std::size_t c = 0; c < group.chunks.size(); ++c) {
    ChunkInfo& info = group.chunks[c].info;
    upload->more.push_back(info.pages.size() > group.chunks[c].pages.size());
    info.pages.clear();
    upload->indexes[c].record.info = std::move(info);
  }
  if (pieces.empty()) return uploaded(upload, {});
  S3Call call;
  call.method = "PUT";
  call.key = data_key(name);
  call.body = std::move(body);
  call.deadline_ns = env_.monotonic_ns() + kWriteNs;
  call.bulk = true;
  call.done = [this, upload](const Result<std::string>& done) { uploaded(upload, done.status()); };
  client_.call(std::move(call));
}

void S3Writer::uploaded(const UploadPtr& upload, const Status& status) {
  if (status.ok()) {
    account_.written(upload->pages, upload->bytes);
    // The data is there: now it may be found.
    for (std::size_t c = 0; c < upload->indexes.size(); ++c) write_index(upload, c);
  } else {
    account_.dropped(upload->bytes);
  }
  end(upload, status);
}

void S3Writer::write_index(const UploadPtr& upload, std::size_t chunk) {
  S3Index& index = upload->indexes[chunk];
  std::sort(index.entries.begin(), index.entries.end(), entry_before);
  if (!upload->more[chunk]) return put_index(upload, index);
  // Its other pages may be there already.
  begin(upload);
  S3Call call;
  call.key = index_key(seal_.hide(index.record.info.id));
  call.deadline_ns = env_.monotonic_ns() + kWriteNs;
  call.bulk = true;
  call.done = [this, upload, chunk](const Result<std::string>& body) {
    S3Index& mine = upload->indexes[chunk];
    if (body.ok()) {
      const auto there = decode_index(mine.record.info.id, *body, seal_);
      const std::size_t n = mine.entries.size();
      for (std::size_t i = 0; there.ok() && i < there->entries.size(); ++i) {
        const S3Entry& entry = there->entries[i];
        const auto end = mine.entries.begin() + static_cast<std::ptrdiff_t>(n);
        const bool known = std::any_of(mine.entries.begin(), end, [&](const S3Entry& other) {
          return other.page.layer == entry.page.layer && other.page.encoding == entry.page.encoding;
        });
        if (!known) mine.entries.push_back(entry);
      }
      std::sort(mine.entries.begin(), mine.entries.end(), entry_before);
    }
    const bool none = body.code() == Code::kNotFound;
    if (body.ok() || none) put_index(upload, mine);
    end(upload, none ? Status() : body.status());
  };
  client_.call(std::move(call));
}

void S3Writer::put_index(const UploadPtr& upload, const S3Index& index) {
  begin(upload);
  S3Call call;
  call.method = "PUT";
  call.key = index_key(seal_.hide(index.record.info.id));
  call.body = std::make_shared<const std::string>(encode_index(index, seal_));
  call.deadline_ns = env_.monotonic_ns() + kWriteNs;
  call.bulk = true;
  call.done = [this, upload](const Result<std::string>& done) { end(upload, done.status()); };
  client_.call(std::move(call));
}

// ---- Erasing ------------------------------------------------------------------------------------

void S3Writer::erase(std::span<const ChunkId> ids) {
  if (ids.empty()) return;
  account_.begin();
  MutexLock lock(mutex_);
  // What still waits to be written is not written.
  const auto gone = [&](const TierWrite& chunk) {
    return std::find(ids.begin(), ids.end(), chunk.info.id) != ids.end();
  };
  for (Group& group : groups_) {
    for (const TierWrite& chunk : group.chunks) {
      if (!gone(chunk)) continue;
      group.bytes -= bytes_of(chunk);
      account_.dropped(bytes_of(chunk));
    }
    std::erase_if(group.chunks, gone);
    if (group.chunks.empty()) account_.end({});
  }
  std::erase_if(groups_, [](const Group& group) { return group.chunks.empty(); });
  erasures_.emplace_back(ids.begin(), ids.end());
  erasing_.insert(ids.begin(), ids.end());
  wake_.notify_all();
}

void S3Writer::erase_in_turn() {
  MutexLock lock(mutex_);
  while (!stop_) {
    // All that need not wait for an upload, at once.
    std::vector<ChunkId> ids;
    std::size_t calls = 0;
    std::erase_if(erasures_, [&](const std::vector<ChunkId>& wanted) HCACHE_REQUIRES(mutex_) {
      const bool busy = std::any_of(
          wanted.begin(), wanted.end(),
          [&](const ChunkId& id) HCACHE_REQUIRES(mutex_) { return uploading_.contains(id); });
      if (busy) return false;
      ids.insert(ids.end(), wanted.begin(), wanted.end());
      ++calls;
      return true;
    });
    if (ids.empty()) {
      wake_.wait(mutex_);
      continue;
    }
    lock.unlock();
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    const Status status = eraser_.erase(ids);
    lock.lock();
    // One of them may have been asked for again meanwhile.
    for (const ChunkId& id : ids) erasing_.erase(id);
    for (const std::vector<ChunkId>& wanted : erasures_) {
      erasing_.insert(wanted.begin(), wanted.end());
    }
    wake_.notify_all();
    lock.unlock();
    for (std::size_t i = 0; i < calls; ++i) account_.end(i == 0 ? status : Status());
    lock.lock();
  }
}

}  // namespace hcache::store
