// Media in requests: how the protocols send pictures and sounds.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/base64.h"
#include "request_fields.h"

namespace hcache::api {
namespace {

using model::ChatMessage;
using model::Medium;

constexpr std::string_view kFile = "file://";
constexpr std::string_view kData = "data:";
constexpr std::string_view kBase64 = ";base64";

Status decode(std::string_view text, const std::string& path, Medium* medium) {
  auto bytes = from_base64(text);
  if (!bytes.ok()) return bytes.status().with_context(path);
  if (bytes->empty()) return invalid_argument(fmt::format("{}: empty", path));
  medium->bytes = std::make_shared<const std::string>(std::move(*bytes));
  return {};
}

// {"url": "data:…"}, or that text itself.
void url_field(Fields& f, std::string_view name, std::string_view inner, Medium* medium) {
  const Json object = {{"type", "object"},
                       {"properties", {{inner, medium_schema()}}},
                       {"required", Json::array({inner})}};
  f.required().value(name, {{"oneOf", Json::array({medium_schema(), object})}}, {},
                     [&](const Json& value, const std::string& path) {
                       if (!value.is_object()) return read_medium(value, path, medium);
                       Fields o(value, path);
                       o.required().value(inner, medium_schema(), {},
                                          [&](const Json& url, const std::string& at) {
                                            return read_medium(url, at, medium);
                                          });
                       return o.status();
                     });
}

void image_url_part(Fields& f, Medium* medium) { url_field(f, "image_url", "url", medium); }
void audio_part(Fields& f, Medium* medium) { url_field(f, "input_audio", "data", medium); }
struct Part {
  const char* type;
  void (*declare)(Fields&, Medium*);
};
constexpr Part kParts[] = {{"image_url", image_url_part},
                           {"input_image", image_url_part},
                           {"input_audio", audio_part},
                           {"image", image_source_field}};

const Part* media_part(const std::string& type) {
  const auto* part = std::find_if(std::begin(kParts), std::end(kParts),
                                  [&](const Part& p) { return p.type == type; });
  return part == std::end(kParts) ? nullptr : part;
}

}  // namespace

Json medium_schema() {
  return {{"type", "string"},
          {"minLength", 4},
          {"description",
           "data:TYPE;base64,…, bare base64, or file://NAME of the folder that the server was "
           "started with (--media-path). It fetches nothing from elsewhere."}};
}

Status read_medium(const Json& value, const std::string& path, Medium* medium) {
  if (!value.is_string()) return wrong_kind(path, "a string", value);
  const std::string_view text = value.get_ref<const std::string&>();
  if (text.starts_with(kFile)) {
    medium->name = text.substr(kFile.size());
    return {};
  }
  if (text.starts_with("http://") || text.starts_with("https://")) {
    return invalid_argument(fmt::format(
        "{}: this server fetches nothing: send the file itself, as data:TYPE;base64,…", path));
  }
  if (!text.starts_with(kData)) return decode(text, path, medium);
  const size_t comma = text.find(',');
  const std::string_view head = text.substr(0, comma);
  if (comma == std::string_view::npos || !head.ends_with(kBase64)) {
    return invalid_argument(fmt::format("{}: expected data:TYPE;base64,…", path));
  }
  return decode(text.substr(comma + 1), path, medium);
}

void image_source_field(Fields& f, Medium* medium) {
  f.required().object("source", {}, [&](Fields& o) {
    std::string type;
    std::string media_type;
    o.required().one_of("type", &type, {"base64", "url"}, {});
    o.text("media_type", &media_type, {});
    o.required().value(type == "url" ? "url" : "data", medium_schema(), {},
                       [&](const Json& value, const std::string& path) {
                         return read_medium(value, path, medium);
                       });
  });
}

void append_medium(Medium medium, ChatMessage* message) {
  message->content += model::kMediaMarker;
  message->media.push_back(std::move(medium));
}

void media_field(Fields& f, std::string_view name, std::string_view doc,
                 std::vector<Medium>* media) {
  f.value(
      name, {{"type", "array"}, {"items", medium_schema()}}, doc,
      [&](const Json& value, const std::string& path) -> Status {
        if (!value.is_array()) return wrong_kind(path, "an array", value);
        for (size_t i = 0; i < value.size(); ++i) {
          Medium medium;
          HCACHE_RETURN_IF_ERROR(read_medium(value[i], fmt::format("{}[{}]", path, i), &medium));
          media->push_back(std::move(medium));
        }
        return {};
      });
}

Json message_content_schema(const std::vector<std::string>& types) {
  Json schema = content_schema(types);
  Json kinds = Json::array({schema["oneOf"][1]["items"]});
  for (const Part& part : kParts) {
    kinds.push_back(describe_fields([&](Fields& f) {
      std::string type;
      Medium medium;
      f.required().one_of("type", &type, {part.type}, {});
      part.declare(f, &medium);
    }));
  }
  schema["oneOf"][1]["items"] = {{"oneOf", std::move(kinds)}};
  return schema;
}

Status read_message_content(const Json& value, const std::string& path,
                            const std::vector<std::string>& types, ChatMessage* message,
                            std::string_view separator) {
  message->content.clear();
  message->media.clear();
  if (!value.is_array()) {
    return read_content(value, path, types, &message->content, separator);
  }
  bool behind_text = false;
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", path, i);
    Fields f(value[i], at);
    std::string type;
    f.text("type", &type, {});
    if (const Part* part = media_part(type); part != nullptr) {
      Medium medium;
      part->declare(f, &medium);
      HCACHE_RETURN_IF_ERROR(f.status());
      append_medium(std::move(medium), message);
      behind_text = false;
      continue;
    }
    std::string text;
    HCACHE_RETURN_IF_ERROR(read_text_part(value[i], at, types, &text));
    if (behind_text && !message->content.empty()) message->content += separator;
    message->content += text;
    behind_text = true;
  }
  return {};
}

}  // namespace hcache::api
