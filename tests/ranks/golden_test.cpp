// Runs the layer of every family on 1 to 7 ranks, with every transport and combine mode, and
// compares its output with the family's golden vectors.
#include "golden_ranks.h"

namespace fusedmoe::golden_test {

using testing::expect_golden_on_rank;
using testing::golden_names;
using testing::kPatient;
using testing::make_communicators;
using testing::RankCase;
using testing::run_ranks;

class GoldenRanks : public ::testing::TestWithParam<int> {};  // how many
INSTANTIATE_TEST_SUITE_P(Ranks, GoldenRanks, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(GoldenRanks, GiveTheVectors) {
  const int size = GetParam();
  // Lent memory, messages and sequences of bytes in turns.
  int round = size;
  for (const std::string& name : golden_names()) {
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      for (const CombineMode combine : {CombineMode::kPerRank, CombineMode::kPerSlot}) {
        RankCase how{.size = size, .transport = transport, .combine = combine};
        if (size == 1) how.transport = "no_ep";
        how.lend = ++round % 3 == 0;
        how.cut = round % 3 == 1;
        const DType dtype = round % 2 == 0 ? DType::kF32 : DType::kBF16;
        const auto comms = make_communicators(size, how.lend, {kPatient}, how.cut);
        run_ranks(size, [&](int rank) { expect_golden_on_rank(name, how, dtype, comms[rank]); });
      }
    }
  }
}

}  // namespace fusedmoe::golden_test
