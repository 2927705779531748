// One request for text, from its parsed form to its answer.
//
// Threading: start() on an intake thread; tokens come on the scheduler's thread, answers are built
// on the writer's. It lives as long as anybody refers to it.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "api/reply.h"
#include "api/request.h"
#include "api/stop_matcher.h"
#include "http/message.h"
#include "http/router.h"
#include "model/sampler.h"
#include "service.h"

namespace hcache::server {

// What is different where nobody waits for the answer.
struct GenerationOptions {
  // As the request's header has it; empty: it is told from the request (conversation_key.h).
  std::string conversation_key;
  bool background = false;  // makes way for other requests
  // Its conversation is remembered only where the request names it.
  bool remember_named_only = false;
  // May be empty. For every reply that was accepted, before the answer that it belongs to; on the
  // writer's thread.
  std::function<void(const scheduler::Outcome&)> on_outcome;
};

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  Generation(Service& service, std::shared_ptr<http::Responder> responder,
             api::GenerationRequest request, const Salt& salt, std::string key,
             GenerationOptions options = {})
      : service_(service),
        responder_(std::move(responder)),
        request_(std::move(request)),
        salt_(salt),
        key_(std::move(key)),
        options_(std::move(options)) {}

  // Renders, tokenises and submits; what is wrong is answered at once, and so is what asks for no
  // text.
  void start();

 private:
  // One reply to one prompt.
  struct Choice {
    size_t prompt = 0;
    std::unique_ptr<model::Sampler> sampler;
    std::optional<api::StopMatcher> stops;
    std::vector<int32_t> reply;  // tokens that are in the chain
    int64_t first_token_ns = 0;
    int64_t last_token_ns = 0;
    std::atomic<scheduler::RequestId> id = 0;  // 0: not submitted
  };

  [[nodiscard]] int64_t wall_s() const;
  // The model's name as the answer has it: as it was asked for.
  [[nodiscard]] const std::string& answered_name() const;
  Status prepare();
  Status make_prompts();
  Result<std::vector<int32_t>> prompt_tokens(const api::Prompt& prompt);
  // A prompt that has media.
  Status add_prompt(const std::string& text, std::span<const model::Medium> media,
                    bool add_special);
  Status add_biases();
  Status make_choices();
  Status submit();
  void refuse(const Status& status);
  void tell_context(api::ErrorAnswer* answer) const;
  void cancel_all();

  // The scheduler's thread.
  Result<scheduler::NextToken> next(size_t choice, std::span<const float> logits);
  api::TokenEvent event_of(Choice& choice, std::span<const float> logits, int32_t token,
                           std::string bytes);

  // The writer's thread.
  void open_stream();
  void on_progress(size_t choice, double fraction);
  void on_first(const scheduler::Outcome& outcome);
  void on_token(size_t choice, const api::TokenEvent& event);
  void on_done(size_t choice, const scheduler::Outcome& outcome);
  void send(const std::string& events);
  // With what clients are told that look at no body.
  [[nodiscard]] http::Headers told(http::Headers headers) const;
  // `whole`: the answer is as it should be.
  void end(bool whole);
  // What a choice leaves behind, without a name.
  [[nodiscard]] FinishedChain chain_of(const Choice& choice) const;
  void remember(const Choice& choice);
  void add_to_conversation(const Choice& choice);
  void persist_later(const std::string& name);

  Service& service_;
  const std::shared_ptr<http::Responder> responder_;
  api::GenerationRequest request_;
  const Salt salt_;
  const std::string key_;
  const GenerationOptions options_;
  std::optional<model::ChatPrompt> chat_;
  std::string conversation_key_;
  std::string id_;           // the answer's, without its protocol's prefix
  std::string response_id_;  // of a response that later ones may go on from
  std::vector<std::string> prompt_texts_;
  std::vector<std::vector<int32_t>> prompts_;
  std::vector<scheduler::MediaRef> media_;  // of each prompt; null: it has none
  std::deque<Choice> choices_;
  std::atomic<bool> gone_ = false;  // the client is
  int64_t submitted_ns_ = 0;

  // The writer's.
  std::unique_ptr<api::ReplyBuilder> builder_;
  bool streams_ = false;  // its headers are sent
  bool begun_ = false;
  bool failed_ = false;
  size_t n_done_ = 0;
  api::PromptProgress progress_;  // of the first choice; total 0: nothing told yet
  int64_t progress_from_ns_ = 0;
  int64_t dropped_ = 0;  // tokens that have left the context; of several choices, the most
};

// A handler that starts the generation of the request that `prepare` makes of a body. The service
// must outlive it.
using Prepare = std::function<Result<api::GenerationRequest>(const api::Json& body)>;
[[nodiscard]] http::Handler generate_by(Service& service, Prepare prepare);

// The generation with the prompt whose answer fills the gap.
[[nodiscard]] Result<api::GenerationRequest> fill_gap(const Service& service,
                                                      api::InfillRequest infill);

}  // namespace hcache::server
