// The subcommands, one file each. add_<name> declares its options on the program and what runs
// when it is chosen; a failure is an Error that main() prints.
#pragma once

#include <CLI/CLI.hpp>

namespace fusedmoe::cli {

void add_run(CLI::App& app);
void add_synth(CLI::App& app);
void add_quantize(CLI::App& app);
void add_inspect(CLI::App& app);
void add_explain(CLI::App& app);
void add_doctor(CLI::App& app);
void add_bench(CLI::App& app);
void add_compare(CLI::App& app);
void add_tune(CLI::App& app);

}  // namespace fusedmoe::cli
