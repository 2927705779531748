// The command line's options. A verb's options are the fields of a struct derived from Options: the
// line that declares a field says all there is to say of the option, its flags, unit, default,
// range and text. Parsing, help, the reference page (docs/cli.md) and the program's defaults come
// from it. A new option is such a line, and the code that reads the field.
//
//   struct SendArgs : Options {
//     std::string file = text(&file, "-f,--file", "FILE", "", "what to send");
//     int64_t wait_ns = duration(&wait_ns, "--wait", 10 * kSecond, "give up after this long");
//     StateOptions state{this};  // options that several verbs share
//   };
//
// A field of somebody else's struct is bound in the constructor's body, and its own value is the
// default: integer(&limits.queued, "--max-queued", "N", limits.queued, {1}, "...").
//
// Threading: one thread. Options stay where they are made: a copy has the values alone.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.h"

namespace hcache::cli {

inline constexpr double kMostExact = 9007199254740992.0;  // 2^53: every integer below is a double
inline constexpr int64_t kSecond = 1'000'000'000;         // in nanoseconds

struct Range {
  double least = -kMostExact;
  double most = kMostExact;
};

// A value that a text option takes, and what it does.
struct Choice {
  std::string_view name;
  std::string_view about;
};

// What few options have.
struct Also {
  const char* variable = "";  // of the environment, which a flag goes before
  const char* needs = "";     // another option, without which this one would do nothing
  const char* excludes = "";  // other options, with commas, that this one makes useless
  bool required = false;
  bool shows_default = true;  // in the help
};

class Options {
 public:
  Options() = default;
  // These go on where the options of `parent` end; null: they are offered to nobody yet.
  explicit Options(Options* parent) {
    if (parent != nullptr) rows_ = parent->rows_;
  }

  // Adds all of them to a verb, in the order of their declaration. A value that is out of range or
  // of the wrong form ends parsing with a message that names the option.
  void add_to(CLI::App& app) const;
  // kInvalidArgument when the user gave one of the options that fill these fields: `why` says
  // where they would do nothing, "does nothing with --trace FILE". Call it while the App of
  // add_to() lives: that knows what was given.
  [[nodiscard]] Status refuse(const std::vector<const void*>& fields, std::string_view why) const;
  // What the user gave, in words that say the same to another process: arguments, and NAME=VALUE
  // for options that have a variable, since their values may be secret. Options that fill these
  // fields are left out. Call it while the App of add_to() lives.
  struct Given {
    std::vector<std::string> args;
    std::vector<std::string> environment;
  };
  [[nodiscard]] Given given_but(const std::vector<const void*>& fields) const;

 protected:
  template <typename T>
  using Same = std::type_identity_t<T>;

  // Each adds an option that fills *out and returns its default. flags as CLI11 takes them:
  // "-m,--model", or "FILE" for a positional argument; unit stands behind the flag in the help.
  // Choices are "a|b|c"; empty: any text.
  std::string text(std::string* out, std::string_view flags, std::string_view unit,
                   std::string_view fallback, std::string_view help, const Also& also = {});
  std::string choice(std::string* out, std::string_view flags, std::string_view fallback,
                     std::string_view choices, std::string_view help, const Also& also = {});
  std::string choice(std::string* out, std::string_view flags, std::string_view fallback,
                     const std::vector<Choice>& choices, std::string_view help,
                     const Also& also = {});
  template <typename T>
  T integer(T* out, std::string_view flags, std::string_view unit, Same<T> fallback, Range range,
            std::string_view help, const Also& also = {});
  template <typename T>
  T number(T* out, std::string_view flags, std::string_view unit, Same<T> fallback, Range range,
           std::string_view help, const Also& also = {});
  // Absent unless given: what it is then follows from elsewhere, as the help says.
  std::optional<double> number(std::optional<double>* out, std::string_view flags,
                               std::string_view unit, Range range, std::string_view help,
                               const Also& also = {});
  uint64_t bytes(uint64_t* out, std::string_view flags, uint64_t fallback, std::string_view help,
                 const Also& also = {});
  std::optional<uint64_t> bytes(std::optional<uint64_t>* out, std::string_view flags,
                                std::string_view help, const Also& also = {});
  int64_t duration(int64_t* out_ns, std::string_view flags, int64_t fallback_ns,
                   std::string_view help, const Also& also = {});
  double duration(double* out_s, std::string_view flags, double fallback_s, std::string_view help,
                  const Also& also = {});
  bool flag(bool* out, std::string_view flags, std::string_view help, const Also& also = {});
  // May be given several times, and take lists with commas.
  std::vector<std::string> texts(std::vector<std::string>* out, std::string_view flags,
                                 std::string_view unit, std::string_view fallback,
                                 std::string_view choices, std::string_view help,
                                 const Also& also = {});
  std::vector<int64_t> integers(std::vector<int64_t>* out, std::string_view flags,
                                std::string_view unit, std::string_view fallback, Range range,
                                std::string_view help, const Also& also = {});

