// libFuzzer target for the GGUF reader and the metadata checks:
//   cmake -DCMAKE_CXX_COMPILER=clang++ -DHCACHE_FUZZ=ON ... && tests/gguf_fuzz CORPUS_DIR
// `hcache model synth` with a tiny shape makes a first corpus.
#include <cstddef>
#include <cstdint>

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
