#include "common_options.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "base/env.h"

namespace hcache::cli {
namespace {

std::string home_path(const char* variable, const std::string& below_home) {
  const char* value = std::getenv(variable);
  if (value != nullptr && *value != '\0') return value;
  const char* home = std::getenv("HOME");
  return (std::filesystem::path(home == nullptr ? "." : home) / below_home).string();
}

// The default of --state-dir.
std::string default_state_dir() {
  const char* xdg = std::getenv("XDG_STATE_HOME");
  const std::filesystem::path base =
      xdg != nullptr && *xdg != '\0' ? xdg : home_path("HOME", "") + "/.local/state";
  return (base / "hcache").string();
}

}  // namespace

StoreOptions::StoreOptions(Options* parent) : Options(parent) {
  after_parsing([this] {
    if (state_dir.empty()) state_dir = default_state_dir();
    if (stores.empty()) stores.push_back((std::filesystem::path(state_dir) / "store").string());
  });
}

Result<std::optional<store::StoreKey>> StoreOptions::key() const {
  if (key_file.empty()) return std::optional<store::StoreKey>();
  HCACHE_ASSIGN_OR_RETURN(const store::StoreKey key, store::read_store_key(Env::real(), key_file));
  return std::optional(key);
}

SamplingArgs::SamplingArgs(Options* parent) : Options(parent) {
  number(&temperature, "--temperature,--temp", "X", temperature, {0, 100},
         "randomness of the choice; 0: always the most likely token");
  integer(&top_k, "--top-k", "N", top_k, {0, 1 << 24},
          "choose among the N most likely tokens; 0: all");
  number(&top_p, "--top-p", "P", top_p, {1e-6, 1},
         "choose among the fewest tokens with this probability; 1: all");
  number(&min_p, "--min-p", "P", min_p, {0, 1},
         "drop tokens below this share of the most likely one's probability; 0: none");
  number(&repeat_penalty, "--repeat-penalty", "X", repeat_penalty, {1e-3, 1e3},
         "divide the logits of recent tokens by this; 1: off");
  number(&frequency_penalty, "--frequency-penalty", "X", frequency_penalty, {-100, 100},
         "subtract this from a logit for each recent occurrence; 0: off");
  number(&presence_penalty, "--presence-penalty", "X", presence_penalty, {-100, 100},
         "subtract this once from the logit of a recent token; 0: off");
  integer(&penalty_last_n, "--penalty-last-n", "TOKENS", penalty_last_n, {0, 1 << 24},
          "how many tokens are recent");
  integer(&seed, "--seed", "N", seed, {0, 4294967295.0}, "the same seed gives the same answer");
  text(&json_schema, "--json-schema", "JSON", "", "the answer must follow this JSON schema");
  text(&json_schema_file_, "--json-schema-file", "FILE", "", "or the one in this file",
       {.excludes = "--json-schema"});
  text(&grammar, "--grammar", "GBNF", "", "the answer must follow this grammar");
  text(&grammar_file_, "--grammar-file", "FILE", "", "or the one in this file",
       {.excludes = "--grammar"});
  texts(&biases_, "-l,--logit-bias", "ID(+|-)X,...", "", "",
        "add this to a token's logit: 15043+1, 15043-0.5");
}

namespace {

// "15043+1.5".
Result<std::pair<int32_t, float>> parse_bias(const std::string& text) {
  std::pair<int32_t, float> bias;
  const char* const end = text.data() + text.size();
  const auto [sign, bad_id] = std::from_chars(text.data(), end, bias.first);
  const bool plus = sign != end && *sign == '+';
  const auto [rest, bad_bias] = std::from_chars(plus ? sign + 1 : sign, end, bias.second);
  if (bad_id != std::errc() || bad_bias != std::errc() || rest != end || bias.first < 0 ||
      (!plus && *sign != '-')) {
    return invalid_argument(
        fmt::format("--logit-bias: '{}' is no token id with a number: 15043+1, 15043-0.5", text));
  }
  return bias;
}

}  // namespace

Result<model::SamplingOptions> SamplingArgs::resolved() const {
  model::SamplingOptions out = *this;
  if (!grammar_file_.empty()) {
    HCACHE_ASSIGN_OR_RETURN(out.grammar, read_whole_file(Env::real(), grammar_file_));
  }
  if (!json_schema_file_.empty()) {
    HCACHE_ASSIGN_OR_RETURN(out.json_schema, read_whole_file(Env::real(), json_schema_file_));
  }
  for (const std::string& text : biases_) {
    HCACHE_ASSIGN_OR_RETURN(out.logit_bias.emplace_back(), parse_bias(text));
  }
  return out;
}

Result<std::string> resolve_model(const std::string& given) {
  if (!given.empty()) return given;
  if (const char* model = std::getenv("HCACHE_MODEL"); model != nullptr && *model != '\0') {
    return std::string(model);
  }
  // The same rule as scripts/third_party.py.
  std::filesystem::path cache = home_path("HCACHE_CACHE_DIR", "");
  if (const char* dir = std::getenv("HCACHE_CACHE_DIR"); dir == nullptr || *dir == '\0') {
    cache = std::filesystem::path(home_path("XDG_CACHE_HOME", ".cache")) / "hcache";
  }
  const std::filesystem::path path = cache / "models" / HCACHE_DEFAULT_MODEL;
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) return path.string();
  return not_found(
      fmt::format("no model given and none at {}; use -m FILE.gguf, or fetch the default one with "
                  "`make print-model`",
                  path.string()));
}

}  // namespace hcache::cli
