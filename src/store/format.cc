#include "format.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "base/xxh3.h"
#include "bytes.h"
#include "seal.h"

namespace hcache::store {
namespace {

constexpr std::string_view kSegmentMagic = "HCACHESG";
constexpr std::string_view kRecordFileMagic = "HCACHERC";
constexpr std::size_t kCheckBytes = 8;
constexpr std::size_t kChunkFixedBytes = 16 * 3 + 8 + 1 + 1 + 2 + 4;
constexpr std::size_t kPageEntryBytes = 24;
constexpr std::size_t kSessionFixedBytes = 16 * 2 + 8 * 4;

std::uint32_t file_format(bool sealed) { return sealed ? kSealedFileFormat : kFileFormat; }

std::uint64_t checksum_of_two(std::string_view first, std::string_view second) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, first.data(), first.size());
  XXH3_64bits_update(&state, second.data(), second.size());
  return XXH3_64bits_digest(&state);
}

template <typename Tag>
std::string_view as_text(const Id128<Tag>& id) {
  return {reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size()};
}

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Splits the trailing checksum off; false if it does not fit.
bool take_check(std::string_view key, std::string_view* body) {
  if (body->size() < kCheckBytes) return false;
  Parser tail(body->substr(body->size() - kCheckBytes));
  body->remove_suffix(kCheckBytes);
  return tail.number<std::uint64_t>() == checksum_of_two(key, *body);
}

// Takes "<name> <value>\n" off the front; false when it is not there.
bool take_line(std::string_view* text, std::string_view name, std::string_view* value) {
  const std::size_t end = text->find('\n');
  if (end == std::string_view::npos || !text->starts_with(name)) return false;
  const std::string_view line = text->substr(0, end);
  if (line.size() <= name.size() || line[name.size()] != ' ') return false;
  *value = line.substr(name.size() + 1);
  text->remove_prefix(end + 1);
  return true;
}

}  // namespace

std::uint64_t checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::uint64_t page_bytes(const ChunkRecord& record) {
  std::uint64_t sum = 0;
  for (const PageInfo& page : record.info.pages) sum += page.bytes;
  return sum;
}

bool page_intact(const ChunkRecord& record, std::size_t page, const Seal& seal,
                 std::span<std::byte> bytes) {
  const PagePlace& place = record.places[page];
  if (!seal.on()) return checksum(bytes) == place.checksum;
  const ChunkInfo& info = record.info;
  return seal.open_page({info.salt, info.id, info.pages[page]}, place.seal, bytes);
}

bool page_before(const PageInfo& a, const PageInfo& b) {
  return std::pair(a.layer, a.encoding) < std::pair(b.layer, b.encoding);
}

bool same_family(const ChunkInfo& a, const ChunkInfo& b) {
  return a.parent == b.parent && a.fingerprint == b.fingerprint && a.salt == b.salt;
}

std::vector<ChunkId> ids_of(std::span<const ChunkRecord> records) {
  std::vector<ChunkId> ids;
  for (const ChunkRecord& record : records) ids.push_back(record.info.id);
  return ids;
}

ChunkId sibling_key(const Fingerprint& fingerprint, const SaltId& salt, const ChunkId& parent) {
  if (!parent.is_zero()) return parent;
  return Hasher("hcache root 1").add(fingerprint).add(salt).finish<ChunkId>();
}

namespace {
Status check_file_format(std::uint32_t format) {
  if (format >= kFileFormat && format <= kSealedFileFormat) return {};
  return unimplemented(
      fmt::format("it has format {}; this program knows {}", format, kSealedFileFormat));
}

void encode_header(std::string_view magic, const StoreId& store, bool sealed, std::uint32_t disk,
                   std::uint32_t number, std::span<std::byte> out) {
  Writer w;
  w.text(magic).number(file_format(sealed)).number(disk).number(number);
  w.number(std::uint32_t{0}).id(store);
  w.out().resize(kSegmentHeaderBytes - kCheckBytes, '\0');
  const std::string head = w.out();
  w.number(checksum_of_two(head, {}));
  std::memcpy(out.data(), w.out().data(), w.out().size());
}
}  // namespace

void encode_segment_header(const StoreId& store, bool sealed, std::uint32_t disk,
                           std::uint32_t segment, std::span<std::byte> out) {
  encode_header(kSegmentMagic, store, sealed, disk, segment, out);
}

