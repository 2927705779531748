#include "redis/redis_tier.h"

#include <fmt/format.h>
#include <hiredis.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string>
#include <utility>

#include "base/log.h"
#include "net/tier_account.h"
#include "redis/redis_client.h"

namespace hcache::store {
namespace {

constexpr std::int64_t kWriteNs = 30'000'000'000;  // for a page to be written
constexpr const char* kRecordField = "record";

// One hash for each chunk, in one slot: evicted and expired as a whole.
std::string key_of(const ChunkId& id, const Seal& seal) {
  return "hcache1:{" + to_hex(seal.hide(id)) + "}";
}

// A page's field says all that is to be known before it is read.
std::string field_of(std::uint16_t layer, Encoding encoding, std::uint32_t bytes,
                     std::uint64_t checksum) {
  return fmt::format("p{}.{}.{}.{:016x}", layer, static_cast<int>(encoding), bytes, checksum);
}

template <typename T>
bool take_number(std::string_view* text, char end, int base, T* out) {
  const auto [at, error] = std::from_chars(text->data(), text->data() + text->size(), *out, base);
  if (error != std::errc()) return false;
  text->remove_prefix(static_cast<std::size_t>(at - text->data()));
  if (end == '\0') return text->empty();
  if (text->empty() || text->front() != end) return false;
  text->remove_prefix(1);
  return true;
}

bool parse_field(std::string_view field, PageInfo* page, std::uint64_t* checksum) {
  if (!field.starts_with('p')) return false;
  field.remove_prefix(1);
  std::uint8_t encoding = 0;
  if (!take_number(&field, '.', 10, &page->layer) || !take_number(&field, '.', 10, &encoding) ||
      !take_number(&field, '.', 10, &page->bytes) || !take_number(&field, '\0', 16, checksum) ||
      !valid_encoding(encoding) || page->bytes == 0 || page->bytes > kMaxPageBytes) {
    return false;
  }
  page->encoding = static_cast<Encoding>(encoding);
  return true;
}

std::string_view text_of(const redisReply* reply) {
  return reply->type == REDIS_REPLY_STRING ? std::string_view(reply->str, reply->len)
                                           : std::string_view();
}

using PageFields = std::vector<std::pair<PageInfo, std::uint64_t>>;  // with their checksums

// What the names of a chunk's fields say of its pages.
PageFields pages_of(const redisReply& fields) {
  PageFields pages;
  for (std::size_t i = 0; i < fields.elements; ++i) {
    PageInfo page;
    std::uint64_t checksum = 0;
    if (parse_field(text_of(fields.element[i]), &page, &checksum)) {
      pages.emplace_back(page, checksum);
    }
  }
  return pages;
}

// Gives a record its pages.
void add_pages(PageFields pages, ChunkRecord* record) {
  const std::size_t n_tokens = record->info.tokens.size();
  std::erase_if(pages, [&](const auto& page) { return page.first.bytes % n_tokens != 0; });
  const auto before = [](const auto& a, const auto& b) {
    return std::tuple(a.first.layer, a.first.encoding, a.second) <
           std::tuple(b.first.layer, b.first.encoding, b.second);
  };
  std::sort(pages.begin(), pages.end(), before);
  for (const auto& [page, checksum] : pages) {
    // Machines whose kernels round differently may have written the same page twice.
    if (record->info.find_page(page.layer, page.encoding) != nullptr) continue;
    record->info.pages.push_back(page);
    record->places.push_back({.disk = kRemoteDisk, .checksum = checksum});
  }
}

class RedisTier : public Tier {
 public:
  RedisTier(Env& env, const RemoteOptions& options, std::string name, const Seal& seal,
            std::unique_ptr<RedisClient> client)
      : env_(env),
        seal_(seal),
        ttl_s_(options.ttl_s),
        account_(env, std::move(name), options.queue_bytes),
        api_(*client),
        client_(std::move(client)) {}
  RedisTier(const RedisTier&) = delete;
  RedisTier& operator=(const RedisTier&) = delete;
  void find(std::vector<ChunkId> ids, std::int64_t deadline_ns, FindDone done) override;
  void read(const PageKey& page, const SaltId& salt, std::uint32_t bytes, std::int64_t deadline_ns,
            ReadDone done) override;
  void touch(std::span<const ChunkId> ids) override;
  bool write(TierWrite write) override;
  void erase(std::span<const ChunkId> ids) override;
  Status flush(std::int64_t deadline_ns) override { return account_.flush(deadline_ns); }
  RemoteStat stat() const override { return account_.stat(api_.available()); }

