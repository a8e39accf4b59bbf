// bench --ep, --tp and --dp: what it costs to bring rows to the ranks of their experts and back, to
// add the sums of ranks with the same tokens, and what of that a step shows.
#pragma once

#include "bench/rank_setup.h"

namespace fusedmoe::cli {

/// Runs on ranks (run_on_ranks), measures, and prints a table or JSON from rank 0: dispatch and
/// combine, beside the data plane alone for the same bytes, and on the CPU one memcpy; and whole
/// steps, beside their experts. Each time is the largest of all ranks. Where all ranks have the
/// same tokens no rows travel, and combine is the sum over the ranks.
void run_rank_bench(const RankBenchOptions& options);

}  // namespace fusedmoe::cli