void encode_record_file_header(const StoreId& store, bool sealed, std::uint32_t disk,
                               std::uint32_t file, std::span<std::byte> out) {
  encode_header(kRecordFileMagic, store, sealed, disk, file, out);
}

Result<FileHeader> decode_file_header(std::span<const std::byte> header) {
  std::string_view text = as_text(header);
  if (text.size() != kSegmentHeaderBytes ||
      (!text.starts_with(kSegmentMagic) && !text.starts_with(kRecordFileMagic))) {
    return data_loss("its header is not a segment's");
  }
  Parser in(text.substr(kSegmentMagic.size()));
  const auto format = in.number<std::uint32_t>();
  if (!take_check({}, &text)) return data_loss("its header is damaged");
  HCACHE_RETURN_IF_ERROR(check_file_format(format));
  FileHeader out;
  out.sealed = format == kSealedFileFormat;
  out.disk = in.number<std::uint32_t>();
  out.number = in.number<std::uint32_t>();
  in.number<std::uint32_t>();
  out.store = in.id<StoreId>();
  return out;
}

Status check_segment_header(std::span<const std::byte> header, const StoreId& store,
                            std::uint32_t disk, std::uint32_t segment) {
  HCACHE_ASSIGN_OR_RETURN(const FileHeader found, decode_file_header(header));
  if (found.store != store || found.disk != disk || found.number != segment) {
    return failed_precondition("it belongs to another store or place");
  }
  return {};
}

std::string encode_disk_file(const DiskFile& file) {
  std::string text = fmt::format("hcache store\nformat {}\nstore {}\ndisk {}\n",
                                 file_format(file.sealed), to_hex(file.store), file.disk);
  return text + fmt::format("check {:016x}\n", checksum_of_two(text, {}));
}

Result<DiskFile> decode_disk_file(std::string_view text) {
  // Whatever the format, the last line covers all before: a number that only damage has made is no
  // format of the future.
  const std::size_t last = text.rfind("check ");
  std::string_view value;
  std::uint64_t check = 0;
  std::string_view tail = last == std::string_view::npos ? std::string_view() : text.substr(last);
  const bool intact = take_line(&tail, "check", &value) && value.size() == 16 && tail.empty() &&
                      parse_number(value, 16, &check) &&
                      check == checksum_of_two(text.substr(0, last), {});
  if (!intact) return data_loss("it is damaged");
  text = text.substr(0, last);
  if (!take_line(&text, "hcache", &value) || value != "store") {
    return data_loss("it does not describe a store");
  }
  std::uint32_t format = 0;
  if (!take_line(&text, "format", &value) || !parse_number(value, 10, &format)) {
    return data_loss("it names no format");
  }
  HCACHE_RETURN_IF_ERROR(check_file_format(format));
  DiskFile file;
  file.sealed = format == kSealedFileFormat;
  if (!take_line(&text, "store", &value) || !parse_id(value, &file.store).ok() ||
      !take_line(&text, "disk", &value) || !parse_number(value, 10, &file.disk) || !text.empty()) {
    return data_loss("it does not describe a disk");
  }
  return file;
}

std::string encode_chunk(const ChunkRecord& record, const Seal& seal) {
  const ChunkInfo& info = record.info;
  Writer w;
  w.id(info.fingerprint).id(info.salt).id(info.parent).number(info.first_position);
  w.number(static_cast<std::uint8_t>(info.k_type)).number(static_cast<std::uint8_t>(info.v_type));
  w.number(static_cast<std::uint16_t>(info.tokens.size()));
  w.number(static_cast<std::uint32_t>(info.pages.size()));
  for (const std::int32_t token : info.tokens) w.number(static_cast<std::uint32_t>(token));
  for (std::size_t i = 0; i < info.pages.size(); ++i) {
    const PageInfo& page = info.pages[i];
    const PagePlace& place = record.places[i];
    w.number(page.layer).number(static_cast<std::uint8_t>(page.encoding)).number(place.disk);
    w.number(place.segment).number(static_cast<std::uint32_t>(place.offset / kPageAlignment));
    w.number(page.bytes).number(place.checksum);
    if (!seal.on()) continue;
    for (const std::uint8_t byte : place.seal.nonce) w.number(byte);
    for (const std::uint8_t byte : place.seal.tag) w.number(byte);
  }
  const std::uint64_t check = checksum_of_two(as_text(info.id), w.out());
  w.number(check);
  return seal.seal_row(std::move(w.out()), as_text(info.id));
}

