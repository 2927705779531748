#include "options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/units.h"

namespace hcache::cli {
namespace {

// The option's long name, for messages.
std::string long_name(std::string_view flags) {
  const size_t comma = flags.find(',');
  std::string_view name = flags.substr(0, comma);
  if (!name.starts_with("--") && comma != std::string_view::npos) {
    name = flags.substr(comma + 1, flags.find(',', comma + 1) - comma - 1);
  }
  return std::string(name);
}

template <typename T>
T parse(std::string_view flags, const std::string& text, Range range, const char* what) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    detail::reject(flags, fmt::format("'{}' is not {}", text, what));
  }
  const auto number = static_cast<double>(value);
  if (!(number >= range.least && number <= range.most)) {
    detail::reject(flags,
                   fmt::format("{} is not between {} and {}", value, range.least, range.most));
  }
  return value;
}

std::string parse_choice(std::string_view flags, const std::string& text,
                         std::string_view choices) {
  if (choices.empty()) return text;
  std::string_view rest = choices;
  while (true) {
    const size_t bar = rest.find('|');
    if (rest.substr(0, bar) == text) return text;
    if (bar == std::string_view::npos) break;
    rest.remove_prefix(bar + 1);
  }
  detail::reject(flags, fmt::format("'{}' is none of {}", text, choices));
}

template <typename T>
T unwrap(std::string_view flags, Result<T> value) {
  if (!value.ok()) detail::reject(flags, value.status().message());
  return std::move(value).value();
}

// What parse_duration takes, in the largest unit that loses nothing: "24h", "250ms".
std::string duration_text(int64_t ns) {
  constexpr std::pair<int64_t, const char*> kUnits[] = {
      {3600 * kSecond, "h"}, {60 * kSecond, "m"}, {kSecond, "s"},
      {1'000'000, "ms"},     {1'000, "us"},       {1, "ns"},
  };
  if (ns == 0) return "0";
  for (const auto& [size, name] : kUnits) {
    if (ns % size == 0) return fmt::format("{}{}", ns / size, name);
  }
  return fmt::format("{}ns", ns);
}

// What parse_bytes takes, in the largest unit that loses nothing.
std::string bytes_text(uint64_t bytes) {
  constexpr std::pair<uint64_t, const char*> kUnits[] = {
      {1ULL << 30, "GiB"}, {1ULL << 20, "MiB"}, {1ULL << 10, "KiB"}};
  for (const auto& [size, name] : kUnits) {
    if (bytes != 0 && bytes % size == 0) return fmt::format("{}{}", bytes / size, name);
  }
  return std::to_string(bytes);
}

template <typename T, typename Parse>
std::vector<T> parse_list(const std::vector<std::string>& typed, Parse parse_item) {
  std::vector<T> values;
  for (const std::string& text : typed) {
    for (const std::string& item : CLI::detail::split(text, ',')) {
      values.push_back(parse_item(item));
    }
  }
  return values;
}

}  // namespace

namespace detail {

void reject(std::string_view flags, const std::string& why) {
  throw CLI::ValidationError(long_name(flags), why);
}

int64_t parse_integer(std::string_view flags, const std::string& text, Range range) {
  return parse<int64_t>(flags, text, range, "a whole number");
}

double parse_number(std::string_view flags, const std::string& text, Range range) {
  return parse<double>(flags, text, range, "a number");
}

std::string number_text(float value) { return fmt::format("{}", value); }
std::string number_text(double value) { return fmt::format("{}", value); }

}  // namespace detail

Options::Row& Options::new_row(const void* field, std::string_view flags, std::string_view unit,
                               std::string shown, std::string_view help, const Also& also) {
  Row& row = rows_->rows.emplace_back();
  row.flags = flags;
  row.unit = unit;
  row.shown = also.shows_default ? std::move(shown) : "";
  row.help = help;
  row.also = also;
  row.field = field;
  return row;
}

std::string Options::text(std::string* out, std::string_view flags, std::string_view unit,
                          std::string_view fallback, std::string_view help, const Also& also) {
  Row& row = new_row(out, flags, unit, std::string(fallback), help, also);
  row.take = [out](const std::string& typed) { *out = typed; };
  return std::string(fallback);
}

