// Pictures, and small random models that take them: one of each kind of position and attention that
// libmtmd knows.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "model/tools.h"
#include "model_fixtures.h"

namespace hcache::testing {

struct MediaCase {
  const char* name;
  const char* arch;
  const char* sectioned;  // SynthOptions'
  const char* projector;
  bool snapshots;  // what the model's state needs beside rows
  bool whole;      // rows of a picture see each other
};
inline constexpr MediaCase kMediaCases[] = {
    {"mlp", "llama", "", "mlp", false, false},
    {"gemma3", "gemma3", "", "gemma3", true, true},  // windows
    {"qwen2vl", "qwen2", "qwen2vl", "qwen2vl_merger", false, false},
};

struct MediaModel {
  std::string model;
  std::string projector;
};

inline MediaModel make_media_model(const model::test::TempDir& dir, const MediaCase& c) {
  model::SynthOptions options = model::test::tiny_options(c.arch, 2, GGML_TYPE_F32);
  options.vocab_from = HCACHE_TEST_MODEL;
  options.sectioned_arch = c.sectioned;
  MediaModel files;
  files.model = model::test::make_tiny(dir, options);
  files.projector = dir.file("projector.gguf");
  model::ProjectorShape shape;
  shape.model = files.model;
  shape.kind = c.projector;
  const Status made = model::synthesise_projector(shape, files.projector);
  EXPECT_TRUE(made.ok()) << made.to_string();
  return files;
}

// A BMP file, each of whose pixels depends on the seed.
inline std::string picture(int width, int height, uint32_t seed) {
  const int row_bytes = (3 * width + 3) / 4 * 4;
  constexpr uint32_t kHeader = 54;
  std::string bytes = "BM";
  const auto put = [&](uint32_t value, int n) {
    for (int i = 0; i < n; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFFU);
  };
  put(kHeader + static_cast<uint32_t>(row_bytes * height), 4);
  put(0, 4);
  put(kHeader, 4);
  put(40, 4);
  put(static_cast<uint32_t>(width), 4);
  put(static_cast<uint32_t>(height), 4);
  put(1, 2);
  put(24, 2);
  bytes.append(24, '\0');
  for (int i = 0; i < row_bytes * height; ++i) {
    seed = seed * 1664525U + 1013904223U;
    bytes += static_cast<char>(seed >> 24U);
  }
  return bytes;
}

}  // namespace hcache::testing
