// A session file is one stream under one running checksum: every check covers all bytes before it.
#include "store/archive.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "base/xxh3.h"
#include "bytes.h"
#include "format.h"

namespace hcache::store {
namespace {

constexpr std::string_view kMagic = "HCACHESN";
constexpr std::string_view kEnd = "HCACHEND";
constexpr std::uint32_t kArchiveVersion = 1;
constexpr std::uint32_t kPackedArchiveVersion = 2;  // of a file with packed pages
constexpr std::uint32_t kLlamaArchiveVersion = 3;   // of one with rows and snapshots of libllama's
constexpr std::size_t kCheckBytes = 8;
constexpr std::size_t kHeadFixedBytes = 64;
constexpr std::size_t kChunkFixedBytes = 8;
constexpr std::size_t kPageEntryBytes = 8;
constexpr std::size_t kPieceBytes = 256U << 10;  // that a sink is given at once

std::uint64_t file_bytes(const ArchiveHead& head, std::span<const MatchedChunk> chunks) {
  std::uint64_t bytes = kHeadFixedBytes + 4 * head.tokens.size() + head.model.size() +
                        head.name.size() + head.metadata_json.size() + kCheckBytes;
  for (const MatchedChunk& chunk : chunks) {
    bytes += kChunkFixedBytes + kCheckBytes;
    for (const PageInfo& page : chunk.chunk.info().pages) {
      bytes += kPageEntryBytes + page.bytes + kCheckBytes;
    }
  }
  return bytes + kEnd.size() + kCheckBytes;
}

// Gathers pieces for the sink and hashes what goes through.
class ArchiveWriter {
 public:
  explicit ArchiveWriter(const ArchiveSink& sink) : sink_(sink) { XXH3_64bits_reset(&hash_); }

  template <typename T>
  ArchiveWriter& number(T value) {
    char bytes[sizeof(T)];
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bytes[i] = static_cast<char>((static_cast<std::uint64_t>(value) >> (8 * i)) & 0xff);
    }
    return text({bytes, sizeof(T)});
  }
  ArchiveWriter& text(std::string_view text) {
    while (!text.empty() && status_.ok()) {
      const std::string_view piece = text.substr(0, kPieceBytes - out_.size());
      XXH3_64bits_update(&hash_, piece.data(), piece.size());
      out_.append(piece);
      text.remove_prefix(piece.size());
      if (out_.size() == kPieceBytes) status_ = flush();
    }
    return *this;
  }
  ArchiveWriter& check() { return number(std::uint64_t{XXH3_64bits_digest(&hash_)}); }
  // What was not given out yet.
  [[nodiscard]] Status flush() {
    const Status status = status_.ok() && !out_.empty() ? sink_(out_) : status_;
    out_.clear();
    return status;
  }
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  const ArchiveSink& sink_;
  XXH3_state_t hash_;
  std::string out_;
  Status status_;
};

void write_head(const ArchiveHead& head, std::span<const MatchedChunk> chunks, ArchiveWriter* w) {
  const auto any = [&](auto is) {
    return std::any_of(chunks.begin(), chunks.end(), [&](const MatchedChunk& chunk) {
      const std::vector<PageInfo>& pages = chunk.chunk.info().pages;
      return std::any_of(pages.begin(), pages.end(),
                         [&](const PageInfo& page) { return is(page.encoding); });
    });
  };
  std::uint32_t version = kArchiveVersion;
  if (any([](Encoding e) { return e == Encoding::kKvPacked; })) version = kPackedArchiveVersion;
  if (any([](Encoding e) { return e >= Encoding::kRows; })) version = kLlamaArchiveVersion;
  w->text(kMagic).number(version);
  w->number(static_cast<std::uint32_t>(chunks.size()));
  w->number(file_bytes(head, chunks));
  w->text({reinterpret_cast<const char*>(head.fingerprint.bytes.data()),
           head.fingerprint.bytes.size()});
  w->number(std::uint64_t{head.tokens.size()});
  w->number(static_cast<std::uint32_t>(head.model.size()));
  w->number(static_cast<std::uint32_t>(head.name.size()));
  w->number(std::uint64_t{head.metadata_json.size()});
  for (const std::int32_t token : head.tokens) w->number(static_cast<std::uint32_t>(token));
  w->text(head.model).text(head.name).text(head.metadata_json).check();
}

Status write_chunk(const ChunkInfo& info, PageReader* reader, ArchiveWriter* w,
                   std::optional<PageInfo>* failed) {
  w->number(static_cast<std::uint16_t>(info.tokens.size()));
  w->number(static_cast<std::uint8_t>(info.k_type)).number(static_cast<std::uint8_t>(info.v_type));
  w->number(static_cast<std::uint32_t>(info.pages.size()));
  for (const PageInfo& page : info.pages) {
    w->number(page.layer).number(static_cast<std::uint8_t>(page.encoding));
    w->number(std::uint8_t{0}).number(page.bytes);
  }
  w->check();
  for (const PageInfo& page : info.pages) {
    HCACHE_ASSIGN_OR_RETURN(const PageView view, reader->next());
    if (view.status.ok()) {
      w->text({reinterpret_cast<const char*>(view.bytes.data()), view.bytes.size()}).check();
    }
    reader->release(view.index);
    if (!view.status.ok()) *failed = page;
    HCACHE_RETURN_IF_ERROR(view.status);
    HCACHE_RETURN_IF_ERROR(w->status());
  }
  return {};
}

// ---- Reading ------------------------------------------------------------------------------------

// Walks over a file; every step fails where the file has not enough left.
class Reader {
 public:
  explicit Reader(std::string_view file) : file_(file) { XXH3_64bits_reset(&hash_); }

