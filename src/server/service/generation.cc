#include "generation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "api/ollama.h"
#include "api/prompt_tokens.h"
#include "base/log.h"
#include "conversation_key.h"
#include "earlier_messages.h"
#include "endpoint.h"
#include "messages.h"
#include "request_log.h"
#include "state/kept_state.h"

namespace hcache::server {
namespace {

using scheduler::NextToken;
using scheduler::Outcome;

constexpr int64_t kDayNs = 24 * 3600 * 1'000'000'000LL;
constexpr double kMsPerSecond = 1e3;
constexpr std::string_view kEnd = "end";
constexpr std::string_view kStop = "stop";
constexpr std::string_view kHowToTruncate =
    "make it shorter, or let what is oldest leave the context with \"truncation\": \"auto\"";

api::Outcome api_outcome(const Outcome& o) {
  api::Outcome out;
  out.prompt_tokens = o.prompt_tokens;
  out.reply_tokens = o.generated_tokens;
  out.resident = o.resident_tokens;
  out.hidden = o.hidden_tokens;
  out.kv = o.kv_tokens;
  out.recomputed = o.recomputed_tokens;
  out.fresh = o.new_tokens;
  out.saved = o.saving_tokens;
  out.dropped_before = o.dropped_before;
  out.dropped = o.dropped_tokens;
  out.drafted = o.drafted_tokens;
  out.accepted = o.accepted_tokens;
  out.bytes = o.bytes;
  out.queue_ms = o.queue_s * kMsPerSecond;
  out.restore_ms = o.restore_s * kMsPerSecond;
  out.first_ms = o.ttft_s * kMsPerSecond;
  out.prompt_ms = std::max(0.0, o.ttft_s - o.queue_s - o.restore_s) * kMsPerSecond;
  out.reply_ms = std::max(0.0, o.total_s - o.ttft_s) * kMsPerSecond;
  if (!o.restores.empty()) out.restore = o.restores.back();
  out.preemptions = static_cast<int64_t>(o.preempted_at_s.size());
  return out;
}

api::FinishReason finish_reason(const Outcome& outcome) {
  if (outcome.phase == scheduler::Phase::kCancelled) return api::FinishReason::kCancelled;
  if (outcome.finish_reason == kEnd) return api::FinishReason::kEnd;
  if (outcome.finish_reason == kStop) return api::FinishReason::kStop;
  return api::FinishReason::kLength;
}

}  // namespace

void Generation::start() {
  if (request_.only_loads) {  // it is loaded
    return send_json(*responder_, api::ollama_load_answer(request_, answered_name(), wall_s()));
  }
  if (Status status = prepare(); !status.ok()) return refuse(status);
  responder_->on_disconnect([self = weak_from_this()] {
    if (const auto generation = self.lock()) generation->cancel_all();
  });
  if (Status status = submit(); !status.ok()) {
    cancel_all();
    refuse(status);
  }
}

void Generation::refuse(const Status& status) {
  // The writer may have begun to answer for a choice that was accepted.
  service_.writer().post([self = shared_from_this(), status] {
    if (self->failed_) return;
    self->failed_ = true;
    api::ErrorAnswer answer = api::render_error(status, api::error_style(self->request_.dialect));
    if (status.code() == Code::kOutOfRange) self->tell_context(&answer);
    if (self->streams_) {
      self->send(self->builder_->fail(status));
      self->responder_->finish();
    } else {
      send_error(*self->responder_, answer);
    }
  });
}

void Generation::tell_context(api::ErrorAnswer* answer) const {
  size_t longest = 0;
  for (const std::vector<int32_t>& prompt : prompts_) longest = std::max(longest, prompt.size());
  api::tell_context(static_cast<int64_t>(longest), service_.context(),
                    api::error_style(request_.dialect), answer);
}

void Generation::cancel_all() {
  gone_.store(true, std::memory_order_relaxed);
  for (const Choice& choice : choices_) {
    if (choice.id != 0) service_.scheduler().cancel(choice.id);
  }
}

Status Generation::prepare() {
  request_.verbose |= service_.options().verbose_answers;
  conversation_key_ = conversation_key(options_.conversation_key, request_);
  HCACHE_RETURN_IF_ERROR(make_prompts());
  HCACHE_RETURN_IF_ERROR(make_choices());
  api::ReplyContext context;
  context.id = id_ = service_.new_id();
  if (request_.dialect == api::Dialect::kResponse) {
    // What goes on from it is to find the server that knows it.
    context.id = id_ = keyed_id(conversation_key_, id_);
    response_id_ = "resp_" + id_;
  }
  context.created_s = wall_s();
  context.model_name = answered_name();
  // It begins as llama-server's does, which clients know it by.
  context.fingerprint = "b" + to_hex(service_.runtime().fingerprint()).substr(0, 12);
  if (chat_) context.format = chat_->format;
  context.prompts = prompt_texts_;
  builder_ = api::ReplyBuilder::create(request_, std::move(context));
  return {};
}

int64_t Generation::wall_s() const { return service_.env().wall_ns() / 1'000'000'000; }

const std::string& Generation::answered_name() const {
  return request_.model_name.empty() ? service_.model_name() : request_.model_name;
}

Status Generation::make_prompts() {
  HCACHE_RETURN_IF_ERROR(add_earlier_messages(service_.conversations(), salt_.id, &request_));
  if (request_.chat) {
    HCACHE_ASSIGN_OR_RETURN(chat_, service_.render(*request_.chat));
    api::apply_prompt(*chat_, &request_);
    const model::EncodeOptions options = {
        .add_special = service_.chat_template().add_special(chat_->text), .parse_special = true};
    if (const auto media = Service::media_of(*request_.chat); !media.empty()) {
      return add_prompt(chat_->text, media, options.add_special);
    }
    HCACHE_ASSIGN_OR_RETURN(Conversations::Tokens tokens,
                            service_.conversations().tokenise(salt_.id, chat_->text, options));
    prompt_texts_.push_back(chat_->text);
    prompts_.push_back(std::move(tokens.tokens));
    media_.emplace_back();
    return {};
  }
  for (const api::Prompt& prompt : request_.prompts) {
    if (!prompt.media.empty()) {
      HCACHE_RETURN_IF_ERROR(
          add_prompt(std::get<std::string>(prompt.parts.front()), prompt.media, true));
      continue;
    }
    HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, prompt_tokens(prompt));
    HCACHE_ASSIGN_OR_RETURN(std::string text, service_.tokenizer().decode(tokens, true));
    prompt_texts_.push_back(std::move(text));
    prompts_.push_back(std::move(tokens));
    media_.emplace_back();
  }
  return {};
}

Status Generation::add_prompt(const std::string& text, std::span<const model::Medium> media,
                              bool add_special) {
  HCACHE_ASSIGN_OR_RETURN(libllama::MediaPrompt prompt,
                          service_.tokenise(text, media, add_special));
  prompt_texts_.push_back(text);
  media_.push_back(std::make_shared<serving::MediaParts>(prompt));
  prompts_.push_back(std::move(prompt.tokens));
  return {};
}

Result<std::vector<int32_t>> Generation::prompt_tokens(const api::Prompt& prompt) {
  const model::EncodeOptions first = {.add_special = true, .parse_special = true};
  if (prompt.parts.size() == 1 && std::holds_alternative<std::string>(prompt.parts[0])) {
    HCACHE_ASSIGN_OR_RETURN(
        Conversations::Tokens whole,
        service_.conversations().tokenise(salt_.id, std::get<std::string>(prompt.parts[0]), first));
    return std::move(whole.tokens);
  }
  return api::prompt_tokens(service_.tokenizer(), prompt);
}

Status Generation::add_biases() {
  const model::Tokenizer& tokenizer = service_.tokenizer();
  auto& biases = request_.sampling.logit_bias;
  for (const auto& [text, bias] : request_.text_bias) {
    HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, tokenizer.encode(text));
    for (const int32_t token : tokens) biases.emplace_back(token, bias);
  }
  if (!request_.ignore_eos) return {};
  for (int32_t token = 0; token < tokenizer.n_vocab(); ++token) {
    if (tokenizer.is_eog(token)) {
      biases.emplace_back(token, -std::numeric_limits<float>::infinity());
    }
  }
  return {};
}

