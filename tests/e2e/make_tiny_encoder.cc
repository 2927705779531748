// make_tiny_encoder FILE POOLING CONTEXT: writes a small BERT model for the end-to-end tests.
// make_tiny_encoder FILE qwen3 MODEL: a small decoder that ranks, with the vocabulary of a model.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "model/model.h"
#include "model/tools.h"
#include "tiny_encoder.h"

namespace {

bool write_decoder(const char* file, const char* vocab_from) {
  hcache::model::SynthOptions options;
  options.shape = tiny_shape(*hcache::model::find_decoder_spec("qwen3"), 2);
  options.type = GGML_TYPE_F32;
  options.vocab_from = vocab_from;
  options.ranking_labels = 2;
  const hcache::Status status = synthesise_model(options, file);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return status.ok();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr,
                 "usage: make_tiny_encoder FILE POOLING CONTEXT\n"
                 "       make_tiny_encoder FILE qwen3 MODEL\n");
    return 1;
  }
  if (std::string_view(argv[2]) == "qwen3") return write_decoder(argv[1], argv[3]) ? 0 : 1;
  const hcache::libllama::test::TinyEncoderFile file(
      {.pooling = std::atoi(argv[2]), .n_context = std::atoi(argv[3])});
  return file.write(argv[1]) ? 0 : 1;
}
