// From the JSON of four protocols to one kind of request.
//
// Fields that are unknown are ignored. kInvalidArgument names the place of what is wrong
// ("messages[2].content[0].text: expected a string, got a number") or missing. Pure functions.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "api/json.h"
#include "base/status.h"
#include "model/chat.h"
#include "model/sampler.h"
#include "model/tokenizer.h"

namespace hcache::api {

// How a request is worded and its answer is expected.
enum class Dialect {
  kChat,        // OpenAI /v1/chat/completions
  kCompletion,  // OpenAI /v1/completions
  kResponse,    // OpenAI /v1/responses
  kMessages,    // Anthropic /v1/messages
  kLlama,       // llama-server /completion
  kOllamaChat,
  kOllamaGenerate,
};

// Text and token ids in a row; special tokens in the text count as such.
struct Prompt {
  using Part = std::variant<std::string, std::vector<int32_t>>;
  std::vector<Part> parts;
  std::vector<model::Medium> media = {};  // in the order of the markers; then there is one text
};

// How long a client wants the state of a conversation to be kept.
enum class Retention { kDefault, kMemory, kDay };

// By how much an adapter (LoRA) of the server's counts.
struct AdapterScale {
  int id = 0;  // its place in GET /lora-adapters
  float scale = 0;
};

struct GenerationRequest {
  Dialect dialect = Dialect::kChat;
  std::string model_name;  // as asked for; empty: whichever is served

  // What is to be continued: one conversation, or prompts, each for itself.
  std::optional<model::ChatInput> chat;
  std::vector<Prompt> prompts;

  model::SamplingOptions sampling;  // without the seed
  std::optional<uint32_t> seed;     // absent: the server's, or one that is drawn
  bool draw_seed = false;           // whatever the server's is
  bool ignore_eos = false;          // tokens that end a reply must not come
  std::vector<std::string> stop;    // strings that end the reply and are no part of it
  int64_t max_tokens = -1;          // of the reply; -1: as many as there is room for
  int n = 1;                        // replies per prompt
  bool logprobs = false;
  int top_logprobs = 0;

  bool stream = false;
  bool include_usage = false;  // in a stream of the OpenAI dialects

  // The state of the conversation.
  std::string session_id;  // a name under which it can be listed, pinned and deleted
  std::string cache_salt;  // requests with different salts never share state
  std::string cache_key;   // requests with the same key are likely to share prefixes
  Retention retention = Retention::kDefault;
  std::optional<bool> truncate;  // what outgrows the context: cut, or refused; absent: the server's
  bool use_cache = true;         // false: compute everything anew
  std::string user;
  int priority = 0;  // higher is served first
  // Tokens guessed for a step at most, if the server guesses more.
  int max_draft = std::numeric_limits<int>::max();

  // OpenAI responses.
  std::string previous_response_id;  // the conversation goes on from there
  bool store = true;                 // later requests may go on from this one
  bool instructed = false;           // the first message is the request's instructions
  std::string conversation_id;       // the conversation that goes on
  std::vector<Json> input_items;     // with it: the input as items, as the client words them

  // Anthropic.
  bool edits_context = false;  // the answer is to say which edits were made

  // llama-server.
  int id_slot = -1;
  bool return_tokens = false;
  std::vector<std::pair<std::string, float>> text_bias;  // as logit_bias, of a text's every token
  bool sampled_probs = false;  // top_logprobs are of what the sampling options leave, as chances
  bool timings_per_token = false;            // in every event of a stream
  bool return_progress = false;              // of the prompt, in events before the first token
  bool verbose = false;                      // llama-server's own answer beside OpenAI's
  std::vector<std::string> response_fields;  // of the answer, "a/b" of objects in it; empty: all
  // Adapters that are left out count nothing; absent: as the server is set.
  std::optional<std::vector<AdapterScale>> adapters;
  std::optional<double> kv_budget;  // absent: as the server was started

