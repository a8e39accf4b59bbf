// Layers whose receive buffers are too small, and one rank that leaves out the same rows.
#pragma once

#include "rank_layers.h"

namespace fusedmoe::testing {

/// What happens to the tokens of all ranks.
struct Dropped {
  std::vector<Tensor> ids;         ///< of each rank, -1 in the slots whose row is dropped
  std::vector<std::int32_t> rows;  ///< of each rank: how many
  std::int64_t most_received = 0;  ///< by one rank, if none were dropped
};

/// The rule in plain loops: a rank takes the rows of rank 0, then those of rank 1, ..., each by
/// token, until it has `capacity`.
inline Dropped drop_rows(const RankCase& how, const std::vector<Tensor>& ids,
                         std::int64_t capacity) {
  Dropped result;
  result.rows.resize(ids.size());
  for (const Tensor& each : ids) {
    result.ids.push_back(Tensor::empty(each.shape(), DType::kI32));
    copy(each, result.ids.back(), {});
  }
  const auto rank_of = [&](std::int32_t expert, std::int64_t token) {
    if (expert < 0) return -1;
    const auto copies = how.placement->replicas(expert);
    return copies[static_cast<std::uint32_t>(token * 2654435769) % copies.size()].rank;
  };
  for (int to = 0; to < how.size; ++to) {
    const bool owns = !how.placement->local_experts(to).empty();
    std::int64_t room = capacity, received = 0;
    for (std::size_t from = 0; from < ids.size(); ++from) {
      for (std::int64_t token = 0; token < ids[from].size(0); ++token) {
        const TensorView mine = ids[from].select(0, token),
                         kept = result.ids[from].select(0, token);
        std::vector<std::int64_t> slots;
        for (std::int64_t slot = 0; slot < mine.numel(); ++slot) {
          if (rank_of(mine.as<std::int32_t>()[slot], token) == to) slots.push_back(slot);
        }
        if (how.transport == "all2all" ? slots.empty() : !owns) continue;
        ++received;
        if (room-- > 0) continue;
        ++result.rows[from];
        for (const std::int64_t slot : slots) kept.as<std::int32_t>()[slot] = -1;
      }
    }
    result.most_received = std::max(result.most_received, received);
  }
  return result;
}

/// A layer on ranks, its capacity, and what each rank gives to it.
struct DropProblem {
  RankCase how;
  Case spec;
  std::int64_t max_tokens = 6, capacity = 0;
  std::vector<Tensor> x, ids, factors;

  /// Everything but `how.lend` and `how.cut`, which do not matter, comes from the seed.
  DropProblem(int size, std::uint64_t seed) {
    Random random(seed);
    const auto one_in = [&](std::int64_t n) { return random.below(n) == 0; };
    spec.num_experts = 2 + random.below(8);
    spec.topk = 1 + random.below(std::min<std::int64_t>(spec.num_experts, 4));
    spec.hidden = 16 * (1 + random.below(3));
    spec.intermediate = 16;
    spec.scheme = schemes::unquantized(DType::kF32);
    how.size = size;
    how.transport = one_in(2) ? "all2all" : "allgather_reducescatter";
    how.combine = one_in(2) ? CombineMode::kPerRank : CombineMode::kPerSlot;
    std::vector<std::int32_t> logical, ranks;
    for (std::int64_t p = 0; p < spec.num_experts + random.below(4); ++p) {
      logical.push_back(static_cast<std::int32_t>(p % spec.num_experts));
      ranks.push_back(static_cast<std::int32_t>(random.below(size)));
    }
    how.placement = ExpertPlacement(spec.num_experts, size, logical, ranks);
    capacity = 1 + random.below(size * max_tokens);
    for (int rank = 0; rank < size; ++rank) {
      const std::int64_t tokens = random.below(max_tokens + 1);
      x.push_back(random_tensor(DType::kF32, {tokens, spec.hidden}, 1, seed + 1000 * rank));
      factors.push_back(random_tensor(DType::kF32, {tokens, spec.topk}, 1, seed + rank));
      ids.push_back(Tensor::empty({tokens, spec.topk}, DType::kI32));
      for (std::int64_t i = 0; i < tokens * spec.topk; ++i) {
        ids.back().as<std::int32_t>()[i] =
            static_cast<std::int32_t>(random.below(spec.num_experts + 1) - 1);
      }
    }
  }

  LayerOptions options(const std::shared_ptr<Communicator>& communicator) const {
    LayerOptions options = rank_options(how, DType::kF32, max_tokens, communicator);
    options.ranks.receive_capacity = capacity;
    options.ranks.drop_rows = true;
    return options;
  }

  /// Runs the layer on one of the ranks and compares.
  void expect_on_rank(const std::shared_ptr<Communicator>& communicator) const {
    const int rank = communicator->rank();
    const Dropped expected = drop_rows(how, ids, capacity);
    const LayerWeights weights = make_layer_weights({spec});
    const MoeLayer alone(weights, one_rank_options(how, DType::kF32));
    const MoeLayer layer(weights, options(communicator));
    const Routing routing{ids[rank], factors[rank]}, kept{expected.ids[rank], factors[rank]};
    const Tensor wanted = forward_exactly(alone, x[rank], 0, &kept);
    for (int again = 0; again < 2; ++again) {
      std::int32_t dropped = 77;
      const Tensor output = forward_exactly(layer, x[rank], max_tokens, &routing, &dropped);
      EXPECT_EQ(dropped, expected.rows[rank]) << "rank " << rank;
      if (how.combine == CombineMode::kPerSlot) {
        EXPECT_TRUE(bitwise_equal(output, wanted)) << "rank " << rank;
      } else {
        EXPECT_LE(compare(output, wanted).max_norm_relative, 1e-5) << "rank " << rank;
      }
    }
  }
};

}  // namespace fusedmoe::testing