std::string Options::choice(std::string* out, std::string_view flags, std::string_view fallback,
                            std::string_view choices, std::string_view help, const Also& also) {
  Row& row = new_row(out, flags, choices, std::string(fallback), help, also);
  row.take = [out, name = row.flags, known = row.unit](const std::string& typed) {
    *out = parse_choice(name, typed, known);
  };
  return std::string(fallback);
}

std::string Options::choice(std::string* out, std::string_view flags, std::string_view fallback,
                            const std::vector<Choice>& choices, std::string_view help,
                            const Also& also) {
  std::string names;
  std::string text(help);
  for (const auto& [name, about] : choices) {
    text += fmt::format("{} {}: {}", names.empty() ? ":" : ";", name, about);
    names += fmt::format("{}{}", names.empty() ? "" : "|", name);
  }
  return choice(out, flags, fallback, names, text, also);
}

uint64_t Options::bytes(uint64_t* out, std::string_view flags, uint64_t fallback,
                        std::string_view help, const Also& also) {
  Row& row = new_row(out, flags, "BYTES", bytes_text(fallback), help, also);
  row.take = [out, name = row.flags](const std::string& typed) {
    *out = unwrap(name, parse_bytes(typed));
  };
  return fallback;
}

std::optional<double> Options::number(std::optional<double>* out, std::string_view flags,
                                      std::string_view unit, Range range, std::string_view help,
                                      const Also& also) {
  Row& row = new_row(out, flags, unit, "", help, also);
  row.take = [out, range, name = row.flags](const std::string& typed) {
    *out = detail::parse_number(name, typed, range);
  };
  return std::nullopt;
}

std::optional<uint64_t> Options::bytes(std::optional<uint64_t>* out, std::string_view flags,
                                       std::string_view help, const Also& also) {
  Row& row = new_row(out, flags, "BYTES", "", help, also);
  row.take = [out, name = row.flags](const std::string& typed) {
    *out = unwrap(name, parse_bytes(typed));
  };
  return std::nullopt;
}

int64_t Options::duration(int64_t* out_ns, std::string_view flags, int64_t fallback_ns,
                          std::string_view help, const Also& also) {
  Row& row = new_row(out_ns, flags, "TIME", duration_text(fallback_ns), help, also);
  row.take = [out_ns, name = row.flags](const std::string& typed) {
    *out_ns = unwrap(name, parse_duration(typed));
  };
  return fallback_ns;
}

double Options::duration(double* out_s, std::string_view flags, double fallback_s,
                         std::string_view help, const Also& also) {
  constexpr auto kNsPerSecond = static_cast<double>(kSecond);
  Row& row = new_row(out_s, flags, "TIME",
                     duration_text(static_cast<int64_t>(fallback_s * kNsPerSecond)), help, also);
  row.take = [out_s, name = row.flags](const std::string& typed) {
    *out_s = static_cast<double>(unwrap(name, parse_duration(typed))) / kNsPerSecond;
  };
  return fallback_s;
}

bool Options::flag(bool* out, std::string_view flags, std::string_view help, const Also& also) {
  new_row(out, flags, "", "", help, also).on = out;
  return false;
}

std::vector<std::string> Options::texts(std::vector<std::string>* out, std::string_view flags,
                                        std::string_view unit, std::string_view fallback,
                                        std::string_view choices, std::string_view help,
                                        const Also& also) {
  Row& row = new_row(out, flags, unit, std::string(fallback), help, also);
  const auto parse_all = [name = row.flags,
                          known = std::string(choices)](const std::vector<std::string>& typed) {
    return parse_list<std::string>(
        typed, [&](const std::string& item) { return parse_choice(name, item, known); });
  };
  row.take_all = [out, parse_all](const auto& typed) { *out = parse_all(typed); };
  if (fallback.empty()) return {};
  return parse_all({std::string(fallback)});
}

