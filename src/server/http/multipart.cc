#include "http/multipart.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "text.h"

namespace hcache::http {
namespace {

constexpr std::string_view kLineEnd = "\r\n";
constexpr std::string_view kBlanks = " \t";
constexpr std::size_t kMaxBoundary = 70;  // RFC 2046, section 5.1.1

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

// A header's value: a token and parameters, "form-data; name=\"a\"". One pass; false: malformed.
class Value {
 public:
  [[nodiscard]] bool parse(std::string_view text) {
    const std::size_t end = text.find(';');
    token_ = trimmed(text.substr(0, end));
    while (end != std::string_view::npos && !text.empty()) {
      text.remove_prefix(std::min(text.find(';'), text.size()));
      if (text.empty()) break;
      text.remove_prefix(1);
      if (trimmed(text).empty()) break;
      if (!take_parameter(&text)) return false;
    }
    return true;
  }
  [[nodiscard]] std::string_view token() const { return token_; }
  [[nodiscard]] const std::string* parameter(std::string_view name) const {
    const auto found = std::find_if(parameters_.begin(), parameters_.end(), [&](const auto& p) {
      return same_ignoring_case(p.first, name);
    });
    return found == parameters_.end() ? nullptr : &found->second;
  }

 private:
  // Up to, but without, the next ';' that is outside of quotes.
  bool take_parameter(std::string_view* text) {
    const std::size_t equals = text->find('=');
    if (equals == std::string_view::npos) return false;
    const std::string_view name = trimmed(text->substr(0, equals));
    text->remove_prefix(equals + 1);
    text->remove_prefix(std::min(text->find_first_not_of(kBlanks), text->size()));
    std::string value;
    if (!text->starts_with('"')) {
      const std::string_view raw = text->substr(0, text->find(';'));
      value = trimmed(raw);
      text->remove_prefix(raw.size());
    } else if (!take_quoted(text, &value)) {
      return false;
    }
    if (name.empty() || name.find_first_of(" \t;\"") != std::string_view::npos) return false;
    parameters_.emplace_back(name, std::move(value));
    return true;
  }

  static bool take_quoted(std::string_view* text, std::string* value) {
    for (std::size_t i = 1; i < text->size(); ++i) {
      const char c = (*text)[i];
      if (c == '"') {
        text->remove_prefix(i + 1);
        const std::size_t next = text->find_first_not_of(kBlanks);
        return next == std::string_view::npos || (*text)[next] == ';';
      }
      // Browsers send quotes as %22 and backslashes as they are.
      const bool escapes =
          c == '\\' && i + 1 < text->size() && ((*text)[i + 1] == '"' || (*text)[i + 1] == '\\');
      value->push_back(escapes ? (*text)[++i] : c);
    }
    return false;
  }

  std::string_view token_;
  std::vector<std::pair<std::string_view, std::string>> parameters_;
};

Result<std::string> boundary_of(std::string_view content_type) {
  Value type;
  if (!type.parse(content_type) || !same_ignoring_case(type.token(), "multipart/form-data")) {
    return invalid_argument("Content-Type: expected multipart/form-data");
  }
  const std::string* boundary = type.parameter("boundary");
  const bool whole = boundary != nullptr && !boundary->empty() &&
                     boundary->size() <= kMaxBoundary &&
                     boundary->find_first_of("\r\n") == std::string::npos;
  if (!whole) {
    return invalid_argument(
        fmt::format("Content-Type: expected a boundary of 1 to {} characters", kMaxBoundary));
  }
  return *boundary;
}

// Goes through the body from delimiter to delimiter.
class Form {
 public:
  Form(std::string_view body, const std::string& boundary, const FormLimits& limits)
      : rest_(body), delimiter_(std::string(kLineEnd) + "--" + boundary), limits_(limits) {}

