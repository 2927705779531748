// make_tiny_encoder FILE POOLING CONTEXT: writes a small BERT model for the end-to-end tests.
#include <cstdio>
#include <cstdlib>

#include "tiny_encoder.h"

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: make_tiny_encoder FILE POOLING CONTEXT\n");
    return 1;
  }
  const hcache::libllama::test::TinyEncoderFile file(
      {.pooling = std::atoi(argv[2]), .n_context = std::atoi(argv[3])});
  return file.write(argv[1]) ? 0 : 1;
}
