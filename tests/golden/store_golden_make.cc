// Writes a golden store and its session as a file: make_golden_store DIR [sealed]. New ones only
// when a format's number changes. sealed: an encrypted store.
#include <cstdio>
#include <string_view>

#include "base/env.h"
#include "store/archive.h"
#include "store_golden.h"

namespace hcache::store::golden {
namespace {

Status make(const std::string& dir, bool sealed) {
  StoreOptions options;
  if (sealed) options.key = key();
  options.dirs = {join_path(dir, "disk0"), join_path(dir, "disk1")};
  HCACHE_ASSIGN_OR_RETURN(const auto store, Store::open(Env::real(), options));
  const std::vector<std::int32_t> all = tokens();
  std::vector<ChunkWrite> batch;
  std::deque<std::vector<std::byte>> memory;
  ChunkId parent;
  for (std::size_t at = 0; at < all.size(); at += kChunkTokens) {
    ChunkWrite& write = batch.emplace_back();
    write.tokens = std::span<const std::int32_t>(all).subspan(
        at, std::min<std::size_t>(kChunkTokens, all.size() - at));
    write.fingerprint = fingerprint();
    write.salt = salt_id(kSaltText);
    write.parent = parent;
    write.first_position = at;
    write.k_type = ElementType::kQ8_0;
    write.v_type = ElementType::kF16;
    write.id = chunk_id(write.fingerprint, write.salt, parent, write.tokens);
    for (const auto& [layer, encoding] : pages(Era::kCut)) {
      memory.push_back(page(at / kChunkTokens, layer, encoding, write.tokens.size()));
      write.pages.push_back({layer, encoding, memory.back()});
    }
    parent = write.id;
  }
  HCACHE_RETURN_IF_ERROR(store->put(batch).status());
  Session session;
  session.name = kSessionName;
  session.fingerprint = fingerprint();
  session.salt = salt_id(kSaltText);
  session.tokens = all;
  session.metadata_json = kMetadata;
  HCACHE_RETURN_IF_ERROR(store->put_session(session));
  std::string file;
  {
    HCACHE_ASSIGN_OR_RETURN(const Match match,
                            store->match(fingerprint(), salt_id(kSaltText), all));
    HCACHE_RETURN_IF_ERROR(
        write_archive(*store, archive_head(), match, [&](std::string_view piece) {
          file += piece;
          return Status();
        }));
  }
  HCACHE_RETURN_IF_ERROR(write_whole_file(Env::real(), join_path(dir, "session.hcache"), file));
  return store->close();
}

}  // namespace
}  // namespace hcache::store::golden

int main(int argc, char** argv) {
  const bool sealed = argc == 3 && std::string_view(argv[2]) == "sealed";
  if (argc != 2 && !sealed) {
    std::fprintf(stderr, "usage: make_golden_store DIR [sealed]\n");
    return 2;
  }
  const hcache::Status status = hcache::store::golden::make(argv[1], sealed);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return hcache::exit_code(status.code());
}
