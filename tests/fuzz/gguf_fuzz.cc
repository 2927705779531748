// Fuzz target for the GGUF reader and the metadata checks.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "fuzz.h"
#include "gguf_file.h"
#include "hparams.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hcache::model;
  const auto file = GgufFile::parse({data, size}, "fuzz");
  if (!file.ok()) return 0;
  volatile uint64_t sum = 0;
  for (const GgufTensor& t : (*file)->tensors()) {
    if (!t.data.empty()) sum = sum + t.data.front() + t.data.back();
  }
  const auto spec = read_architecture(**file);
  if (spec.ok()) read_hparams(**file, **spec).status().ignore("only crashes matter");
  return 0;
}

std::vector<std::string> hcache::fuzz::seeds() {
  std::ifstream in(HCACHE_TEST_DATA "/golden/opt_tiny.gguf", std::ios::binary);
  std::string file(std::istreambuf_iterator<char>(in), {});
  if (file.empty()) std::abort();
  // Mutations shall hit the metadata, not the weights behind it.
  const std::string head = file.substr(0, 4096);
  return {std::move(file), head};
}
