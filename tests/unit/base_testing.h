// What tests of every module may use: status assertions and a temporary directory.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/status.h"

#define ASSERT_OK(expr)                                                     \
  do {                                                                      \
    const auto& assert_ok_ = (expr);                                        \
    ASSERT_TRUE(assert_ok_.ok()) << ::hcache::testing::text_of(assert_ok_); \
  } while (false)
#define EXPECT_OK(expr)                                                     \
  do {                                                                      \
    const auto& expect_ok_ = (expr);                                        \
    EXPECT_TRUE(expect_ok_.ok()) << ::hcache::testing::text_of(expect_ok_); \
  } while (false)

namespace hcache::testing {

inline std::string text_of(const Status& status) { return status.to_string(); }
template <typename T>
std::string text_of(const Result<T>& result) {
  return result.status().to_string();
}

class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "hcache-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace hcache::testing
