// The program's verbs. Each adds itself (its options and help) to the command line; `verb` is set
// to what it does when the user named it.
#pragma once

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "options.h"

namespace hcache::cli {

void add_chat(CLI::App& app, Verb* verb);
void add_run(CLI::App& app, Verb* verb);
void add_serve(CLI::App& app, Verb* verb);
void add_batch(CLI::App& app, Verb* verb);
void add_bench(CLI::App& app, Verb* verb);
void add_eval(CLI::App& app, Verb* verb);
void add_plan(CLI::App& app, Verb* verb);
void add_profile(CLI::App& app, Verb* verb);
void add_model(CLI::App& app, Verb* verb);
void add_store(CLI::App& app, Verb* verb);
void add_sim(CLI::App& app, Verb* verb);
void add_rpc_serve(CLI::App& app, Verb* verb);

// `--device list`: prints the devices that this build sees.
[[nodiscard]] Status list_devices();

}  // namespace hcache::cli
