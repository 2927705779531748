// Fuzz target for session files. Inputs get valid checksums, so that mutations reach what is behind
// them.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "format.h"
#include "fuzz.h"
#include "store/archive.h"

namespace hcache::store {
namespace {

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

// Where the reader finds a checksum that does not match; npos: it found something else, or nothing.
std::size_t wrong_check(const Status& status) {
  std::size_t at = 0;
  int length = 0;
  std::sscanf(status.message().c_str(),
              "the session file is damaged at byte %zu: the checksum does not match%n", &at,
              &length);
  return length > 0 ? at : std::string::npos;
}

void set_number(std::string* file, std::size_t at, std::uint64_t value) {
  for (std::size_t i = 0; i < 8; ++i) (*file)[at + i] = static_cast<char>(value >> (8 * i));
}

void check(const Archive& archive, std::string_view file) {
  std::uint64_t at = 0;
  const auto* begin = reinterpret_cast<const std::byte*>(file.data());
  for (const ArchiveChunk& chunk : archive.chunks) {
    require(chunk.first_token == at, "chunks follow each other");
    at += chunk.n_tokens;
    for (const PageWrite& page : chunk.pages) {
      require(page.bytes.data() >= begin &&
                  page.bytes.data() + page.bytes.size() <= begin + file.size(),
              "pages lie in the file");
      require(!page.bytes.empty() && page.bytes.size() % chunk.n_tokens == 0,
              "pages have whole rows");
    }
  }
  require(at <= archive.head.tokens.size(), "no more state than tokens");
}

// A file that a store wrote.
std::string made_file() {
  std::string dir = (std::filesystem::temp_directory_path() / "hcache-fuzz-XXXXXX").string();
  require(mkdtemp(dir.data()) != nullptr, "a temporary folder");
  std::string file;
  {
    StoreOptions options;
    options.dirs = {dir};
    auto store = Store::open(Env::real(), options);
    require(store.ok(), "a store");
    const std::vector<std::byte> page(640, std::byte{7});
    ArchiveHead head{
        .fingerprint = {}, .model = "m", .name = "n", .tokens = {}, .metadata_json = "{}"};
    for (std::int32_t i = 0; i < 70; ++i) head.tokens.push_back(i);
    std::vector<ChunkWrite> batch(2);
    batch[0].tokens = std::span<const std::int32_t>(head.tokens).first(64);
    batch[1].tokens = std::span<const std::int32_t>(head.tokens).subspan(64);
    for (std::size_t c = 0; c < batch.size(); ++c) {
      ChunkWrite& write = batch[c];
      if (c > 0) write.parent = batch[c - 1].id;
      write.first_position = c * kChunkTokens;
      write.id = chunk_id(write.fingerprint, write.salt, write.parent, write.tokens);
      write.k_type = write.v_type = ElementType::kF16;
      const auto bytes = std::span(page).first(write.tokens.size() * 2);
      write.pages = {{0, Encoding::kHiddenF16, bytes}, {1, Encoding::kKv, bytes}};
    }
    require((*store)->put(batch).ok(), "a chain");
    const auto match = (*store)->match(Fingerprint(), {}, head.tokens);
    require(match.ok() && match->n_tokens == 70, "a match");
    const Status status = write_archive(**store, head, *match, [&](std::string_view piece) {
      file += piece;
      return Status();
    });
    require(status.ok(), "a file");
  }
  std::filesystem::remove_all(dir);
  return file;
}

}  // namespace
}  // namespace hcache::store

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hcache::store;
  constexpr std::size_t kSizeAt = 16;
  std::string file(reinterpret_cast<const char*>(data), size);
  if (file.size() >= kSizeAt + 8) set_number(&file, kSizeAt, file.size());
  while (true) {
    const auto archive = read_archive(file);
    if (archive.ok()) {
      check(*archive, file);
      return 0;
    }
    const std::size_t at = wrong_check(archive.status());
    if (at == std::string::npos) return 0;
    set_number(&file, at, checksum(std::as_bytes(std::span(std::string_view(file).substr(0, at)))));
  }
}

std::vector<std::string> hcache::fuzz::seeds() {
  std::string file = hcache::store::made_file();
  hcache::store::require(hcache::store::read_archive(file).ok(), "the seed is valid");
  return {std::move(file)};
}
