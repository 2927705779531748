// Words for the load that `hcache bench serve` sends: passages of a real text, so that they
// tokenise as people's messages do. Threading: immutable after make().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::load {

// The essay demo/lighthouse.txt, UTF-8.
[[nodiscard]] std::string_view built_in_text();

class TextSource {
 public:
  // Another seed gives other passages. kInvalidArgument: `text` holds no word.
  [[nodiscard]] static Result<TextSource> make(std::string_view text, double bytes_per_token,
                                               uint64_t seed);

  // About `tokens` tokens, at least one word: a title of a few random words, so that no two keys
  // share a beginning, then the text from a random sentence on. A shorter passage of the same key
  // is a prefix of a longer one.
  [[nodiscard]] std::string passage(uint64_t key, int64_t tokens) const;

 private:
  std::vector<std::string> words_;
  std::vector<size_t> sentences_;  // where they begin in words_
  double bytes_per_token_ = 0;
  uint64_t seed_ = 0;
};

}  // namespace hcache::load
