#include "model/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <span>

#include "base/ids.h"
#include "text/llama_handle.h"
#include "text/vocab_metadata.h"

namespace hcache::model {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// llama.cpp asks the loader for tensor data through this; a vocabulary has none.
void no_tensor_data(ggml_tensor* /*tensor*/, void* /*user_data*/) {}

// How many bytes of s begin one well-formed UTF-8 character: `need` is its full length (0 when the
// first byte can't begin one) and `have` how many of them are there and fit.
struct Utf8Prefix {
  size_t need = 0;
  size_t have = 0;
};

Utf8Prefix utf8_prefix(std::string_view s) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return {1, 1};
  size_t need = 0;
  unsigned char low = 0x80;  // bounds of the second byte: no overlong forms, no surrogates
  unsigned char high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    need = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    need = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    need = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {0, 1};
  }
  size_t have = 1;
  while (have < need && have < s.size()) {
    if (at(have) < low || at(have) > high) break;
    low = 0x80;
    high = 0xBF;
    have++;
  }
  return {need, have};
}

// A template with both texts in their places.
std::string filled(std::string_view text, std::string_view query, std::string_view document) {
  constexpr std::string_view kQuery = "{query}";
  constexpr std::string_view kDocument = "{document}";
  std::string out;
  while (!text.empty()) {
    if (text.starts_with(kQuery)) {
      out += query;
      text.remove_prefix(kQuery.size());
    } else if (text.starts_with(kDocument)) {
      out += document;
      text.remove_prefix(kDocument.size());
    } else {
      out += text.front();
      text.remove_prefix(1);
    }
  }
  return out;
}

}  // namespace

std::string take_valid_utf8(std::string& bytes) {
  std::string out;
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const Utf8Prefix p = utf8_prefix(rest);
    if (p.have == p.need) {
      out += rest.substr(0, p.have);
    } else if (p.need != 0 && p.have == rest.size()) {
      break;  // may still become a character
    } else {
      out += kReplacement;
    }
    rest.remove_prefix(p.have);
  }
  bytes = std::string(rest);
  return out;
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

Result<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::string& gguf_path) {
  HCACHE_ASSIGN_OR_RETURN(GgufPtr metadata, read_vocab_metadata(gguf_path));
  const ErrorLog log;
  auto impl = std::make_unique<Impl>();
  try {
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    params.n_gpu_layers = 0;
    impl->model.reset(llama_model_init_from_user(metadata.get(), no_tensor_data, nullptr, params));
  } catch (const std::exception& e) {
    return data_loss(fmt::format("{}: unsound vocabulary: {}", gguf_path, e.what()));
  }
  if (!impl->model) {
    return data_loss(fmt::format("{}: unsound vocabulary: {}", gguf_path, log.text("unreadable")));
  }
  impl->vocab = llama_model_get_vocab(impl->model.get());
  impl->n_vocab = llama_vocab_n_tokens(impl->vocab);
  // encode(add_special) would abort on these.
  if (llama_vocab_get_add_bos(impl->vocab) && llama_vocab_bos(impl->vocab) < 0) {
    return data_loss(fmt::format("{}: unsound vocabulary: it asks for a BOS it lacks", gguf_path));
  }
  if (llama_vocab_get_add_eos(impl->vocab) && llama_vocab_eos(impl->vocab) < 0) {
    return data_loss(fmt::format("{}: unsound vocabulary: it asks for an EOS it lacks", gguf_path));
  }
  if (llama_vocab_type(impl->vocab) == LLAMA_VOCAB_TYPE_WPM) {
    for (const int32_t token : {llama_vocab_bos(impl->vocab), llama_vocab_sep(impl->vocab)}) {
      if (token < 0 || token >= impl->n_vocab) {
        return data_loss(fmt::format(
            "{}: unsound vocabulary: it lacks what texts begin and end with", gguf_path));
      }
    }
  }
  const char* chat = llama_model_chat_template(impl->model.get(), nullptr);
  if (chat != nullptr) impl->chat_template = chat;
  const char* pair = llama_model_chat_template(impl->model.get(), "rerank");
  if (pair != nullptr) impl->pair_template = pair;
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(impl)));
}

int32_t Tokenizer::n_vocab() const { return impl_->n_vocab; }
int32_t Tokenizer::bos() const { return llama_vocab_bos(impl_->vocab); }
int32_t Tokenizer::eos() const { return llama_vocab_eos(impl_->vocab); }
bool Tokenizer::adds_bos() const { return llama_vocab_get_add_bos(impl_->vocab); }
bool Tokenizer::is_eog(int32_t token) const { return llama_vocab_is_eog(impl_->vocab, token); }
Tokenizer::FillTokens Tokenizer::fill_tokens() const {
  const llama_vocab* vocab = impl_->vocab;
  return {.prefix = llama_vocab_fim_pre(vocab),
          .suffix = llama_vocab_fim_suf(vocab),
          .middle = llama_vocab_fim_mid(vocab),
          .repository = llama_vocab_fim_rep(vocab),
          .file = llama_vocab_fim_sep(vocab)};
}
const std::string& Tokenizer::chat_template() const { return impl_->chat_template; }

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  // No token is shorter than a byte, but a leading space and the special tokens may be added.
  constexpr size_t kExtra = 16;
  if (text.size() > std::numeric_limits<int32_t>::max() - kExtra) {
    return out_of_range("the text is longer than 2 GiB");
  }
  try {
    std::vector<int32_t> tokens(text.size() + kExtra);
    for (;;) {
      const int32_t n = llama_tokenize(impl_->vocab, text.data(), static_cast<int32_t>(text.size()),
                                       tokens.data(), static_cast<int32_t>(tokens.size()),
                                       options.add_special, options.parse_special);
      if (n == std::numeric_limits<int32_t>::min()) return out_of_range("the text is too long");
      if (n >= 0) {
        tokens.resize(static_cast<size_t>(n));
        return tokens;
      }
      tokens.resize(static_cast<size_t>(-static_cast<int64_t>(n)));
    }
  } catch (const std::exception& e) {
    return invalid_argument(fmt::format("can't tokenize the text: {}", e.what()));
  }
}

