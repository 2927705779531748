// TLS of the Redis client's connections.
//
// Threading: the client's thread.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "base/status.h"
#include "redis/redis_url.h"

struct redisAsyncContext;

namespace hcache::store {

struct SslContextDeleter {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};
using SslContext = std::unique_ptr<SSL_CTX, SslContextDeleter>;

// Null where the URL asks for no TLS. invalid_argument: the certificates can't be loaded.
[[nodiscard]] Result<SslContext> make_tls(const RedisUrl& url);

// Before anything is sent. The server's certificate must be for `host`, as it was asked for.
[[nodiscard]] Status start_tls(SSL_CTX* tls, redisAsyncContext* context, const std::string& host);

}  // namespace hcache::store
