// cuFile's library: what is missing is said, files and memory are registered and given back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <vector>

#include "base/direct_storage.h"
#include "base_testing.h"
#include "fake_cufile.h"

namespace hcache {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kBytes = 256 << 10;

class DirectStorageTest : public ::testing::Test {
 protected:
  // A file of kBytes whose bytes tell their place and the file.
  std::unique_ptr<File> make_file(const std::string& name, unsigned seed) {
    auto file = Env::real().open_file(dir_ / name, {.write = true, .create = true});
    EXPECT_TRUE(file.ok()) << file.status().to_string();
    const Status written = (*file)->write_at(0, content(seed));
    EXPECT_TRUE(written.ok()) << written.to_string();
    return std::move(*file);
  }
  static std::vector<std::byte> content(unsigned seed) {
    std::vector<std::byte> bytes(kBytes);
    for (size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 253 + seed);
    return bytes;
  }
  std::unique_ptr<DirectStorage> open() {
    auto opened = DirectStorage::open(testing::FakeCuFile::path());
    EXPECT_TRUE(opened.ok()) << opened.status().to_string();
    return std::move(*opened);
  }

  testing::FakeCuFile library_;
  testing::TempDir dir_;
  AlignedBuffer memory_{2 * kBytes};  // of the device
};

TEST_F(DirectStorageTest, AMissingLibraryIsNamedWithTheRemedy) {
  const auto opened = DirectStorage::open("libnosuchcufile.so.0");
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.code(), Code::kFailedPrecondition);
  EXPECT_THAT(
      opened.status().to_string(),
      AllOf(HasSubstr("libnosuchcufile.so.0"), HasSubstr("nvidia-gds"), HasSubstr("--gpu-direct")));
}

TEST_F(DirectStorageTest, ALibraryOfAnotherKindIsRefused) {
  const auto opened = DirectStorage::open("libc.so.6");
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.code(), Code::kFailedPrecondition);
  EXPECT_THAT(opened.status().to_string(), HasSubstr("cuFileDriverOpen"));
}

TEST_F(DirectStorageTest, ADriverThatDoesNotOpenIsSaid) {
  library_.driver_error(5001);
  const auto opened = DirectStorage::open(testing::FakeCuFile::path());
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.code(), Code::kFailedPrecondition);
  EXPECT_THAT(opened.status().to_string(), AllOf(HasSubstr("5001"), HasSubstr("nvidia-gds")));
  EXPECT_EQ(library_.drivers(), 0);
}

TEST_F(DirectStorageTest, ReadsWhereItIsToldInPiecesToo) {
  const auto file = make_file("a", 7);
  const auto storage = open();
  ASSERT_TRUE(storage->add_memory(memory_.data(), memory_.size()).ok());
  const std::vector<std::byte> wanted = content(7);
  for (const size_t most : {size_t{0}, size_t{10000}}) {
    library_.most_bytes(most);
    std::fill(memory_.span().begin(), memory_.span().end(), std::byte{0});
    const auto got = storage->read(*file, 4096, memory_.data(), 8192, 65536);
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    EXPECT_EQ(*got, 65536U);
    EXPECT_TRUE(
        std::equal(wanted.begin() + 4096, wanted.begin() + 4096 + 65536, memory_.data() + 8192));
    EXPECT_EQ(memory_.data()[8191], std::byte{0});
    EXPECT_EQ(memory_.data()[8192 + 65536], std::byte{0});
  }
  // Short at the end of the file alone.
  const auto end = storage->read(*file, kBytes - 4096, memory_.data(), 0, 8192);
  ASSERT_TRUE(end.ok());
  EXPECT_EQ(*end, 4096U);
  storage->remove_memory(memory_.data());
}

TEST_F(DirectStorageTest, ErrorsNameTheFile) {
  const auto file = make_file("broken", 1);
  const auto storage = open();
  ASSERT_TRUE(storage->add_memory(memory_.data(), memory_.size()).ok());
  library_.read_error(5008);
  const auto got = storage->read(*file, 0, memory_.data(), 0, 4096);
  ASSERT_FALSE(got.ok());
  EXPECT_THAT(got.status().to_string(), AllOf(HasSubstr("broken"), HasSubstr("5008")));
  EXPECT_FALSE(storage->add_memory(memory_.data(), memory_.size()).ok());  // twice
  storage->remove_memory(memory_.data());
}

TEST_F(DirectStorageTest, AFileThatTookAnothersPlaceIsReadAsItself) {
  const auto storage = open();
  ASSERT_TRUE(storage->add_memory(memory_.data(), memory_.size()).ok());
  auto first = make_file("segment", 1);
  ASSERT_TRUE(storage->read(*first, 0, memory_.data(), 0, 4096).ok());
  first.reset();
  std::filesystem::remove(dir_ / "segment");
  const auto second = make_file("segment", 2);
  ASSERT_TRUE(storage->read(*second, 0, memory_.data(), 0, 4096).ok());
  const std::vector<std::byte> wanted = content(2);
  EXPECT_TRUE(std::equal(wanted.begin(), wanted.begin() + 4096, memory_.data()));
  storage->remove_memory(memory_.data());
}

TEST_F(DirectStorageTest, FewDescriptorsStayOpenAndNoneAtTheEnd) {
  {
    const auto storage = open();
    EXPECT_EQ(library_.drivers(), 1);
    ASSERT_TRUE(storage->add_memory(memory_.data(), memory_.size()).ok());
    EXPECT_EQ(library_.buffers(), 1);
    for (unsigned i = 0; i < 100; ++i) {
      const auto file = make_file("f" + std::to_string(i), i);
      ASSERT_TRUE(storage->read(*file, 0, memory_.data(), 0, 4096).ok());
      EXPECT_EQ(memory_.data()[0], content(i)[0]);
    }
    EXPECT_EQ(library_.handles(), 64);
    storage->remove_memory(memory_.data());
  }
  EXPECT_EQ(library_.handles(), 0);
  EXPECT_EQ(library_.buffers(), 0);
  EXPECT_EQ(library_.drivers(), 0);
}

}  // namespace
}  // namespace hcache