Status Generation::make_choices() {
  const model::Tokenizer& tokenizer = service_.tokenizer();
  HCACHE_RETURN_IF_ERROR(add_biases());
  model::SamplingOptions sampling = request_.sampling;
  std::optional<uint32_t> asked = request_.seed;
  if (!asked && !request_.draw_seed) asked = service_.options().seed;
  const uint32_t seed = asked.value_or(static_cast<uint32_t>(service_.env().random_u64()));
  request_.seed = seed;
  for (size_t prompt = 0; prompt < prompts_.size(); ++prompt) {
    if (prompts_[prompt].empty()) return invalid_argument("prompt: it has no tokens");
    for (int i = 0; i < request_.n; ++i) {
      Choice& choice = choices_.emplace_back();
      choice.prompt = prompt;
      sampling.seed = seed + static_cast<uint32_t>(i);
      HCACHE_ASSIGN_OR_RETURN(choice.sampler, model::Sampler::create(tokenizer, sampling));
      std::vector<int32_t> text = prompts_[prompt];
      std::erase_if(text, [](int32_t token) { return token < 0; });
      choice.sampler->remember(text);
      choice.stops.emplace(request_.stop);
    }
  }
  return {};
}

Status Generation::submit() {
  submitted_ns_ = service_.env().monotonic_ns();
  const bool truncates = request_.truncate.value_or(service_.options().truncate);
  // What only the remote tier has is known before the scheduler asks.
  if (request_.use_cache) {
    for (const std::vector<int32_t>& prompt : prompts_) {
      std::vector<policy::HeldRows> cuts;
      if (truncates) cuts = service_.cuts_of(prompt);
      service_.runtime().look_up(prompt, salt_.id, cuts);
    }
  }
  for (size_t i = 0; i < choices_.size(); ++i) {
    scheduler::Request request;
    request.tokens = prompts_[choices_[i].prompt];
    request.media = media_[choices_[i].prompt];
    const int64_t most =
        request_.max_tokens >= 0 ? request_.max_tokens : service_.options().max_new_tokens;
    if (most >= 0) request.max_new_tokens = most;
    if (truncates) {
      request.truncation = service_.options().truncation;
      request.next_message = service_.next_message();
    }
    request.salt = salt_;
    request.save = request_.use_cache && request_.retention != api::Retention::kMemory;
    // The batch engine shares what the store has, and no rows.
    if (service_.runtime().batch() != nullptr) request.cache = scheduler::CacheUse::kSaved;
    if (!request_.use_cache) request.cache = scheduler::CacheUse::kNone;
    request.restore.mode = service_.options().restore_mode;
    request.key = key_;
    request.priority = request_.priority;
    request.max_draft = request_.max_draft;
    request.background = options_.background;
    request.next = [self = shared_from_this(), i](std::span<const float> logits) {
      return self->next(i, logits);
    };
    if (request_.return_progress && request_.stream) {
      request.on_state = [self = shared_from_this(), i](scheduler::Phase phase, double fraction) {
        if (phase != scheduler::Phase::kPrefill) return;
        self->service_.writer().post([self, i, fraction] { self->on_progress(i, fraction); });
      };
    }
    request.on_first = [self = shared_from_this()](const Outcome& outcome) {
      self->service_.writer().post([self, outcome] { self->on_first(outcome); });
    };
    request.on_done = [self = shared_from_this(), i](const Outcome& outcome) {
      self->service_.writer().post([self, i, outcome] { self->on_done(i, outcome); });
    };
    Result<scheduler::RequestId> id = service_.scheduler().submit(std::move(request));
    if (id.code() == Code::kOutOfRange && !truncates) {
      return out_of_range(fmt::format("{}; {}", id.status().message(), kHowToTruncate));
    }
    HCACHE_ASSIGN_OR_RETURN(choices_[i].id, std::move(id));
  }
  // The client may have left before there was anything to cancel.
  if (gone_.load(std::memory_order_relaxed)) cancel_all();
  return {};
}

