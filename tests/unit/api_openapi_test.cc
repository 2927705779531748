// The parsers and the OpenAPI document agree: what the document allows is taken, what it does not
// allow is refused.
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "api/conversations.h"
#include "api/embeddings.h"
#include "api/request.h"
#include "api/rerank.h"
#include "api_testing.h"

namespace hcache::api {
namespace {

using test::document;
using test::json;

struct Endpoint {
  const char* schema;
  const char* body;  // that is taken
  std::function<Status(const Json&)> parse;
};

template <typename T>
std::function<Status(const Json&)> status_of(Result<T> (*parse)(const Json&)) {
  return [parse](const Json& body) { return parse(body).status(); };
}
template <typename T>
std::function<Status(const Json&)> status_of(Result<T> (*parse)(const Json&, const Defaults&)) {
  return [parse](const Json& body) { return parse(body, {}).status(); };
}

const char* const kMessages = R"({"messages": [{"role": "user", "content": "Hi"}]})";

std::vector<Endpoint> endpoints() {
  return {
      {"ChatCompletionRequest", kMessages, status_of(parse_chat_completion)},
      {"CompletionRequest", R"({"prompt": "x"})", status_of(parse_completion)},
      {"ResponseRequest", R"({"input": "x"})", status_of(parse_response)},
      {"MessagesRequest", kMessages, status_of(parse_messages)},
      {"CountTokensRequest", kMessages, status_of(parse_count_tokens)},
      {"LlamaCompletionRequest", R"({"prompt": "x"})", status_of(parse_llama_completion)},
      {"ApplyTemplateRequest", kMessages, status_of(parse_apply_template)},
      {"EmbeddingRequest", R"({"input": "x"})",
       [](const Json& body) { return parse_embedding(body).status(); }},
      {"LlamaEmbeddingRequest", R"({"content": "x"})",
       [](const Json& body) { return parse_llama_embedding(body).status(); }},
      {"OllamaEmbedRequest", R"({"model": "m", "input": "x"})", status_of(parse_ollama_embed)},
      {"OllamaEmbeddingsRequest", R"({"model": "m", "prompt": "x"})",
       status_of(parse_ollama_embeddings)},
      {"RerankRequest", R"({"query": "x", "documents": ["x"]})", status_of(parse_rerank)},
      {"TokenizeRequest", R"({"content": "x"})", status_of(parse_tokenize)},
      {"DetokenizeRequest", R"({"tokens": [1]})", status_of(parse_detokenize)},
      {"SlotFileRequest", R"({"filename": "x"})", status_of(parse_slot_file)},
      {"OllamaChatRequest", kMessages, status_of(parse_ollama_chat)},
      {"OllamaGenerateRequest", R"({"prompt": "x"})", status_of(parse_ollama_generate)},
      {"OllamaShowRequest", R"({"model": "x"})", status_of(parse_ollama_show)},
      {"CreateBatchRequest", R"({"input_file_id": "x", "endpoint": "x"})",
       status_of(parse_create_batch)},
      {"MessageBatchRequest", R"({"requests": [{"custom_id": "x", "params": {}}]})",
       status_of(parse_message_batch)},
      {"CreateConversationRequest", "{}", status_of(parse_create_conversation)},
      {"UpdateConversationRequest", R"({"metadata": {}})", status_of(parse_update_conversation)},
      {"CreateItemsRequest", R"({"items": [{"role": "user", "content": "x"}]})",
       status_of(parse_create_items)}};
}

const Json& schema_of(const std::string& name) {
  return document().at("components").at("schemas").at(name);
}

const Json* alternatives(const Json& schema) {
  for (const char* key : {"oneOf", "anyOf"}) {
    if (schema.contains(key)) return &schema[key];
  }
  return nullptr;
}

// Values that a schema allows, at its bounds where it has some.
std::vector<Json> samples(const Json& schema) {
  std::vector<Json> out;
  if (const Json* all = alternatives(schema)) {
    for (const Json& one : *all) {
      for (Json& sample : samples(one)) out.push_back(std::move(sample));
    }
    return out;
  }
  if (schema.contains("enum")) return {schema["enum"].begin(), schema["enum"].end()};
  const std::string type = schema["type"];
  if (type == "boolean") return {true, false};
  if (type == "string") {
    const auto shortest = schema.value("minLength", size_t{1});
    return {std::string(shortest, 'x'),
            std::string(schema.value("maxLength", std::max(shortest, size_t{3})), 'x')};
  }
  if (type == "integer" || type == "number") {
    return {schema.value("minimum", Json(0)), schema.value("maximum", Json(1000))};
  }
  if (type == "array") {
    if (schema.value("minItems", 0) == 0) out.push_back(Json::array());
    if (schema.contains("prefixItems")) {
      Json tuple = Json::array();
      for (const Json& item : schema["prefixItems"]) tuple.push_back(samples(item).front());
      return {tuple};
    }
    for (Json& item : samples(schema["items"])) out.push_back(Json::array({std::move(item)}));
    return out;
  }
  EXPECT_EQ(type, "object");
  Json least = Json::object();
  const Json properties = schema.value("properties", Json::object());
  for (const Json& name : schema.value("required", Json::array())) {
    least[name.get<std::string>()] = samples(properties[name.get<std::string>()]).front();
  }
  out.push_back(least);
  for (const auto& item : properties.items()) {
    for (Json& sample : samples(item.value())) {
      Json more = least;
      more[item.key()] = std::move(sample);
      out.push_back(std::move(more));
    }
  }
  return out;
}

// The kinds of values that a schema allows, as JSON's own type numbers.
std::set<std::string> kinds(const Json& schema) {
  std::set<std::string> out;
  if (const Json* all = alternatives(schema)) {
    for (const Json& one : *all) out.merge(kinds(one));
    return out;
  }
  const std::string type = schema["type"];
  out.insert(type == "integer" ? "number" : type);
  return out;
}

// What a parser says of a value of the wrong kind or outside its bounds. Other refusals are rules
// between fields, which no schema expresses.
bool contradicts_schema(const Status& status) {
  for (const char* words : {"expected", "out of range", "is none of", "too many", "is no token"}) {
    if (status.message().find(words) != std::string::npos) return true;
  }
  return false;
}

TEST(OpenApi, WhatItAllowsIsTaken) {
  for (const Endpoint& e : endpoints()) {
    const Status plain = e.parse(json(e.body));
    EXPECT_TRUE(plain.ok()) << e.schema << ": " << plain.to_string();
    int taken = 0;
    int tried = 0;
    for (const auto& property : schema_of(e.schema)["properties"].items()) {
      for (const Json& sample : samples(property.value())) {
        Json body = json(e.body);
        body[property.key()] = sample;
        const Status status = e.parse(body);
        EXPECT_FALSE(contradicts_schema(status))
            << e.schema << " " << body.dump() << ": " << status.to_string();
        tried++;
        taken += status.ok() ? 1 : 0;
      }
    }
    EXPECT_GT(taken, tried / 2) << e.schema;
  }
}

TEST(OpenApi, WhatItDoesNotAllowIsRefused) {
  const std::pair<const char*, Json> values[] = {{"boolean", true},
                                                 {"number", 1},
                                                 {"string", "x"},
                                                 {"array", Json::array({Json::object()})},
                                                 {"object", {{"x", Json::array()}}}};
  for (const Endpoint& e : endpoints()) {
    const Json& schema = schema_of(e.schema);
    for (const auto& property : schema["properties"].items()) {
      const std::string& name = property.key();
      const auto refused = [&](const Json& value) {
        Json body = json(e.body);
        body[name] = value;
        const Status status = e.parse(body);
        EXPECT_EQ(status.code(), Code::kInvalidArgument) << e.schema << " " << body.dump();
        EXPECT_EQ(status.message().rfind(name, 0), 0U) << status.message();
      };
      const auto allowed = kinds(property.value());
      for (const auto& [kind, value] : values) {
        if (allowed.count(kind) == 0) refused(value);
      }
      const Json& s = property.value();
      if (s.contains("enum")) refused("no such value");
      if (s.contains("minimum")) refused(s["minimum"].get<double>() - 1);
      if (s.contains("maximum")) refused(s["maximum"].get<double>() + 1);
      if (s.contains("maxLength")) refused(std::string(s["maxLength"].get<size_t>() + 1, 'x'));
    }
    for (const Json& name : schema.value("required", Json::array())) {
      Json body = json(e.body);
      body.erase(name.get<std::string>());
      EXPECT_EQ(e.parse(body).message(), name.get<std::string>() + ": missing");
    }
  }
}

void find_refs(const Json& node, std::set<std::string>* refs) {
  if (node.is_object() && node.contains("$ref")) refs->insert(node["$ref"].get<std::string>());
  if (node.is_structured()) {
    for (const Json& inner : node) find_refs(inner, refs);
  }
}

TEST(OpenApi, IsWholeInItself) {
  EXPECT_EQ(document()["openapi"], "3.1.0");
  std::set<std::string> refs;
  find_refs(document(), &refs);
  for (const std::string& ref : refs) {
    ASSERT_EQ(ref.rfind("#/", 0), 0U);
    EXPECT_TRUE(document().contains(Json::json_pointer(ref.substr(1)))) << ref;
  }
  // Every schema and every parser is used by an endpoint.
  for (const auto& schema : document()["components"]["schemas"].items()) {
    EXPECT_EQ(refs.count("#/components/schemas/" + schema.key()), 1U) << schema.key();
  }
  std::set<std::string> operations;
  for (const auto& path : document()["paths"].items()) {
    for (const auto& method : path.value().items()) {
      EXPECT_TRUE(operations.insert(method.value()["operationId"].get<std::string>()).second);
      // Or it says that it is not there.
      const Json& responses = method.value()["responses"];
      EXPECT_NE(responses.contains("200"), responses.contains("501")) << path.key();
    }
  }
  EXPECT_GE(operations.size(), 15U);
}

TEST(OpenApi, EveryFieldIsDescribed) {
  for (const Endpoint& e : endpoints()) {
    for (const auto& property : schema_of(e.schema)["properties"].items()) {
      EXPECT_TRUE(property.value().contains("description")) << e.schema << "." << property.key();
    }
  }
}

}  // namespace
}  // namespace hcache::api
