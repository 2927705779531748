#include "seal.h"

#include <fmt/format.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "aes_gcm.h"
#include "base/sync.h"
#include "bytes.h"
#include "libcrypto.h"

namespace hcache::store {
namespace {

using Key = AesGcm::Key;

constexpr std::size_t kStoreIdRandom = 8;  // of its bytes; the rest says which key
// Of blocks that become numbers: what keeps their kinds apart.
constexpr std::uint8_t kFirstToken = 1;
constexpr std::uint8_t kChecksum = 2;

// A key for one purpose.
Key derive(const Key& from, std::string_view purpose, std::span<const std::uint8_t> more = {}) {
  std::string input(purpose);
  input.push_back('\0');
  input.append(reinterpret_cast<const char*>(more.data()), more.size());
  Key out;
  unsigned int n = 0;
  if (HMAC(EVP_sha256(), from.data(), static_cast<int>(from.size()), bytes_of(input.data()),
           input.size(), out.data(), &n) == nullptr ||
      n != out.size()) {
    die("libcrypto cannot compute an HMAC");
  }
  return out;
}

// One block by itself.
void aes_block(const Key& key, bool encrypt, const std::uint8_t* in, std::uint8_t* out) {
  static const EVP_CIPHER* const cipher = fetch_cipher("AES-256-ECB");
  EVP_CIPHER_CTX* c = cipher_of_thread();
  int n = 0;
  if (EVP_CipherInit_ex2(c, cipher, key.data(), nullptr, encrypt ? 1 : 0, nullptr) != 1 ||
      EVP_CIPHER_CTX_set_padding(c, 0) != 1 || EVP_CipherUpdate(c, out, &n, in, 16) != 1) {
    die("libcrypto cannot encrypt a block");
  }
}

// What a page's seal covers beside its bytes.
std::string text_of(const PageName& name) {
  const PageInfo& page = name.page;
  Writer w;
  w.id(name.chunk).number(page.layer).number(static_cast<std::uint8_t>(page.encoding));
  w.number(page.bytes);
  return std::move(w.out());
}

// From the end of a row or a value.
PageSeal seal_at(const void* at) {
  PageSeal seal;
  std::memcpy(seal.nonce.data(), at, seal.nonce.size());
  std::memcpy(seal.tag.data(), bytes_of(at) + seal.nonce.size(), seal.tag.size());
  return seal;
}

}  // namespace

struct Seal::Keys {
  explicit Keys(const StoreKey& key)
      : store(derive(key.bytes, "hcache store")),
        ids(derive(key.bytes, "hcache ids")),
        numbers(derive(key.bytes, "hcache numbers")),
        names(derive(key.bytes, "hcache names")),
        rows(derive(key.bytes, "hcache rows")),
        pages(derive(key.bytes, "hcache pages")) {}

  // Of a salt's pages; stays where it is.
  const AesGcm& pages_of(const SaltId& salt) const HCACHE_EXCLUDES(mutex) {
    const MutexLock lock(mutex);
    const auto at = of_salts.find(salt);
    if (at != of_salts.end()) return at->second;
    return of_salts.emplace(salt, derive(pages, "hcache salt", salt.bytes)).first->second;
  }

