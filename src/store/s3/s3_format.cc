#include "s3/s3_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "bytes.h"
#include "store/store.h"
#include "tier.h"

namespace hcache::store {
namespace {

constexpr std::string_view kIndexMagic = "HCS3IDX1";
constexpr std::string_view kHeadMagic = "HCS3OBJ1";
constexpr std::size_t kEntryBytes = 2 + 1 + 1 + 4 + 8 + 8 + 16;
constexpr std::size_t kCheckBytes = 8;

std::span<const std::byte> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// What an index's seal covers beside its bytes: it is no row of a catalog.
std::string name_of(const ChunkId& id) { return "index " + to_hex(id); }

}  // namespace

// ---- Indexes ------------------------------------------------------------------------------------

std::string index_key(const ChunkId& hidden) { return "c/" + to_hex(hidden); }
std::string data_key(const ObjectName& name) { return "d/" + to_hex(name); }

std::string encode_index(const S3Index& index, const Seal& seal) {
  const std::string record = encode_chunk(index.record, {});  // sealed with all the rest
  Writer w;
  w.text(kIndexMagic).number(static_cast<std::uint32_t>(record.size())).text(record);
  w.number(static_cast<std::uint32_t>(index.entries.size()));
  for (const S3Entry& entry : index.entries) {
    w.number(entry.page.layer).number(static_cast<std::uint8_t>(entry.page.encoding));
    w.number(std::uint8_t{0}).number(entry.page.bytes).number(entry.checksum);
    w.number(entry.offset).id(entry.object);
  }
  const std::uint64_t check = checksum(bytes_of(w.out()));
  w.number(check);
  return seal.seal_row(std::move(w.out()), name_of(index.record.info.id));
}

Result<S3Index> decode_index(const ChunkId& id, std::string_view body, const Seal& seal) {
  const auto bad = [&](const char* why) {
    return data_loss(fmt::format("index of chunk {}: {}", to_hex(id), why));
  };
  const std::optional<std::string> opened = seal.open_row(body, name_of(id));
  if (!opened) return bad("it was not written with this key, or was changed");
  body = *opened;
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
  S3Index index;
  HCACHE_ASSIGN_OR_RETURN(index.record, decode_chunk(id, in.text(n_record), {}));
  index.record.info.pages.clear();
  index.record.places.clear();
  const auto n = in.number<std::uint32_t>();
  if (body.size() != 8 + n_record + n * kEntryBytes) return bad("inconsistent sizes");
  for (std::uint32_t i = 0; i < n; ++i) {
    S3Entry entry;
    entry.page.layer = in.number<std::uint16_t>();
    const auto encoding = in.number<std::uint8_t>();
    in.number<std::uint8_t>();
    entry.page.bytes = in.number<std::uint32_t>();
    entry.checksum = in.number<std::uint64_t>();
    entry.offset = in.number<std::uint64_t>();
    entry.object = in.id<ObjectName>();
    if (!valid_encoding(encoding) || entry.page.bytes == 0 || entry.page.bytes > kMaxPageBytes ||
        entry.page.bytes % index.record.info.tokens.size() != 0 ||
        entry.offset > kMaxHeadBytes + kObjectBytes + kMaxPageBytes) {
      return bad("impossible page");
    }
    entry.page.encoding = static_cast<Encoding>(encoding);
    index.entries.push_back(entry);
  }
  if (!std::is_sorted(index.entries.begin(), index.entries.end(), entry_before)) {
    return bad("pages out of order");
  }
  return index;
}

// The record with its pages, as match() offers it.
ChunkRecord record_of(const S3Index& index) {
  ChunkRecord record = index.record;
  for (const S3Entry& entry : index.entries) {
    if (record.info.find_page(entry.page.layer, entry.page.encoding) != nullptr) continue;
    record.info.pages.push_back(entry.page);
    record.places.push_back({.disk = kRemoteDisk, .checksum = entry.checksum});
  }
  return record;
}

// ---- Data objects -------------------------------------------------------------------------------

std::string encode_head(std::span<const S3Member> members) {
  Writer w;
  w.text(kHeadMagic).number(static_cast<std::uint32_t>(members.size()));
  for (const S3Member& member : members) {
    w.id(member.id).number(static_cast<std::uint8_t>(member.erased ? 1 : 0));
  }
  const std::uint64_t check = checksum(bytes_of(w.out()));
  w.number(check);
  return std::move(w.out());
}

std::optional<std::vector<S3Member>> decode_head(std::string_view object) {
  if (object.size() < head_bytes(1) || !object.starts_with(kHeadMagic)) return std::nullopt;
  const auto n = number_at<std::uint32_t>(object, kHeadMagic.size());
  if (n == 0 || n > kMaxObjectChunks || object.size() < head_bytes(n)) return std::nullopt;
  const std::string_view checked = object.substr(0, head_bytes(n) - kCheckBytes);
  if (number_at<std::uint64_t>(object, checked.size()) != checksum(bytes_of(checked))) {
    return std::nullopt;
  }
  Parser in(checked.substr(kHeadMagic.size() + 4));
  std::vector<S3Member> members(n);
  for (S3Member& member : members) {
    member.id = in.id<ChunkId>();
    member.erased = in.number<std::uint8_t>() != 0;
  }
  return members;
}

std::optional<std::string> without_chunks(std::string object, std::span<const ChunkId> chunks,
                                          std::span<const S3Hole> holes) {
  auto members = decode_head(object);
  const std::size_t n_head = members ? head_bytes(members->size()) : 0;
  for (const S3Hole& hole : holes) {
    if (hole.offset < n_head || hole.offset > object.size()) continue;
    const std::size_t n = std::min<std::size_t>(hole.bytes, object.size() - hole.offset);
    std::fill_n(object.begin() + static_cast<std::ptrdiff_t>(hole.offset), n, '\0');
  }
  if (!members) {
    // Who else lies there is not known: it is empty when no byte is left.
    const bool empty = object.find_first_not_of('\0') == std::string::npos;
    return empty ? std::nullopt : std::optional(std::move(object));
  }
  bool empty = true;
  for (S3Member& member : *members) {
    if (std::find(chunks.begin(), chunks.end(), member.id) != chunks.end()) member.erased = true;
    empty = empty && member.erased;
  }
  if (empty) return std::nullopt;
  object.replace(0, n_head, encode_head(*members));
  return object;
}

}  // namespace hcache::store
