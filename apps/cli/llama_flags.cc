#include "llama_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>

namespace hcache::cli {
namespace {

enum class Meaning {
  kOption,     // our option; -1 is its default
  kMebibytes,  // our option, in MiB; -1 would be no limit
  kTogether,   // one of those that combine() looks at
  kIgnored,    // nothing depends on it here; `target` says why
};
enum class Value { kNone, kOne, kSwitch };  // kSwitch: on, off or auto may follow

struct Row {
  std::string_view spellings;  // with commas
  Meaning meaning;
  Value value;
  std::string_view target;    // our option, or why it is ignored
  const char* variable = "";  // of llama-server, where CLI11 does not read it
};

constexpr std::string_view kAlways = "it is always so here";
constexpr std::string_view kDevice = "the whole model is computed where --device says";
constexpr std::string_view kLoading = "how the weights are held follows from --device";
constexpr std::string_view kPlacing = "the system places the threads";
constexpr std::string_view kCaching = "the cache is managed without it";
constexpr std::string_view kLogging = "see --log-requests and --verbose";
constexpr std::string_view kFixed = "it can't be chosen here";

constexpr std::string_view kBatch = "--batch";
constexpr std::string_view kUbatch = "--step-tokens";
constexpr std::string_view kTypeK = "-ctk";
constexpr std::string_view kTypeV = "-ctv";

// clang-format off
constexpr Row kTable[] = {
    {"-np,--parallel", Meaning::kOption, Value::kOne, "--parallel"},
    {"-t,--threads", Meaning::kOption, Value::kOne, "--threads"},
    {"-s,--seed", Meaning::kOption, Value::kOne, "--seed"},
    {"--ctx-size", Meaning::kOption, Value::kOne, "--ctx"},
    {"-dev", Meaning::kOption, Value::kOne, "--device"},
    {"--cors-origins", Meaning::kOption, Value::kOne, "--cors"},
    {"--repeat-last-n", Meaning::kOption, Value::kOne, "--penalty-last-n"},
    {"-j", Meaning::kOption, Value::kOne, "--json-schema"},
    {"-cram,--cache-ram", Meaning::kMebibytes, Value::kOne, "--dram", "LLAMA_ARG_CACHE_RAM"},
    {"-b,--batch,--batch-size", Meaning::kTogether, Value::kOne, kBatch, "LLAMA_ARG_BATCH"},
    {"-ub,--ubatch-size", Meaning::kTogether, Value::kOne, kUbatch, "LLAMA_ARG_UBATCH"},
    {"-ctk,--cache-type-k", Meaning::kTogether, Value::kOne, kTypeK, "LLAMA_ARG_CACHE_TYPE_K"},
    {"-ctv,--cache-type-v", Meaning::kTogether, Value::kOne, kTypeV, "LLAMA_ARG_CACHE_TYPE_V"},

    {"-cb,--cont-batching,--jinja,--slots,--metrics,--cache-prompt,-kvu,--kv-unified,--ui,--webui,"
     "--no-context-shift,--offline,--no-mmproj", Meaning::kIgnored, Value::kNone, kAlways},
    {"--no-ui,--no-webui", Meaning::kIgnored, Value::kNone, "the page is part of the server"},
    {"-ngl,--gpu-layers,--n-gpu-layers,-sm,--split-mode,-ts,--tensor-split,-mg,--main-gpu",
     Meaning::kIgnored, Value::kOne, kDevice},
    {"--mlock,--mmap,--no-mmap,-kvo,--kv-offload,-nkvo,--no-kv-offload,--repack,-nr,--no-repack,"
     "--op-offload,--no-op-offload,--no-host,--warmup,--no-warmup", Meaning::kIgnored, Value::kNone,
     kLoading},
    {"-lm,--load-mode,-lzm,--lazy-mode", Meaning::kIgnored, Value::kOne, kLoading},
    {"-fit,--fit", Meaning::kIgnored, Value::kSwitch, "--ctx is taken as it is"},
    {"-fitt,--fit-target,-fitc,--fit-ctx", Meaning::kIgnored, Value::kOne,
     "--ctx is taken as it is"},
    {"-fa,--flash-attn", Meaning::kIgnored, Value::kSwitch, "--attention chooses the kernel"},
    {"-tb,--threads-batch", Meaning::kIgnored, Value::kOne, "--threads counts for prompts too"},
    {"-C,--cpu-mask,-Cr,--cpu-range,--cpu-strict,--prio,--poll,-Cb,--cpu-mask-batch,-Crb,"
     "--cpu-range-batch,--cpu-strict-batch,--prio-batch,--poll-batch,--numa", Meaning::kIgnored,
     Value::kOne, kPlacing},
    {"--swa-full,--cache-idle-slots", Meaning::kIgnored, Value::kNone, kCaching},
    {"-dt,--defrag-thold,--cache-reuse,-sps,--slot-prompt-similarity,-ctxcp,--ctx-checkpoints,"
     "--swa-checkpoints,-cms,--checkpoint-min-step", Meaning::kIgnored, Value::kOne, kCaching},
    {"--perf,--no-perf,--log-disable,--log-prefix,--no-log-prefix,--log-timestamps,"
     "--no-log-timestamps", Meaning::kIgnored, Value::kNone, kLogging},
    {"--log-colors", Meaning::kIgnored, Value::kSwitch, kLogging},
    {"-lv,--verbosity,--log-verbosity", Meaning::kIgnored, Value::kOne, kLogging},
    {"-to,--timeout,--threads-http,--sse-ping-interval", Meaning::kIgnored, Value::kOne, kFixed},
};
// clang-format on

constexpr std::string_view kSwitchValues[] = {"on",   "off",   "auto",    "1",       "0",
                                              "true", "false", "enabled", "disabled"};

bool has_spelling(const Row& row, std::string_view flag) {
  std::string_view rest = row.spellings;
  while (true) {
    const size_t comma = rest.find(',');
    if (rest.substr(0, comma) == flag) return true;
    if (comma == std::string_view::npos) return false;
    rest.remove_prefix(comma + 1);
  }
}

const Row* find_row(std::string_view flag) {
  const auto* row =
      std::ranges::find_if(kTable, [&](const Row& r) { return has_spelling(r, flag); });
  return row == std::end(kTable) ? nullptr : row;
}

// "--ctx-size" of "--ctx-size=4096".
std::string_view flag_of(std::string_view arg) {
  return arg.starts_with("--") ? arg.substr(0, arg.find('=')) : arg;
}

bool is_given(std::span<const std::string> args, const Row& row) {
  return std::ranges::any_of(args, [&](const std::string& arg) {
    const std::string_view flag = flag_of(arg);
    return flag == row.target || has_spelling(row, flag);
  });
}

class Translator {
 public:
  Status run(std::span<const std::string> args, const GetEnv& get_env) {
    for (size_t at = 0; at < args.size();) {
      HCACHE_RETURN_IF_ERROR(translate(args, &at));
    }
    for (const Row& row : kTable) {
      const char* value = *row.variable == '\0' ? nullptr : get_env(row.variable);
      if (value == nullptr || *value == '\0' || is_given(args, row)) continue;
      add(row, row.variable, value);
    }
    return combine(is_type_given(args));
  }
  LlamaFlags take() { return std::move(out_); }