  Status parse(std::vector<FormPart>* parts) {
    HCACHE_RETURN_IF_ERROR(skip_preamble());
    while (true) {
      HCACHE_ASSIGN_OR_RETURN(const bool more, end_delimiter());
      if (!more) return {};
      if (parts->size() >= limits_.parts) {
        return invalid_argument(fmt::format("the form has more than {} parts", limits_.parts));
      }
      HCACHE_ASSIGN_OR_RETURN(FormPart part, take_part());
      parts->push_back(std::move(part));
    }
  }

 private:
  static Status torn() { return invalid_argument("the form ends within a part"); }

  Status skip_preamble() {
    const std::string_view first = std::string_view(delimiter_).substr(kLineEnd.size());
    if (rest_.starts_with(first)) {
      rest_.remove_prefix(first.size());
      return {};
    }
    return take_up_to(delimiter_, nullptr);
  }

  // What stands before the next `end`, and `end` itself.
  Status take_up_to(std::string_view end, std::string_view* before) {
    const std::size_t at = rest_.find(end);
    if (at == std::string_view::npos) return torn();
    if (before != nullptr) *before = rest_.substr(0, at);
    rest_.remove_prefix(at + end.size());
    return {};
  }

  // Behind a delimiter: whether another part follows.
  Result<bool> end_delimiter() {
    if (rest_.starts_with("--")) return false;
    rest_.remove_prefix(std::min(rest_.find_first_not_of(kBlanks), rest_.size()));
    if (!rest_.starts_with(kLineEnd)) return torn();
    rest_.remove_prefix(kLineEnd.size());
    return true;
  }

  Result<FormPart> take_part() {
    FormPart part;
    bool named = false;
    for (std::size_t bytes = 0; !rest_.starts_with(kLineEnd);) {
      std::string_view line;
      const std::string_view window = rest_.substr(0, limits_.header_bytes - bytes);
      const std::size_t end = window.find(kLineEnd);
      if (end == std::string_view::npos) {
        if (window.size() == rest_.size()) return torn();
        return invalid_argument(fmt::format("a part of the form has more than {} bytes of headers",
                                            limits_.header_bytes));
      }
      line = window.substr(0, end);
      bytes += end + kLineEnd.size();
      rest_.remove_prefix(end + kLineEnd.size());
      HCACHE_RETURN_IF_ERROR(take_header(line, &part, &named));
    }
    // Without content the empty line may be the delimiter's own line end.
    if (rest_.substr(kLineEnd.size()).starts_with(std::string_view(delimiter_).substr(2))) {
      rest_.remove_prefix(delimiter_.size());
    } else {
      rest_.remove_prefix(kLineEnd.size());
      HCACHE_RETURN_IF_ERROR(take_up_to(delimiter_, &part.content));
    }
    if (!named) return invalid_argument("a part of the form has no name");
    return part;
  }

  static Status take_header(std::string_view line, FormPart* part, bool* named) {
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos || colon == 0) {
      return invalid_argument("a part of the form has a line that is no header");
    }
    if (!same_ignoring_case(line.substr(0, colon), "content-disposition")) return {};
    Value value;
    if (!value.parse(line.substr(colon + 1)) || !same_ignoring_case(value.token(), "form-data")) {
      return invalid_argument("a part of the form has a malformed Content-Disposition");
    }
    if (const std::string* name = value.parameter("name"); name != nullptr) {
      part->name = *name;
      *named = true;
    }
    if (const std::string* filename = value.parameter("filename"); filename != nullptr) {
      part->filename = *filename;
    }
    return {};
  }

  std::string_view rest_;
  const std::string delimiter_;
  const FormLimits limits_;
};

}  // namespace

Result<std::vector<FormPart>> parse_form(std::string_view content_type, std::string_view body,
                                         const FormLimits& limits) {
  HCACHE_ASSIGN_OR_RETURN(const std::string boundary, boundary_of(content_type));
  std::vector<FormPart> parts;
  HCACHE_RETURN_IF_ERROR(Form(body, boundary, limits).parse(&parts));
  return parts;
}

}  // namespace hcache::http
