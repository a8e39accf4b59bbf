// The subcommands, one file each. add_<name> declares its options on the program and what runs
// when it is chosen; a failure is an Error that main() prints.
#pragma once

#include "command_line.h"

namespace fusedmoe::cli {

void add_run(Program& program);
void add_synth(Program& program);
void add_quantize(Program& program);
void add_inspect(Program& program);
void add_explain(Program& program);
void add_families(Program& program);
void add_doctor(Program& program);
void add_bench(Program& program);
void add_balance(Program& program);
void add_compare(Program& program);
void add_simulate(Program& program);
void add_tune(Program& program);
void add_completion(Program& program);

}  // namespace fusedmoe::cli
