// Forms with files: what clients send, and what nobody should.
#include <gmock/gmock.h>

#include "base_testing.h"
#include "http/multipart.h"

namespace hcache::http {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

const std::string kType = "multipart/form-data; boundary=XX";

std::string part(const std::string& disposition, const std::string& content) {
  return "--XX\r\nContent-Disposition: form-data; " + disposition + "\r\n\r\n" + content + "\r\n";
}

TEST(Multipart, TakesWhatClientsSend) {
  const std::string body = "preamble\r\n" + part("name=\"purpose\"", "batch") +
                           "--XX \t\r\ncontent-type: application/jsonl\r\n"
                           "CONTENT-DISPOSITION: form-data; filename=\"a \\\"b\\\".jsonl\"; "
                           "name=file\r\n\r\n{\"a\":1}\r\n\r\n--X\r\n--XX--\r\nepilogue";
  const auto parts = parse_form("Multipart/Form-Data; charset=utf-8; Boundary=\"XX\"", body);
  ASSERT_OK(parts);
  ASSERT_THAT(*parts, SizeIs(2));
  EXPECT_EQ((*parts)[0].name, "purpose");
  EXPECT_EQ((*parts)[0].filename, "");
  EXPECT_EQ((*parts)[0].content, "batch");
  EXPECT_EQ((*parts)[1].name, "file");
  EXPECT_EQ((*parts)[1].filename, "a \"b\".jsonl");
  EXPECT_EQ((*parts)[1].content, "{\"a\":1}\r\n\r\n--X");
}

TEST(Multipart, ContentMayBeEmptyOrAnyBytes) {
  const std::string bytes("\0\r\n\n\r--X\xff", 9);
  const std::string body = part("name=a", "") + part("name=b", bytes) +
                           "--XX\r\nContent-Disposition: form-data; name=c\r\n\r\n--XX--";
  const auto parts = parse_form(kType, body);
  ASSERT_OK(parts);
  ASSERT_THAT(*parts, SizeIs(3));
  EXPECT_EQ((*parts)[0].content, "");
  EXPECT_EQ((*parts)[1].content, bytes);
  EXPECT_EQ((*parts)[2].content, "");
  EXPECT_THAT(*parse_form(kType, "--XX--"), SizeIs(0));
}

TEST(Multipart, RefusesOtherTypes) {
  for (const char* type :
       {"", "application/json", "multipart/mixed; boundary=XX", "multipart/form-data",
        "multipart/form-data; boundary=", "multipart/form-data; boundary=\"XX",
        "multipart/form-data; boundary", "multipart/form-data; =XX"}) {
    EXPECT_EQ(parse_form(type, part("name=a", "x") + "--XX--").code(), Code::kInvalidArgument)
        << type;
  }
  EXPECT_EQ(parse_form("multipart/form-data; boundary=" + std::string(71, 'b'), "").code(),
            Code::kInvalidArgument);
}

TEST(Multipart, RefusesWhatIsTornOrMalformed) {
  const std::string good = part("name=\"a\"", "content") + "--XX--";
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_EQ(parse_form(kType, good.substr(0, n)).code(), Code::kInvalidArgument) << n;
  }
  for (const std::string& body :
       {part("filename=\"a\"", "x") + "--XX--", std::string("--XX\r\nno header\r\n\r\nx\r\n--XX--"),
        std::string("--XX\r\nContent-Disposition: attachment; name=a\r\n\r\nx\r\n--XX--"),
        std::string("--XX\r\n\r\nx\r\n--XX--"), std::string("--XXY\r\n\r\nx\r\n--XX--"),
        part("name=\"a", "x") + "--XX--", part("name=\"a\"b", "x") + "--XX--"}) {
    EXPECT_EQ(parse_form(kType, body).code(), Code::kInvalidArgument) << body;
  }
}

TEST(Multipart, KeepsToItsLimits) {
  std::string body;
  for (int i = 0; i < 3; ++i) body += part("name=a", "x");
  body += "--XX--";
  EXPECT_OK(parse_form(kType, body, {.parts = 3}));
  EXPECT_THAT(parse_form(kType, body, {.parts = 2}).status().message(), HasSubstr("2 parts"));
  const std::string long_header =
      "--XX\r\nA: " + std::string(5000, 'x') + "\r\nContent-Disposition: form-data; name=a\r\n\r\n";
  EXPECT_THAT(parse_form(kType, long_header + "x\r\n--XX--").status().message(),
              HasSubstr("4096 bytes of headers"));
}

}  // namespace
}  // namespace hcache::http
