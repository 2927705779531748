// hcache: an LLM server and command line that never pays twice for a context it has seen.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/cpu_target.h"
#include "commands.h"
#include "llama_flags.h"
#include "terminal.h"

namespace {

using hcache::Code;
using hcache::Status;

int report(const Status& status) {
  if (status.ok()) return 0;
  std::fflush(stdout);
  if (status.code() != Code::kCancelled) fmt::print(stderr, "hcache: {}\n", status.message());
  return hcache::exit_code(status.code());
}

// How often a compute thread looks whether the others have come before it sleeps (some
// microseconds). libgomp's own 300,000 are a whole time slice: with another program on the same
// cores every operation of a graph would wait for so long.
constexpr const char* kSpinCount = "5000";

// libgomp reads its settings when it is loaded, which was before main(): so the program starts
// again with them, unless they are set. Where it can't, it goes on as it is.
void spin_briefly(char** argv) {
  if (std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  std::error_code error;
  // Not by its name in /proc, or that would become the process's.
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error || setenv("GOMP_SPINCOUNT", kSpinCount, 0) != 0) return;
  execv(self.c_str(), argv);
}

int run(int argc, char** argv) {
  if (const Status status = hcache::check_cpu_target(); !status.ok()) return report(status);

  CLI::App app(
      "Runs language models from GGUF files and keeps their conversations: what was "
      "computed once is restored, not computed again.",
      "hcache");
  app.set_version_flag("--version", HCACHE_VERSION);
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.footer(
      "`hcache VERB --help` lists a verb's options with their units and defaults.\n"
      "Exit codes: 0 done, 2 bad input, 3 not found, 4 refused or in the wrong state, "
      "5 out of space,\n6 damaged data, 7 unavailable, 8 unsupported, 130 interrupted, "
      "1 anything else.");

  hcache::cli::Verb verb;
  hcache::cli::add_chat(app, &verb);
  hcache::cli::add_run(app, &verb);
#ifdef HCACHE_SERVER
  hcache::cli::add_serve(app, &verb);
  hcache::cli::add_batch(app, &verb);
  hcache::cli::add_bench(app, &verb);
  hcache::cli::add_eval(app, &verb);
#endif
  hcache::cli::add_plan(app, &verb);
#ifdef HCACHE_SERVER
  hcache::cli::add_profile(app, &verb);
  hcache::cli::add_sim(app, &verb);
#endif
  hcache::cli::add_model(app, &verb);
  hcache::cli::add_store(app, &verb);
  hcache::cli::add_rpc_serve(app, &verb);

  std::vector<std::string> args(argv + 1, argv + argc);
  std::vector<std::string> notes;
  if (!args.empty() && args[0] == "serve") {
    auto flags = hcache::cli::translate_llama_flags(std::span(args).subspan(1), std::getenv);
    if (!flags.ok()) return report(flags.status());
    args = std::move(flags->args);
    args.insert(args.begin(), "serve");
    notes = std::move(flags->notes);
  }
  std::reverse(args.begin(), args.end());  // as CLI11 takes them
  try {
    app.parse(std::move(args));
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    fmt::print(stderr, "hcache: {}\nRun with --help for the options.\n", e.what());
    return hcache::exit_code(Code::kInvalidArgument);
  }
  for (const std::string& note : notes) fmt::print(stderr, "hcache: {}\n", note);
  hcache::cli::catch_interrupts();
  return report(verb());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    spin_briefly(argv);
    return run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "hcache: internal error: {}\n", e.what());
    return hcache::exit_code(Code::kInternal);
  }
}
