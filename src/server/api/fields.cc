#include "fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace hcache::api {
namespace {

// 2^63: the integers a double can't tell from int64's end are out of range anyway.
constexpr double kInt64End = 9223372036854775808.0;

constexpr size_t kQuoted = 64;  // bytes of a client's text in a message

// The whole number that a JSON number is: 5, and also 5.0.
std::optional<int64_t> whole_number(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return {};
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  const auto number = value.get<double>();
  if (std::trunc(number) != number || std::abs(number) >= kInt64End) return {};
  return static_cast<int64_t>(number);
}

std::string range_text(Range range) {
  if (range.max == Range().max) return fmt::format("at least {}", range.min);
  if (range.min == Range().min) return fmt::format("at most {}", range.max);
  return fmt::format("between {} and {}", range.min, range.max);
}

Status out_of(const std::string& path, const Json& value, Range range) {
  return invalid_argument(
      fmt::format("{}: {} is out of range, it must be {}", path, value.dump(), range_text(range)));
}

// Bounds as JSON numbers, whole ones without a fraction.
void add_bounds(Json* schema, Range range) {
  const auto bound = [](double x) { return std::trunc(x) == x ? Json(std::llround(x)) : Json(x); };
  if (range.min != Range().min) (*schema)["minimum"] = bound(range.min);
  if (range.max != Range().max) (*schema)["maximum"] = bound(range.max);
}

}  // namespace

std::string_view kind_of(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::boolean: return "a boolean";
    case Json::value_t::string: return "a string";
    case Json::value_t::array: return "an array";
    case Json::value_t::object: return "an object";
    default: return "a number";
  }
}

Status wrong_kind(const std::string& path, std::string_view expected, const Json& value) {
  return invalid_argument(fmt::format("{}: expected {}, got {}", path.empty() ? "the body" : path,
                                      expected, kind_of(value)));
}

Fields::Fields(const Json& object, std::string path) : object_(&object), path_(std::move(path)) {
  if (!object.is_object()) status_ = wrong_kind(path_, "an object", object);
}

Fields::Fields(Json* schema) : schema_(schema) {
  (*schema)["type"] = "object";
  (*schema)["properties"] = Json::object();
}

bool Fields::has(std::string_view name) const {
  if (!reading() || !object_->is_object()) return false;
  const auto it = object_->find(name);
  return it != object_->end() && !it->is_null();
}

std::string Fields::path_of(std::string_view name) const {
  return path_.empty() ? std::string(name) : fmt::format("{}.{}", path_, name);
}

void Fields::fail(std::string_view name, std::string_view message) {
  if (reading()) take(invalid_argument(fmt::format("{}: {}", path_of(name), message)));
}

void Fields::take(Status status) {
  if (status_.ok()) status_ = std::move(status);
}

Fields& Fields::required() {
  required_ = true;
  return *this;
}

const Json* Fields::find(std::string_view name) {
  const bool required = std::exchange(required_, false);
  if (!reading() || !ok()) return nullptr;
  if (!has(name)) {
    if (required) fail(name, "missing");
    return nullptr;
  }
  return &*object_->find(name);
}

Json& Fields::describe(std::string_view name, Json schema, std::string_view doc) {
  if (std::exchange(required_, false)) (*schema_)["required"].push_back(name);
  if (!doc.empty()) schema["description"] = doc;
  Json& place = (*schema_)["properties"][std::string(name)];
  place = std::move(schema);
  return place;
}

void Fields::flag(std::string_view name, bool* out, std::string_view doc) {
  if (!reading()) {
    describe(name, {{"type", "boolean"}}, doc);
    return;
  }
  const Json* value = find(name);
  if (value == nullptr) return;
  if (!value->is_boolean()) return take(wrong_kind(path_of(name), "a boolean", *value));
  *out = value->get<bool>();
}

void Fields::integer_value(std::string_view name, Range range, std::string_view doc,
                           const std::function<void(int64_t)>& set) {
  if (!reading()) {
    add_bounds(&describe(name, {{"type", "integer"}}, doc), range);
    return;
  }
  const Json* value = find(name);
  if (value == nullptr) return;
  if (!value->is_number()) return take(wrong_kind(path_of(name), "an integer", *value));
  const auto as_double = value->get<double>();
  if (as_double < range.min || as_double > range.max || std::abs(as_double) >= kInt64End) {
    return take(out_of(path_of(name), *value, range));
  }
  const std::optional<int64_t> number = whole_number(*value);
  if (!number) return fail(name, fmt::format("expected an integer, got {}", value->dump()));
  set(*number);
}

