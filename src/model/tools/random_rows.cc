#include "random_rows.h"

#include "base/xxh3.h"

namespace hcache::model {

Status write_random(const GgufWriter& writer, std::span<const Init> inits, uint64_t seed,
                    const std::string& out) {
  const auto fill = [&](size_t index, int64_t first_row, int64_t n_rows, uint8_t* data) {
    const GgufTensor& t = writer.tensors()[index];
    const uint64_t stream = XXH3_64bits_withSeed(t.name.data(), t.name.size(), seed);
    auto* rows = reinterpret_cast<float*>(data);
    for (int64_t r = 0; r < n_rows; ++r) {
      fill_uniform(stream, first_row + r, t.ne[0], inits[index], rows + r * t.ne[0]);
    }
    return Status();
  };
  return writer.write(out, fill, /*n_threads=*/1, /*progress=*/{});
}

}  // namespace hcache::model
