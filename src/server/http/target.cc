#include "target.h"

#include <algorithm>
#include <optional>

namespace hcache::http {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

// Nothing where '%' is not followed by two hex digits that give a byte fit for text.
std::optional<std::string> percent_decode(std::string_view text, bool plus_is_space,
                                          bool allow_control) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '%') {
      if (i + 2 >= text.size()) return std::nullopt;
      const int high = hex_digit(text[i + 1]);
      const int low = hex_digit(text[i + 2]);
      if (high < 0 || low < 0) return std::nullopt;
      c = static_cast<char>(high * 16 + low);
      i += 2;
      if (c == '\0' || (is_control(c) && !allow_control)) return std::nullopt;
    } else if (c == '+' && plus_is_space) {
      c = ' ';
    }
    out.push_back(c);
  }
  return out;
}

// Calls visit(piece) for every piece between separators; stops when it returns false.
template <typename Visit>
bool split(std::string_view text, char separator, Visit visit) {
  while (true) {
    const std::size_t end = text.find(separator);
    if (!visit(text.substr(0, end))) return false;
    if (end == std::string_view::npos) return true;
    text.remove_prefix(end + 1);
  }
}

// "http://host:port/a" becomes "/a", "http://host?b" becomes "/?b".
std::string without_authority(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!target.starts_with(scheme)) continue;
    target.remove_prefix(scheme.size());
    target.remove_prefix(std::min(target.find_first_of("/?"), target.size()));
    return target.starts_with('/') ? std::string(target) : "/" + std::string(target);
  }
  return std::string(target);
}

Status parse_path(std::string_view text, Target* out) {
  const bool ok = split(text, '/', [&](std::string_view piece) {
    std::optional<std::string> segment = percent_decode(piece, false, false);
    if (!segment) return false;
    if (segment->empty() || *segment == ".") return true;
    if (*segment == "..") {
      if (out->segments.empty()) return false;
      out->segments.pop_back();
      return true;
    }
    out->segments.push_back(std::move(*segment));
    return true;
  });
  if (!ok) return invalid_argument("the path of the request target is malformed");
  for (const std::string& segment : out->segments) out->path.append("/").append(segment);
  if (out->path.empty()) out->path = "/";
  return {};
}

Status parse_query(std::string_view text, Target* out) {
  const bool ok = split(text, '&', [&](std::string_view piece) {
    if (piece.empty()) return true;
    const std::size_t equals = piece.find('=');
    auto name = percent_decode(piece.substr(0, equals), true, true);
    auto value = percent_decode(
        equals == std::string_view::npos ? std::string_view() : piece.substr(equals + 1), true,
        true);
    if (!name || !value) return false;
    out->query.emplace_back(std::move(*name), std::move(*value));
    return true;
  });
  if (!ok) return invalid_argument("the query of the request target is malformed");
  return {};
}

}  // namespace

Result<Target> parse_target(std::string_view target) {
  const bool visible = std::all_of(target.begin(), target.end(),
                                   [](char c) { return c > 0x20 && c < 0x7f && c != '#'; });
  if (!visible) return invalid_argument("the request target has characters that need escaping");
  Target out;
  if (target == "*") {
    out.path = "*";
    return out;
  }
  const std::string local = without_authority(target);
  if (!local.starts_with('/')) return invalid_argument("the request target must begin with '/'");
  const std::string_view view = local;
  const std::size_t question = view.find('?');
  HCACHE_RETURN_IF_ERROR(parse_path(view.substr(0, question), &out));
  if (question != std::string_view::npos) {
    HCACHE_RETURN_IF_ERROR(parse_query(view.substr(question + 1), &out));
  }
  return out;
}

}  // namespace hcache::http