Result<ChunkRecord> decode_chunk(const ChunkId& id, std::string_view body, const Seal& seal) {
  auto bad = [&](const char* why) {
    return data_loss(fmt::format("catalog row of chunk {}: {}", to_hex(id), why));
  };
  std::optional<std::string> opened;
  if (seal.on()) {
    opened = seal.open_row(body, as_text(id));
    if (!opened) return bad("it was not written with this key, or was changed");
    body = *opened;
  }
  if (!take_check(as_text(id), &body)) return bad("checksum mismatch");
  if (body.size() < kChunkFixedBytes) return bad("too short");
  Parser in(body);
  ChunkRecord record;
  ChunkInfo& info = record.info;
  info.id = id;
  info.fingerprint = in.id<Fingerprint>();
  info.salt = in.id<SaltId>();
  info.parent = in.id<ChunkId>();
  info.first_position = in.number<std::uint64_t>();
  const auto k_type = in.number<std::uint8_t>();
  const auto v_type = in.number<std::uint8_t>();
  const auto n_tokens = in.number<std::uint16_t>();
  const auto n_pages = in.number<std::uint32_t>();
  const std::size_t page_entry = kPageEntryBytes + (seal.on() ? kSealBytes : 0);
  if (n_tokens == 0 || n_tokens > kChunkTokens || !valid_element_type(k_type) ||
      !valid_element_type(v_type) ||
      body.size() != kChunkFixedBytes + 4ULL * n_tokens + page_entry * std::uint64_t{n_pages}) {
    return bad("inconsistent sizes");
  }
  info.k_type = static_cast<ElementType>(k_type);
  info.v_type = static_cast<ElementType>(v_type);
  info.tokens.reserve(n_tokens);
  for (std::uint32_t i = 0; i < n_tokens; ++i) {
    info.tokens.push_back(static_cast<std::int32_t>(in.number<std::uint32_t>()));
  }
  info.pages.reserve(n_pages);
  record.places.reserve(n_pages);
  for (std::uint32_t i = 0; i < n_pages; ++i) {
    PageInfo page;
    PagePlace place;
    page.layer = in.number<std::uint16_t>();
    const auto encoding = in.number<std::uint8_t>();
    place.disk = in.number<std::uint8_t>();
    place.segment = in.number<std::uint32_t>();
    place.offset = std::uint64_t{in.number<std::uint32_t>()} * kPageAlignment;
    page.bytes = in.number<std::uint32_t>();
    place.checksum = in.number<std::uint64_t>();
    if (seal.on()) {
      for (std::uint8_t& byte : place.seal.nonce) byte = in.number<std::uint8_t>();
      for (std::uint8_t& byte : place.seal.tag) byte = in.number<std::uint8_t>();
    }
    if (!valid_encoding(encoding) || page.bytes == 0 || page.bytes > kMaxPageBytes ||
        place.offset < kSegmentHeaderBytes) {
      return bad("impossible page");
    }
    page.encoding = static_cast<Encoding>(encoding);
    info.pages.push_back(page);
    record.places.push_back(place);
  }
  if (chunk_id(info.fingerprint, info.salt, info.parent, info.tokens) != id) {
    return bad("the id is not the hash of the content");
  }
  return record;
}

std::string encode_session(const Session& session, const Seal& seal) {
  Writer w;
  w.id(session.fingerprint).id(session.salt);
  w.number(session.created_ns).number(session.updated_ns);
  w.number(std::uint64_t{session.tokens.size()})
      .number(std::uint64_t{session.metadata_json.size()});
  for (const std::int32_t token : session.tokens) w.number(static_cast<std::uint32_t>(token));
  w.text(session.metadata_json);
  const std::uint64_t check = checksum_of_two(session.name, w.out());
  w.number(check);
  if (!seal.on()) return std::move(w.out());
  Writer named;
  named.number(static_cast<std::uint32_t>(session.name.size())).text(session.name).text(w.out());
  return seal.seal_row(std::move(named.out()), seal.hide_name(session.name));
}