  const Key store;
  const Key ids;
  const Key numbers;
  const Key names;
  const AesGcm rows;
  const Key pages;
  mutable Mutex mutex;
  mutable std::unordered_map<SaltId, AesGcm> of_salts HCACHE_GUARDED_BY(mutex);
};

Seal::Seal(const StoreKey& key) : keys_(std::make_shared<const Keys>(key)) {}

StoreId Seal::new_store_id(const StoreId& random) const {
  if (!on()) return random;
  StoreId id = random;
  const Key mark = derive(keys_->store, "id", std::span(random.bytes).first<kStoreIdRandom>());
  std::copy_n(mark.begin(), id.bytes.size() - kStoreIdRandom, id.bytes.begin() + kStoreIdRandom);
  return id;
}

Status Seal::fits(const StoreId& store, bool sealed, std::string_view where) const {
  if (sealed && !on()) {
    return failed_precondition(
        fmt::format("the store in {} is encrypted; give its key (--encrypt-key-file)", where));
  }
  if (!sealed && on()) {
    return failed_precondition(
        fmt::format("the store in {} is not encrypted; leave --encrypt-key-file out, or give an "
                    "empty directory",
                    where));
  }
  if (sealed && new_store_id(store) != store) {
    return failed_precondition(
        fmt::format("the store in {} was encrypted with another key; nothing was changed", where));
  }
  return {};
}

Seal::Block Seal::hidden(const Block& block) const {
  Block out{};
  if (block == out) return out;  // no id stays none
  aes_block(keys_->ids, true, block.data(), out.data());
  return out;
}

Seal::Block Seal::shown(const Block& block) const {
  Block out{};
  if (block == out) return out;
  aes_block(keys_->ids, false, block.data(), out.data());
  return out;
}

std::int32_t Seal::hide_first_token(const ChunkId& sibling_key, std::int32_t token) const {
  if (!on()) return token;
  Block block = sibling_key.bytes;
  block[11] = kFirstToken;
  std::memcpy(&block[12], &token, sizeof token);
  aes_block(keys_->numbers, true, block.data(), block.data());
  std::int32_t out = 0;
  std::memcpy(&out, block.data(), sizeof out);
  return out;
}

std::uint64_t Seal::hide_checksum(std::uint64_t checksum) const {
  if (!on()) return checksum;
  Block block{};
  std::memcpy(block.data(), &checksum, sizeof checksum);
  block[11] = kChecksum;
  aes_block(keys_->numbers, true, block.data(), block.data());
  std::uint64_t out = 0;
  std::memcpy(&out, block.data(), sizeof out);
  return out;
}

std::string Seal::hide_name(std::string_view session) const {
  if (!on()) return std::string(session);
  const Key name = derive(keys_->names, "name", {bytes_of(session.data()), session.size()});
  return to_hex(std::span(name).first<16>());
}

std::string Seal::seal_row(std::string row, std::string_view of) const {
  if (!on()) return row;
  PageSeal seal;
  auto* bytes = reinterpret_cast<std::byte*>(row.data());
  keys_->rows.encrypt(of, {bytes, row.size()}, bytes, &seal);
  row.append(reinterpret_cast<const char*>(seal.nonce.data()), seal.nonce.size());
  row.append(reinterpret_cast<const char*>(seal.tag.data()), seal.tag.size());
  return row;
}

std::optional<std::string> Seal::open_row(std::string_view sealed, std::string_view of) const {
  if (!on()) return std::string(sealed);
  if (sealed.size() < kSealBytes) return std::nullopt;
  const PageSeal seal = seal_at(sealed.data() + sealed.size() - kSealBytes);
  std::string row(sealed.substr(0, sealed.size() - kSealBytes));
  if (!keys_->rows.decrypt(of, seal, std::as_writable_bytes(std::span(row)))) return std::nullopt;
  return row;
}

void Seal::seal_page(const PageName& page, std::span<const std::byte> in, std::byte* out,
                     PageSeal* seal) const {
  keys_->pages_of(page.salt).encrypt(text_of(page), in, out, seal);
}

bool Seal::open_page(const PageName& page, const PageSeal& seal, std::span<std::byte> bytes) const {
  return keys_->pages_of(page.salt).decrypt(text_of(page), seal, bytes);
}

std::shared_ptr<const AlignedBuffer> Seal::seal_value(
    const PageName& page, std::shared_ptr<const AlignedBuffer> bytes) const {
  if (!on()) return bytes;
  auto value = std::make_shared<AlignedBuffer>(bytes->size() + kSealBytes);
  PageSeal seal;
  seal_page(page, {bytes->data(), bytes->size()}, value->data(), &seal);
  std::byte* end = value->data() + bytes->size();
  std::memcpy(end, seal.nonce.data(), seal.nonce.size());
  std::memcpy(end + seal.nonce.size(), seal.tag.data(), seal.tag.size());
  return value;
}

std::shared_ptr<const AlignedBuffer> Seal::open_value(const PageName& page,
                                                      std::string_view value) const {
  if (value.size() != value_bytes(page.page.bytes)) return nullptr;
  auto bytes = std::make_shared<AlignedBuffer>(page.page.bytes);
  std::memcpy(bytes->data(), value.data(), bytes->size());
  if (on() && !open_page(page, seal_at(value.data() + bytes->size()), bytes->span())) {
    return nullptr;
  }
  return bytes;
}

}  // namespace hcache::store
