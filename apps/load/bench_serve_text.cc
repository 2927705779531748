#include "bench_serve_text.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "sim/random.h"

namespace hcache::load {
namespace {

constexpr int kTitleWords = 4;

bool ends_sentence(std::string_view word) {
  return word.back() == '.' || word.back() == '?' || word.back() == '!';
}

std::string_view without_punctuation(std::string_view word) {
  std::string_view bare = word;
  while (!bare.empty() && std::ispunct(static_cast<unsigned char>(bare.back())) != 0) {
    bare.remove_suffix(1);
  }
  return bare.empty() ? word : bare;
}

}  // namespace

Result<TextSource> TextSource::make(std::string_view text, double bytes_per_token, uint64_t seed) {
  constexpr std::string_view kSpace = " \t\r\n\v\f";
  TextSource source;
  source.bytes_per_token_ = bytes_per_token;
  source.seed_ = seed;
  for (size_t at = text.find_first_not_of(kSpace); at != std::string_view::npos;
       at = text.find_first_not_of(kSpace, at)) {
    const size_t end = std::min(text.find_first_of(kSpace, at), text.size());
    if (source.words_.empty() || ends_sentence(source.words_.back())) {
      source.sentences_.push_back(source.words_.size());
    }
    source.words_.emplace_back(text.substr(at, end - at));
    at = end;
  }
  if (source.words_.empty()) return invalid_argument("the text holds no word");
  return source;
}

std::string TextSource::passage(uint64_t key, int64_t tokens) const {
  const auto budget =
      static_cast<size_t>(std::llround(static_cast<double>(tokens) * bytes_per_token_));
  std::string out;
  const auto append = [&](std::string_view word) {
    if (!out.empty() && out.size() + 1 + word.size() > budget) return false;
    if (!out.empty()) out += ' ';
    out += word;
    return true;
  };
  sim::Random random({seed_, key});
  for (int i = 1; i <= kTitleWords; i++) {
    std::string word(without_punctuation(words_[random.below(words_.size())]));
    if (i == kTitleWords) word += ':';
    if (!append(word)) return out;
  }
  size_t at = sentences_[random.below(sentences_.size())];
  while (append(words_[at])) at = (at + 1) % words_.size();
  return out;
}

}  // namespace hcache::load
