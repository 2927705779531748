#include "store/key.h"

#include <fmt/format.h>
#include <openssl/rand.h>

#include "base/ids.h"

namespace hcache::store {

Result<StoreKey> read_store_key(Env& env, const std::string& path) {
  auto text = read_whole_file(env, path);
  if (!text.ok()) return text.status().with_context("the store's key");
  while (!text->empty() && (text->back() == '\n' || text->back() == '\r')) text->pop_back();
  StoreKey key;
  if (!from_hex(*text, key.bytes).ok()) {
    return invalid_argument(
        fmt::format("{} holds no key: 64 hex digits, as `hcache store new-key` writes them", path));
  }
  return key;
}

Status make_store_key(Env& env, const std::string& path) {
  HCACHE_ASSIGN_OR_RETURN(const FileInfo there, env.file_info(path));
  if (there.exists) {
    return already_exists(fmt::format(
        "{} exists; what was encrypted with the key in it could never be read again", path));
  }
  StoreKey key;
  if (RAND_bytes(key.bytes.data(), static_cast<int>(key.bytes.size())) != 1) {
    return internal_error("libcrypto has no random numbers");
  }
  return write_whole_file(env, path, to_hex(key.bytes) + "\n");
}

}  // namespace hcache::store
