#include "embedding_endpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <utility>

#include "api/embeddings.h"
#include "api/prompt_tokens.h"
#include "base/log.h"
#include "model/pooling.h"
#include "request_log.h"

namespace hcache::server {
namespace {

using api::Json;
using scheduler::Outcome;

// Of one list of texts.
constexpr size_t kInFlight = 16;

using Parse = std::function<Result<api::EmbeddingRequest>(const Json& body)>;

// One request for vectors, from its parsed form to its answer. start() on an intake thread; rows
// come on the scheduler's, the answer is made on the writer's. It lives as long as anybody refers
// to it.
class EmbeddingJob : public std::enable_shared_from_this<EmbeddingJob> {
 public:
  EmbeddingJob(Service& service, const Call& call, api::EmbeddingRequest request)
      : service_(service),
        http_(call.request),
        responder_(call.responder),
        request_(std::move(request)),
        salt_(service.salt_of(http_, "")) {}

  void start() {
    const Status status = make_texts();
    if (!status.ok()) return send_status(http_, *responder_, status);
    responder_->on_disconnect([self = weak_from_this()] {
      if (const auto job = self.lock()) job->cancel_all();
    });
    service_.writer().post([self = shared_from_this()] { self->submit(); });
  }

 private:
  struct Text {
    std::vector<int32_t> tokens;
    model::Pooler pooler;
    std::atomic<scheduler::RequestId> id = 0;  // 0: not submitted

    Text(std::vector<int32_t> t, model::Pooling pooling)
        : tokens(std::move(t)), pooler(pooling, static_cast<int64_t>(tokens.size())) {}
  };

  Status make_texts() {
    HCACHE_ASSIGN_OR_RETURN(const model::Pooling pooling, service_.pooling());
    HCACHE_RETURN_IF_ERROR(api::check_pooling(request_, pooling != model::Pooling::kNone));
    for (const api::Prompt& input : request_.inputs) {
      HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                              api::prompt_tokens(service_.tokenizer(), input));
      if (tokens.empty()) {
        return invalid_argument(fmt::format("input[{}]: it has no tokens", texts_.size()));
      }
      const auto context = static_cast<size_t>(service_.context());
      if (request_.truncate && tokens.size() > context) tokens.resize(context);
      texts_.emplace_back(std::move(tokens), pooling);
    }
    return {};
  }

  // Any thread.
  void cancel_all() {
    gone_.store(true, std::memory_order_relaxed);
    for (const Text& text : texts_) {
      if (text.id != 0) service_.scheduler().cancel(text.id);
    }
  }

  // ---- The writer's thread

  // As many as may be in flight; the others follow as these end, so that a long list takes no more
  // of the queue than that.
  void submit() {
    while (!answered_ && n_submitted_ < texts_.size() && n_submitted_ - n_done_ < kInFlight) {
      Text& text = texts_[n_submitted_];
      Result<scheduler::RequestId> id = service_.scheduler().submit(request_for(text));
      if (id.code() == Code::kResourceExhausted && n_submitted_ > n_done_) return;
      if (!id.ok()) return fail(id.status());
      text.id = *id;
      ++n_submitted_;
    }
    // The client may have left before there was anything to cancel.
    if (gone_.load(std::memory_order_relaxed)) cancel_all();
  }

  scheduler::Request request_for(Text& text) {
    scheduler::Request request;
    request.tokens = text.tokens;
    request.max_new_tokens = 0;
    request.salt = salt_;
    request.save = false;
    request.key = http_.key_name;
    request.tells_hidden = true;
    request.logits_from = text.pooler.first_row();
    request.on_prompt_logits = [self = shared_from_this(), &text](int64_t row,
                                                                  std::span<const float> values) {
      text.pooler.take(row, values);
    };
    request.next = [](std::span<const float>) -> Result<scheduler::NextToken> {
      return internal_error("a text that is embedded goes on");
    };
    request.on_done = [self = shared_from_this()](const Outcome& outcome) {
      self->service_.writer().post([self, outcome] { self->on_done(outcome); });
    };
    return request;
  }

  void on_done(const Outcome& outcome) {
    service_.metrics().observe(outcome);
    if (service_.options().log_requests) {
      log::write(log::Level::kInfo, request_line(id_, n_done_, http_.key_name, outcome));
    }
    ++n_done_;
    if (answered_) return;
    if (outcome.phase != scheduler::Phase::kDone) return fail(outcome.status);
    if (n_done_ == texts_.size()) return answer();
    submit();
  }

  void answer() {
    const bool pooled = service_.pooling().value() != model::Pooling::kNone;
    std::vector<api::Embedding> embeddings;
    for (Text& text : texts_) {
      api::Embedding& made = embeddings.emplace_back();
      made.rows = std::move(text.pooler).vectors();
      made.tokens = static_cast<int64_t>(text.tokens.size());
      const Status status = api::shape_embedding(request_, pooled, &made);
      if (!status.ok()) return fail(status);
    }
    answered_ = true;
    const std::string& name =
        request_.model_name.empty() ? service_.model_name() : request_.model_name;
    const int64_t total_ns = service_.env().monotonic_ns() - begin_ns_;
    send_json(*responder_, api::embeddings_answer(request_, name, embeddings, total_ns));
  }

  void fail(const Status& status) {
    answered_ = true;
    cancel_all();
    const api::ErrorStyle style = api::error_style(http_.path);
    api::ErrorAnswer error = api::render_error(status, style);
    if (status.code() == Code::kOutOfRange) {
      size_t longest = 0;
      for (const Text& text : texts_) longest = std::max(longest, text.tokens.size());
      api::tell_context(static_cast<int64_t>(longest), service_.context(), style, &error);
    }
    send_error(*responder_, error);
  }

  Service& service_;
  const http::Request http_;
  const std::shared_ptr<http::Responder> responder_;
  const api::EmbeddingRequest request_;
  const Salt salt_;
  const std::string id_ = service_.new_id();
  std::deque<Text> texts_;
  std::atomic<bool> gone_ = false;  // the client is
  const int64_t begin_ns_ = service_.env().monotonic_ns();

  // The writer's.
  size_t n_submitted_ = 0;
  size_t n_done_ = 0;
  bool answered_ = false;
};

http::Handler embed_by(Service& service, Parse parse) {
  return [&service, parse = std::move(parse)](const http::Request& request,
                                              const std::shared_ptr<http::Responder>& responder) {
    service.intake().post([&service, parse, call = Call{request, responder, {}}] {
      const Result<Json> body = api::parse_body(call.request.body);
      if (!body.ok()) return send_status(call.request, *call.responder, body.status());
      Result<api::EmbeddingRequest> asked = parse(*body);
      if (!asked.ok()) return send_status(call.request, *call.responder, asked.status());
      std::make_shared<EmbeddingJob>(service, call, std::move(*asked))->start();
    });
  };
}

void refuse_to_rank(const http::Request& request,
                    const std::shared_ptr<http::Responder>& responder) {
  send_status(request, *responder,
              unimplemented("this model writes text and ranks none; start `hcache serve -m FILE` "
                            "with the file of a reranker"));
}

}  // namespace

void EmbeddingEndpoints::add_to(http::Router* router) {
  for (api::EmbeddingRoute& route : api::embedding_routes(service_.options().embd_normalize)) {
    router->add("POST", route.path, embed_by(service_, std::move(route.parse)));
  }
  for (const char* path : {"/v1/rerank", "/rerank", "/v1/reranking", "/reranking"}) {
    router->add("POST", path, refuse_to_rank);
  }
}

}  // namespace hcache::server
