// What several users of libcrypto need of it.
#pragma once

#include <fmt/format.h>
#include <openssl/evp.h>

#include <cstdint>
#include <memory>

#include "base/status.h"

namespace hcache::store {

inline const std::uint8_t* bytes_of(const void* data) {
  return static_cast<const std::uint8_t*>(data);
}

// The calling thread's.
inline EVP_CIPHER_CTX* cipher_of_thread() {
  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
  };
  thread_local const std::unique_ptr<EVP_CIPHER_CTX, Free> context(EVP_CIPHER_CTX_new());
  if (context == nullptr) die("out of memory for a cipher");
  return context.get();
}

inline const EVP_CIPHER* fetch_cipher(const char* name) {
  const EVP_CIPHER* cipher = EVP_CIPHER_fetch(nullptr, name, nullptr);
  if (cipher == nullptr) die(fmt::format("libcrypto has no {}", name));
  return cipher;
}

}  // namespace hcache::store