// ---- The scheduler's thread ---------------------------------------------------------------------

Result<NextToken> Generation::next(size_t index, std::span<const float> logits) {
  Choice& choice = choices_[index];
  HCACHE_ASSIGN_OR_RETURN(const int32_t token, choice.sampler->sample(logits));
  HCACHE_RETURN_IF_ERROR(choice.sampler->accept(token));
  NextToken next = {.token = token, .stop = false, .finish_reason = {}};
  if (service_.tokenizer().is_eog(token)) {
    next.stop = true;
    next.finish_reason = kEnd;
    return next;
  }
  choice.reply.push_back(token);
  const int64_t now_ns = service_.env().monotonic_ns();
  if (choice.last_token_ns > 0) {
    service_.metrics().observe_gap(static_cast<double>(now_ns - choice.last_token_ns) * 1e-9);
  }
  choice.last_token_ns = now_ns;
  if (choice.reply.size() == 1) choice.first_token_ns = now_ns;
  api::TokenEvent event = event_of(
      choice, logits, token,
      chat_ ? chat_->piece(service_.tokenizer(), token) : service_.tokenizer().piece(token));
  event.reply_ms = static_cast<double>(now_ns - choice.first_token_ns) * 1e-6;
  if (choice.stops->stopped()) {
    next.stop = true;
    next.finish_reason = kStop;
  }
  service_.writer().post([self = shared_from_this(), index, event = std::move(event)] {
    self->on_token(index, event);
  });
  return next;
}

