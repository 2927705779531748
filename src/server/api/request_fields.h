// Groups of fields that several protocols share, and the fields of every request: the parsers read
// with them, the OpenAPI document is made of them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "api/conversations.h"
#include "api/embeddings.h"
#include "api/request.h"
#include "api/rerank.h"
#include "fields.h"

namespace hcache::api {

// A request for text by the fields that `declare` names, in the order it names them.
[[nodiscard]] Result<GenerationRequest> read_request(const Json& body, const Defaults& defaults,
                                                     void (*declare)(Fields& f,
                                                                     GenerationRequest* r));

// read_fields() of a body with the conversation that a prompt is made of, whose volatile text is
// where the model is to read it.
[[nodiscard]] Status read_prompt_body(const Json& body, const Fields::Declare& declare);

// Strings and lists in the forms that clients send them. The schemas describe what the readers
// take.
[[nodiscard]] Json prompt_schema();
[[nodiscard]] Json prompts_schema();
[[nodiscard]] Status read_prompts(const Json& value, const std::string& path,
                                  std::vector<Prompt>* out);
[[nodiscard]] Status read_prompt(const Json& value, const std::string& path, Prompt* out);
[[nodiscard]] Status read_tokens(const Json& value, const std::string& path,
                                 std::vector<int32_t>* out);
[[nodiscard]] Json token_schema();
[[nodiscard]] Status read_strings(const Json& value, const std::string& path,
                                  std::vector<std::string>* out);
// Of a text in an array.
[[nodiscard]] Json cache_control_schema();
// A string, or an array of parts with a text of one of the `types`; parts are joined by
// `separator`.
[[nodiscard]] Json content_schema(const std::vector<std::string>& types);
[[nodiscard]] Status read_content(const Json& value, const std::string& path,
                                  const std::vector<std::string>& types, std::string* out,
                                  std::string_view separator = "\n");
[[nodiscard]] Status read_text_part(const Json& value, const std::string& path,
                                    const std::vector<std::string>& types, std::string* text);

// The same of a message, some of whose parts may be media: OpenAI's image_url, input_image and
// input_audio, Anthropic's image. A marker stands for each, without a separator around it.
[[nodiscard]] Json message_content_schema(const std::vector<std::string>& types);
[[nodiscard]] Status read_message_content(const Json& value, const std::string& path,
                                          const std::vector<std::string>& types,
                                          model::ChatMessage* message,
                                          std::string_view separator = "\n");
// What one of them is: "data:image/png;base64,…", bare base64, or "file://NAME" of the server's
// folder. The server fetches nothing.
[[nodiscard]] Status read_medium(const Json& value, const std::string& path, model::Medium* medium);
// A list of them.
void media_field(Fields& f, std::string_view name, std::string_view doc,
                 std::vector<model::Medium>* media);
[[nodiscard]] Json medium_schema();
// The `source` of an image block, as Anthropic has it.
void image_source_field(Fields& f, model::Medium* medium);
// Puts a medium at the end of a message.
void append_medium(model::Medium medium, model::ChatMessage* message);

// An object of a few short texts.
void metadata_field(Fields& f, Json* metadata, std::string_view doc);
void model_field(Fields& f, GenerationRequest* r);
void sampling_fields(Fields& f, GenerationRequest* r);
// "max_tokens", "n_predict", ...
void limit_field(Fields& f, GenerationRequest* r, std::string_view name);
void stop_field(Fields& f, GenerationRequest* r, std::string_view name);
void stream_fields(Fields& f, GenerationRequest* r);
void cache_fields(Fields& f, GenerationRequest* r);
void adapters_field(Fields& f, std::optional<std::vector<AdapterScale>>* adapters);
// OpenAI's response_format, and its flat form in /v1/responses, into a schema; empty: plain text.
void format_fields(Fields& f, std::string* schema, bool flat);
// A tool's name, description and schema.
void function_fields(Fields& f, model::ChatTool* tool, std::string_view schema_name);
// "none", "minimal", ..., as a switch and a variable of the template.
void effort_field(Fields& f, std::string_view name, model::ChatInput* chat);
void template_fields(Fields& f, model::ChatInput* chat);
// OpenAI's list of tools, and the calls of a message of the assistant's; Ollama has both as well.
void tools_field(Fields& f, model::ChatInput* chat);
void calls_field(Fields& f, model::ChatMessage* message);
void logprobs_fields(Fields& f, GenerationRequest* r);
// What a tool choice must not contradict.
void check_tools(Fields& f, const GenerationRequest& r);

void chat_completion_fields(Fields& f, GenerationRequest* r);
void completion_fields(Fields& f, GenerationRequest* r);
void response_fields(Fields& f, GenerationRequest* r);
void messages_fields(Fields& f, GenerationRequest* r);
void count_tokens_fields(Fields& f, GenerationRequest* r);
void llama_completion_fields(Fields& f, GenerationRequest* r);
// Those of it that say nothing of the prompt.
void llama_generation_fields(Fields& f, GenerationRequest* r);
void infill_fields(Fields& f, InfillRequest* r);
void apply_template_fields(Fields& f, GenerationRequest* r);
void embedding_fields(Fields& f, EmbeddingRequest* r);
void llama_embedding_fields(Fields& f, EmbeddingRequest* r);
void ollama_embed_fields(Fields& f, EmbeddingRequest* r);
void ollama_embeddings_fields(Fields& f, EmbeddingRequest* r);
void rerank_fields(Fields& f, RerankRequest* r);
void tokenize_fields(Fields& f, TokenizeRequest* r);
void detokenize_fields(Fields& f, std::vector<int32_t>* tokens);
void slot_file_fields(Fields& f, std::string* filename);
void ollama_chat_fields(Fields& f, GenerationRequest* r);
void ollama_generate_fields(Fields& f, InfillRequest* r);
void ollama_show_fields(Fields& f, std::string* model);
void create_batch_fields(Fields& f, CreateBatch* batch);
void message_batch_fields(Fields& f, std::string* lines);
void create_conversation_fields(Fields& f, CreateConversation* r);
void update_conversation_fields(Fields& f, Json* metadata);
void create_items_fields(Fields& f, std::vector<Json>* items);

}  // namespace hcache::api