bool Tokenizer::adds_end() const {
  const llama_vocab* vocab = impl_->vocab;
  return llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_WPM || llama_vocab_get_add_eos(vocab);
}

Result<std::vector<int32_t>> Tokenizer::encode_pair(std::string_view query,
                                                    std::string_view document) const {
  if (!impl_->pair_template.empty()) {
    return encode(filled(impl_->pair_template, query, document), {.parse_special = true});
  }
  const llama_vocab* vocab = impl_->vocab;
  const int32_t end = llama_vocab_eos(vocab) >= 0 ? llama_vocab_eos(vocab) : llama_vocab_sep(vocab);
  std::vector<int32_t> tokens;
  const auto add_one = [&](bool wanted, int32_t token) {
    if (wanted && token >= 0) tokens.push_back(token);
  };
  add_one(llama_vocab_get_add_bos(vocab), llama_vocab_bos(vocab));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> first, encode(query));
  tokens.insert(tokens.end(), first.begin(), first.end());
  add_one(llama_vocab_get_add_eos(vocab), end);
  add_one(llama_vocab_get_add_sep(vocab), llama_vocab_sep(vocab));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> second, encode(document));
  tokens.insert(tokens.end(), second.begin(), second.end());
  add_one(llama_vocab_get_add_eos(vocab), end);
  return tokens;
}

std::string Tokenizer::piece(int32_t token, bool special) const {
  if (token < 0 || token >= impl_->n_vocab) return {};
  try {
    std::string out(32, '\0');
    for (;;) {
      const int32_t n = llama_token_to_piece(impl_->vocab, token, out.data(),
                                             static_cast<int32_t>(out.size()), 0, special);
      out.resize(static_cast<size_t>(n < 0 ? -n : n));
      if (n >= 0) return out;
    }
  } catch (const std::exception&) {
    return {};  // a byte token whose name is no byte: it has no text
  }
}

Result<int32_t> common_vocabulary(const Tokenizer& a, const Tokenizer& b) {
  constexpr int32_t kNamedFreely = 5;
  constexpr int32_t kMostPadding = 128;
  const auto [fewer, more] = std::minmax({a.n_vocab(), b.n_vocab()});
  if (more - fewer > kMostPadding) {
    return invalid_argument(fmt::format(
        "the vocabularies have {} and {} tokens; they must be the same", a.n_vocab(), b.n_vocab()));
  }
  if (a.adds_bos() != b.adds_bos() || (a.adds_bos() && a.bos() != b.bos())) {
    return invalid_argument("texts begin with different tokens in the two vocabularies");
  }
  for (int32_t token = kNamedFreely; token < fewer; ++token) {
    if (a.piece(token, true) == b.piece(token, true)) continue;
    return invalid_argument(fmt::format("token {} is '{}' in one vocabulary and '{}' in the other",
                                        token, a.piece(token, true), b.piece(token, true)));
  }
  return fewer;
}

Result<int32_t> common_vocabulary(const Tokenizer& a, const std::string& gguf_path) {
  HCACHE_ASSIGN_OR_RETURN(const auto b, Tokenizer::load(gguf_path));
  return common_vocabulary(a, *b);
}

Result<std::string> Tokenizer::decode(std::span<const int32_t> tokens, bool special) const {
  TextDecoder decoder(*this, special);
  std::string out;
  for (const int32_t token : tokens) {
    if (token < 0 || token >= impl_->n_vocab) {
      return invalid_argument(
          fmt::format("token {} is outside the vocabulary of {}", token, impl_->n_vocab));
    }
    out += decoder.push(token);
  }
  out += decoder.flush();
  return out;
}

std::string TextDecoder::push(int32_t token) {
  held_ += tokenizer_.piece(token, special_);
  return take_valid_utf8(held_);
}

std::string TextDecoder::flush() {
  if (held_.empty()) return {};
  held_.clear();
  return std::string(kReplacement);
}

Result<std::string> text_with_media(const Tokenizer& tokenizer, std::span<const int32_t> tokens) {
  constexpr size_t kIdDigits = 16;
  std::string out;
  while (!tokens.empty()) {
    const bool media = tokens.front() < 0;
    const auto end = std::find_if(tokens.begin(), tokens.end(),
                                  [&](int32_t token) { return (token < 0) != media; });
    const auto run = tokens.first(static_cast<size_t>(end - tokens.begin()));
    tokens = tokens.subspan(run.size());
    if (media) {
      Hasher hasher("hcache media in text");
      hasher.add(std::as_bytes(run));
      const std::string id = to_hex(hasher.finish<ChunkId>()).substr(0, kIdDigits);
      out += fmt::format("<media:{}:{}>", id, run.size());
    } else {
      HCACHE_ASSIGN_OR_RETURN(const std::string text, tokenizer.decode(run, true));
      out += text;
    }
  }
  return out;
}

}  // namespace hcache::model