api::TokenEvent Generation::event_of(Choice& choice, std::span<const float> logits, int32_t token,
                                     std::string bytes) {
  api::TokenEvent event;
  event.text = choice.stops->push(bytes);
  event.chosen.token = token;
  if (request_.logprobs && request_.sampled_probs) {
    const model::SampledProbs probs = choice.sampler->probabilities(token, request_.top_logprobs);
    event.chosen.logprob = probs.chosen;
    for (const auto& [top, prob] : probs.top) {
      event.top.push_back({top, service_.tokenizer().piece(top, true), prob});
    }
  } else if (request_.logprobs) {
    const model::Logprobs probabilities = model::logprobs(logits, token, request_.top_logprobs);
    event.chosen.logprob = probabilities.chosen;
    for (const model::TokenLogprob& top : probabilities.top) {
      event.top.push_back({top.token, service_.tokenizer().piece(top.token, true), top.logprob});
    }
  }
  event.chosen.bytes = std::move(bytes);
  return event;
}

// ---- The writer's thread ------------------------------------------------------------------------

void Generation::send(const std::string& events) {
  if (!request_.stream || events.empty()) return;
  if (!responder_->write(events)) cancel_all();
}

http::Headers Generation::told(http::Headers headers) const {
  headers.emplace_back(kConversationHeader, conversation_key_);
  if (dropped_ > 0) headers.emplace_back("X-HCache-Dropped-Tokens", fmt::to_string(dropped_));
  return headers;
}

void Generation::open_stream() {
  if (!request_.stream || streams_) return;
  streams_ = true;
  responder_->start_stream(200, told(http::stream_headers(builder_->stream_type())));
}

void Generation::on_progress(size_t index, double fraction) {
  if (begun_ || failed_ || index > 0) return;
  open_stream();
  const auto total = static_cast<int64_t>(prompts_[choices_[index].prompt].size());
  const int64_t now_ns = service_.env().monotonic_ns();
  const auto processed = static_cast<int64_t>(std::llround(fraction * static_cast<double>(total)));
  if (progress_.total == 0) {
    progress_ = {.total = total, .cached = processed, .processed = -1};
    progress_from_ns_ = now_ns;
  }
  if (processed <= progress_.processed) return;
  progress_.processed = processed;
  progress_.ms = static_cast<double>(now_ns - progress_from_ns_) * 1e-6;
  send(builder_->progress(progress_));
}

void Generation::on_first(const Outcome& outcome) {
  if (begun_ || failed_) return;
  begun_ = true;
  dropped_ = outcome.dropped_tokens;
  open_stream();
  const api::Outcome counts = api_outcome(outcome);
  const double spent_ms = static_cast<double>(service_.env().monotonic_ns() - submitted_ns_) * 1e-6;
  send(builder_->begin({.tokens = counts.prompt_tokens,
                        .cached = counts.cached(),
                        .saved = counts.saved,
                        .prompt_ms = spent_ms - counts.queue_ms - counts.restore_ms}));
}

void Generation::on_token(size_t index, const api::TokenEvent& event) {
  if (failed_) return;
  send(builder_->push(static_cast<int>(index), event));
}

void Generation::on_done(size_t index, const Outcome& outcome) {
  Choice& choice = choices_[index];
  ++n_done_;
  service_.metrics().observe(outcome);
  if (options_.on_outcome) options_.on_outcome(outcome);
  if (service_.options().log_requests) {
    log::write(log::Level::kInfo, request_line(id_, index, key_, outcome));
  }
  if (failed_) return;
  if (outcome.phase == scheduler::Phase::kFailed) {
    cancel_all();
    return refuse(outcome.status);
  }
  on_first(outcome);  // a reply without a token
  const api::Finish finish = {.reason = finish_reason(outcome),
                              .stop_string = choice.stops->stop_string(),
                              .outcome = api_outcome(outcome)};
  send(builder_->finish(static_cast<int>(index), choice.stops->flush(), finish));
  const bool whole = outcome.phase == scheduler::Phase::kDone;
  const bool is_item = !request_.conversation_id.empty();
  if (whole && request_.use_cache && !is_item) remember(choice);
  dropped_ = std::max(dropped_, outcome.dropped_tokens);
  if (n_done_ == choices_.size()) end(whole);
}

