// llama-server: /completion, /tokenize, /detokenize, /slots.
#include <algorithm>
#include <array>

#include "request_fields.h"

namespace hcache::api {
namespace {

constexpr size_t kMaxFileName = 255;

// llama-server's rules: nothing that separates or climbs folders, that looks as if it did, or that
// some file system would change.
bool is_file_name(std::string_view name) {
  if (name.empty() || name.front() == ' ' || name.back() == ' ' || name.back() == '.') return false;
  constexpr std::array<std::string_view, 6> kForbidden = {
      "..",            // parents
      "\xEF\xBC\x8E",  // fullwidth full stop
      "\xE2\x88\x95",  // division slash
      "\xE2\x88\x96",  // set minus
      "\xEF\xBF\xBD",  // replacement character
      "\xEF\xBB\xBF",  // byte order mark
  };
  for (const std::string_view text : kForbidden) {
    if (name.find(text) != std::string_view::npos) return false;
  }
  for (size_t i = 0; i < name.size(); ++i) {
    const auto c = static_cast<unsigned char>(name[i]);
    const bool c1 =
        c == 0xC2 && i + 1 < name.size() && static_cast<unsigned char>(name[i + 1]) < 0xA0;
    if (c < 0x20 || c == 0x7F || c1) return false;
  }
  return name.find_first_of("/\\:*?\"<>|") == std::string_view::npos;
}

}  // namespace

void llama_completion_fields(Fields& f, GenerationRequest* r) {
  f.required().value("prompt", prompts_schema(),
                     "Text, token ids, or both mixed in an array; one prompt or several.",
                     [&](const Json& value, const std::string& path) {
                       return read_prompts(value, path, &r->prompts);
                     });
  llama_generation_fields(f, r);
}

void llama_generation_fields(Fields& f, GenerationRequest* r) {
  r->dialect = Dialect::kLlama;
  model_field(f, r);
  limit_field(f, r, "max_tokens");
  limit_field(f, r, "n_predict");
  stop_field(f, r, "stop");
  f.integer("n_cmpl", &r->n, {1, 128}, "How many answers to each prompt.");
  f.integer("n_probs", &r->top_logprobs, {0, 100},
            "Give the log-probabilities of so many of the likeliest tokens.");
  r->logprobs = r->top_logprobs > 0;
  f.integer("id_slot", &r->id_slot, {-1, Range().max}, "Given back; slots are not assigned.");
  f.flag("return_tokens", &r->return_tokens, "Give the answer's token ids, too.");
  f.flag("post_sampling_probs", &r->sampled_probs,
         "n_probs counts what the sampling options leave, and gives chances, not logarithms.");
  f.value("response_fields", {{"type", "array"}, {"items", {{"type", "string"}}}},
          "Give these fields of the answer alone; \"a/b\" is field b of a.",
          [&](const Json& value, const std::string& path) {
            return read_strings(value, path, &r->response_fields);
          });
  sampling_fields(f, r);
  stream_fields(f, r);
  cache_fields(f, r);
}

void tokenize_fields(Fields& f, TokenizeRequest* r) {
  f.required().value("content", prompt_schema(), "Text, token ids, or both mixed in an array.",
                     [&](const Json& value, const std::string& path) {
                       return read_prompt(value, path, &r->content);
                     });
  f.flag("add_special", &r->add_special, "Put BOS before it, where the model wants one.");
  f.flag("parse_special", &r->parse_special, "Special tokens in the text count as such.");
  f.flag("with_pieces", &r->with_pieces, "Give each token's text, too.");
}

void detokenize_fields(Fields& f, std::vector<int32_t>* tokens) {
  f.required().value(
      "tokens", {{"type", "array"}, {"items", token_schema()}}, "Token ids.",
      [&](const Json& value, const std::string& path) { return read_tokens(value, path, tokens); });
}

void slot_file_fields(Fields& f, std::string* filename) {
  f.required().text("filename", filename,
                    "A name to save under or restore from; it names no file of the server's.",
                    kMaxFileName);
  if (f.has("filename") && f.ok() && !is_file_name(*filename)) {
    f.fail("filename", "this is no plain file name");
  }
}

Result<GenerationRequest> parse_llama_completion(const Json& body, const Defaults& defaults) {
  return read_request(body, defaults, llama_completion_fields);
}

Result<TokenizeRequest> parse_tokenize(const Json& body) {
  TokenizeRequest r;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { tokenize_fields(f, &r); }));
  return r;
}

Result<std::vector<int32_t>> parse_detokenize(const Json& body) {
  std::vector<int32_t> tokens;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { detokenize_fields(f, &tokens); }));
  return tokens;
}

Result<std::string> parse_slot_file(const Json& body) {
  std::string filename;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { slot_file_fields(f, &filename); }));
  return filename;
}

}  // namespace hcache::api
