// Against llama.cpp's own forward pass on the real model: with ggml's attention our logits are
// libllama's to the bit, with ours they stay as close as switching its flash attention would.
#include <llama.h>

#include "engine_testing.h"
#include "products.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class Llama {
 public:
  explicit Llama(const std::string& path) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    ggml_backend_dev_t none =
        nullptr;  // the list's end: nothing is offloaded to a GPU of this build
    model_params.devices = &none;
    model_ = llama_model_load_from_file(path.c_str(), model_params);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 1024;
    params.n_batch = 512;
    params.n_ubatch = 512;
    params.n_threads = 1;
    params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    if (model_ != nullptr) context_ = llama_init_from_model(model_, params);
  }
  ~Llama() {
    llama_free(context_);
    llama_model_free(model_);
  }
  Llama(const Llama&) = delete;
  Llama& operator=(const Llama&) = delete;

  [[nodiscard]] bool ok() const { return context_ != nullptr; }
  // The logits of the last of `tokens`, appended in one step.
  Row append(Tokens tokens) {
    const llama_batch batch =
        llama_batch_get_one(tokens.data(), static_cast<int32_t>(tokens.size()));
    if (llama_decode(context_, batch) != 0) return {};
    const float* logits = llama_get_logits_ith(context_, -1);
    return {logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(model_))};
  }

 private:
  llama_model* model_ = nullptr;
  llama_context* context_ = nullptr;
};

// Prefill in odd chunks, then greedy decoding. llama.cpp's tiled kernel starts at 64 rows and the
// single-row one serves fewer, where we pad: so the chunks are either large or single.
TEST(Oracle, SmolLM2AnswersAsLlamaDoes) {
  Llama llama(HCACHE_TEST_MODEL);
  ASSERT_TRUE(llama.ok());
  EngineOptions options = {.arena_tokens = 512, .max_batch_rows = 512};
  options.attention = AttentionKind::kGgml;
  const std::unique_ptr<Engine> exact = make_engine(smollm2(), options);
  options.attention = AttentionKind::kOurs;
  const std::unique_ptr<Engine> ours = make_engine(smollm2(), options);
  const SeqId exact_seq = new_sequence(*exact);
  const SeqId ours_seq = new_sequence(*ours);

  const Tokens prompt = random_tokens(smollm2(), 77 + 131 + 65, 5);
  std::vector<Row> llama_rows;
  std::vector<Row> exact_rows;
  std::vector<Row> ours_rows;
  const auto step = [&](std::span<const int32_t> tokens) {
    const int n = static_cast<int>(tokens.size());
    llama_rows.push_back(llama.append({tokens.begin(), tokens.end()}));
    exact_rows.push_back(append(*exact, exact_seq, tokens, n, Output::kLast).at(0));
    ours_rows.push_back(append(*ours, ours_seq, tokens, n, Output::kLast).at(0));
  };
  size_t done = 0;
  for (const size_t n : {77, 131, 65}) {
    step(std::span(prompt).subspan(done, n));
    done += n;
  }
  for (int i = 0; i < 12; ++i) {
    const int32_t next = model::argmax(llama_rows.back());
    step({&next, 1});
  }
  if (model::product_kernels().empty()) {
    EXPECT_TRUE(same_rows(exact_rows, llama_rows));
  } else {
    EXPECT_LT(mean_kl(llama_rows, exact_rows), 5e-3);
  }
  EXPECT_LT(mean_kl(llama_rows, ours_rows), 5e-3);
}

}  // namespace
}  // namespace hcache::engine