  // Of a group that was made without a parent: takes over the options of these fields alone.
  void offer(const Options& group, std::initializer_list<const void*> fields);
  // Takes back what a group added: in this verb it would do nothing.
  void withhold(std::initializer_list<const void*> fields);

  // Fills in what follows from other options; runs once all are known.
  void after_parsing(std::function<void()> complete);

 private:
  struct Row {
    std::string flags;
    std::string unit;
    std::string shown;  // the default, as it would be typed
    std::string help;
    Also also;
    const void* field = nullptr;
    bool* on = nullptr;                            // of a flag
    std::function<void(const std::string&)> take;  // of an option with one value
    std::function<void(const std::vector<std::string>&)> take_all;
    CLI::Option* added = nullptr;
  };
  struct Rows {
    std::vector<Row> rows;
    std::vector<std::function<void()>> completions;
  };

  static CLI::Option* add_row(CLI::App& app, const Row& row);
  static void relate(CLI::App& app, const Row& row);
  Row& new_row(const void* field, std::string_view flags, std::string_view unit, std::string shown,
               std::string_view help, const Also& also);

  std::shared_ptr<Rows> rows_ = std::make_shared<Rows>();
};

using Verb = std::function<Status()>;

// Adds a verb with the options of Args; `run` takes them when the user names the verb.
template <typename Args, typename Run>
CLI::App* add_verb(CLI::App& app, Verb* verb, const std::string& name, const std::string& about,
                   Run run) {
  CLI::App* sub = app.add_subcommand(name, about);
  const auto args = std::make_shared<Args>();
  args->add_to(*sub);
  sub->callback([args, verb, run] { *verb = [args, run] { return run(*args); }; });
  return sub;
}

// ---- Parsing, for the templates below
// ------------------------------------------------------------

namespace detail {

[[noreturn]] void reject(std::string_view flags, const std::string& why);
// Whole numbers only, where `whole`; rejects what is none or out of range.
int64_t parse_integer(std::string_view flags, const std::string& text, Range range);
double parse_number(std::string_view flags, const std::string& text, Range range);
std::string number_text(float value);
std::string number_text(double value);

}  // namespace detail

template <typename T>
T Options::integer(T* out, std::string_view flags, std::string_view unit, Same<T> fallback,
                   Range range, std::string_view help, const Also& also) {
  Row& row = new_row(out, flags, unit, std::to_string(fallback), help, also);
  row.take = [out, range, name = row.flags](const std::string& typed) {
    *out = static_cast<T>(detail::parse_integer(name, typed, range));
  };
  return fallback;
}

template <typename T>
T Options::number(T* out, std::string_view flags, std::string_view unit, Same<T> fallback,
                  Range range, std::string_view help, const Also& also) {
  Row& row = new_row(out, flags, unit, detail::number_text(fallback), help, also);
  row.take = [out, range, name = row.flags](const std::string& typed) {
    *out = static_cast<T>(detail::parse_number(name, typed, range));
  };
  return fallback;
}

}  // namespace hcache::cli