  [[nodiscard]] std::size_t at() const { return at_; }
  [[nodiscard]] std::size_t left() const { return file_.size() - at_; }
  // Empty where fewer than n are left.
  std::string_view text(std::size_t n) {
    if (n > left()) return {};
    const std::string_view out = file_.substr(at_, n);
    at_ += n;
    return out;
  }
  // The caller has made sure that it is there.
  template <typename T>
  T number() {
    at_ += sizeof(T);
    return number_at<T>(file_, at_ - sizeof(T));
  }
  // Compares the check that stands here with what was read so far.
  Status check() {
    if (left() < kCheckBytes) return wrong("it ends within a checksum");
    XXH3_64bits_update(&hash_, file_.data() + hashed_, at_ - hashed_);
    hashed_ = at_;
    const std::size_t place = at_;
    if (number<std::uint64_t>() == XXH3_64bits_digest(&hash_)) return {};
    at_ = place;
    return wrong("the checksum does not match");
  }
  [[nodiscard]] Status wrong(std::string_view why) const {
    return invalid_argument(fmt::format("the session file is damaged at byte {}: {}", at_, why));
  }

 private:
  std::string_view file_;
  XXH3_state_t hash_;
  std::size_t at_ = 0;
  std::size_t hashed_ = 0;
};

Status read_head(Reader* in, std::size_t size, ArchiveHead* head, std::uint32_t* n_chunks) {
  if (in->left() < kHeadFixedBytes || in->text(kMagic.size()) != kMagic) {
    return invalid_argument("this is no session file");
  }
  const auto version = in->number<std::uint32_t>();
  if (version < kArchiveVersion || version > kLlamaArchiveVersion) {
    return invalid_argument(fmt::format("the session file has format {}; this program knows {}",
                                        version, kLlamaArchiveVersion));
  }
  *n_chunks = in->number<std::uint32_t>();
  const auto bytes = in->number<std::uint64_t>();
  if (bytes != size) {
    return invalid_argument(
        fmt::format("the session file should have {} bytes and has {}", bytes, size));
  }
  const std::string_view fingerprint = in->text(head->fingerprint.bytes.size());
  std::memcpy(head->fingerprint.bytes.data(), fingerprint.data(), fingerprint.size());
  const auto n_tokens = in->number<std::uint64_t>();
  const auto n_model = in->number<std::uint32_t>();
  const auto n_name = in->number<std::uint32_t>();
  const auto n_metadata = in->number<std::uint64_t>();
  // Each is compared before they are added, so that no sum overflows.
  const std::uint64_t left = in->left();
  if (n_tokens > left / 4 || n_metadata > left ||
      4 * n_tokens + n_model + n_name + n_metadata > left) {
    return in->wrong("the sizes in its head are larger than the file");
  }
  head->tokens.reserve(n_tokens);
  for (std::uint64_t i = 0; i < n_tokens; ++i) {
    head->tokens.push_back(static_cast<std::int32_t>(in->number<std::uint32_t>()));
  }
  head->model = in->text(n_model);
  head->name = in->text(n_name);
  head->metadata_json = in->text(n_metadata);
  return in->check();
}

Status read_page_entry(Reader* in, const ArchiveChunk& chunk, const PageInfo* before,
                       PageInfo* page) {
  page->layer = in->number<std::uint16_t>();
  const auto encoding = in->number<std::uint8_t>();
  const auto zero = in->number<std::uint8_t>();
  page->bytes = in->number<std::uint32_t>();
  if (!valid_encoding(encoding) || zero != 0) return in->wrong("an unknown encoding");
  page->encoding = static_cast<Encoding>(encoding);
  if (page->bytes == 0 || page->bytes > kMaxPageBytes || page->bytes % chunk.n_tokens != 0) {
    return in->wrong(fmt::format("a page of {} bytes for {} tokens", page->bytes, chunk.n_tokens));
  }
  if (before != nullptr &&
      std::pair(before->layer, before->encoding) >= std::pair(page->layer, page->encoding)) {
    return in->wrong("its pages are not in order");
  }
  const bool typed = chunk.k_type != ElementType::kNone && chunk.v_type != ElementType::kNone;
  if (is_kv(page->encoding) && !typed) return in->wrong("kv pages without types");
  return {};
}

// `first` is the chunk's first token, `n_tokens` how many the session has.
Result<ArchiveChunk> read_chunk(Reader* in, std::uint64_t first, std::uint64_t n_tokens) {
  if (in->left() < kChunkFixedBytes) return in->wrong("it ends within a chunk");
  ArchiveChunk chunk;
  chunk.first_token = first;
  chunk.n_tokens = in->number<std::uint16_t>();
  const auto k_type = in->number<std::uint8_t>();
  const auto v_type = in->number<std::uint8_t>();
  const auto n_pages = in->number<std::uint32_t>();
  if (chunk.n_tokens == 0 || chunk.n_tokens > kChunkTokens || chunk.n_tokens > n_tokens - first ||
      !valid_element_type(k_type) || !valid_element_type(v_type)) {
    return in->wrong("a chunk that can't be");
  }
  chunk.k_type = static_cast<ElementType>(k_type);
  chunk.v_type = static_cast<ElementType>(v_type);
  if (n_pages > in->left() / kPageEntryBytes) return in->wrong("more pages than fit the file");
  std::vector<PageInfo> pages(n_pages);
  for (std::uint32_t i = 0; i < n_pages; ++i) {
    HCACHE_RETURN_IF_ERROR(read_page_entry(in, chunk, i == 0 ? nullptr : &pages[i - 1], &pages[i]));
  }
  HCACHE_RETURN_IF_ERROR(in->check());
  chunk.pages.reserve(n_pages);
  for (const PageInfo& page : pages) {
    const std::string_view bytes = in->text(page.bytes);
    if (bytes.empty()) return in->wrong("it ends within a page");
    HCACHE_RETURN_IF_ERROR(in->check());
    chunk.pages.push_back({page.layer, page.encoding, std::as_bytes(std::span(bytes))});
  }
  return chunk;
}

}  // namespace

