#include "encoder/encoder_server.h"

#include <utility>

#include "api/answers.h"
#include "encode_queue.h"
#include "encoder_endpoints.h"
#include "http/access_log.h"
#include "model/tokenizer.h"

namespace hcache::encoder {
namespace {

class EncoderServerImpl final : public EncoderServer {
 public:
  EncoderServerImpl(Env& env, EncoderServerOptions options)
      : env_(env), options_(std::move(options)) {}
  ~EncoderServerImpl() override { stop(0); }

  Status start();
  void drain() override { endpoints_->drain(); }
  void stop(int64_t grace_ns) override;
  [[nodiscard]] uint16_t port() const override { return http_->port(); }

 private:
  Status listen();

  Env& env_;
  const EncoderServerOptions options_;
  std::unique_ptr<model::Tokenizer> tokenizer_;
  std::unique_ptr<EncodeQueue> queue_;
  std::unique_ptr<EncoderEndpoints> endpoints_;
  std::unique_ptr<http::Server> http_;
};

// The port is taken first, as by a server of a model that writes text.
Status EncoderServerImpl::listen() {
  http::Options http = options_.http;
  http.loopback_hosts_only = http.api_keys.empty() && http::are_loopback_hosts(http.host);
  http.error_body = [](int status, std::string_view message, std::string_view path) {
    return http::ErrorBody{
        .content_type = "application/json",
        .content = api::to_text(api::error_body(status, message, api::error_style(path)))};
  };
  http.access_log = http::log_access;
  HCACHE_ASSIGN_OR_RETURN(http_, http::Server::start(env_, std::move(http)));
  if (options_.on_listening) options_.on_listening(http_->port());
  return {};
}

Status EncoderServerImpl::start() {
  HCACHE_RETURN_IF_ERROR(listen());
  HCACHE_ASSIGN_OR_RETURN(tokenizer_, model::Tokenizer::load(options_.model_path));
  HCACHE_ASSIGN_OR_RETURN(queue_, EncodeQueue::start(env_, options_.max_queued, [this] {
                            return libllama::LlamaEncoder::load(options_.model_path,
                                                                options_.encoder);
                          }));
  endpoints_ = std::make_unique<EncoderEndpoints>(env_, options_, *queue_, *tokenizer_);
  http::Router router;
  endpoints_->add_to(&router);
  http_->serve(std::move(router));
  return {};
}

void EncoderServerImpl::stop(int64_t grace_ns) {
  if (http_) http_->stop(grace_ns);
  if (endpoints_) endpoints_->stop_intake();
  if (queue_) queue_->stop();
  if (endpoints_) endpoints_->stop_writer();
}

}  // namespace

Result<std::unique_ptr<EncoderServer>> EncoderServer::start(Env& env,
                                                            EncoderServerOptions options) {
  auto server = std::make_unique<EncoderServerImpl>(env, std::move(options));
  HCACHE_RETURN_IF_ERROR(server->start());
  return std::unique_ptr<EncoderServer>(std::move(server));
}

}  // namespace hcache::encoder