 private:
  // Everything in background goes through here. A payload has been accepted by the account.
  void send_bulk(std::string key, std::vector<std::string> args,
                 std::shared_ptr<const AlignedBuffer> payload);
  [[nodiscard]] std::string key_of(const ChunkId& id) const { return store::key_of(id, seal_); }
  // The page in a field's value; `where` says whose.
  [[nodiscard]] Result<std::shared_ptr<const AlignedBuffer>> page_in(
      const redisReply& reply, const PageName& page, std::uint64_t check,
      const std::string& where) const;
  [[nodiscard]] std::vector<std::string> expire_args(const std::string& key) const {
    return {"EXPIRE", key, std::to_string(static_cast<long long>(ttl_s_))};
  }

  Env& env_;
  const Seal seal_;
  const double ttl_s_;
  TierAccount account_;
  RedisClient& api_;
  const std::unique_ptr<RedisClient> client_;  // the last: its thread uses all of the above
};

void RedisTier::find(std::vector<ChunkId> ids, std::int64_t deadline_ns, FindDone done) {
  // On the client's thread, but for its making. A chunk's two answers come in any order: one of
  // them may have been sent around, or waited until the client knew its servers.
  struct Search {
    struct Chunk {
      std::optional<ChunkRecord> record;
      PageFields pages;
    };
    std::vector<Chunk> chunks;
    std::size_t left = 0;
    Status status;
    FindDone done;
    void end() {
      if (--left > 0) return;
      if (!status.ok()) return done(status);
      std::vector<std::optional<ChunkRecord>> found;
      for (Chunk& chunk : chunks) {
        if (chunk.record) add_pages(std::move(chunk.pages), &*chunk.record);
        found.push_back(std::move(chunk.record));
      }
      done(std::move(found));
    }
  };
  auto search = std::make_shared<Search>();
  search->chunks.resize(ids.size());
  search->left = 2 * ids.size();
  search->done = std::move(done);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::string key = key_of(ids[i]);
    RedisCall record;
    record.key = key;
    record.args = {"HGET", key, kRecordField};
    record.deadline_ns = deadline_ns;
    record.done = [this, search, i, id = ids[i]](const Result<const redisReply*>& reply) {
      if (!reply.ok()) {
        search->status = reply.status();
      } else if ((*reply)->type == REDIS_REPLY_STRING) {
        auto decoded = decode_chunk(id, text_of(*reply), seal_);
        if (decoded.ok()) {
          decoded->info.pages.clear();
          decoded->places.clear();
          search->chunks[i].record = std::move(*decoded);
        } else {
          log::warn("in Redis: {}", decoded.status().to_string());
        }
      }
      search->end();
    };
    api_.call(std::move(record));
    RedisCall fields;
    fields.key = key;
    fields.args = {"HKEYS", key};
    fields.deadline_ns = deadline_ns;
    fields.done = [search, i](const Result<const redisReply*>& reply) {
      if (!reply.ok()) {
        search->status = reply.status();
      } else if ((*reply)->type == REDIS_REPLY_ARRAY) {
        search->chunks[i].pages = pages_of(**reply);
      }
      search->end();
    };
    api_.call(std::move(fields));
  }
}

void RedisTier::read(const PageKey& page, const SaltId& salt, std::uint32_t bytes,
                     std::int64_t deadline_ns, ReadDone done) {
  account_.begin_read();
  const std::string key = key_of(page.chunk);
  const std::string field = field_of(page.layer, page.encoding, bytes, page.checksum);
  RedisCall call;
  call.key = key;
  call.args = {"HGET", key, field};
  call.deadline_ns = deadline_ns;
  const PageName name{salt, page.chunk, {page.layer, page.encoding, bytes}};
  call.done = [this, key, field, name, check = page.checksum,
               done = std::move(done)](const Result<const redisReply*>& reply) {
    Result<std::shared_ptr<const AlignedBuffer>> result = reply.status();
    if (reply.ok()) result = page_in(**reply, name, check, key + " field " + field);
    account_.end_read(result.status(), name.page.bytes);
    if (result.code() == Code::kDataLoss) send_bulk(key, {"HDEL", key, field}, nullptr);
    done(std::move(result));
  };
  api_.call(std::move(call));
}

Result<std::shared_ptr<const AlignedBuffer>> RedisTier::page_in(const redisReply& reply,
                                                                const PageName& page,
                                                                std::uint64_t check,
                                                                const std::string& where) const {
  if (reply.type != REDIS_REPLY_STRING) {
    return not_found(fmt::format("{} has lost {}", account_.name(), where));
  }
  auto bytes = seal_.open_value(page, text_of(&reply));
  if (bytes == nullptr || seal_.hide_checksum(checksum({bytes->data(), bytes->size()})) != check) {
    return data_loss(fmt::format("checksum mismatch in {} in {}", where, account_.name()));
  }
  return bytes;
}

void RedisTier::send_bulk(std::string key, std::vector<std::string> args,
                          std::shared_ptr<const AlignedBuffer> payload) {
  const std::size_t bytes = payload ? payload->size() : 0;
  account_.begin();
  RedisCall call;
  call.key = std::move(key);
  call.args = std::move(args);
  call.payload = std::move(payload);
  call.deadline_ns = env_.monotonic_ns() + kWriteNs;
  call.bulk = true;
  call.done = [this, bytes](const Result<const redisReply*>& reply) {
    if (reply.ok() && bytes > 0) {
      account_.written(1, bytes);
    } else {
      account_.dropped(bytes);
    }
    account_.end(reply.status());
  };
  api_.call(std::move(call));
}

void RedisTier::touch(std::span<const ChunkId> ids) {
  if (ttl_s_ <= 0) return;
  for (const ChunkId& id : ids) {
    const std::string key = key_of(id);
    send_bulk(key, expire_args(key), nullptr);
  }
}

bool RedisTier::write(TierWrite write) {
  std::uint64_t bytes = 0;
  for (const TierPage& page : write.pages) bytes += seal_.value_bytes(page.info.bytes);
  if (!account_.accept(write.pages.size(), bytes, api_.available())) return false;
  const std::string key = key_of(write.info.id);
  for (TierPage& page : write.pages) {
    const std::string field = field_of(page.info.layer, page.info.encoding, page.info.bytes,
                                       seal_.hide_checksum(page.checksum));
    const PageName name{write.info.salt, write.info.id, page.info};
    send_bulk(key, {"HSET", key, field}, seal_.seal_value(name, std::move(page.bytes)));
  }
  ChunkRecord record;
  record.info = std::move(write.info);
  record.info.pages.clear();
  send_bulk(key, {"HSET", key, kRecordField, encode_chunk(record, seal_)}, nullptr);
  if (ttl_s_ > 0) send_bulk(key, expire_args(key), nullptr);
  return true;
}

void RedisTier::erase(std::span<const ChunkId> ids) {
  for (const ChunkId& id : ids) {
    const std::string key = key_of(id);
    send_bulk(key, {"UNLINK", key}, nullptr);
  }
}

}  // namespace

Result<std::unique_ptr<Tier>> open_redis_tier(Env& env, const RemoteOptions& options,
                                              const Seal& seal) {
  HCACHE_ASSIGN_OR_RETURN(RedisUrl url, parse_redis_url(options.url));
  const std::string name = url.display();
  HCACHE_ASSIGN_OR_RETURN(auto client, RedisClient::open(env, std::move(url)));
  return std::unique_ptr<Tier>(
      std::make_unique<RedisTier>(env, options, name, seal, std::move(client)));
}

}  // namespace hcache::store
