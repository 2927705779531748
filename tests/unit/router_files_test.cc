// The models that a folder holds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base_testing.h"
#include "model_files.h"

namespace hcache::router {
namespace {

using ::testing::ElementsAre;

class ModelFiles : public ::testing::Test {
 protected:
  void put(const std::string& path, std::size_t bytes) {
    const std::filesystem::path file = std::filesystem::path(dir_.path()) / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << std::string(bytes, 'x');
  }
  [[nodiscard]] std::vector<std::string> found() const {
    const auto models = find_models(Env::real(), dir_.path());
    EXPECT_TRUE(models.ok()) << models.status().to_string();
    std::vector<std::string> out;
    if (!models.ok()) return out;
    for (const ModelFile& m : *models) {
      out.push_back(m.name + " " + m.path.substr(dir_.path().size() + 1) + " " +
                    std::to_string(m.bytes));
      if (!m.projector.empty()) out.back() += " " + m.projector.substr(dir_.path().size() + 1);
    }
    return out;
  }
  testing::TempDir dir_;
};

TEST_F(ModelFiles, FilesFoldersAndParts) {
  put("small.gguf", 3);
  put("Large-00001-of-00002.gguf", 4);
  put("Large-00002-of-00002.gguf", 5);
  put("seeing/model.gguf", 6);
  put("seeing/mmproj-model.gguf", 7);
  put("seeing/z-mmproj-f16.gguf", 100);  // the first is taken
  put("alone/mmproj-model.gguf", 7);
  put("cut/big-00001-of-00003.gguf", 1);
  put("cut/big-00002-of-00003.gguf", 1);
  put("cut/big-00003-of-00003.gguf", 1);
  put("empty/readme.txt", 1);
  put("mmproj-small.gguf", 1);
  put(".hidden.gguf", 1);
  put(".cache/model.gguf", 1);
  put("notes.txt", 1);
  EXPECT_THAT(
      found(),
      ElementsAre("Large Large-00001-of-00002.gguf 9", "cut cut/big-00001-of-00003.gguf 3",
                  "seeing seeing/model.gguf 13 seeing/mmproj-model.gguf", "small small.gguf 3"));
}

TEST_F(ModelFiles, NamesThatOnlyLookLikeParts) {
  put("a-00001-of-0000x.gguf", 1);
  put("-00001-of-00001.gguf", 1);
  put("b-00002-of-00002.gguf", 1);  // the first part is missing
  EXPECT_THAT(found(), ElementsAre("-00001-of-00001 -00001-of-00001.gguf 1",
                                   "a-00001-of-0000x a-00001-of-0000x.gguf 1"));
}

TEST_F(ModelFiles, AFileGoesBeforeAFolderOfItsName) {
  put("same.gguf", 1);
  put("same/other.gguf", 2);
  EXPECT_THAT(found(), ElementsAre("same same.gguf 1"));
}

TEST_F(ModelFiles, AFolderThatIsNotThere) {
  EXPECT_EQ(find_models(Env::real(), dir_.path() + "/none").code(), Code::kNotFound);
}

}  // namespace
}  // namespace hcache::router