std::vector<int64_t> Options::integers(std::vector<int64_t>* out, std::string_view flags,
                                       std::string_view unit, std::string_view fallback,
                                       Range range, std::string_view help, const Also& also) {
  Row& row = new_row(out, flags, unit, std::string(fallback), help, also);
  const auto parse_all = [name = row.flags, range](const std::vector<std::string>& typed) {
    return parse_list<int64_t>(
        typed, [&](const std::string& item) { return detail::parse_integer(name, item, range); });
  };
  row.take_all = [out, parse_all](const auto& typed) { *out = parse_all(typed); };
  if (fallback.empty()) return {};
  return parse_all({std::string(fallback)});
}

void Options::offer(const Options& group, std::initializer_list<const void*> fields) {
  for (const void* field : fields) {
    const auto& rows = group.rows_->rows;
    const auto row = std::ranges::find(rows, field, &Row::field);
    if (row == rows.end()) die("a verb offers an option that its group does not have");
    rows_->rows.push_back(*row);
  }
  const auto& completions = group.rows_->completions;
  rows_->completions.insert(rows_->completions.end(), completions.begin(), completions.end());
}

void Options::withhold(std::initializer_list<const void*> fields) {
  std::erase_if(rows_->rows, [&](const Row& row) {
    return std::ranges::find(fields, row.field) != fields.end();
  });
}

void Options::after_parsing(std::function<void()> complete) {
  rows_->completions.push_back(std::move(complete));
}

CLI::Option* Options::add_row(CLI::App& app, const Row& row) {
  if (row.on != nullptr) return app.add_flag(row.flags, *row.on, row.help);
  CLI::Option* option = nullptr;
  if (row.take_all) {
    // One value per flag, so that a positional argument may follow.
    option = app.add_option_function<std::vector<std::string>>(row.flags, row.take_all, row.help)
                 ->expected(1, CLI::detail::expected_max_vector_size)
                 ->allow_extra_args(false);
  } else {
    option = app.add_option_function<std::string>(row.flags, row.take, row.help);
  }
  return option->type_name(row.unit)->default_str(row.shown);
}

// Once all options of the verb are there.
void Options::relate(CLI::App& app, const Row& row) {
  if (*row.also.needs != '\0') row.added->needs(app.get_option(row.also.needs));
  if (*row.also.excludes == '\0') return;
  for (const std::string& other : CLI::detail::split(row.also.excludes, ',')) {
    // A shared group may name options that this verb does not take.
    if (CLI::Option* found = app.get_option_no_throw(other)) row.added->excludes(found);
  }
}

void Options::add_to(CLI::App& app) const {
  for (Row& row : rows_->rows) {
    row.added = add_row(app, row);
    row.added->required(row.also.required);
    if (*row.also.variable != '\0') row.added->envname(row.also.variable);
  }
  for (const Row& row : rows_->rows) relate(app, row);
  app.parse_complete_callback([rows = rows_] {
    for (const auto& complete : rows->completions) complete();
  });
}

Status Options::refuse(const std::vector<const void*>& fields, std::string_view why) const {
  for (const Row& row : rows_->rows) {
    const bool named = std::ranges::find(fields, row.field) != fields.end();
    if (named && row.added != nullptr && row.added->count() > 0) {
      return invalid_argument(fmt::format("{} {}", long_name(row.flags), why));
    }
  }
  return {};
}

Options::Given Options::given_but(const std::vector<const void*>& fields) const {
  Given out;
  for (const Row& row : rows_->rows) {
    const bool named = std::ranges::find(fields, row.field) != fields.end();
    if (named || row.added == nullptr || row.added->count() == 0) continue;
    const std::string name = long_name(row.flags);
    if (row.on != nullptr) {
      if (*row.on) out.args.push_back(name);
      continue;
    }
    for (const std::string& value : row.added->results()) {
      if (*row.also.variable != '\0') {
        out.environment.push_back(fmt::format("{}={}", row.also.variable, value));
      } else {
        out.args.push_back(fmt::format("{}={}", name, value));
      }
    }
  }
  return out;
}

}  // namespace hcache::cli
