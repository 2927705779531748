// Fuzz target for what the store reads back: catalog rows, segment headers and disk files. Inputs
// get valid checksums and ids, so that mutations reach the parsers behind those checks.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "base/xxh3.h"
#include "format.h"
#include "fuzz.h"
#include "seal.h"

namespace hcache::store {
namespace {

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

std::string with_check(std::string_view key, std::string_view body) {
  const std::string text = std::string(key) + std::string(body);
  const std::uint64_t check = XXH3_64bits(text.data(), text.size());
  std::string out(body);
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(check >> (8 * i)));
  return out;
}

template <typename T>
T load(std::string_view text, std::size_t at) {
  T value{};
  std::memcpy(&value, text.data() + at, sizeof(value));
  return value;
}

// The id that a row's content asks for; zero where there is too little of it.
ChunkId id_of(std::string_view body) {
  constexpr std::size_t kTokensAt = 3 * 16 + 8 + 2;
  constexpr std::size_t kFixed = kTokensAt + 2 + 4;
  if (body.size() < kFixed) return {};
  const auto n_tokens = load<std::uint16_t>(body, kTokensAt);
  if (body.size() < kFixed + 4U * n_tokens) return {};
  std::vector<std::int32_t> tokens(n_tokens);
  for (std::size_t i = 0; i < n_tokens; ++i) {
    tokens[i] = load<std::int32_t>(body, kFixed + 4 * i);
  }
  return chunk_id(load<Fingerprint>(body, 0), load<SaltId>(body, 16), load<ChunkId>(body, 32),
                  tokens);
}

void read_chunk(std::string_view body) {
  const ChunkId id = id_of(body);
  const std::string_view key(reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size());
  const std::string row = with_check(key, body);
  const Seal seal{StoreKey()};
  decode_chunk(id, row, seal).status().ignore("no crash: it is not sealed");
  const Result<ChunkRecord> sealed = decode_chunk(id, seal.seal_row(row, key), seal);
  if (sealed.ok()) {
    const Result<ChunkRecord> again = decode_chunk(id, encode_chunk(*sealed, seal), seal);
    require(again.ok() && again->places == sealed->places, "a sealed chunk can be written again");
  }
  const Result<ChunkRecord> record = decode_chunk(id, row, {});
  if (!record.ok()) return;
  require(encode_chunk(*record, {}) == row, "an accepted chunk is what encode_chunk() writes");
  require(record->info.pages.size() == record->places.size(), "every page has a place");
}

void read_session(std::string_view body) {
  const std::string row = with_check("name", body);
  const Result<Session> session = decode_session("name", row, {});
  if (session.ok()) {
    require(encode_session(*session, {}) == row, "an accepted session is what was written");
  }
  const Seal seal{StoreKey()};
  const std::string name = seal.hide_name("name");
  decode_session(name, seal.seal_row(std::string(body), name), seal).status().ignore("no crash");
}

void read_header(std::string_view body) {
  const std::string header = with_check({}, body);
  check_segment_header(std::as_bytes(std::span(header)), StoreId{}, 1, 7).ignore("no crash");
}

void read_disk_file(std::string_view text) {
  const Result<DiskFile> file = decode_disk_file(text);
  if (!file.ok()) return;
  const Result<DiskFile> again = decode_disk_file(encode_disk_file(*file));
  require(again.ok() && again->store == file->store && again->disk == file->disk,
          "an accepted disk file can be written and read again");
}

}  // namespace
}  // namespace hcache::store

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hcache::store;
  if (size == 0) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 4) {
    case 0: read_chunk(body); break;
    case 1: read_session(body); break;
    case 2: read_header(body); break;
    default: read_disk_file(body); break;
  }
  return 0;
}

std::vector<std::string> hcache::fuzz::seeds() {
  using namespace hcache::store;
  constexpr std::size_t kCheck = 8;
  ChunkRecord chunk;
  chunk.info.tokens = {1, 2, 3, 70000};
  chunk.info.k_type = ElementType::kF16;
  chunk.info.v_type = ElementType::kF16;
  chunk.info.pages = {{.layer = 0, .encoding = Encoding::kKv, .bytes = 4096},
                      {.layer = 1, .encoding = Encoding::kKv, .bytes = 100}};
  chunk.places = {{.disk = 0, .segment = 1, .offset = 4096, .checksum = 5},
                  {.disk = 1, .segment = 2, .offset = 1 << 20, .checksum = 6}};
  chunk.info.id = chunk_id(Fingerprint{}, SaltId{}, ChunkId{}, chunk.info.tokens);
  std::string row = encode_chunk(chunk, {});
  require(decode_chunk(chunk.info.id, row, {}).ok(), "the seed is valid");
  Session session;
  session.name = "name";
  session.tokens = {5, 6, 7};
  session.metadata_json = R"({"a":1})";
  std::string session_row = encode_session(session, {});
  std::string header(kSegmentHeaderBytes, '\0');
  encode_segment_header(StoreId{}, false, 1, 7, std::as_writable_bytes(std::span(header)));
  row.resize(row.size() - kCheck);
  session_row.resize(session_row.size() - kCheck);
  header.resize(header.size() - kCheck);
  return {'\0' + row, '\1' + session_row, '\2' + header, '\3' + encode_disk_file({})};
}
