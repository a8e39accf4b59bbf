// The subcommands, one file each. add_<name> declares its options on the program and what runs
// when it is chosen; a failure is an Error that main() prints.
#pragma once

#include "command_line.h"

namespace fusedmoe::cli {

void add_run(Command& program);
void add_synth(Command& program);
void add_quantize(Command& program);
void add_inspect(Command& program);
void add_explain(Command& program);
void add_families(Command& program);
void add_doctor(Command& program);
void add_bench(Command& program);
void add_compare(Command& program);
void add_tune(Command& program);

}  // namespace fusedmoe::cli
