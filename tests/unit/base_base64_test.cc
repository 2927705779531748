#include <gtest/gtest.h>

#include "base/base64.h"

namespace hcache {
namespace {

TEST(Base64, VectorsOfTheRfc) {
  const std::pair<const char*, const char*> vectors[] = {{"", ""},
                                                         {"f", "Zg=="},
                                                         {"fo", "Zm8="},
                                                         {"foo", "Zm9v"},
                                                         {"foob", "Zm9vYg=="},
                                                         {"fooba", "Zm9vYmE="},
                                                         {"foobar", "Zm9vYmFy"}};
  for (const auto& [bytes, text] : vectors) {
    EXPECT_EQ(base64(bytes), text);
    EXPECT_EQ(from_base64(text).value_or("?"), bytes);
  }
}

TEST(Base64, EveryByteComesBack) {
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes += static_cast<char>(i * 7);
  for (size_t n = 0; n < 300; ++n) {
    const std::string some = bytes.substr(n, n);
    EXPECT_EQ(from_base64(base64(some)).value_or("?"), some);
  }
}

TEST(Base64, LinesAndMissingPadding) {
  EXPECT_EQ(from_base64("Zm9v\r\nYmFy\n").value_or("?"), "foobar");
  EXPECT_EQ(from_base64("Zm9vYg").value_or("?"), "foob");
}

TEST(Base64, WhatIsNoneIsNamed) {
  EXPECT_EQ(from_base64("Zm-v").status().message(), "byte 2 of 4 is no base64");
  EXPECT_EQ(from_base64("Zg==Zg==").status().message(), "byte 4 of 8 is no base64");
  EXPECT_EQ(from_base64("Zm9vY").status().message(), "base64 of 5 digits is cut short");
}

}  // namespace
}  // namespace hcache
