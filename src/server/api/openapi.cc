// The document: paths and answers from openapi.json, requests from the parsers' own fields.
#include <string>

#include "api/answers.h"
#include "request_fields.h"

namespace hcache::api {

extern const char* const kOpenApiText;

namespace {

template <typename Request>
Json request_schema(void (*declare)(Fields&, Request*)) {
  return describe_fields([&](Fields& f) {
    Request request;
    declare(f, &request);
  });
}

std::string make_document() {
  Json document = Json::parse(kOpenApiText);
  Json& schemas = document["components"]["schemas"];
  schemas["ChatCompletionRequest"] = request_schema(chat_completion_fields);
  schemas["CompletionRequest"] = request_schema(completion_fields);
  schemas["ResponseRequest"] = request_schema(response_fields);
  schemas["MessagesRequest"] = request_schema(messages_fields);
  schemas["CountTokensRequest"] = request_schema(count_tokens_fields);
  schemas["LlamaCompletionRequest"] = request_schema(llama_completion_fields);
  schemas["InfillRequest"] = request_schema(infill_fields);
  schemas["ApplyTemplateRequest"] = request_schema(apply_template_fields);
  schemas["EmbeddingRequest"] = request_schema(embedding_fields);
  schemas["LlamaEmbeddingRequest"] = request_schema(llama_embedding_fields);
  schemas["OllamaEmbedRequest"] = request_schema(ollama_embed_fields);
  schemas["OllamaEmbeddingsRequest"] = request_schema(ollama_embeddings_fields);
  schemas["RerankRequest"] = request_schema(rerank_fields);
  schemas["TokenizeRequest"] = request_schema(tokenize_fields);
  schemas["DetokenizeRequest"] = request_schema(detokenize_fields);
  schemas["SlotFileRequest"] = request_schema(slot_file_fields);
  schemas["OllamaChatRequest"] = request_schema(ollama_chat_fields);
  schemas["OllamaGenerateRequest"] = request_schema(ollama_generate_fields);
  schemas["OllamaShowRequest"] = request_schema(ollama_show_fields);
  schemas["CreateBatchRequest"] = request_schema(create_batch_fields);
  schemas["MessageBatchRequest"] = request_schema(message_batch_fields);
  schemas["CreateConversationRequest"] = request_schema(create_conversation_fields);
  schemas["UpdateConversationRequest"] = request_schema(update_conversation_fields);
  schemas["CreateItemsRequest"] = request_schema(create_items_fields);
  return document.dump(2);
}

}  // namespace

const std::string& openapi_document() {
  static const std::string document = make_document();
  return document;
}

}  // namespace hcache::api
