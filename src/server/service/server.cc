#include "server/server.h"

#include <optional>
#include <string>
#include <utility>

#include "api/answers.h"
#include "base/sync.h"
#include "endpoints.h"
#include "http/access_log.h"
#include "service.h"

namespace hcache::server {
namespace {

constexpr int kUnavailable = 503;

// What clients are told while the model loads. Threading: any thread.
class Loading {
 public:
  void set(const std::string& what, double fraction) {
    MutexLock lock(mutex_);
    what_ = what;
    fraction_ = fraction;
  }
  void end() {
    MutexLock lock(mutex_);
    ended_ = true;
  }
  // As llama-server words it, with what is being done and how far it is, or as Ollama does; nothing
  // afterwards.
  [[nodiscard]] std::optional<api::Json> error_body(api::ErrorStyle style) const {
    MutexLock lock(mutex_);
    if (ended_) return std::nullopt;
    if (style == api::ErrorStyle::kOllama) {
      return api::error_body(kUnavailable, "the model is being loaded: " + what_, style);
    }
    api::Json body;
    body["error"] = {{"message", "Loading model"},
                     {"type", "unavailable_error"},
                     {"code", kUnavailable},
                     {"reason", what_},
                     {"progress", fraction_}};
    return body;
  }

 private:
  mutable Mutex mutex_;
  std::string what_ HCACHE_GUARDED_BY(mutex_) = "opening the model";
  double fraction_ HCACHE_GUARDED_BY(mutex_) = 0;
  bool ended_ HCACHE_GUARDED_BY(mutex_) = false;
};

class ServerImpl : public Server {
 public:
  ~ServerImpl() override {
    stop(0).ignore("a destructor has nobody to tell; Runtime::close logs what it meets");
  }

  Status start(Env& env, ServerOptions options) {
    // The port is taken first: a server that can't have it need not load a model for that, and
    // clients of one that can learn why they have to wait.
    HCACHE_RETURN_IF_ERROR(listen(env, options));
    options.runtime.progress = [this, shown = std::move(options.runtime.progress)](
                                   const std::string& what, double fraction) {
      loading_.set(what, fraction);
      return !shown || shown(what, fraction);
    };
    HCACHE_ASSIGN_OR_RETURN(service_, Service::open(env, options));
    service_->open_batches();
    http::Router router;
    endpoints_ = add_endpoints(*service_, &router);
    loading_.end();
    http_->serve(std::move(router));
    service_->watch(http_.get());
    return {};
  }

  void drain() override {
    if (service_) service_->drain();
  }

  Status stop(int64_t grace_ns) override {
    if (!service_) {
      if (http_) http_->stop(0);
      http_.reset();
      return {};
    }
    service_->stop_batches();  // what clients wait for may end, batches go on after the next start
    service_->stop_events();   // they have no end of their own
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
  Status listen(Env& env, const ServerOptions& options) {
    http::Options http = options.http;
    http.loopback_hosts_only = http.api_keys.empty() && http::are_loopback_hosts(http.host);
    http.error_body = [this](int status, std::string_view message, std::string_view path) {
      const api::ErrorStyle style = api::error_style(path);
      std::optional<api::Json> loading;
      if (status == kUnavailable) loading = loading_.error_body(style);
      return http::ErrorBody{
          .content_type = "application/json",
          .content = api::to_text(loading ? *loading : api::error_body(status, message, style))};
    };
    http.access_log = http::log_access;
    HCACHE_ASSIGN_OR_RETURN(http_, http::Server::start(env, std::move(http)));
    if (options.on_listening) options.on_listening(http_->port());
    return {};
  }

  Loading loading_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<Endpoints> endpoints_;
  std::unique_ptr<http::Server> http_;
};

}  // namespace

Result<std::unique_ptr<Server>> Server::start(Env& env, ServerOptions options) {
  auto server = std::make_unique<ServerImpl>();
  HCACHE_RETURN_IF_ERROR(server->start(env, std::move(options)));
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace hcache::server