 private:
  static bool is_type_given(std::span<const std::string> args) {
    return std::ranges::any_of(args, [](const auto& a) { return flag_of(a) == "--kv-type"; });
  }

  Status translate(std::span<const std::string> args, size_t* at) {
    const std::string& arg = args[(*at)++];
    const std::string_view flag = flag_of(arg);
    const Row* row = find_row(flag);
    if (row == nullptr) {
      out_.args.push_back(arg);
      return {};
    }
    std::string value;
    if (flag.size() < arg.size()) {
      value = arg.substr(flag.size() + 1);
    } else if (row->value == Value::kOne) {
      if (*at == args.size()) return invalid_argument(fmt::format("{} wants a value", arg));
      value = args[(*at)++];
    } else if (row->value == Value::kSwitch && *at < args.size() &&
               std::ranges::find(kSwitchValues, args[*at]) != std::end(kSwitchValues)) {
      ++*at;
    }
    add(*row, flag, value);
    return {};
  }

  void add(const Row& row, std::string_view name, const std::string& value) {
    switch (row.meaning) {
      case Meaning::kIgnored:
        out_.notes.push_back(fmt::format("{} is ignored: {}", name, row.target));
        break;
      case Meaning::kTogether: together_[row.target] = value; break;
      case Meaning::kOption:
        if (value != "-1") push(row.target, value);
        break;
      case Meaning::kMebibytes:
        if (value != "-1") {
          push(row.target, value + "MiB");
        } else {
          out_.notes.push_back(fmt::format("{} -1 is ignored: it takes a size", name));
        }
        break;
    }
  }

  void push(std::string_view option, std::string value) {
    out_.args.emplace_back(option);
    out_.args.push_back(std::move(value));
  }

  Status combine(bool is_type_given) {
    HCACHE_ASSIGN_OR_RETURN(const std::optional<int64_t> batch, number(kBatch, "-b"));
    HCACHE_ASSIGN_OR_RETURN(const std::optional<int64_t> ubatch, number(kUbatch, "-ub"));
    // A step here is one of llama-server's physical batches.
    if (batch || ubatch) {
      const int64_t rows = std::min(batch.value_or(INT64_MAX), ubatch.value_or(INT64_MAX));
      push(kBatch, std::to_string(rows));
      if (ubatch) push(kUbatch, std::to_string(rows));
    }
    if (is_type_given || !(together_.contains(kTypeK) || together_.contains(kTypeV))) return {};
    const std::string k = value_or(kTypeK, "f16");
    if (const std::string v = value_or(kTypeV, "f16"); k != v) {
      return invalid_argument(
          fmt::format("-ctk {} and -ctv {}: K and V have one type here; give both the same", k, v));
    }
    push("--kv-type", k);
    return {};
  }

  [[nodiscard]] std::string value_or(std::string_view name, const char* otherwise) const {
    const auto found = together_.find(name);
    return found == together_.end() ? otherwise : found->second;
  }

  [[nodiscard]] Result<std::optional<int64_t>> number(std::string_view name,
                                                      std::string_view flag) const {
    const auto found = together_.find(name);
    if (found == together_.end()) return std::optional<int64_t>();
    const std::string& text = found->second;
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 1) {
      return invalid_argument(fmt::format("{}: '{}' is no number of tokens", flag, text));
    }
    return std::optional(value);
  }

  LlamaFlags out_;
  std::map<std::string_view, std::string> together_;  // of kTogether
};

}  // namespace

Result<LlamaFlags> translate_llama_flags(std::span<const std::string> args, const GetEnv& get_env) {
  Translator translator;
  HCACHE_RETURN_IF_ERROR(translator.run(args, get_env));
  return translator.take();
}

}  // namespace hcache::cli
