#include "text/vocab_metadata.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "gguf_file.h"

namespace hcache::model {
namespace {

constexpr uint64_t kMaxTokens = 1U << 24;  // far above any real vocabulary
// `bert` is that of encoders, `test` that of llama.cpp's random models, whose tokens are numbers.
constexpr std::string_view kKinds[] = {"gpt2", "llama",  "gemma4",    "t5",         "bert",
                                       "rwkv", "plamo2", "hybriddna", "whitespace", "test"};

bool is_text_key(std::string_view key) {
  return key == "general.name" || key.starts_with("tokenizer.");
}

template <typename T>
T number(const GgufValue& value) {
  T out{};
  std::memcpy(&out, value.bytes.data(), sizeof(T));
  return out;
}

// A string's length and bytes; GgufFile has checked that both lie within `bytes`.
std::string take_string(std::span<const uint8_t>& bytes) {
  uint64_t n = 0;
  std::memcpy(&n, bytes.data(), sizeof(n));
  std::string out(reinterpret_cast<const char*>(bytes.data()) + sizeof(n), n);
  bytes = bytes.subspan(sizeof(n) + n);
  return out;
}

void copy_array(gguf_context* out, const char* key, const GgufValue& value) {
  if (value.item_type != GGUF_TYPE_STRING) {
    gguf_set_arr_data(out, key, value.item_type, value.bytes.data(), value.count);
    return;
  }
  std::vector<std::string> texts(value.count);
  std::vector<const char*> pointers(value.count);
  std::span<const uint8_t> rest = value.bytes;
  for (size_t i = 0; i < texts.size(); i++) {
    texts[i] = take_string(rest);
    pointers[i] = texts[i].c_str();
  }
  gguf_set_arr_str(out, key, pointers.data(), pointers.size());
}

void copy_value(gguf_context* out, const char* key, const GgufValue& value) {
  switch (value.type) {
    case GGUF_TYPE_UINT8: return gguf_set_val_u8(out, key, number<uint8_t>(value));
    case GGUF_TYPE_INT8: return gguf_set_val_i8(out, key, number<int8_t>(value));
    case GGUF_TYPE_UINT16: return gguf_set_val_u16(out, key, number<uint16_t>(value));
    case GGUF_TYPE_INT16: return gguf_set_val_i16(out, key, number<int16_t>(value));
    case GGUF_TYPE_UINT32: return gguf_set_val_u32(out, key, number<uint32_t>(value));
    case GGUF_TYPE_INT32: return gguf_set_val_i32(out, key, number<int32_t>(value));
    case GGUF_TYPE_FLOAT32: return gguf_set_val_f32(out, key, number<float>(value));
    case GGUF_TYPE_UINT64: return gguf_set_val_u64(out, key, number<uint64_t>(value));
    case GGUF_TYPE_INT64: return gguf_set_val_i64(out, key, number<int64_t>(value));
    case GGUF_TYPE_FLOAT64: return gguf_set_val_f64(out, key, number<double>(value));
    case GGUF_TYPE_BOOL: return gguf_set_val_bool(out, key, number<uint8_t>(value) != 0);
    case GGUF_TYPE_STRING: {
      std::span<const uint8_t> bytes = value.bytes;
      return gguf_set_val_str(out, key, take_string(bytes).c_str());
    }
    case GGUF_TYPE_ARRAY: return copy_array(out, key, value);
    case GGUF_TYPE_COUNT: return;  // no value has it
  }
}

// What llama.cpp asserts or takes on trust.
Status check_vocab(const std::string& path, const gguf_context* ctx) {
  const auto bad = [&](std::string_view what) {
    return data_loss(fmt::format("{}: unsound vocabulary: {}", path, what));
  };
  const auto none = [&] {
    return failed_precondition(
        fmt::format("{}: the model has no vocabulary; it takes token ids only", path));
  };
  const int64_t model_id = gguf_find_key(ctx, "tokenizer.ggml.model");
  if (model_id < 0) return none();
  if (gguf_get_kv_type(ctx, model_id) != GGUF_TYPE_STRING) {
    return bad("tokenizer.ggml.model is not a string");
  }
  const std::string kind = gguf_get_val_str(ctx, model_id);
  if (kind == "no_vocab" || kind == "none") return none();
  if (std::find(std::begin(kKinds), std::end(kKinds), kind) == std::end(kKinds)) {
    return unimplemented(
        fmt::format("{}: vocabularies of kind '{}' are not supported (there are: {})", path,
                    printable(kind), fmt::join(kKinds, ", ")));
  }
  const int64_t list_id = gguf_find_key(ctx, "tokenizer.ggml.tokens");
  if (list_id < 0 || gguf_get_kv_type(ctx, list_id) != GGUF_TYPE_ARRAY ||
      gguf_get_arr_type(ctx, list_id) != GGUF_TYPE_STRING) {
    return bad("tokenizer.ggml.tokens is missing or not an array of strings");
  }
  const size_t n_tokens = gguf_get_arr_n(ctx, list_id);
  if (n_tokens == 0 || n_tokens > kMaxTokens) return bad(fmt::format("{} tokens", n_tokens));
  // One that must be there, as such files write it.
  bool has_newline = kind != "rwkv";
  // Two ids of one text would trip an assertion. Empty texts get a made-up name there.
  std::unordered_set<std::string> seen;
  seen.reserve(n_tokens);
  for (size_t i = 0; i < n_tokens; i++) {
    std::string text = gguf_get_arr_str(ctx, list_id, i);
    has_newline = has_newline || text == "\\n";
    if (text.empty()) text = fmt::format("[EMPTY_{}]", i);
    if (!seen.insert(std::move(text)).second) {
      return bad(fmt::format("token {} has the text of another one", i));
    }
  }
  if (!has_newline) return bad("it has no token for the end of a line");
  return {};
}

}  // namespace

Result<GgufPtr> read_vocab_metadata(const std::string& path) {
  HCACHE_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::open(path));
  GgufPtr out(gguf_init_empty());
  gguf_set_val_str(out.get(), "general.architecture", "llama");
  for (const auto& [key, value] : file->values()) {
    if (!is_text_key(key)) continue;
    if (key.find('\0') != std::string::npos) {
      return data_loss(fmt::format("{}: a key contains a zero byte", path));
    }
    copy_value(out.get(), key.c_str(), value);
  }
  HCACHE_RETURN_IF_ERROR(check_vocab(path, out.get()));
  return out;
}

}  // namespace hcache::model
