// Small GGUF files with a vocabulary and nothing else, for the text tests.
#pragma once

#include <gguf.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

namespace hcache::model::test {

struct GgufFree {
  void operator()(gguf_context* ctx) const { gguf_free(ctx); }
};
using Gguf = std::unique_ptr<gguf_context, GgufFree>;

// A byte-level BPE vocabulary: 256 byte tokens, "he", an end-of-turn token.
inline Gguf tiny_vocab() {
  Gguf ctx(gguf_init_empty());
  gguf_set_val_str(ctx.get(), "general.architecture", "llama");
  gguf_set_val_str(ctx.get(), "tokenizer.ggml.model", "gpt2");
  gguf_set_val_str(ctx.get(), "tokenizer.ggml.pre", "default");
  // GPT-2's table: printable bytes stand for themselves, the others for 256, 257, ...
  std::vector<std::string> tokens;
  int next = 256;
  for (int byte = 0; byte < 256; byte++) {
    const bool plain =
        (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    const int code = plain ? byte : next++;
    std::string text;
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else {
      text += static_cast<char>(0xC0 | (code >> 6));
      text += static_cast<char>(0x80 | (code & 0x3F));
    }
    tokens.push_back(text);
  }
  tokens.emplace_back("he");
  tokens.emplace_back("<|im_end|>");
  std::vector<const char*> pointers;
  for (const std::string& t : tokens) pointers.push_back(t.c_str());
  gguf_set_arr_str(ctx.get(), "tokenizer.ggml.tokens", pointers.data(), pointers.size());
  std::vector<int32_t> types(tokens.size(), 1);
  types.back() = 3;  // control
  gguf_set_arr_data(ctx.get(), "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(),
                    types.size());
  const char* merges[] = {"h e"};
  gguf_set_arr_str(ctx.get(), "tokenizer.ggml.merges", merges, 1);
  const auto end = static_cast<uint32_t>(tokens.size() - 1);
  gguf_set_val_u32(ctx.get(), "tokenizer.ggml.bos_token_id", end);
  gguf_set_val_u32(ctx.get(), "tokenizer.ggml.eos_token_id", end);
  gguf_set_val_bool(ctx.get(), "tokenizer.ggml.add_bos_token", false);
  return ctx;
}

// A file in a folder of its own that disappears with the object.
class TempFile {
 public:
  TempFile() {
    std::string pattern = (std::filesystem::temp_directory_path() / "hcache-text-XXXXXX").string();
    dir_ = mkdtemp(pattern.data());
    path_ = dir_ + "/vocab.gguf";
  }
  explicit TempFile(const Gguf& ctx) : TempFile() {
    gguf_write_to_file(ctx.get(), path_.c_str(), /*only_meta=*/true);
  }
  ~TempFile() { std::filesystem::remove_all(dir_); }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string read() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void write(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }

 private:
  std::string dir_;
  std::string path_;
};

}  // namespace hcache::model::test
