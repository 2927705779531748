// Tiny models on disk for the model tests.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "model/tools.h"

namespace hcache::model::test {

// A directory that goes away with the test.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "hcache-model-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TempDir() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::vector<uint8_t> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline void write_file(const std::string& path, const std::vector<uint8_t>& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
}

// An architecture with a number of KV heads, of four query heads.
struct ArchCase {
  const char* arch;
  int n_head_kv;
};

// What came after the first five: each feature of the table that they lack, twice where the file
// decides.
inline constexpr std::array kMoreArchitectures = {
    ArchCase{"gemma", 1},      ArchCase{"phi2", 4},       ArchCase{"phi3", 4},
    ArchCase{"granite", 2},    ArchCase{"olmo2", 4},      ArchCase{"olmo2", 2},
    ArchCase{"smollm3", 2},    ArchCase{"glm4", 2},       ArchCase{"seed_oss", 2},
    ArchCase{"command-r", 2},  ArchCase{"starcoder2", 2}, ArchCase{"stablelm", 4},
    ArchCase{"stablelm", 2},   ArchCase{"gptneox", 4},    ArchCase{"gptneox", 2},
    ArchCase{"gpt2", 4},       ArchCase{"internlm2", 2},  ArchCase{"orion", 4},
    ArchCase{"nemotron", 2},   ArchCase{"qwen2moe", 2},   ArchCase{"qwen3moe", 2},
    ArchCase{"olmoe", 4},      ArchCase{"deepseek", 4},   ArchCase{"phimoe", 2},
    ArchCase{"granitemoe", 2}, ArchCase{"gemma2", 2},     ArchCase{"gemma3", 2},
    ArchCase{"cohere2", 2},    ArchCase{"exaone4", 2},    ArchCase{"gpt-oss", 2},
    ArchCase{"mistral3", 2}};

inline SynthOptions tiny_options(const char* arch, int n_head_kv, ggml_type type) {
  SynthOptions options;
  options.shape = tiny_shape(*find_decoder_spec(arch), n_head_kv);
  options.type = type;
  options.n_threads = 1;
  options.head_norms = std::string_view(arch) == "stablelm" && n_head_kv == 4;
  if (std::string_view(arch) == "smollm3") options.shape.n_layer = 5;  // the fourth has no RoPE
  if (std::string_view(arch) == "mistral3") {                          // beyond the first context
    options.extra_integers.emplace_back("mistral3.rope.scaling.original_context_length", 32);
    options.extra_numbers.emplace_back("mistral3.rope.scaling.factor", 4.0F);
    options.extra_numbers.emplace_back("mistral3.rope.scaling.yarn_log_multiplier", 0.5F);
    options.extra_numbers.emplace_back("mistral3.rope.scaling.yarn_beta_fast", 16.0F);
    options.extra_numbers.emplace_back("mistral3.attention.temperature_scale", 0.3F);
    options.extra_strings.emplace_back("mistral3.rope.scaling.type", "yarn");
  }
  if (std::string_view(arch) == "olmo2" && n_head_kv == 2) {  // OLMo 3
    options.shape.n_window = 40;
    options.shape.window_period = 3;
  }
  return options;
}

// Writes a tiny model and returns its path.
inline std::string make_tiny(const TempDir& dir, const SynthOptions& options) {
  const std::string path =
      dir.file(options.shape.name + "-" + ggml_type_name(options.type) + ".gguf");
  const Status status = synthesise_model(options, path);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return path;
}

inline std::unique_ptr<Device> open_cpu(int n_threads = 1) {
  auto device = Device::open("cpu", n_threads);
  EXPECT_TRUE(device.ok()) << device.status().to_string();
  return std::move(device).value();
}

}  // namespace hcache::model::test