void Generation::end(bool whole) {
  const std::string last = builder_->end();
  // Known before the client can ask for it.
  if (whole && !request_.conversation_id.empty()) add_to_conversation(choices_.front());
  if (request_.stream) {
    send(last);
    responder_->finish();
  } else {
    responder_->send(200, told({{"Content-Type", "application/json"}}),
                     api::to_text(builder_->answer()));
  }
}

FinishedChain Generation::chain_of(const Choice& choice) const {
  FinishedChain chain;
  chain.salt = salt_.id;
  chain.adapted = state::differs(salt_);
  chain.user = request_.user;
  chain.tokens = prompts_[choice.prompt];
  chain.tokens.insert(chain.tokens.end(), choice.reply.begin(), choice.reply.end());
  chain.cache_key = request_.cache_key;
  if (request_.retention == api::Retention::kDay) chain.keep_ns = kDayNs;
  return chain;
}

void Generation::remember(const Choice& choice) {
  const bool named = !request_.session_id.empty() || (!response_id_.empty() && request_.store);
  if (options_.remember_named_only && !named) return;
  FinishedChain chain = chain_of(choice);
  // Of several replies to one prompt the first one is the conversation's.
  if (&choice == &choices_.front()) chain.name = request_.session_id;
  if (!response_id_.empty() && request_.store) {
    chain.name = response_id_;
    std::vector<model::ChatMessage> messages = request_.chat->messages;
    messages.push_back(builder_->message(0));
    chain.messages = messages_text(messages);
  }
  if (chain.name.empty()) chain.ttl_ns = service_.options().ttl_ns;
  // Known before the client can ask for it; the disk follows, where it may.
  const std::string name = service_.conversations().remember(std::move(chain));
  if (request_.retention != api::Retention::kMemory) persist_later(name);
}

void Generation::add_to_conversation(const Choice& choice) {
  std::vector<ItemPtr> items;
  for (const api::Json& item : request_.input_items) {
    items.push_back(make_item(item, api::item_id(item, service_.new_id())));
  }
  const api::Json answer = builder_->answer();
  for (const api::Json& item : answer["output"]) {
    items.push_back(make_item(item, item["id"].get<std::string>()));
  }
  FinishedChain chain = chain_of(choice);
  chain.name = request_.conversation_id;
  // Items are the client's, whatever it wants of the cache.
  if (!request_.use_cache || request_.retention == api::Retention::kMemory) chain.tokens.clear();
  const Status added = service_.conversations().append(std::move(chain), items);
  if (added.ok()) persist_later(request_.conversation_id);  // else it was deleted meanwhile
}

void Generation::persist_later(const std::string& name) {
  service_.keeper().post([&service = service_, salt = salt_.id, name] {
    const Status status = service.conversations().persist(salt, name);
    if (!status.ok()) log::warn("session {} is not on disk: {}", name, status.to_string());
  });
}

// ---- Handlers -----------------------------------------------------------------------------------

http::Handler generate_by(Service& service, Prepare prepare) {
  return [&service, prepare = std::move(prepare)](http::Request request,
                                                  std::shared_ptr<http::Responder> responder) {
    service.intake().post(
        [&service, prepare, request = std::move(request), responder = std::move(responder)] {
          const Result<api::Json> body = api::parse_body(request.body);
          if (!body.ok()) return send_status(request, *responder, body.status());
          Result<api::GenerationRequest> prepared = prepare(*body);
          if (!prepared.ok()) return send_status(request, *responder, prepared.status());
          const Result<Salt> salt = service.salt_of(request, *prepared);
          if (!salt.ok()) return send_status(request, *responder, salt.status());
          GenerationOptions options;
          const std::string* key = request.header("x-hcache-conversation");
          if (key != nullptr) options.conversation_key = *key;
          std::make_shared<Generation>(service, responder, std::move(*prepared), *salt,
                                       request.key_name, std::move(options))
              ->start();
        });
  };
}

Result<api::GenerationRequest> fill_gap(const Service& service, api::InfillRequest infill) {
  // A reply without a limit has a quarter of the context.
  const int64_t context = service.context();
  const int64_t asked = infill.generation.max_tokens;
  const int64_t reply = asked < 0 ? context / 4 : std::min(asked, context / 2);
  HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                          api::infill_prompt(service.tokenizer(), infill, context - reply,
                                             service.options().suffix_first));
  infill.generation.prompts = {api::Prompt{{std::move(tokens)}}};
  return std::move(infill.generation);
}

}  // namespace hcache::server
