// Files that are damaged or lie: always an error that says where, never a crash.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>

#include "gguf_file.h"
#include "gguf_writer.h"
#include "model_fixtures.h"

namespace hcache::model {
namespace {

using test::TempDir;

// A tiny model that the tests damage: metadata and tensors can be changed one by one.
class Mutable {
 public:
  explicit Mutable(const SynthOptions& options) {
    const std::string path = test::make_tiny(dir_, options);
    file_ = GgufFile::open(path).value();
    for (const GgufTensor& t : file_->tensors()) tensors_.push_back(t);
  }
  void drop_key(const std::string& key) { dropped_.push_back(key); }
  void set_u32(const std::string& key, uint32_t value) {
    drop_key(key);
    u32_[key] = value;
  }
  void set_f32(const std::string& key, float value) {
    drop_key(key);
    f32_[key] = value;
  }
  void set_string(const std::string& key, const std::string& value) {
    drop_key(key);
    text_[key] = value;
  }
  void set_bool(const std::string& key, bool value) {
    drop_key(key);
    bools_[key] = value;
  }
  void drop_tensor(const std::string& name) {
    std::erase_if(tensors_, [&](const GgufTensor& t) { return t.name == name; });
  }
  GgufTensor& tensor(const std::string& name) {
    for (GgufTensor& t : tensors_) {
      if (t.name == name) return t;
    }
    ADD_FAILURE() << name;
    return tensors_[0];
  }
  void add_tensor(const std::string& name, ggml_type type, int64_t ne0, int64_t ne1) {
    GgufTensor t;
    t.name = name;
    t.type = type;
    t.n_dims = 2;
    t.ne[0] = ne0;
    t.ne[1] = ne1;
    tensors_.push_back(t);
  }

  // What loading the changed file says.
  Status load() {
    GgufWriter writer;
    for (const auto& [key, value] : file_->values()) {
      if (std::find(dropped_.begin(), dropped_.end(), key) == dropped_.end())
        writer.copy(key, value);
    }
    for (const auto& [key, value] : u32_) writer.set_u32(key, value);
    for (const auto& [key, value] : f32_) writer.set_f32(key, value);
    for (const auto& [key, value] : text_) writer.set_string(key, value);
    for (const auto& [key, value] : bools_) writer.set_bool(key, value);
    for (const GgufTensor& t : tensors_) {
      writer.add_tensor(t.name, t.type, t.ne[0], t.n_dims > 1 ? t.ne[1] : 0);
    }
    const std::string path = dir_.file("changed.gguf");
    const auto zeros = [&](size_t index, int64_t, int64_t n_rows, uint8_t* out) {
      memset(out, 0, writer.tensors()[index].row_bytes() * static_cast<size_t>(n_rows));
      return Status();
    };
    const Status written = writer.write(path, zeros, 1, nullptr);
    if (!written.ok()) return written;
    const auto device = test::open_cpu();
    return Model::load(path, *device).status();
  }

