// llama-server: /infill.
#include <algorithm>

#include "request_fields.h"

namespace hcache::api {
namespace {

using model::Tokenizer;
using Tokens = std::vector<int32_t>;

// Of the room for prefix and suffix, and of the steps in which the prefix is cut.
constexpr int64_t kSuffixShare = 4;
constexpr int64_t kCutSteps = 8;

// A prefix that is too long begins at a multiple of so many tokens: it grows by that before its
// beginning changes.
Tokens last_of(Tokens tokens, int64_t most, int64_t step) {
  const int64_t excess = static_cast<int64_t>(tokens.size()) - most;
  if (excess <= 0) return tokens;
  const int64_t cut =
      std::min((excess + step - 1) / step * step, static_cast<int64_t>(tokens.size()));
  return {tokens.begin() + cut, tokens.end()};
}

void append(const Tokens& tokens, Tokens* to) {
  to->insert(to->end(), tokens.begin(), tokens.end());
}

// The further texts, each behind its name; those that fit, from the last one.
Result<Tokens> extra_tokens(const Tokenizer& tokenizer, const InfillRequest& request,
                            int64_t room) {
  const Tokenizer::FillTokens fill = tokenizer.fill_tokens();
  Tokens head;
  if (fill.repository != Tokenizer::kNoToken) {
    HCACHE_ASSIGN_OR_RETURN(const Tokens name, tokenizer.encode("project\n"));
    head.push_back(fill.repository);
    append(name, &head);
  }
  Tokens out;
  for (auto extra = request.extra.rbegin(); extra != request.extra.rend(); ++extra) {
    Tokens one;
    const bool marked = fill.file != Tokenizer::kNoToken;
    if (marked) one.push_back(fill.file);
    HCACHE_ASSIGN_OR_RETURN(
        const Tokens text,
        tokenizer.encode(marked ? extra->name + "\n" + extra->text
                                : "\n\n--- " + extra->name + " ---\n\n" + extra->text));
    append(text, &one);
    if (static_cast<int64_t>(head.size() + one.size() + out.size()) > room) break;
    append(out, &one);
    out = std::move(one);
  }
  if (out.empty()) return out;
  append(out, &head);
  return head;
}

}  // namespace

void infill_fields(Fields& f, InfillRequest* r) {
  f.required().text("input_prefix", &r->prefix, "What stands before the gap.");
  f.required().text("input_suffix", &r->suffix, "What stands behind it.");
  f.text("prompt", &r->prompt, "What is written of the gap already.");
  f.objects("input_extra", "Further texts to look at, the most telling last.", [&](Fields& o) {
    InfillRequest::Extra extra = {.name = "file", .text = {}};
    o.text("filename", &extra.name, "Its name.");
    o.required().text("text", &extra.text, "The text.");
    r->extra.push_back(std::move(extra));
  });
  llama_generation_fields(f, &r->generation);
}

Result<InfillRequest> parse_infill(const Json& body, const Defaults& defaults) {
  InfillRequest r;
  r.generation.sampling = defaults;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { infill_fields(f, &r); }));
  return r;
}

Result<Tokens> infill_prompt(const Tokenizer& tokenizer, const InfillRequest& request, int64_t room,
                             bool suffix_first) {
  const Tokenizer::FillTokens fill = tokenizer.fill_tokens();
  for (const int32_t token : {fill.prefix, fill.suffix, fill.middle}) {
    if (token == Tokenizer::kNoToken) {
      return unimplemented(
          "Infill is not supported by this model: its vocabulary has no tokens "
          "for what stands before, behind and in a gap");
    }
  }
  HCACHE_ASSIGN_OR_RETURN(Tokens prefix, tokenizer.encode(request.prefix));
  HCACHE_ASSIGN_OR_RETURN(const Tokens begun, tokenizer.encode(request.prompt));
  HCACHE_ASSIGN_OR_RETURN(Tokens suffix, tokenizer.encode(request.suffix));
  append(begun, &prefix);
  room -= 3 + (tokenizer.adds_bos() ? 1 : 0);  // the marks
  const auto before = static_cast<int64_t>(prefix.size());
  const auto behind = static_cast<int64_t>(suffix.size());
  // Either may have what the other leaves of its share.
  const int64_t suffix_room = std::max({room / kSuffixShare, room - before, int64_t{0}});
  suffix.resize(static_cast<size_t>(std::min(behind, suffix_room)));
  const int64_t prefix_room = std::max(room - static_cast<int64_t>(suffix.size()), int64_t{0});
  prefix = last_of(std::move(prefix), prefix_room, std::max(room / kCutSteps, int64_t{1}));
  const int64_t left = room - static_cast<int64_t>(prefix.size() + suffix.size());

  HCACHE_ASSIGN_OR_RETURN(Tokens out, extra_tokens(tokenizer, request, left));
  if (tokenizer.adds_bos()) out.insert(out.begin(), tokenizer.bos());
  prefix.insert(prefix.begin(), fill.prefix);
  suffix.insert(suffix.begin(), fill.suffix);
  append(suffix_first ? suffix : prefix, &out);
  append(suffix_first ? prefix : suffix, &out);
  out.push_back(fill.middle);
  return out;
}

}  // namespace hcache::api