std::span<const MatchedChunk> archived_chunks(const Match& match) {
  std::span<const MatchedChunk> chunks = match.chunks;
  if (!chunks.empty() && chunks.back().usable_rows < chunks.back().chunk.info().tokens.size()) {
    chunks = chunks.first(chunks.size() - 1);
  }
  return chunks;
}

Status write_archive(Store& store, const ArchiveHead& head, const Match& match,
                     const ArchiveSink& sink) {
  const std::span<const MatchedChunk> chunks = archived_chunks(match);
  std::vector<PageRequest> requests;
  std::uint64_t largest = 0;
  for (const MatchedChunk& chunk : chunks) {
    for (const PageInfo& page : chunk.chunk.info().pages) {
      requests.push_back({chunk.chunk, page.layer, page.encoding});
      largest = std::max<std::uint64_t>(largest, page.bytes);
    }
  }
  ReaderOptions options;
  options.ring_bytes =
      std::max<std::uint64_t>(8U << 20, 4 * (round_up(largest, kBlock) + 2 * kBlock));
  HCACHE_ASSIGN_OR_RETURN(const std::unique_ptr<PageReader> reader, store.new_reader(options));
  HCACHE_RETURN_IF_ERROR(reader->submit(requests));
  ArchiveWriter out(sink);
  write_head(head, chunks, &out);
  for (const MatchedChunk& chunk : chunks) {
    const ChunkInfo& info = chunk.chunk.info();
    std::optional<PageInfo> failed;
    const Status status = write_chunk(info, reader.get(), &out, &failed);
    if (failed) {
      store.quarantine(info.id, failed->layer, failed->encoding)
          .ignore("the page's own failure is the one to report");
    }
    HCACHE_RETURN_IF_ERROR(status);
  }
  out.text(kEnd).check();
  return out.flush();
}