void Fields::integer(std::string_view name, int64_t* out, Range range, std::string_view doc) {
  integer_value(name, range, doc, [&](int64_t x) { *out = x; });
}

void Fields::integer(std::string_view name, int* out, Range range, std::string_view doc) {
  range.min = std::max(range.min, static_cast<double>(std::numeric_limits<int>::min()));
  range.max = std::min(range.max, static_cast<double>(std::numeric_limits<int>::max()));
  integer_value(name, range, doc, [&](int64_t x) { *out = static_cast<int>(x); });
}

void Fields::number(std::string_view name, float* out, Range range, std::string_view doc) {
  if (!reading()) {
    add_bounds(&describe(name, {{"type", "number"}}, doc), range);
    return;
  }
  const Json* value = find(name);
  if (value == nullptr) return;
  if (!value->is_number()) return take(wrong_kind(path_of(name), "a number", *value));
  const auto number = value->get<double>();
  if (!(number >= range.min && number <= range.max)) {
    return take(out_of(path_of(name), *value, range));
  }
  *out = static_cast<float>(number);
}

void Fields::text(std::string_view name, std::string* out, std::string_view doc, size_t max_bytes) {
  if (!reading()) {
    Json& schema = describe(name, {{"type", "string"}}, doc);
    if (max_bytes > 0) schema["maxLength"] = max_bytes;
    return;
  }
  const Json* value = find(name);
  if (value == nullptr) return;
  if (!value->is_string()) return take(wrong_kind(path_of(name), "a string", *value));
  const auto& string = value->get_ref<const std::string&>();
  if (max_bytes > 0 && string.size() > max_bytes) {
    return fail(name, fmt::format("{} bytes are too many, at most {} are allowed", string.size(),
                                  max_bytes));
  }
  *out = string;
}

void Fields::one_of(std::string_view name, std::string* out, const std::vector<std::string>& values,
                    std::string_view doc) {
  if (!reading()) {
    describe(name, {{"type", "string"}, {"enum", values}}, doc);
    return;
  }
  std::string value = *out;
  text(name, &value, doc);
  if (!has(name) || !ok()) return;
  if (std::find(values.begin(), values.end(), value) == values.end()) {
    return fail(
        name, fmt::format("'{}' is none of {}", value.substr(0, kQuoted), fmt::join(values, ", ")));
  }
  *out = value;
}

void Fields::schema(std::string_view name, std::string* out, std::string_view doc) {
  value(name, {{"type", "object"}}, doc, [&](const Json& value, const std::string& path) -> Status {
    if (!value.is_object()) return wrong_kind(path, "an object", value);
    *out = to_text(value);
    return {};
  });
}

void Fields::object(std::string_view name, std::string_view doc, const Declare& declare) {
  if (!reading()) {
    describe(name, describe_fields(declare), doc);
    return;
  }
  const Json* value = find(name);
  if (value == nullptr) return;
  Fields inner(*value, path_of(name));
  if (inner.ok()) declare(inner);
  take(inner.status());
}

void Fields::objects(std::string_view name, std::string_view doc, const Declare& declare) {
  if (!reading()) {
    describe(name, {{"type", "array"}, {"items", describe_fields(declare)}}, doc);
    return;
  }
  const Json* value = find(name);
  if (value == nullptr) return;
  if (!value->is_array()) return take(wrong_kind(path_of(name), "an array", *value));
  for (size_t i = 0; i < value->size() && ok(); i++) {
    Fields inner((*value)[i], fmt::format("{}[{}]", path_of(name), i));
    if (inner.ok()) declare(inner);
    take(inner.status());
  }
}

void Fields::value(std::string_view name, Json schema, std::string_view doc, const Read& read) {
  if (!reading()) {
    describe(name, std::move(schema), doc);
    return;
  }
  const Json* value = find(name);
  if (value != nullptr) take(read(*value, path_of(name)));
}

Status read_fields(const Json& body, const Fields::Declare& declare) {
  Fields fields(body, "");
  if (fields.ok()) declare(fields);
  return fields.status();
}

Json describe_fields(const Fields::Declare& declare) {
  Json schema = Json::object();
  Fields fields(&schema);
  declare(fields);
  return schema;
}

}  // namespace hcache::api
