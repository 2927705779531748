// A scenario of `hcache sim` as JSON: settings asked for by name, whatever is wrong named by its
// place. docs/simulator.md lists them.
// Threading: plain values.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/status.h"
#include "options.h"
#include "policy/hardware_plan.h"
#include "terminal.h"

namespace hcache::cli {

// One object of the file. The first thing that is wrong, here or in an object within, goes to
// *status, which must outlive this.
class Settings {
 public:
  // `place` names the object in errors: "scenario.json: workload".
  Settings(Json object, std::string place, Status* status)
      : object_(std::move(object)), place_(std::move(place)), status_(status) {
    if (!object_.is_object()) fail("this must be an object");
  }

  [[nodiscard]] bool has(const std::string& name) const {
    return object_.is_object() && object_.contains(name);
  }

  template <typename T>
  T get(const std::string& name, T fallback) {
    asked_.insert(name);
    if (!has(name)) return fallback;
    try {
      return object_.at(name).get<T>();
    } catch (const Json::exception& e) {
      fail(fmt::format("'{}': {}", name, e.what()));
      return fallback;
    }
  }
  template <typename T>
  T require(const std::string& name) {
    if (!has(name)) fail(fmt::format("'{}' is missing", name));
    return get<T>(name, T());
  }
  // A number in [least, most].
  double number(const std::string& name, double fallback, double least, double most) {
    const double value = get<double>(name, fallback);
    if (!(value >= least && value <= most)) {
      fail(fmt::format("'{}' is {}; it takes {} to {}", name, value, least, most));
    }
    return value;
  }
  int64_t integer(const std::string& name, int64_t fallback, int64_t least, int64_t most) {
    return static_cast<int64_t>(number(name, static_cast<double>(fallback),
                                       static_cast<double>(least), static_cast<double>(most)));
  }
  // What a parser makes of a text.
  template <typename Parse>
  auto parsed(const std::string& name, const std::string& text, Parse parse)
      -> std::remove_cvref_t<decltype(parse(text).value())> {
    auto result = parse(text);
    if (result.ok()) return *std::move(result);
    fail(fmt::format("'{}': {}", name, result.status().message()));
    return {};
  }
  // Empty where there is none.
  Settings object(const std::string& name) {
    return {get<Json>(name, Json::object()), fmt::format("{}: {}", place_, name), status_};
  }

  void fail(std::string_view what) {
    if (status_->ok()) *status_ = invalid_argument(fmt::format("{}: {}", place_, what));
  }
  [[nodiscard]] const std::string& place() const { return place_; }
  [[nodiscard]] Status* status() const { return status_; }
  // Unknown settings are errors, too.
  void refuse_others() {
    if (!object_.is_object()) return;
    for (const auto& [name, value] : object_.items()) {
      if (!asked_.contains(name)) fail(fmt::format("no setting '{}'", name));
    }
  }

 private:
  Json object_;
  std::string place_;
  std::set<std::string> asked_;
  Status* status_;
};

// What the command line says beside the scenario.
struct SimArgs : Options {
  std::string scenario = text(&scenario, "--scenario", "FILE", "",
                              "what to simulate (docs/simulator.md)", {.required = true});
  std::string trace = text(&trace, "--trace", "FILE", "",
                           "recorded requests in Mooncake's format, instead of the scenario's own");
  std::string json_file =
      text(&json_file, "--json", "FILE", "",
           "also write the figures as JSON; - prints them instead of the table");
  std::string csv_file =
      text(&csv_file, "--csv", "FILE", "", "also write the figures as CSV, a line for each row");
};

// A file that the scenario names, from the scenario's folder.
[[nodiscard]] inline std::string beside_scenario(const SimArgs& args, const std::string& named) {
  return std::filesystem::path(args.scenario).parent_path() / named;
}
// Empty: none is named.
[[nodiscard]] inline std::string trace_file(const SimArgs& args, const std::string& named) {
  if (!args.trace.empty() || named.empty()) return args.trace;
  return beside_scenario(args, named);
}

// Which published devices, and how many.
inline void read_devices(Settings& s, policy::HardwareSetup* hardware) {
  hardware->device = s.parsed("device", s.get<std::string>("device", "a100"), policy::find_device);
  hardware->n_gpu = static_cast<int32_t>(s.integer("gpus", 1, 1, 1024));
  hardware->n_ssd = static_cast<int32_t>(s.integer("ssds", 0, 0, 1024));
}

// The scenario itself, or it with each of its `cases` laid over it (RFC 7386).
[[nodiscard]] inline Result<std::vector<Json>> scenario_cases(const SimArgs& args,
                                                              const Json& scenario) {
  const Json patches = scenario.value("cases", Json::array({Json::object()}));
  if (!patches.is_array()) return invalid_argument(args.scenario + ": 'cases' must be an array");
  std::vector<Json> cases;
  for (const Json& patch : patches) {
    cases.push_back(scenario);
    cases.back().merge_patch(patch);
  }
  return cases;
}

// What a kind of scenario gives.
struct SimResults {
  std::string headline;
  std::vector<std::vector<std::string>> table;  // for people, the header first
  Json rows = Json::array();                    // one object of numbers and texts each
  Json extra = Json::object();                  // beside the rows
};
// `scenario`: what the file says. kInvalidArgument names the setting.
[[nodiscard]] Result<SimResults> simulate_prefix_caches(const SimArgs& args, const Json& scenario);
[[nodiscard]] Result<SimResults> simulate_batches(const SimArgs& args, const Json& scenario);
[[nodiscard]] Result<SimResults> simulate_overlap(const SimArgs& args, const Json& scenario);
[[nodiscard]] Result<SimResults> simulate_servers(const SimArgs& args, const Json& scenario);

}  // namespace hcache::cli
