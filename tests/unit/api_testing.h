// What the tests of the protocols share.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "api/answers.h"
#include "api/json.h"

namespace hcache::api::test {

inline Json json(const std::string& text) {
  const auto parsed = parse_body(text);
  EXPECT_TRUE(parsed.ok()) << parsed.status().to_string() << " in " << text;
  return parsed.ok() ? *parsed : Json();
}

// `base` with the members of `patch` put in.
inline Json with(Json base, const std::string& patch) {
  base.update(json(patch));
  return base;
}

struct Event {
  std::string name;  // empty where the dialect has none
  Json data;         // the string "[DONE]" for the end mark
};

// Server-sent events in the form in which the builders write them.
inline std::vector<Event> events(const std::string& stream) {
  std::vector<Event> out;
  size_t at = 0;
  while (at < stream.size()) {
    const size_t end = stream.find("\n\n", at);
    EXPECT_NE(end, std::string::npos) << "an event without an end";
    if (end == std::string::npos) break;
    std::string event = stream.substr(at, end - at);
    at = end + 2;
    Event parsed;
    if (event.rfind("event: ", 0) == 0) {
      const size_t line = event.find('\n');
      parsed.name = event.substr(7, line - 7);
      event.erase(0, line + 1);
    }
    EXPECT_EQ(event.rfind("data: ", 0), 0U) << event;
    event.erase(0, 6);
    parsed.data = event == "[DONE]" ? Json(event) : json(event);
    out.push_back(std::move(parsed));
  }
  return out;
}

inline const Json& document() {
  static const Json document = Json::parse(openapi_document());
  return document;
}

inline const Json& resolve(const Json& schema) {
  if (!schema.contains("$ref")) return schema;
  const std::string ref = schema["$ref"];
  return document().at(Json::json_pointer(ref.substr(1)));
}

inline bool is_kind(const Json& value, const std::string& type) {
  if (type == "null") return value.is_null();
  if (type == "boolean") return value.is_boolean();
  if (type == "integer") return value.is_number_integer();
  if (type == "number") return value.is_number();
  if (type == "string") return value.is_string();
  if (type == "array") return value.is_array();
  return type == "object" && value.is_object();
}

// What of `value` does not agree with the schema; empty: nothing. Knows the keywords that the
// answers' schemas use.
inline std::string disagreement(const Json& given, const Json& value, const std::string& path) {
  const Json& schema = resolve(given);
  if (schema.contains("oneOf")) {
    for (const Json& one : schema["oneOf"]) {
      if (disagreement(one, value, path).empty()) return {};
    }
    return path + ": none of the alternatives";
  }
  if (schema.contains("type")) {
    bool fits = false;
    const Json& type = schema["type"];
    for (const Json& one : type.is_array() ? type : Json::array({type})) {
      fits = fits || is_kind(value, one);
    }
    if (!fits) return path + ": is no " + type.dump();
  }
  if (schema.contains("enum")) {
    bool found = false;
    for (const Json& one : schema["enum"]) found = found || one == value;
    if (!found) return path + ": is none of " + schema["enum"].dump();
  }
  for (const Json& name : schema.value("required", Json::array())) {
    if (value.is_object() && !value.contains(name)) return path + ": lacks " + name.dump();
  }
  if (value.is_object() && schema.contains("properties")) {
    for (const auto& item : value.items()) {
      if (!schema["properties"].contains(item.key())) return path + ": unknown " + item.key();
      const std::string inner =
          disagreement(schema["properties"][item.key()], item.value(), path + "." + item.key());
      if (!inner.empty()) return inner;
    }
  }
  if (value.is_array() && schema.contains("items")) {
    for (const Json& item : value) {
      const std::string inner = disagreement(schema["items"], item, path + "[]");
      if (!inner.empty()) return inner;
    }
  }
  return {};
}

// Compares with a schema of the OpenAPI document.
inline void expect_documented(const Json& answer, const std::string& schema) {
  EXPECT_EQ(disagreement({{"$ref", "#/components/schemas/" + schema}}, answer, schema), "")
      << answer.dump(2);
}

}  // namespace hcache::api::test
