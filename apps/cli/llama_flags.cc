#include "llama_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>

#include "llama_flag_table.h"

namespace hcache::cli {
namespace {

constexpr std::string_view kSwitchValues[] = {"on",   "off",   "auto",    "1",       "0",
                                              "true", "false", "enabled", "disabled"};
constexpr std::string_view kOffValues[] = {"off", "0", "false", "disabled"};

// Calls visit(item) for each item between separators until it returns true. Whether one did.
template <typename Visit>
bool any_item(std::string_view list, char separator, Visit visit) {
  while (true) {
    const size_t end = list.find(separator);
    if (visit(list.substr(0, end))) return true;
    if (end == std::string_view::npos) return false;
    list.remove_prefix(end + 1);
  }
}

bool has_spelling(const LlamaFlagRow& row, std::string_view flag) {
  return any_item(row.spellings, ',', [&](std::string_view spelling) { return spelling == flag; });
}

const LlamaFlagRow* find_row(std::string_view flag) {
  const auto* row = std::ranges::find_if(
      kLlamaFlags, [&](const LlamaFlagRow& r) { return has_spelling(r, flag); });
  return row == std::end(kLlamaFlags) ? nullptr : row;
}

// "--ctx-size" of "--ctx-size=4096".
std::string_view flag_of(std::string_view arg) {
  return arg.starts_with("--") ? arg.substr(0, arg.find('=')) : arg;
}

// llama-server takes "--ctx_size" too.
std::string with_dashes(std::string arg) {
  if (!arg.starts_with("--")) return arg;
  const auto end = arg.begin() + static_cast<std::ptrdiff_t>(std::min(arg.find('='), arg.size()));
  std::replace(arg.begin(), end, '_', '-');
  return arg;
}

bool is_off_value(std::string_view value) {
  return std::ranges::find(kOffValues, value) != std::end(kOffValues);
}

// Of a switch that a flag or a variable's value turns on or off.
bool is_off(std::string_view name, std::string_view value) {
  return name.starts_with("--no-") || is_off_value(value);
}

bool is_given(std::span<const std::string> args, const LlamaFlagRow& row) {
  return std::ranges::any_of(args, [&](const std::string& arg) {
    const std::string_view flag = flag_of(arg);
    return flag == row.target || has_spelling(row, flag);
  });
}

std::optional<double> number_of(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Numbers are compared by value: "0.0" is "0".
bool is_neutral(const LlamaFlagRow& row, std::string_view value) {
  if (row.neutral.empty()) return false;
  return any_item(row.neutral, '|', [&](std::string_view neutral) {
    if (neutral == value) return true;
    const auto number = number_of(value);
    return number.has_value() && number == number_of(neutral);
  });
}

class Translator {
 public:
  Status run(std::span<const std::string> args, const GetEnv& get_env) {
    for (size_t at = 0; at < args.size();) {
      HCACHE_RETURN_IF_ERROR(translate(args, &at));
    }
    for (const LlamaFlagRow& row : kLlamaFlags) {
      if (is_given(args, row)) continue;
      HCACHE_RETURN_IF_ERROR(take_variable(row, get_env));
    }
    return combine(is_type_given(args));
  }
  LlamaFlags take() { return std::move(out_); }

 private:
  static bool is_type_given(std::span<const std::string> args) {
    return std::ranges::any_of(args, [](const auto& a) { return flag_of(a) == "--kv-type"; });
  }

  Status translate(std::span<const std::string> args, size_t* at) {
    const std::string arg = with_dashes(args[(*at)++]);
    const std::string_view flag = flag_of(arg);
    const LlamaFlagRow* row = find_row(flag);
    if (row == nullptr || row->meaning == Meaning::kOwn) {
      out_.args.push_back(arg);
      // Its value is none of llama-server's flags, whatever it looks like.
      const bool value_follows = row != nullptr && row->value == Value::kOne && flag == arg;
      if (value_follows && *at < args.size()) out_.args.push_back(args[(*at)++]);
      return {};
    }
    std::string value;
    if (flag.size() < arg.size()) {
      value = arg.substr(flag.size() + 1);
    } else if (row->value == Value::kOne || row->value == Value::kTwo) {
      const size_t wanted = row->value == Value::kTwo ? 2 : 1;
      if (args.size() - *at < wanted) return invalid_argument(fmt::format("{} wants a value", arg));
      value = args[*at];
      *at += wanted;
    } else if (row->value == Value::kSwitch && *at < args.size() &&
               std::ranges::find(kSwitchValues, args[*at]) != std::end(kSwitchValues)) {
      value = args[(*at)++];
    }
    return add(*row, flag, value);
  }

  // A switch may be off; then it asks for nothing.
  Status take_variable(const LlamaFlagRow& row, const GetEnv& get_env) {
    if (*row.variable == '\0') return {};
    const char* value = get_env(row.variable);
    if (value == nullptr || *value == '\0') return {};
    const bool asks = row.meaning != Meaning::kIgnored && row.meaning != Meaning::kOff;
    if (row.value == Value::kNone && asks && is_off_value(value)) return {};
    return add(row, row.variable, value);
  }

  Status add(const LlamaFlagRow& row, std::string_view name, const std::string& value) {
    switch (row.meaning) {
      case Meaning::kOwn: {  // by its variable
        const std::string_view spellings = row.spellings;
        const size_t comma = spellings.rfind(',');
        push(comma == std::string_view::npos ? spellings : spellings.substr(comma + 1), value);
        break;
      }
      case Meaning::kOption:
        if (is_neutral(row, value)) break;
        if (const size_t is = row.target.find('='); is != std::string_view::npos) {
          push(row.target.substr(0, is), std::string(row.target.substr(is + 1)));
        } else if (row.value == Value::kNone) {
          out_.args.emplace_back(row.target);
        } else {
          push(row.target, value);
        }
        break;
      case Meaning::kOff:
        if (is_off(name, value)) out_.args.emplace_back(row.target);
        break;
      case Meaning::kMebibytes: add_size(row, name, value); break;
      case Meaning::kTogether: together_[row.target] = value; break;
      case Meaning::kRpc: add_rpc(value); break;
      case Meaning::kListDevices: push("--device", "list"); break;
      case Meaning::kIgnored:
        out_.notes.push_back(fmt::format("{} is ignored: {}", name, row.target));
        break;
      case Meaning::kRefused:
        if (is_neutral(row, value)) break;
        return invalid_argument(
            fmt::format("{} is not followed here, and answers would be others without it: {}", name,
                        row.target));
    }
    return {};
  }

  void add_size(const LlamaFlagRow& row, std::string_view name, const std::string& value) {
    if (value != "-1") return push(row.target, value + "MiB");
    out_.notes.push_back(fmt::format("{} -1 is ignored: it takes a size", name));
  }

  // Servers with commas: each is a device.
  void add_rpc(const std::string& servers) {
    std::string devices;
    any_item(servers, ',', [&](std::string_view server) {
      devices += fmt::format("{}rpc:{}", devices.empty() ? "" : ",", server);
      return false;
    });
    push("--device", devices);
  }

  void push(std::string_view option, std::string value) {
    pushed_[option] = value;
    out_.args.emplace_back(option);
    out_.args.push_back(std::move(value));
  }

  // llama-server divides its cache among its slots, unless it is told to unify it.
  Status divide() {
    if (together_.contains(kUnified) || pushed_.contains(kSequenceCtx)) return {};
    HCACHE_ASSIGN_OR_RETURN(const std::optional<int64_t> ctx, number(pushed_, kCtx, "-c"));
    HCACHE_ASSIGN_OR_RETURN(const std::optional<int64_t> slots, number(pushed_, kParallel, "-np"));
    if (!ctx || !slots || *slots == 1) return {};
    push(kSequenceCtx, std::to_string(*ctx / *slots));
    out_.notes.push_back(
        fmt::format("-c {} -np {}: a conversation may have {} tokens; --kv-unified lifts that",
                    *ctx, *slots, *ctx / *slots));
    return {};
  }

  Status combine(bool is_type_given) {
    HCACHE_RETURN_IF_ERROR(divide());
    HCACHE_ASSIGN_OR_RETURN(const std::optional<int64_t> batch, number(together_, kBatch, "-b"));
    HCACHE_ASSIGN_OR_RETURN(const std::optional<int64_t> ubatch, number(together_, kUbatch, "-ub"));
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

  using Values = std::map<std::string_view, std::string>;
  [[nodiscard]] static Result<std::optional<int64_t>> number(const Values& values,
                                                             std::string_view name,
                                                             std::string_view flag) {
    const auto found = values.find(name);
    if (found == values.end()) return std::optional<int64_t>();
    const std::string& text = found->second;
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 1) {
      return invalid_argument(fmt::format("{}: '{}' is no number of tokens", flag, text));
    }
    return std::optional(value);
  }

  LlamaFlags out_;
  Values together_;  // of kTogether
  Values pushed_;    // our options, the last value of each
};

}  // namespace

Result<LlamaFlags> translate_llama_flags(std::span<const std::string> args, const GetEnv& get_env) {
  Translator translator;
  HCACHE_RETURN_IF_ERROR(translator.run(args, get_env));
  return translator.take();
}

}  // namespace hcache::cli
