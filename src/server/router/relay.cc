#include "relay.h"

#include <boost/asio/post.hpp>
#include <chrono>
#include <utility>

#include "api/answers.h"

namespace hcache::router {
namespace {

// Longer answers, and those without a length, are passed on piece by piece.
constexpr std::int64_t kCollectedBytes = 1 << 20;
// How often a client that has enough to read is looked at.
constexpr std::chrono::milliseconds kClientPause{5};

}  // namespace

Relay::Relay(boost::asio::io_context& context, http::Request request, std::string target,
             std::shared_ptr<http::Responder> responder)
    : context_(context),
      request_(std::move(request)),
      target_(std::move(target)),
      responder_(std::move(responder)),
      pause_(context) {}

void Relay::on_gone(std::function<void()> callback) {
  gone_ = std::move(callback);
  if (!responder_) return;
  const std::weak_ptr<Relay> weak = weak_from_this();
  responder_->on_disconnect([weak, &context = context_] {
    boost::asio::post(context, [weak] {
      if (const auto self = weak.lock()) self->leave();
    });
  });
}

void Relay::leave() {
  left_ = true;
  pause_.cancel();
  if (forwarding_) forwarding_->stop();
  if (gone_) std::exchange(gone_, nullptr)();
}

void Relay::run(std::uint16_t port, std::function<void(ForwardEnd)> done) {
  done_ = std::move(done);
  Outgoing outgoing = {.method = request_.method,
                       .target = target_,
                       .headers = std::move(request_.headers),
                       .body = std::move(request_.body)};
  const auto self = shared_from_this();
  forwarding_ =
      Forwarding::start(context_, port, std::move(outgoing),
                        {.on_head =
                             [self](int status, http::Headers headers, std::int64_t length) {
                               self->on_head(status, std::move(headers), length);
                             },
                         .on_body = [self](std::string_view piece) { return self->on_body(piece); },
                         .on_end = [self](ForwardEnd how) { self->on_end(how); }});
  on_gone(nullptr);
}

void Relay::on_head(int status, http::Headers headers, std::int64_t length) {
  status_ = status;
  collecting_ = length >= 0 && length <= kCollectedBytes;
  if (collecting_) {
    headers_ = std::move(headers);
  } else {
    responder_->start_stream(status, headers);
  }
}

bool Relay::on_body(std::string_view piece) {
  if (collecting_) {
    body_.append(piece);
    return true;
  }
  if (!responder_->write(piece)) {
    leave();
    return false;
  }
  if (responder_->writable()) return true;
  wait_for_client();
  return false;
}

void Relay::wait_for_client() {
  pause_.expires_after(kClientPause);
  pause_.async_wait([self = shared_from_this()](boost::system::error_code error) {
    if (error || self->left_ || !self->forwarding_) return;
    if (!self->responder_->writable()) return self->wait_for_client();
    self->forwarding_->resume();
  });
}

void Relay::on_end(ForwardEnd how) {
  forwarding_ = nullptr;
  if (how == ForwardEnd::kWhole && collecting_) {
    responder_->send(status_, headers_, std::move(body_));
  } else if (how == ForwardEnd::kWhole) {
    responder_->finish();
  }
  // An answer whose head alone has come is none.
  if (how == ForwardEnd::kCutOff && collecting_) how = ForwardEnd::kNoHead;
  if (how != ForwardEnd::kNoHead) responder_ = nullptr;
  if (done_) std::exchange(done_, nullptr)(how);
}

void Relay::refuse(int status, std::string_view message) {
  const auto responder = std::exchange(responder_, nullptr);
  if (!responder) return;
  const api::ErrorStyle style = api::error_style(request_.path);
  http::Headers headers = {{"Content-Type", "application/json"}};
  if (status == 503) headers.emplace_back("Retry-After", "1");
  responder->send(status, headers, api::to_text(api::error_body(status, message, style)));
}

}  // namespace hcache::router
