// The fields of a request, each declared once: read from JSON, or described for the OpenAPI
// document. A function that declares fields runs in both modes, so the two can't disagree.
//
//   void sampling_fields(Fields& f, model::SamplingOptions* o) {
//     f.number("temperature", &o->temperature, {0, 2}, "...");
//
// Absent and null fields leave their variables alone, unknown ones are ignored. The first error
// ends the reading; it names the field's place ("messages[2].content: expected ...").
// Threading: one object, one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/json.h"
#include "base/status.h"

namespace hcache::api {

struct Range {
  double min = std::numeric_limits<double>::lowest();
  double max = std::numeric_limits<double>::max();
};

// "a string", "an array", ...: for messages.
[[nodiscard]] std::string_view kind_of(const Json& value);
[[nodiscard]] Status wrong_kind(const std::string& path, std::string_view expected,
                                const Json& value);

class Fields {
 public:
  // Reads `object`, which lies at `path` in the body ("": it is the body).
  Fields(const Json& object, std::string path);
  // Describes into `schema`, a JSON schema of an object.
  explicit Fields(Json* schema);

  [[nodiscard]] bool reading() const { return object_ != nullptr; }
  [[nodiscard]] bool ok() const { return status_.ok(); }
  [[nodiscard]] const Status& status() const { return status_; }
  // Whether the field is there and not null. False when describing.
  [[nodiscard]] bool has(std::string_view name) const;
  [[nodiscard]] std::string path_of(std::string_view name) const;
  // An error of the field's; for rules that no declaration expresses. Nothing when describing.
  void fail(std::string_view name, std::string_view message);

  // The next field that is declared must be there.
  Fields& required();

  void flag(std::string_view name, bool* out, std::string_view doc);
  void integer(std::string_view name, int64_t* out, Range range, std::string_view doc);
  void integer(std::string_view name, int* out, Range range, std::string_view doc);
  void number(std::string_view name, float* out, Range range, std::string_view doc);
  // At most `max_bytes` of UTF-8; 0: any number.
  void text(std::string_view name, std::string* out, std::string_view doc, size_t max_bytes = 0);
  void one_of(std::string_view name, std::string* out, const std::vector<std::string>& values,
              std::string_view doc);
  // A JSON schema, kept as text.
  void schema(std::string_view name, std::string* out, std::string_view doc);
  using Declare = std::function<void(Fields&)>;
  void object(std::string_view name, std::string_view doc, const Declare& declare);
  // An array of objects; `declare` runs once for each (and once when describing).
  void objects(std::string_view name, std::string_view doc, const Declare& declare);
  // Anything else: `schema` describes it, `read` takes it and its path.
  using Read = std::function<Status(const Json&, const std::string&)>;
  void value(std::string_view name, Json schema, std::string_view doc, const Read& read);

 private:
  // The field's value; null when absent, when describing and after an error.
  const Json* find(std::string_view name);
  Json& describe(std::string_view name, Json schema, std::string_view doc);
  void integer_value(std::string_view name, Range range, std::string_view doc,
                     const std::function<void(int64_t)>& set);
  void take(Status status);

  const Json* object_ = nullptr;
  std::string path_;
  Json* schema_ = nullptr;
  bool required_ = false;
  Status status_;
};

// Reads a body with `declare`. kInvalidArgument also when it is no object.
[[nodiscard]] Status read_fields(const Json& body, const Fields::Declare& declare);
// The JSON schema of what read_fields() takes.
[[nodiscard]] Json describe_fields(const Fields::Declare& declare);

}  // namespace hcache::api
