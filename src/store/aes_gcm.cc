#include "aes_gcm.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#ifdef HCACHE_IPSEC_MB
#include <intel-ipsec-mb.h>
#endif

#include "base/status.h"
#include "libcrypto.h"

namespace hcache::store {
namespace {

std::uint8_t* writable(std::byte* data) { return reinterpret_cast<std::uint8_t*>(data); }

EVP_CIPHER_CTX* begin(const AesGcm::Key& key, const PageSeal& seal, bool encrypt,
                      std::string_view of) {
  static const EVP_CIPHER* const cipher = fetch_cipher("AES-256-GCM");
  EVP_CIPHER_CTX* c = cipher_of_thread();
  int n = 0;
  if (EVP_CipherInit_ex2(c, cipher, key.data(), seal.nonce.data(), encrypt ? 1 : 0, nullptr) != 1 ||
      EVP_CipherUpdate(c, nullptr, &n, bytes_of(of.data()), static_cast<int>(of.size())) != 1) {
    die("libcrypto cannot begin AES-256-GCM");
  }
  return c;
}

#ifdef HCACHE_IPSEC_MB
// What its functions are called through; null where the processor lacks what it needs.
const IMB_MGR* manager() {
  static const IMB_MGR* const made = []() -> const IMB_MGR* {
    IMB_MGR* m = alloc_mb_mgr(0);
    if (m == nullptr) return nullptr;
    init_mb_mgr_auto(m, nullptr);
    const bool usable = imb_get_errno(m) == 0 && (m->features & IMB_FEATURE_AESNI) != 0 &&
                        (m->features & IMB_FEATURE_PCLMULQDQ) != 0;
    if (usable) return m;
    free_mb_mgr(m);
    return nullptr;
  }();
  return made;
}
#endif

}  // namespace

#ifdef HCACHE_IPSEC_MB
struct AesGcm::Prepared {
  gcm_key_data key;
};
#else
struct AesGcm::Prepared {};
#endif

AesGcm::AesGcm(const Key& key, [[maybe_unused]] Library library) : key_(key) {
#ifdef HCACHE_IPSEC_MB
  if (library == Library::kFastest && manager() != nullptr) {
    prepared_ = std::make_unique<Prepared>();
    IMB_AES256_GCM_PRE(manager(), key.data(), &prepared_->key);
  }
#endif
}

AesGcm::~AesGcm() = default;
AesGcm::AesGcm(AesGcm&&) noexcept = default;
AesGcm& AesGcm::operator=(AesGcm&&) noexcept = default;

std::string_view AesGcm::library() const {
  return prepared_ == nullptr ? "libcrypto" : "Intel's multi-buffer library";
}

void AesGcm::encrypt(std::string_view of, std::span<const std::byte> in, std::byte* out,
                     PageSeal* seal) const {
  if (RAND_bytes(seal->nonce.data(), static_cast<int>(seal->nonce.size())) != 1) {
    die("libcrypto has no random numbers");
  }
#ifdef HCACHE_IPSEC_MB
  if (prepared_ != nullptr) {
    gcm_context_data context;
    IMB_AES256_GCM_ENC(manager(), &prepared_->key, &context, writable(out), bytes_of(in.data()),
                       in.size(), seal->nonce.data(), bytes_of(of.data()), of.size(),
                       seal->tag.data(), seal->tag.size());
    return;
  }
#endif
  EVP_CIPHER_CTX* c = begin(key_, *seal, true, of);
  int n = 0;
  std::uint8_t* to = writable(out);
  if (EVP_CipherUpdate(c, to, &n, bytes_of(in.data()), static_cast<int>(in.size())) != 1 ||
      EVP_CipherFinal_ex(c, to + n, &n) != 1 ||
      EVP_CIPHER_CTX_ctrl(c, EVP_CTRL_AEAD_GET_TAG, static_cast<int>(seal->tag.size()),
                          seal->tag.data()) != 1) {
    die("libcrypto cannot encrypt");
  }
}

bool AesGcm::decrypt(std::string_view of, const PageSeal& seal,
                     std::span<std::byte> in_place) const {
  std::uint8_t* data = writable(in_place.data());
  std::array<std::uint8_t, 16> tag = seal.tag;
#ifdef HCACHE_IPSEC_MB
  if (prepared_ != nullptr) {
    gcm_context_data context;
    IMB_AES256_GCM_DEC(manager(), &prepared_->key, &context, data, data, in_place.size(),
                       seal.nonce.data(), bytes_of(of.data()), of.size(), tag.data(), tag.size());
    return CRYPTO_memcmp(tag.data(), seal.tag.data(), tag.size()) == 0;
  }
#endif
  EVP_CIPHER_CTX* c = begin(key_, seal, false, of);
  int n = 0;
  if (EVP_CipherUpdate(c, data, &n, data, static_cast<int>(in_place.size())) != 1 ||
      EVP_CIPHER_CTX_ctrl(c, EVP_CTRL_AEAD_SET_TAG, static_cast<int>(tag.size()), tag.data()) !=
          1) {
    die("libcrypto cannot decrypt");
  }
  return EVP_CipherFinal_ex(c, data + n, &n) == 1;
}

}  // namespace hcache::store
