// The command line's options: one table with every option's name, unit, default, range and text.
// Help, the reference page (docs/cli.md) and the defaults of the program all come from it.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/sampler.h"

namespace hcache::cli {

enum class Kind { kText, kInteger, kNumber, kBytes, kRate, kDuration, kFlag };

struct OptionRow {
  std::string_view id;     // how the code names it
  std::string_view flags;  // as CLI11 takes it: "-m,--model"
  Kind kind;
  std::string_view unit;      // what stands behind the flag in --help
  std::string_view fallback;  // the default as it would be typed; empty: none
  double min;                 // of kInteger and kNumber
  double max;
  std::string_view choices;  // of kText: "a|b|c"; empty: any
  std::string_view help;
};

// Adds the table's row `id` to a verb and sets *out to its default. The overload must fit the
// row's kind: text, integers, numbers, bytes (uint64_t), rates (double), durations (int64_t, ns).
// A value out of range or of the wrong form ends parsing with a message that names the option.
CLI::Option* add_option(CLI::App& app, std::string_view id, std::string* out);
CLI::Option* add_option(CLI::App& app, std::string_view id, int* out);
CLI::Option* add_option(CLI::App& app, std::string_view id, int64_t* out);
CLI::Option* add_option(CLI::App& app, std::string_view id, uint32_t* out);
CLI::Option* add_option(CLI::App& app, std::string_view id, uint64_t* out);
CLI::Option* add_option(CLI::App& app, std::string_view id, float* out);
CLI::Option* add_option(CLI::App& app, std::string_view id, double* out);
CLI::Option* add_option(CLI::App& app, std::string_view id, bool* out);
// What a text option takes that is a table elsewhere, whose parser refuses the rest.
struct Choice {
  std::string_view name;
  std::string_view about;
};
void offer(CLI::Option* option, const std::vector<Choice>& choices);
// May be given several times, and takes lists with commas.
CLI::Option* add_option(CLI::App& app, std::string_view id, std::vector<std::string>* out);
CLI::Option* add_option(CLI::App& app, std::string_view id, std::vector<int64_t>* out);

// Where the program keeps its state and how it reports.
struct StateOptions {
  std::string state_dir;            // resolved: never empty after parsing
  std::vector<std::string> stores;  // resolved
  uint64_t quota_bytes = 0;
};
void add_state_options(CLI::App& app, StateOptions* out);

// What every verb that runs a model takes.
struct ModelOptions {
  std::string path;  // as given; resolve_model() finds the default
  std::string device;
  int threads = 0;
};
void add_model_options(CLI::App& app, ModelOptions* out);
// The path given, else $HCACHE_MODEL, else the model in the cache folder that `make` fills.
// kNotFound says how to get one.
[[nodiscard]] Result<std::string> resolve_model(const std::string& given);

void add_sampling_options(CLI::App& app, model::SamplingOptions* out);

}  // namespace hcache::cli
