// fuzz_main [ROUNDS [SEED]]: runs a fuzz target on its seeds and on ROUNDS mutations of them, the
// same ones every time, so that a crash comes again under a debugger.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

void run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  std::string mutate(std::string input, const std::string& other) {
    for (size_t n = 1 + below(4); n > 0; --n) step(&input, other);
    return input;
  }

 private:
  size_t below(size_t n) { return n == 0 ? 0 : random_() % n; }

  void step(std::string* s, const std::string& other) {
    const size_t at = below(s->size());
    switch (below(7)) {
      case 0:  // one bit
        if (!s->empty()) (*s)[at] = static_cast<char>((*s)[at] ^ (1 << below(8)));
        break;
      case 1:  // one byte
        if (!s->empty()) (*s)[at] = static_cast<char>(random_());
        break;
      case 2: {  // a number at one of its limits
        static constexpr uint64_t kLimits[] = {0,      1,          0x7f,       0xff,      0x7fff,
                                               0xffff, 0x7fffffff, 0xffffffff, UINT64_MAX};
        const uint64_t value = kLimits[below(std::size(kLimits))];
        const size_t width = size_t{1} << below(4);
        for (size_t i = at; i < std::min(at + width, s->size()); ++i) {
          (*s)[i] = static_cast<char>(value >> (8 * (i - at)));
        }
        break;
      }
      case 3: s->resize(at); break;
      case 4: s->insert(at, s->substr(at, below(64))); break;
      case 5: s->erase(at, below(16)); break;
      default:
        if (!other.empty()) s->replace(at, below(32), other.substr(below(other.size()), below(32)));
    }
  }

  std::mt19937 random_;
};

}  // namespace

int main(int argc, char** argv) {
  const long rounds = argc > 1 ? std::atol(argv[1]) : 200000;
  Mutator mutator(argc > 2 ? static_cast<uint32_t>(std::atol(argv[2])) : 1);
  const std::vector<std::string> seeds = hcache::fuzz::seeds();
  for (const std::string& seed : seeds) run(seed);
  std::mt19937 pick(7);
  for (long i = 0; i < rounds; ++i) {
    run(mutator.mutate(seeds[pick() % seeds.size()], seeds[pick() % seeds.size()]));
  }
  std::printf("%zu seeds, %ld mutations: ok\n", seeds.size(), rounds);
  return 0;
}
