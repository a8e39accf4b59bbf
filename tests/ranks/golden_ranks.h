// Golden vectors through layers on ranks: each rank loads its part of the checkpoint and has a part
// of the tokens.
#pragma once

#include "fusedmoe/checkpoint.h"
#include "golden.h"
#include "rank_layers.h"

namespace fusedmoe::testing {

inline void expect_golden_on_rank(const std::string& name, const RankCase& how, DType dtype,
                                  const std::shared_ptr<Communicator>& communicator) {
  constexpr std::int64_t kTokens = 7;
  const int size = communicator->size(), rank = communicator->rank();
  const SafetensorsFile file = SafetensorsFile::open(golden_path(name));
  const Golden golden(file, kTokens);
  const Checkpoint checkpoint = Checkpoint::open(golden_path(name));
  LayerOptions options = rank_options(how, dtype, kTokens, communicator);
  options.parallel = parallel_of(options);
  const MoeLayer layer(checkpoint.load_layer(checkpoint.moe_layers().front(), options.parallel),
                       options);
  const std::int64_t begin = kTokens * rank / size, end = kTokens * (rank + 1) / size;
  const Tensor x = Tensor::empty({end - begin, golden.hidden_states.size(1)}, dtype);
  convert(golden.hidden_states.slice(0, begin, end), x);
  // bf16: the bound of one rank, and one more rounding of the parts of a sum.
  const double tolerance = dtype == DType::kF32 ? 2e-5 : 2e-2;
  EXPECT_LE(compare(forward_exactly(layer, x, kTokens), golden.output.slice(0, begin, end))
                .max_norm_relative,
            tolerance)
      << name << ", rank " << rank << " of " << size;
}

}  // namespace fusedmoe::testing
