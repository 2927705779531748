// The endpoints of a server whose model makes vectors or ranks.
//
//   intake      parses bodies, tokenises, submits
//   the queue's computes (encode_queue.h)
//   writer      turns rows into answers
//
// Threading: stop() from one thread, before the queue's; everything else from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api/embeddings.h"
#include "api/json.h"
#include "api/rerank.h"
#include "base/env.h"
#include "base/status.h"
#include "base/work_queue.h"
#include "encode_queue.h"
#include "encoder/encoder_server.h"
#include "encoder_answers.h"
#include "http/message.h"
#include "http/router.h"
#include "model/tokenizer.h"

namespace hcache::encoder {

class EncoderEndpoints {
 public:
  // All must outlive it.
  EncoderEndpoints(Env& env, const EncoderServerOptions& options, EncodeQueue& queue,
                   const model::Tokenizer& tokenizer);

  // It must outlive the router.
  void add_to(http::Router* router);
  void drain() { draining_.store(true, std::memory_order_relaxed); }
  // What was received is submitted. After the HTTP side has stopped.
  void stop_intake() { intake_.reset(); }
  // What was computed is answered. After the queue has stopped.
  void stop_writer() { writer_.reset(); }

 private:
  using Texts = std::vector<std::vector<int32_t>>;
  // A request and whom its answer goes to.
  struct Asked {
    http::Request request;
    std::shared_ptr<http::Responder> responder;
    api::Json body;       // null where there was none
    int64_t longest = 0;  // tokens of the last text that was looked at
  };
  using AskedPtr = std::shared_ptr<Asked>;
  using Answer = std::function<Result<api::Json>(const Asked&)>;
  using Make = std::function<Result<api::Json>(std::vector<libllama::EncodedText>)>;
  using ParseEmbedding = std::function<Result<api::EmbeddingRequest>(const api::Json&)>;

  // Handlers that run on the intake's thread, with the body parsed.
  http::Handler on_intake(std::function<void(const AskedPtr&)> run);
  http::Handler quick(Answer answer);
  http::Handler embed_by(ParseEmbedding parse);

  void embed(const AskedPtr& asked, const ParseEmbedding& parse);
  void rerank(const AskedPtr& asked);
  [[nodiscard]] Result<Texts> texts_of(const api::EmbeddingRequest& request, Asked* asked) const;
  // The texts' rows, and of them what `make` makes.
  void submit(const AskedPtr& asked, Texts texts, Make make);
  void fail(const Asked& asked, const Status& status) const;
  // Whether the encoder takes it, so that it can't fail the others of its batch. kOutOfRange: it is
  // too long; `name` is its place in the request.
  [[nodiscard]] Status check_text(const std::vector<int32_t>& text, const std::string& name,
                                  Asked* asked) const;
  [[nodiscard]] bool ranks() const;
  [[nodiscard]] bool pools() const;

  void add_quick(http::Router* router);
  void add_public(http::Router* router);
  // The rest of what a server of a model that writes text answers.
  static void add_refusals(http::Router* router);

  Env& env_;
  const EncoderServerOptions& options_;
  EncodeQueue& queue_;
  const model::Tokenizer& tokenizer_;
  const std::string model_name_;
  const int64_t started_s_;
  const EncoderCard card_;
  std::atomic<bool> draining_ = false;
  std::unique_ptr<WorkQueue> intake_ = std::make_unique<WorkQueue>(1);
  std::unique_ptr<WorkQueue> writer_ = std::make_unique<WorkQueue>(1);
};

}  // namespace hcache::encoder
