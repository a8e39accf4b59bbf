#include "bench/rank_setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "bench/bench_problem.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "layer/row_choice.h"
#include "testing/cases.h"

namespace fusedmoe::cli {
namespace {

/// The sizes of the weights where the experts do not run: transports read them.
class NoWeights final : public PackedWeights {
 public:
  using PackedWeights::PackedWeights;
  std::int64_t nbytes() const override { return 0; }
};

}  // namespace

MoeConfig rank_config(const RankBenchOptions& options, int rank, Device device) {
  MoeConfig config = moe_config(options.model, options.dtype, device);
  config.scheme = options.scheme;
  config.parallel = options.parallel(rank);
  config.dispatch_dtype = options.dispatch_dtype;
  // Costs are fitted to rows of one form, whatever their number.
  if (!options.calibrate.empty() && config.parallel.needs_dispatch() &&
      layer::may_travel_quantized(config)) {
    config.dispatch_dtype = config.dtype;
  }
  const ParallelConfig& parallel = config.parallel;
  if (parallel.tp_size > 1) {
    config.intermediate =
        slice_of(config.intermediate, slice_unit(config.scheme), parallel.tp_size, parallel.tp_rank)
            .size();
  }
  if (parallel.ep_size > 1) {
    const auto placement = ExpertPlacement::linear(config.num_experts, parallel.ep_size);
    const auto held = static_cast<std::int64_t>(placement.local_experts(rank).size());
    config.num_local_experts = std::max<std::int64_t>(held, 1);  // as local_weights() has it
    config.has_expert_map = true;
  }
  return config;
}

std::vector<const PrepareFinalizeDescriptor*> rank_transports(const RankBenchOptions& options) {
  const MoeConfig config = rank_config(options, 0, parse_device(options.device));
  std::vector<const PrepareFinalizeDescriptor*> serving;
  std::string reasons;
  for (const PrepareFinalizeDescriptor* each : {&no_ep(), &all2all(), &allgather_reducescatter()}) {
    const Support support = each->supports(config);
    const bool wanted = options.transport.empty() || options.transport == each->name();
    if (wanted && support) {
      serving.push_back(each);
    } else {
      reasons += fmt::format("{}{}{}", reasons.empty() ? "" : "; ", each->name(),
                             support ? "" : fmt::format(" ({})", support.text));
    }
  }
  if (!serving.empty()) return serving;
  throw Error::invalid("--experts",
                       options.transport.empty()
                           ? "no transport serves these ranks: " + reasons
                           : fmt::format("--experts {} does not serve these ranks; there are: {}",
                                         options.transport, reasons));
}

std::vector<int> ranks_of_rows(const ParallelConfig& parallel,
                               const PrepareFinalizeDescriptor& transport) {
  if (&transport == &no_ep()) return {};
  if (&transport != &all2all()) return parallel.gather_group();
  std::vector<int> all(static_cast<std::size_t>(parallel.num_ranks()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<int> ranks_of_sums(const ParallelConfig& parallel,
                               const PrepareFinalizeDescriptor& transport) {
  using Combine = ParallelConfig::Combine;
  if (&transport == &no_ep()) return parallel.reduce_group(Combine::kNone);
  return parallel.reduce_group(&transport == &all2all() ? Combine::kComplete
                                                        : Combine::kReduceScatter);
}

RankExperts make_experts(const RankBenchOptions& options, int rank, Device device) {
  const MoeConfig config = rank_config(options, rank, device);
  if (options.rows_only) {
    PackedWeights::Info info;
    info.num_experts = config.num_local_experts;
    info.hidden = config.hidden;
    info.intermediate = config.intermediate;
    info.scheme = config.scheme;
    info.device = config.device;
    info.a1_scale = 1;
    return {nullptr, std::make_shared<NoWeights>(info)};
  }
  RankExperts result;
  result.experts = select(config).experts->create(config, make_context());
  testing::Case spec = bench_case(options.model, options.scheme, 1);
  spec.intermediate = config.intermediate;
  result.weights = result.experts->pack(bench_weights(spec, config.num_local_experts));
  return result;
}

}  // namespace fusedmoe::cli
