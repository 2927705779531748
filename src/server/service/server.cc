#include "server/server.h"

#include "api/answers.h"
#include "base/log.h"
#include "endpoints.h"
#include "service.h"

namespace hcache::server {
namespace {

class ServerImpl : public Server {
 public:
  ~ServerImpl() override {
    stop(0).ignore("a destructor has nobody to tell; Runtime::close logs what it meets");
  }

  Status start(Env& env, const ServerOptions& options) {
    HCACHE_ASSIGN_OR_RETURN(service_, Service::open(env, options));
    http::Router router;
    endpoints_ = add_endpoints(*service_, &router);
    http::Options http = options.http;
    http.loopback_hosts_only = http.api_keys.empty() && http::is_loopback_host(http.host);
    http.error_body = [](int status, std::string_view message, std::string_view path) {
      return http::ErrorBody{
          .content_type = "application/json",
          .content = api::to_text(api::error_body(status, message, api::error_style(path)))};
    };
    http.access_log = [](const http::AccessRecord& r) {
      log::info("http {} {} {} {} B {:.3f} s key={} peer={}", r.method, r.path, r.status, r.bytes,
                r.seconds, r.key_name, r.peer);
    };
    HCACHE_ASSIGN_OR_RETURN(http_, http::Server::start(env, std::move(http), std::move(router)));
    service_->watch(http_.get());
    return {};
  }

  Status stop(int64_t grace_ns) override {
    if (!service_) return {};
    service_->stop_events();  // they have no end of their own
    // The generation of a client that is cut off here is cancelled.
    if (http_) http_->stop(grace_ns);
    if (endpoints_) endpoints_->stop();
    service_->watch(nullptr);
    const Status status = service_->stop(0);
    http_.reset();
    endpoints_.reset();
    service_.reset();
    return status;
  }
  [[nodiscard]] uint16_t port() const override { return http_->port(); }

 private:
  std::unique_ptr<Service> service_;
  std::unique_ptr<Endpoints> endpoints_;
  std::unique_ptr<http::Server> http_;
};

}  // namespace

Result<std::unique_ptr<Server>> Server::start(Env& env, ServerOptions options) {
  auto server = std::make_unique<ServerImpl>();
  HCACHE_RETURN_IF_ERROR(server->start(env, options));
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace hcache::server
