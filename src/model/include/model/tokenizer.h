// A model's vocabulary, read from its GGUF file alone (no weights are touched).
//
// Works for every architecture whose file holds a byte-pair or SentencePiece vocabulary, OPT
// included: only the `tokenizer.*` keys are read, and each is checked before llama.cpp sees it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::model {

// What encode() makes of the vocabulary's control tokens.
struct EncodeOptions {
  bool add_special = false;    // put BOS (and EOS) where the model wants them at a text's ends
  bool parse_special = false;  // "<|im_end|>" in the text becomes the token, not its letters
};

// Immutable after load; safe to use from any thread.
class Tokenizer {
 public:
  // Token id meaning "the vocabulary has none".
  static constexpr int32_t kNoToken = -1;

  // kNotFound for a missing file, kDataLoss for a damaged or lying one, kUnimplemented for a kind
  // of vocabulary that is not known here, kFailedPrecondition for a model that has
  // no vocabulary (synthetic weights): those take token ids only.
  static Result<std::unique_ptr<Tokenizer>> load(const std::string& gguf_path);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  [[nodiscard]] int32_t n_vocab() const;
  // kNoToken where the vocabulary has none.
  [[nodiscard]] int32_t bos() const;
  [[nodiscard]] int32_t eos() const;
  // Whether encode(add_special) puts BOS first.
  [[nodiscard]] bool adds_bos() const;
  // True for every token that ends a reply (EOS, end of turn, ...). False outside the vocabulary.
  [[nodiscard]] bool is_eog(int32_t token) const;
  // The tokens around the parts of a text with a gap, which some models learned to fill. kNoToken
  // for each that the vocabulary has not; repository and file stand before further texts.
  struct FillTokens {
    int32_t prefix;
    int32_t suffix;
    int32_t middle;
    int32_t repository;
    int32_t file;
  };
  [[nodiscard]] FillTokens fill_tokens() const;
  // The Jinja chat template in the file; empty when there is none.
  [[nodiscard]] const std::string& chat_template() const;

  [[nodiscard]] Result<std::vector<int32_t>> encode(std::string_view text,
                                                    EncodeOptions options = {}) const;
  // A query and a document as the model's file wants them side by side: by its template for it,
  // or between the special tokens that its texts have.
  [[nodiscard]] Result<std::vector<int32_t>> encode_pair(std::string_view query,
                                                         std::string_view document) const;
  // Whether encode(add_special) puts a token at the end.
  [[nodiscard]] bool adds_end() const;
  // The bytes of one token, which need not be whole UTF-8 characters. Control tokens have none
  // unless `special`. Empty outside the vocabulary.
  [[nodiscard]] std::string piece(int32_t token, bool special = false) const;
  // The pieces of `tokens` in a row, made valid UTF-8 (see TextDecoder).
  // kInvalidArgument names a token outside the vocabulary.
  [[nodiscard]] Result<std::string> decode(std::span<const int32_t> tokens,
                                           bool special = false) const;

  // The library's objects behind this one, for Sampler and ChatTemplate.
  struct Impl;
  [[nodiscard]] const Impl& impl() const { return *impl_; }

 private:
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// How many tokens, from 0 on, two vocabularies share: all of the smaller one's, so that one model's
// tokens can be fed to the other. kInvalidArgument names what differs. What the first few tokens
// are called may differ, since files name unused ones as they like, and so may the number, by
// padding.
[[nodiscard]] Result<int32_t> common_vocabulary(const Tokenizer& a, const Tokenizer& b);
// The same with a file's; its errors as well.
[[nodiscard]] Result<int32_t> common_vocabulary(const Tokenizer& a, const std::string& gguf_path);

// Turns a stream of tokens into text that is valid UTF-8 at every moment: bytes of a character
// that is not complete yet are held back, and bytes that can't become one are replaced by U+FFFD.
// One stream, one thread. The Tokenizer must outlive it.
class TextDecoder {
 public:
  explicit TextDecoder(const Tokenizer& tokenizer, bool special = false)
      : tokenizer_(tokenizer), special_(special) {}

  // The text that has become complete with `token`; often empty inside a multi-token character.
  [[nodiscard]] std::string push(int32_t token);
  // Ends the stream: U+FFFD for a character that never became complete, else empty.
  [[nodiscard]] std::string flush();

 private:
  const Tokenizer& tokenizer_;
  bool special_;
  std::string held_;  // a proper prefix of one UTF-8 character, at most 3 bytes
};

// Moves the longest valid UTF-8 out of `bytes`, leaving an incomplete last character in it.
// Malformed bytes become U+FFFD, one for each maximal prefix of a character (as Unicode 15 §3.9).
[[nodiscard]] std::string take_valid_utf8(std::string& bytes);

// The text of a chain, special tokens included, in which rows of pictures and sounds (tokens below
// 0) are named: "<media:0123456789abcdef:256>" are 256 rows of one or more.
[[nodiscard]] Result<std::string> text_with_media(const Tokenizer& tokenizer,
                                                  std::span<const int32_t> tokens);

}  // namespace hcache::model
