// hcache sim: production's policies and scheduler under recorded or drawn load, without a machine
// that could serve it.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/env.h"
#include "commands.h"
#include "sim_settings.h"

namespace hcache::cli {
namespace {

struct Kind {
  std::string_view name;
  Result<SimResults> (*simulate)(const SimArgs&, const Json&);
  bool takes_trace;
};
constexpr std::array kKinds = {
    Kind{"batch", simulate_batches, false},
    Kind{"overlap", simulate_overlap, false},
    Kind{"prefix-cache", simulate_prefix_caches, true},
    Kind{"serving", simulate_servers, true},
};

Result<Json> read_scenario(const std::string& file) {
  HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(Env::real(), file));
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_object()) return json;
  return invalid_argument(fmt::format("{}: no JSON object", file));
}

Result<SimResults> run(const SimArgs& args, const Json& scenario) {
  std::string names;
  for (const Kind& kind : kKinds) {
    if (scenario.contains("kind") && scenario.at("kind") == std::string(kind.name)) {
      if (!kind.takes_trace) {
        HCACHE_RETURN_IF_ERROR(
            args.refuse({&args.trace}, "does nothing in a scenario of this kind"));
      }
      return kind.simulate(args, scenario);
    }
    names += fmt::format("{}{}", names.empty() ? "" : ", ", kind.name);
  }
  return invalid_argument(fmt::format("{}: 'kind' must be one of {}", args.scenario, names));
}

// Columns of all rows, in the order in which they first come. Objects in a row become columns:
// "ttft_ms.first.p50".
std::string to_csv(const Json& rows) {
  std::vector<std::string> columns;
  std::vector<Json> lines;
  for (const Json& row : rows) {
    lines.push_back(row.flatten());
    for (const auto& [name, value] : lines.back().items()) {
      if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
    }
  }
  const auto title = [](std::string pointer) {  // "/ttft_ms/first/p50"
    std::replace(pointer.begin(), pointer.end(), '/', '.');
    return pointer.substr(1);
  };
  const auto row_of = [&](const auto& cell) {
    std::vector<std::string> cells;
    for (const std::string& column : columns) cells.push_back(cell(column));
    return fmt::format("{}\n", fmt::join(cells, ","));
  };
  std::string csv = row_of(title);
  for (const Json& line : lines) {
    csv += row_of([&](const std::string& column) {
      return line.contains(column) ? line.at(column).dump() : std::string();
    });
  }
  return csv;
}

Status simulate(const SimArgs& args) {
  HCACHE_ASSIGN_OR_RETURN(const Json scenario, read_scenario(args.scenario));
  HCACHE_ASSIGN_OR_RETURN(SimResults results, run(args, scenario));
  if (args.json_file != "-") {
    fmt::print("{}\n\n{}", results.headline, format_columns(results.table));
  }
  if (!args.csv_file.empty()) {
    HCACHE_RETURN_IF_ERROR(write_whole_file(Env::real(), args.csv_file, to_csv(results.rows)));
  }
  if (args.json_file.empty()) return {};
  Json json = std::move(results.extra);
  json["scenario"] = args.scenario;
  json["rows"] = std::move(results.rows);
  return write_json(json, args.json_file == "-" ? "" : args.json_file);
}

}  // namespace

void add_sim(CLI::App& app, Verb* verb) {
  add_verb<SimArgs>(
      app, verb, "sim",
      "Run production's policies and scheduler on simulated hardware, under a given load",
      simulate);
}

}  // namespace hcache::cli
