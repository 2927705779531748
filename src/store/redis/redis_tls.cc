#include "redis/redis_tls.h"

#include <arpa/inet.h>
#include <async.h>
#include <fmt/format.h>
#include <hiredis.h>
#include <hiredis_ssl.h>
#include <openssl/err.h>

#include <utility>

namespace hcache::store {

Result<SslContext> make_tls(const RedisUrl& url) {
  SslContext tls;
  if (!url.tls) return tls;
  tls.reset(SSL_CTX_new(TLS_client_method()));
  if (!tls) return internal_error("OpenSSL can't make a context");
  SSL_CTX_set_min_proto_version(tls.get(), TLS1_2_VERSION);
  SSL_CTX_set_verify(tls.get(), SSL_VERIFY_PEER, nullptr);
  const bool loaded = url.ca_file.empty() ? SSL_CTX_set_default_verify_paths(tls.get()) == 1
                                          : SSL_CTX_load_verify_locations(
                                                tls.get(), url.ca_file.c_str(), nullptr) == 1;
  if (!loaded) {
    ERR_clear_error();
    return invalid_argument(fmt::format("the certificates in {} can't be loaded",
                                        url.ca_file.empty() ? "the system's place" : url.ca_file));
  }
  return tls;
}

Status start_tls(SSL_CTX* tls, redisAsyncContext* context, const std::string& host) {
  SSL* ssl = SSL_new(tls);
  if (ssl == nullptr) return internal_error("OpenSSL can't make a connection");
  unsigned char raw[sizeof(in6_addr)];
  const bool is_address =
      inet_pton(AF_INET, host.c_str(), raw) == 1 || inet_pton(AF_INET6, host.c_str(), raw) == 1;
  bool ok = false;
  if (is_address) {
    ok = X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host.c_str()) == 1;
  } else {
    ok = SSL_set1_host(ssl, host.c_str()) == 1 && SSL_set_tlsext_host_name(ssl, host.c_str()) == 1;
  }
  if (ok && redisInitiateSSL(&context->c, ssl) == REDIS_OK) return {};
  SSL_free(ssl);  // hiredis takes it only when it says so
  return unavailable(fmt::format("TLS can't be started: {}", context->c.errstr));
}

}  // namespace hcache::store