Result<Session> decode_session(std::string_view name, std::string_view body, const Seal& seal) {
  auto bad = [&](const char* why) {
    return data_loss(fmt::format("catalog row of session '{}': {}", name, why));
  };
  std::optional<std::string> opened;
  if (seal.on()) {
    opened = seal.open_row(body, name);
    if (!opened) return bad("it was not written with this key, or was changed");
    body = *opened;
    if (body.size() < 4 || number_at<std::uint32_t>(body, 0) > body.size() - 4) {
      return bad("inconsistent sizes");
    }
    name = body.substr(4, number_at<std::uint32_t>(body, 0));
    body.remove_prefix(4 + name.size());
  }
  if (!take_check(name, &body)) return bad("checksum mismatch");
  if (body.size() < kSessionFixedBytes) return bad("too short");
  Parser in(body);
  Session session;
  session.name = name;
  session.fingerprint = in.id<Fingerprint>();
  session.salt = in.id<SaltId>();
  session.created_ns = in.number<std::int64_t>();
  session.updated_ns = in.number<std::int64_t>();
  const auto n_tokens = in.number<std::uint64_t>();
  const auto n_json = in.number<std::uint64_t>();
  const std::uint64_t rest = body.size() - kSessionFixedBytes;
  if (n_tokens > rest / 4 || n_json != rest - 4 * n_tokens) return bad("inconsistent sizes");
  session.tokens.reserve(n_tokens);
  for (std::uint64_t i = 0; i < n_tokens; ++i) {
    session.tokens.push_back(static_cast<std::int32_t>(in.number<std::uint32_t>()));
  }
  session.metadata_json = in.text(n_json);
  return session;
}

std::string segment_name(std::uint32_t segment) {
  return fmt::format("segment-{:08}.hcs", segment);
}

bool parse_segment_name(std::string_view name, std::uint32_t* segment) {
  constexpr std::string_view kPrefix = "segment-";
  constexpr std::string_view kSuffix = ".hcs";
  if (name.size() != kPrefix.size() + 8 + kSuffix.size() || !name.starts_with(kPrefix) ||
      !name.ends_with(kSuffix)) {
    return false;
  }
  return parse_number(name.substr(kPrefix.size(), 8), 10, segment) && *segment > 0;
}

bool valid_encoding(std::uint8_t value) {
  return (value >= 1 && value <= 6) || value == 16 || value == 17 || (value >= 32 && value <= 34);
}
bool valid_element_type(std::uint8_t value) { return value <= 6; }

std::string_view encoding_name(Encoding encoding) {
  switch (encoding) {
    case Encoding::kHiddenF32: return "hidden-f32";
    case Encoding::kHiddenF16: return "hidden-f16";
    case Encoding::kHiddenBf16: return "hidden-bf16";
    case Encoding::kHiddenQ8_0: return "hidden-q8_0";
    case Encoding::kHiddenQ8_1: return "hidden-q8_1";
    case Encoding::kHiddenQ8_K: return "hidden-q8_k";
    case Encoding::kKv: return "kv";
    case Encoding::kKvPacked: return "kv-packed";
    case Encoding::kRows: return "rows";
    case Encoding::kSnapshot: return "snapshot";
    case Encoding::kChosen: return "chosen";
  }
  return "unknown";
}

std::string_view element_type_name(ElementType type) {
  switch (type) {
    case ElementType::kNone: return "none";
    case ElementType::kF32: return "f32";
    case ElementType::kF16: return "f16";
    case ElementType::kBf16: return "bf16";
    case ElementType::kQ8_0: return "q8_0";
    case ElementType::kQ8_1: return "q8_1";
    case ElementType::kQ8_K: return "q8_k";
  }
  return "unknown";
}

const PageInfo* ChunkInfo::find_page(std::uint16_t layer, Encoding encoding) const {
  const auto at = std::lower_bound(pages.begin(), pages.end(), std::pair(layer, encoding),
                                   [](const PageInfo& page, const auto& key) {
                                     return std::pair(page.layer, page.encoding) < key;
                                   });
  if (at == pages.end() || at->layer != layer || at->encoding != encoding) return nullptr;
  return &*at;
}

const PageInfo* ChunkInfo::find_state(std::uint16_t layer, Encoding encoding) const {
  const PageInfo* page = find_page(layer, encoding);
  if (page != nullptr || !is_kv(encoding)) return page;
  return find_page(layer, encoding == Encoding::kKv ? Encoding::kKvPacked : Encoding::kKv);
}

}  // namespace hcache::store