 private:
  TempDir dir_;
  std::unique_ptr<GgufFile> file_;
  std::vector<GgufTensor> tensors_;
  std::vector<std::string> dropped_;
  std::map<std::string, uint32_t> u32_;
  std::map<std::string, float> f32_;
  std::map<std::string, std::string> text_;
  std::map<std::string, bool> bools_;
};

Mutable tiny_llama() { return Mutable(test::tiny_options("llama", 2, GGML_TYPE_F16)); }

#define EXPECT_REFUSED(status_expr, expected_code, fragment)                               \
  do {                                                                                     \
    const Status status_ = (status_expr);                                                  \
    EXPECT_EQ(status_.code(), expected_code) << status_.to_string();                       \
    EXPECT_NE(status_.message().find(fragment), std::string::npos) << status_.to_string(); \
  } while (false)

TEST(Corrupt, UnchangedFileLoads) { EXPECT_TRUE(tiny_llama().load().ok()); }

TEST(Corrupt, NoFileAtAll) {
  const auto device = test::open_cpu();
  const TempDir dir;
  EXPECT_REFUSED(Model::load(dir.file("absent"), *device).status(), Code::kNotFound, "absent");
  EXPECT_REFUSED(Model::load("/", *device).status(), Code::kInvalidArgument, "regular file");
  test::write_file(dir.file("empty"), {});
  EXPECT_REFUSED(Model::load(dir.file("empty"), *device).status(), Code::kDataLoss, "empty");
  test::write_file(dir.file("text"), {'h', 'e', 'l', 'l', 'o', ' ', 'y', 'o', 'u'});
  EXPECT_REFUSED(Model::load(dir.file("text"), *device).status(), Code::kDataLoss, "GGUF");
}

TEST(Corrupt, UnknownArchitecture) {
  Mutable m = tiny_llama();
  m.set_string("general.architecture", "mamba\x1b[31m");
  EXPECT_REFUSED(m.load(), Code::kUnimplemented, "\"mamba?[31m\"");  // no escape reaches a terminal
  Mutable n = tiny_llama();
  n.drop_key("general.architecture");
  EXPECT_REFUSED(n.load(), Code::kNotFound, "general.architecture");
  Mutable o = tiny_llama();
  o.set_u32("general.architecture", 7);
  EXPECT_REFUSED(o.load(), Code::kDataLoss, "not a string");
}

TEST(Corrupt, EveryMissingTensorIsNamed) {
  for (const char* arch : {"llama", "qwen2", "qwen3", "falcon", "opt", "phi3", "olmo2", "glm4",
                           "seed_oss", "stablelm", "gptneox", "gpt2"}) {
    const auto options = test::tiny_options(arch, 2, GGML_TYPE_F16);
    TempDir dir;
    const auto file = GgufFile::open(test::make_tiny(dir, options)).value();
    for (const GgufTensor& t : file->tensors()) {
      if (t.name.starts_with("blk.0") || t.name.starts_with("blk.2")) continue;
      // Absent is another meaning for these: tied embeddings, a bias less, Falcon-7B's one norm.
      const bool optional = t.name == "output.weight" ||
                            t.name.find("attn_norm_2.weight") != std::string::npos ||
                            (t.name.ends_with(".bias") && t.name.find("norm") == std::string::npos);
      Mutable m(options);
      m.drop_tensor(t.name);
      const Status status = m.load();
      if (t.name.find("attn_norm_2.weight") != std::string::npos) {
        EXPECT_REFUSED(status, Code::kUnimplemented, "attn_norm_2.bias");  // a bias is left over
      } else if (optional) {
        EXPECT_TRUE(status.ok()) << status.to_string();
      } else {
        EXPECT_REFUSED(status, Code::kNotFound, t.name);
      }
    }
  }
}

TEST(Corrupt, EveryWrongShapeIsNamed) {
  const auto options = test::tiny_options("llama", 2, GGML_TYPE_F16);
  TempDir dir;
  const auto file = GgufFile::open(test::make_tiny(dir, options)).value();
  for (const GgufTensor& t : file->tensors()) {
    Mutable m(options);
    m.tensor(t.name).ne[0] += 32;
    EXPECT_REFUSED(m.load(), Code::kDataLoss, t.name);
    if (t.n_dims < 2 || t.name == "token_embd.weight") continue;
    Mutable n(options);
    n.tensor(t.name).ne[1] -= 1;
    EXPECT_REFUSED(n.load(), Code::kDataLoss, t.name);
  }
}

TEST(Corrupt, WrongTypesAreNamed) {
  Mutable m = tiny_llama();
  m.tensor("blk.1.attn_k.weight").type = GGML_TYPE_I32;
  EXPECT_REFUSED(m.load(), Code::kUnimplemented, "blk.1.attn_k.weight");
  Mutable n = tiny_llama();
  n.tensor("blk.1.attn_norm.weight").type = GGML_TYPE_F16;
  EXPECT_REFUSED(n.load(), Code::kUnimplemented, "must be F32");
  Mutable o = tiny_llama();
  o.tensor("token_embd.weight").type = GGML_TYPE_Q8_K;
  EXPECT_REFUSED(o.load(), Code::kUnimplemented, "token_embd.weight");
}

TEST(Corrupt, UnknownTensorsAreNotIgnored) {
  Mutable m = tiny_llama();
  m.add_tensor("blk.0.attn_sinks.weight", GGML_TYPE_F32, 4, 1);
  EXPECT_REFUSED(m.load(), Code::kUnimplemented, "blk.0.attn_sinks.weight");
}

TEST(Corrupt, BadNumbers) {
  struct Bad {
    const char* key;
    uint32_t value;
    Code code;
  };
  for (const Bad& bad : {
           Bad{"llama.block_count", 0, Code::kDataLoss},
           Bad{"llama.block_count", 4, Code::kNotFound},  // a layer less than promised
           Bad{"llama.block_count", UINT32_MAX, Code::kDataLoss},
           Bad{"llama.embedding_length", 0, Code::kDataLoss},
           Bad{"llama.embedding_length", 255, Code::kDataLoss},
           Bad{"llama.embedding_length", UINT32_MAX, Code::kDataLoss},
           Bad{"llama.feed_forward_length", 0, Code::kDataLoss},
           Bad{"llama.feed_forward_length", 513, Code::kDataLoss},
           Bad{"llama.attention.head_count", 0, Code::kDataLoss},
           Bad{"llama.attention.head_count", 3, Code::kDataLoss},
           Bad{"llama.attention.head_count_kv", 0, Code::kDataLoss},
           Bad{"llama.attention.head_count_kv", 3, Code::kDataLoss},
           Bad{"llama.attention.head_count_kv", 8, Code::kDataLoss},
           Bad{"llama.attention.key_length", 0, Code::kDataLoss},
           Bad{"llama.attention.key_length", 32, Code::kUnimplemented},
           Bad{"llama.rope.dimension_count", 0, Code::kDataLoss},
           Bad{"llama.rope.dimension_count", 7, Code::kDataLoss},
           Bad{"llama.rope.dimension_count", 66, Code::kDataLoss},
           Bad{"llama.context_length", 0, Code::kDataLoss},
           Bad{"llama.context_length", UINT32_MAX, Code::kDataLoss},
           Bad{"llama.expert_count", 8, Code::kNotFound},
           Bad{"llama.expert_count", 5000, Code::kDataLoss},
           Bad{"general.alignment", 0, Code::kDataLoss},
           Bad{"general.alignment", 33, Code::kDataLoss},
           Bad{"general.alignment", 1U << 31, Code::kDataLoss},
       }) {
    Mutable m = tiny_llama();
    m.set_u32(bad.key, bad.value);
    EXPECT_REFUSED(m.load(), bad.code, "changed.gguf");
  }
  for (const float value : {-1.0F, INFINITY, NAN}) {
    for (const char* key : {"llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base",
                            "llama.rope.scaling.factor"}) {
      Mutable m = tiny_llama();
      m.set_f32(key, value);
      EXPECT_REFUSED(m.load(), Code::kDataLoss, key);
    }
  }
}

TEST(Corrupt, KeysOfOtherModelsAreIgnored) {
  for (const char* key : {"llama.attention.max_alibi_bias", "llama.attention.clamp_kqv",
                          "llama.attn_logit_softcapping", "llama.final_logit_softcapping",
                          "llama.logit_scale", "llama.residual_scale", "llama.embedding_scale"}) {
    Mutable m = tiny_llama();
    m.set_f32(key, 30.0F);
    const Status status = m.load();
    EXPECT_TRUE(status.ok()) << status.to_string();
    m.set_string(key, "thirty");
    EXPECT_REFUSED(m.load(), Code::kDataLoss, key);
  }
}

TEST(Corrupt, FeaturesOfOtherModelsAreRefused) {
  Mutable m = tiny_llama();
  m.set_bool("llama.attention.causal", false);
  EXPECT_REFUSED(m.load(), Code::kUnimplemented, "llama.attention.causal");
  Mutable n = tiny_llama();
  n.set_string("llama.rope.scaling.type", "longrope");
  EXPECT_REFUSED(n.load(), Code::kNotFound, "rope_factors_short");
  n.set_string("llama.rope.scaling.type", "spiral");
  EXPECT_REFUSED(n.load(), Code::kUnimplemented, "spiral");
  Mutable o(test::tiny_options("opt", 4, GGML_TYPE_F16));
  o.set_bool("opt.do_layer_norm_before", false);
  EXPECT_REFUSED(o.load(), Code::kUnimplemented, "OPT-350m");
}

// The bytes of a tiny model, parsed in memory.
std::vector<uint8_t> tiny_bytes() {
  TempDir dir;
  auto options = test::tiny_options("llama", 2, GGML_TYPE_Q8_0);
  options.shape.n_layer = 1;
  return test::read_file(test::make_tiny(dir, options));
}

TEST(Corrupt, TruncationAnywhereIsNoticed) {
  const std::vector<uint8_t> whole = tiny_bytes();
  ASSERT_TRUE(GgufFile::parse(whole, "whole").ok());
  const size_t header_end = 4096;  // all of the header and some data
  for (size_t size = 0; size < whole.size(); size += size < header_end ? 1 : 997) {
    const std::vector<uint8_t> cut(whole.begin(),
                                   whole.begin() + static_cast<std::ptrdiff_t>(size));
    const auto file = GgufFile::parse(cut, "cut");
    ASSERT_FALSE(file.ok()) << size;
    EXPECT_EQ(file.code(), Code::kDataLoss) << file.status().to_string();
  }
}

// Everything that reads a file's header, and the ends of what it says are tensors.
uint64_t exercise(const std::vector<uint8_t>& bytes) {
  const auto file = GgufFile::parse(bytes, "mutant");
  if (!file.ok()) {
    EXPECT_FALSE(file.status().message().empty());
    return 0;
  }
  uint64_t sum = 1;
  for (const GgufTensor& t : (*file)->tensors()) {
    sum += t.describe().size();
    if (!t.data.empty()) sum += t.data.front() + t.data.back();
  }
  for (const auto& [key, value] : (*file)->values()) {
    sum += value.count;
    sum += static_cast<uint64_t>((*file)->integer(key).ok());
    sum += static_cast<uint64_t>((*file)->number(key).ok());
    sum += static_cast<uint64_t>((*file)->string(key).ok());
    sum += static_cast<uint64_t>((*file)->boolean(key).ok());
  }
  return sum;
}

TEST(Corrupt, HeaderMutationsNeverCrash) {
  const std::vector<uint8_t> whole = tiny_bytes();
  std::mt19937_64 random(42);
  const size_t header = std::min<size_t>(whole.size(), 4096);
  const std::vector<uint64_t> extremes = {
      0, 1, 255, 0x7fffffff, 0xffffffff, 1ULL << 40, 0x7fffffffffffffff, UINT64_MAX};
  for (int i = 0; i < 6000; i++) {
    std::vector<uint8_t> mutant = whole;
    const int n_edits = 1 + static_cast<int>(random() % 3);
    for (int e = 0; e < n_edits; e++) {
      const size_t at = random() % header;
      if (random() % 2 == 0) {
        mutant[at] = static_cast<uint8_t>(random());
      } else {
        const uint64_t value = extremes[random() % extremes.size()];
        memcpy(mutant.data() + at, &value, std::min<size_t>(8, mutant.size() - at));
      }
    }
    exercise(mutant);
  }
}

TEST(Corrupt, MutatedFilesLoadOrReport) {
  TempDir dir;
  const auto device = test::open_cpu();
  const std::vector<uint8_t> whole = tiny_bytes();
  std::mt19937_64 random(7);
  int n_loaded = 0;
  for (int i = 0; i < 1500; i++) {
    std::vector<uint8_t> mutant = whole;
    mutant[random() % 3000] = static_cast<uint8_t>(random());
    test::write_file(dir.file("mutant"), mutant);
    const auto model = Model::load(dir.file("mutant"), *device);
    if (!model.ok()) {
      EXPECT_NE(model.status().message().find("mutant"), std::string::npos);
      continue;
    }
    n_loaded++;
    const std::vector<int32_t> tokens = {0, 1};
    std::vector<float> rows(2 * static_cast<size_t>((*model)->hparams().n_embd));
    EXPECT_TRUE((*model)->embed_tokens(tokens, rows.data()).ok());
  }
  EXPECT_GT(n_loaded, 0);  // some bytes (names, scales) don't matter
}

}  // namespace
}  // namespace hcache::model