  // Ollama.
  bool only_loads = false;  // there is nothing to answer, the model is to be loaded
};

// `defaults` are the sampling options of requests that don't name their own.
using Defaults = model::SamplingOptions;
[[nodiscard]] Result<GenerationRequest> parse_chat_completion(const Json& body,
                                                              const Defaults& defaults = {});
[[nodiscard]] Result<GenerationRequest> parse_completion(const Json& body,
                                                         const Defaults& defaults = {});
[[nodiscard]] Result<GenerationRequest> parse_response(const Json& body,
                                                       const Defaults& defaults = {});
[[nodiscard]] Result<GenerationRequest> parse_messages(const Json& body,
                                                       const Defaults& defaults = {});
[[nodiscard]] Result<GenerationRequest> parse_llama_completion(const Json& body,
                                                               const Defaults& defaults = {});

// The body of POST /lora-adapters.
[[nodiscard]] Result<std::vector<AdapterScale>> parse_adapters(const Json& body);

// llama-server's /infill: text with a gap that the answer fills, and further texts that it may look
// at, the most telling last.
struct InfillRequest {
  struct Extra {
    std::string name;
    std::string text;
  };
  GenerationRequest generation;  // without its prompt
  std::vector<Extra> extra;
  std::string prefix;
  std::string prompt;  // what was written of the gap already
  std::string suffix;
};
[[nodiscard]] Result<InfillRequest> parse_infill(const Json& body, const Defaults& defaults = {});

// Ollama's /api/chat and /api/generate, whose answers are streams unless the request says
// otherwise.
[[nodiscard]] Result<GenerationRequest> parse_ollama_chat(const Json& body,
                                                          const Defaults& defaults = {});
// With a suffix there is a gap to fill, between prefix and suffix; without, the generation is
// whole.
[[nodiscard]] Result<InfillRequest> parse_ollama_generate(const Json& body,
                                                          const Defaults& defaults = {});
// The name of the model to describe, never empty.
[[nodiscard]] Result<std::string> parse_ollama_show(const Json& body);

// Its prompt: [extra] PREFIX prefix prompt SUFFIX suffix MIDDLE, or with SUFFIX suffix first, in at
// most `room` tokens. What does not fit is left out: extra texts from the first one on, the
// beginning of the prefix, the end of the suffix. The prefix is cut in large steps, so that the
// prompts of one who goes on writing begin alike. kUnimplemented for a vocabulary without the
// tokens.
[[nodiscard]] Result<std::vector<int32_t>> infill_prompt(const model::Tokenizer& tokenizer,
                                                         const InfillRequest& request, int64_t room,
                                                         bool suffix_first);

// /v1/messages/count_tokens and /apply-template: the conversation alone.
[[nodiscard]] Result<model::ChatInput> parse_count_tokens(const Json& body);
[[nodiscard]] Result<model::ChatInput> parse_apply_template(const Json& body);

// A JSON object of variables for chat templates, as `chat_template_kwargs` of a request: a
// conversation without messages that has them.
[[nodiscard]] Result<model::ChatInput> parse_template_args(const std::string& text);
// Takes over those that `chat` does not set.
void apply_template_args(const model::ChatInput& defaults, model::ChatInput* chat);

// Takes over what the rendered conversation asks for: its grammar, where the request has none of
// its own, and its stop strings.
void apply_prompt(const model::ChatPrompt& prompt, GenerationRequest* request);

struct TokenizeRequest {
  Prompt content;
  bool add_special = false;
  bool parse_special = true;
  bool with_pieces = false;
};
[[nodiscard]] Result<TokenizeRequest> parse_tokenize(const Json& body);

[[nodiscard]] Result<std::vector<int32_t>> parse_detokenize(const Json& body);

// The `filename` of a slot action: a name that llama-server would take, never a path.
[[nodiscard]] Result<std::string> parse_slot_file(const Json& body);

// What starts a batch of uploaded requests.
struct CreateBatch {
  std::string input_file_id;
  std::string endpoint;
  std::string window = "24h";  // "1h", "6h", "24h", "7d" or "30d"; and as time
  int64_t window_ns = 24LL * 3600 * 1'000'000'000;
  int64_t output_ttl_ns = 0;  // of its results' files; 0: as long as others
  Json metadata;              // null, or an object of texts
};
[[nodiscard]] Result<CreateBatch> parse_create_batch(const Json& body);

// A batch of Anthropic's requests, as lines of JSON: one object with custom_id and params each.
[[nodiscard]] Result<std::string> parse_message_batch(const Json& body);

}  // namespace hcache::api
