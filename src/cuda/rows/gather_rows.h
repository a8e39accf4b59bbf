// Rows that are brought from where they lie, in the memory of several GPUs, to the order of their
// experts, while the experts have begun.
#pragma once

#include "cuda/rows/permute.h"
#include "cuda/rows/quantize_rows.h"
#include "cuda/rows/row_arrivals.h"
#include "fusedmoe/router.h"
#include "moe/row_places.h"

namespace fusedmoe::cuda {

/// Of so many local experts.
struct GatheredRows {
  const RowSources& sources;
  const RoutingData& routing;
  std::int64_t num_experts;
  std::int32_t* arrivals;  ///< RowArrivals::counts, all zero
};

/// As permute_rows() of copies and permute_codes() for families that await rows, but that rows come
/// from the sources: where `args` says that they lie does not count. By few thread blocks, which
/// let the next launch begin when the launch before has ended: LaunchOrder::kBesideArrivals, with
/// what is returned.
RowArrivals gather_rows(const PermuteRows& args, const GatheredRows& from, const Stream& stream);
RowArrivals gather_codes(const CodedRows& args, const QuantKey& key, std::int64_t columns,
                         const GatheredRows& from, const Stream& stream);

}  // namespace fusedmoe::cuda