Result<Archive> read_archive(std::string_view file) {
  Archive archive;
  Reader in(file);
  std::uint32_t n_chunks = 0;
  HCACHE_RETURN_IF_ERROR(read_head(&in, file.size(), &archive.head, &n_chunks));
  const std::uint64_t n_tokens = archive.head.tokens.size();
  if (n_chunks > (n_tokens + kChunkTokens - 1) / kChunkTokens) {
    return in.wrong("more chunks than the session has tokens for");
  }
  archive.chunks.reserve(n_chunks);
  for (std::uint32_t i = 0; i < n_chunks; ++i) {
    HCACHE_ASSIGN_OR_RETURN(ArchiveChunk chunk,
                            read_chunk(&in, std::uint64_t{i} * kChunkTokens, n_tokens));
    if (i + 1 < n_chunks && chunk.n_tokens != kChunkTokens) {
      return in.wrong("a short chunk before the last one");
    }
    archive.chunks.push_back(std::move(chunk));
  }
  if (in.text(kEnd.size()) != kEnd) return in.wrong("its end is not where it should be");
  HCACHE_RETURN_IF_ERROR(in.check());
  if (in.left() > 0) return in.wrong("bytes behind its end");
  return archive;
}

Result<PutReport> put_archive(Store& store, const Archive& archive, const Salt& salt) {
  const std::span<const std::int32_t> tokens = archive.head.tokens;
  std::vector<ChunkWrite> batch;
  ChunkId parent;
  for (const ArchiveChunk& chunk : archive.chunks) {
    ChunkWrite& write = batch.emplace_back();
    write.parent = parent;
    write.fingerprint = archive.head.fingerprint;
    write.salt = salt.id;
    write.owner = salt.owner;
    write.first_position = chunk.first_token;
    write.tokens = tokens.subspan(chunk.first_token, chunk.n_tokens);
    write.id = chunk_id(write.fingerprint, salt.id, parent, write.tokens);
    write.k_type = chunk.k_type;
    write.v_type = chunk.v_type;
    write.pages = chunk.pages;
    parent = write.id;
  }
  return store.put(batch);
}

}  // namespace hcache::store
