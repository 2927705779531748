// Fuzz target for uploads: a form's type, up to the first newline, and its body. What is taken lies
// within the body, in order, and no part holds the delimiter.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "fuzz.h"
#include "http/multipart.h"

namespace {

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t end = input.find('\n');
  if (end == std::string_view::npos) return 0;
  const std::string_view type = input.substr(0, end);
  const std::string body(input.substr(end + 1));
  const hcache::http::FormLimits limits = {.parts = 4, .header_bytes = 200};
  const auto parts = hcache::http::parse_form(type, body, limits);
  if (!parts.ok()) {
    require(parts.code() == hcache::Code::kInvalidArgument, "what is wrong is the client's");
    return 0;
  }
  require(parts->size() <= limits.parts, "no more parts than allowed");
  const char* at = body.data();
  for (const hcache::http::FormPart& part : *parts) {
    if (part.content.empty()) continue;
    require(part.content.data() >= at, "parts are in order");
    at = part.content.data() + part.content.size();
    require(at <= body.data() + body.size(), "parts are within the body");
    require(part.name.size() + part.filename.size() <= limits.header_bytes, "names are bounded");
    if (type == "multipart/form-data; boundary=XX") {
      require(part.content.find("\r\n--XX") == std::string_view::npos, "parts end at a delimiter");
    }
  }
  return 0;
}

std::vector<std::string> hcache::fuzz::seeds() {
  const std::string type = "multipart/form-data; boundary=XX\n";
  return {
      type +
          "--XX\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n"
          "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.jsonl\"\r\n"
          "Content-Type: application/jsonl\r\n\r\n{\"custom_id\":\"a\"}\n\r\n--XX--\r\n",
      type + "preamble\r\n--XX \r\ncontent-disposition:form-data;name=a\r\n\r\n\r\n--XX--epilogue",
      "multipart/form-data; charset=x; boundary=\"X\\\"Y\"\n--X\"Y\r\n"
      "Content-Disposition: form-data; name=\"a\\\\b\"; filename=c\r\n\r\n--X\"Y--",
      type + "--XX--",
  };
}
