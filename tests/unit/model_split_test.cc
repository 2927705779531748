// Models in several files: read as one, and errors that name the file where they don't fit.
#include <gtest/gtest.h>

#include <filesystem>

#include "gguf_file.h"
#include "model/model.h"
#include "model_fixtures.h"
#include "split_model.h"

namespace hcache::model {
namespace {

constexpr int kParts = 3;

class Split : public ::testing::Test {
 protected:
  void SetUp() override {
    whole_ = test::make_tiny(dir_, test::tiny_options("llama", 2, GGML_TYPE_Q8_0));
    parts_ = test::split_model(whole_, dir_.file("model"), kParts);
  }
  // The status of a model that must not load, with what its message says.
  void expect_refused(const std::string& path, Code code, const std::string& said) {
    const auto file = GgufFile::open(path);
    ASSERT_FALSE(file.ok());
    EXPECT_EQ(file.status().code(), code) << file.status().to_string();
    EXPECT_NE(file.status().message().find(said), std::string::npos) << file.status().to_string();
  }
  test::TempDir dir_;
  std::string whole_;
  std::vector<std::string> parts_;
};

TEST_F(Split, IsReadAsOneFile) {
  const auto whole = GgufFile::open(whole_).value();
  const auto split = GgufFile::open(parts_[0]).value();
  ASSERT_EQ(split->parts().size(), size_t{kParts});
  ASSERT_EQ(split->tensors().size(), whole->tensors().size());
  for (const GgufTensor& t : whole->tensors()) {
    const GgufTensor* same = split->tensor(t.name);
    ASSERT_NE(same, nullptr) << t.name;
    EXPECT_EQ(same->describe(), t.describe());
    EXPECT_TRUE(std::equal(t.data.begin(), t.data.end(), same->data.begin(), same->data.end()));
    const auto bytes = split->parts()[same->part].bytes;
    EXPECT_TRUE(bytes.data() <= same->data.data() &&
                same->data.data() + same->data.size() <= bytes.data() + bytes.size());
  }
}

// What one conversation saved the other finds: the model is the same.
TEST_F(Split, HasTheDigestOfTheWhole) {
  const auto device = test::open_cpu();
  const auto whole = Model::load(whole_, *device).value();
  const auto split = Model::load(parts_[0], *device).value();
  EXPECT_EQ(whole->content_digest("", nullptr).value(), split->content_digest("", nullptr).value());
  EXPECT_EQ(whole->n_params(), split->n_params());
}

// A digest that is kept is of all parts.
TEST_F(Split, DigestsAreKeptForAllParts) {
  const auto device = test::open_cpu();
  const std::string cache = dir_.file("digests");
  const auto digest = [&] {
    return Model::load(parts_[0], *device).value()->content_digest(cache, nullptr).value();
  };
  const std::string before = digest();
  std::vector<uint8_t> last = test::read_file(parts_[2]);
  last.back() ^= 1;
  std::filesystem::remove(parts_[2]);
  test::write_file(parts_[2], last);
  EXPECT_NE(digest(), before);
}

TEST_F(Split, IsOpenedByItsFirstPart) {
  expect_refused(parts_[1], Code::kInvalidArgument, "name the first, " + parts_[0]);
}

TEST_F(Split, PartsAreFoundByTheirNames) {
  const std::string renamed = dir_.file("renamed.gguf");
  std::filesystem::copy_file(parts_[0], renamed);
  expect_refused(renamed, Code::kInvalidArgument, "-00001-of-00003.gguf");
}

TEST_F(Split, MissingPartsAreNamed) {
  std::filesystem::remove(parts_[1]);
  expect_refused(parts_[0], Code::kNotFound, parts_[1]);
}

TEST_F(Split, PartsOutOfPlaceAreRefused) {
  std::filesystem::rename(parts_[1], dir_.file("kept"));
  std::filesystem::copy_file(parts_[2], parts_[1]);
  expect_refused(parts_[0], Code::kDataLoss, "is part 3 of 3, by its name it is part 2 of 3");
}

TEST_F(Split, TruncatedPartsAreNamed) {
  std::filesystem::resize_file(parts_[1], std::filesystem::file_size(parts_[1]) - 1000);
  expect_refused(parts_[0], Code::kDataLoss, parts_[1]);
}

TEST_F(Split, TensorsTwiceOrMissingAreRefused) {
  test::Splitter splitter(whole_);
  const int64_t n = splitter.n_tensors();
  const std::string first = splitter.write(dir_.file("other"), 0, 2, 0, n / 2);
  splitter.write(dir_.file("other"), 1, 2, n / 2 - 1, n);
  expect_refused(first, Code::kDataLoss, "is in another part too");
  splitter.write(dir_.file("other"), 1, 2, n / 2 + 1, n);
  expect_refused(first, Code::kDataLoss, "tensors, and it promises");
}

}  // namespace
}  // namespace hcache::model
