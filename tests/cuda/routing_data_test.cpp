// Routing data built on the GPU against fusedmoe::build_routing_data, word for word.
#include "cuda/rows/routing_data.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cuda_test.h"
#include "fusedmoe/error.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

using testing::kGpu;
using testing::Random;
using testing::to_gpu;
using testing::to_host;

using Ints = std::vector<std::int32_t>;
constexpr std::int32_t kPoison = 0x7f7f7f7f;
constexpr std::int64_t kGuard = 64;  // words before and behind what may be written

enum class Ids {
  kRandom,
  kOneExpert,   // all slots on the last expert
  kFew,         // experts 0 and 7 and the last one; the others stay empty
  kWild,        // a third each: valid, -1, out of range
  kNoneAtAll,   // all -1
  kDescending,  // long runs of one expert, from the last to the first
};

struct RoutingCase {
  std::string name;
  std::int64_t num_tokens, topk, num_local_experts;
  Ids ids = Ids::kRandom;
  std::int64_t num_global = 0;  // > 0: with an expert map of that size
  std::int64_t num_zeroed = 0;
};
void PrintTo(const RoutingCase& spec, std::ostream* stream) {
  *stream << spec.name;
}

std::vector<RoutingCase> routing_cases() {
  return {
      {"one_slot", 1, 1, 1},
      {"one_slot_of_many_experts", 1, 1, 2048, Ids::kRandom, 0, 1},
      {"one_token", 1, 4, 32, Ids::kRandom, 0, 37},
      {"one_token_nothing", 1, 8, 128, Ids::kNoneAtAll, 0, 129},
      {"fewer_slots_than_a_warp", 7, 3, 5, Ids::kWild, 0, 31},
      {"a_warp", 32, 1, 8, Ids::kRandom, 0, 33},
      {"one_past_a_warp", 33, 1, 8, Ids::kWild},
      {"one_short_of_a_block", 1023, 1, 16, Ids::kRandom, 0, 1000},
      {"a_block", 128, 8, 128, Ids::kRandom, 0, 1025},
      {"one_past_a_block", 1025, 1, 64, Ids::kWild, 0, 64},
      {"one_expert_exists", 500, 3, 1, Ids::kRandom, 0, 5},
      {"one_expert_chosen", 700, 4, 64, Ids::kOneExpert, 0, 300},
      {"mostly_empty", 300, 4, 256, Ids::kFew, 0, 2000},
      {"mostly_empty_large", 5000, 8, 2048, Ids::kFew, 0, 5000},
      {"descending", 2000, 2, 32, Ids::kDescending},
      {"nothing", 600, 5, 40, Ids::kNoneAtAll, 0, 640},
      {"map", 97, 6, 48, Ids::kRandom, 96, 111},
      {"map_and_wild_ids", 1500, 7, 100, Ids::kWild, 333, 444},
      {"map_to_one_expert", 260, 2, 1, Ids::kRandom, 8, 3},
      {"topk_64", 65, 64, 256, Ids::kRandom, 0, 4096},
      {"slots_100000", 12500, 8, 128, Ids::kRandom, 0, 50000},
      {"slots_100000_wild", 25000, 4, 1000, Ids::kWild, 1500, 50000},
      {"slots_100000_one_expert", 100000, 1, 2048, Ids::kOneExpert, 0, 12345},
      {"slots_99999_few_experts", 33333, 3, 2, Ids::kRandom, 0, 99999},
      // The last that every block sorts, and the first that a cluster shares.
      {"slots_2048", 256, 8, 128, Ids::kRandom, 0, 77},
      {"slots_2049", 683, 3, 128, Ids::kWild, 0, 77},
      {"few_slots_of_16384_experts", 20, 8, 16384, Ids::kRandom, 0, 100},
      {"many_slots_of_16384_experts", 1000, 8, 16384, Ids::kWild, 20000},
      {"slots_4000000", 500000, 8, 256, Ids::kRandom},
      {"slots_3000000_one_expert", 3000000, 1, 8, Ids::kOneExpert},
  };
}

Tensor make_ids(const RoutingCase& spec, std::uint64_t seed) {
  Random random(seed);
  const std::int64_t experts = spec.num_global > 0 ? spec.num_global : spec.num_local_experts;
  constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
  const std::int32_t outside[] = {static_cast<std::int32_t>(experts), kMax, -kMax - 1, -2,
                                  static_cast<std::int32_t>(experts) + 1};
  Tensor ids = Tensor::empty({spec.num_tokens, spec.topk}, DType::kI32);
  for (std::int64_t slot = 0; slot < ids.numel(); ++slot) {
    std::int64_t id = random.below(experts);
    if (spec.ids == Ids::kOneExpert) id = experts - 1;
    if (spec.ids == Ids::kFew) {
      const std::int64_t few[] = {0, std::min<std::int64_t>(7, experts - 1), experts - 1};
      id = few[random.below(3)];
    }
    if (spec.ids == Ids::kDescending) id = experts - 1 - slot * experts / ids.numel();
    if (spec.ids == Ids::kNoneAtAll) id = -1;
    if (spec.ids == Ids::kWild) {
      const std::int64_t kind = random.below(3);
      if (kind == 1) id = -1;
      if (kind == 2) id = outside[random.below(std::ssize(outside))];
    }
    ids.as<std::int32_t>()[slot] = static_cast<std::int32_t>(id);
  }
  return ids;
}

/// Every other global expert is remote; values that are no local expert select nothing either.
Tensor make_map(const RoutingCase& spec) {
  if (spec.num_global == 0) return {};
  Tensor map = Tensor::empty({spec.num_global}, DType::kI32);
  for (std::int64_t e = 0; e < spec.num_global; ++e) {
    const std::int64_t local = spec.num_local_experts - 1 - e / 2;  // < 0 behind the last expert
    map.as<std::int32_t>()[e] = static_cast<std::int32_t>(e % 2 == 0 ? local : -1);
  }
  if (spec.num_global > 5) {
    map.as<std::int32_t>()[1] = static_cast<std::int32_t>(spec.num_local_experts);
  }
  return map;
}

/// Words on the GPU with guards on both sides, all poisoned.
struct Guarded {
  std::int64_t count;
  Tensor memory;

  explicit Guarded(std::int64_t words)
      : count(words), memory(Tensor::empty({words + 2 * kGuard}, DType::kI32, kGpu)) {
    testing::poison(memory);
  }
  std::int32_t* data() const { return memory.as<std::int32_t>() + kGuard; }
  /// The words; reports writes outside.
  Ints words(const char* what) const {
    const Tensor host = to_host(memory);
    const auto* all = host.as<const std::int32_t>();
    for (std::int64_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(all[i], kPoison) << what << ": written " << kGuard - i << " words before";
      EXPECT_EQ(all[kGuard + count + i], kPoison) << what << ": written " << i << " words behind";
    }
    return {all + kGuard, all + kGuard + count};
  }
};

/// One launch; `zeroed` may have no words.
RoutingData build(const Tensor& ids, const Tensor& map, std::int64_t num_local_experts,
                  const Guarded& memory, const Guarded& zeroed, Stream stream) {
  cuda::RoutingDataExtras extras;
  extras.zeroed = zeroed.count > 0 ? zeroed.data() : nullptr;
  extras.num_zeroed = zeroed.count;
  return cuda::build_routing_data(ids, map, num_local_experts, memory.data(), extras, stream);
}

/// All words of the routing data, in the order of its views.
Ints expected_words(const Tensor& ids, const Tensor& map, std::int64_t num_local_experts) {
  const std::size_t bytes = routing_data_bytes(ids.size(0), ids.size(1), num_local_experts);
  Ints words(bytes / 4, kPoison);
  build_routing_data(ids, map, num_local_experts, words.data(), bytes);
  return words;
}

void expect_equal(const Ints& actual, const Ints& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  const auto differ = std::mismatch(actual.begin(), actual.end(), expected.begin());
  EXPECT_TRUE(differ.first == actual.end())
      << "word " << differ.first - actual.begin() << " of " << actual.size() << ": "
      << *differ.first << " against " << *differ.second;
}

class CudaRoutingData : public testing::CudaTestWith<RoutingCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, CudaRoutingData, ::testing::ValuesIn(routing_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CudaRoutingData, EqualsTheCpus) {
  const RoutingCase& spec = GetParam();
  const Tensor ids = make_ids(spec, 1), map = make_map(spec);
  const Tensor gpu_ids = to_gpu(ids), gpu_map = map ? to_gpu(map) : Tensor();
  const Ints expected = expected_words(ids, map, spec.num_local_experts);
  const Guarded memory(std::ssize(expected)), zeroed(spec.num_zeroed);
  const Stream stream{kGpu};
  const RoutingData data = build(gpu_ids, gpu_map, spec.num_local_experts, memory, zeroed, stream);
  synchronize(stream);
  expect_equal(memory.words("routing data"), expected);
  EXPECT_EQ(zeroed.words("zeroed"), Ints(static_cast<std::size_t>(spec.num_zeroed), 0));
  EXPECT_TRUE(testing::bitwise_equal(to_host(gpu_ids), ids));

  // The views are where the CPU's are.
  const std::int64_t slots = ids.numel(), experts = spec.num_local_experts;
  EXPECT_EQ(data.expert_num_tokens.data(), memory.data());
  EXPECT_EQ(data.expert_offsets.data(), memory.data() + experts);
  EXPECT_EQ(data.permuted_to_slot.data(), memory.data() + 2 * experts + 1);
  EXPECT_EQ(data.slot_to_permuted.data(), memory.data() + 2 * experts + 1 + slots);
  EXPECT_EQ(data.expert_offsets.shape(), Shape{experts + 1});
  EXPECT_EQ(data.slot_to_permuted.shape(), Shape{slots});
  EXPECT_EQ(data.slot_to_permuted.device(), kGpu);
}

// The rows of the grouped GEMM besides: each the row of its token, byte for byte.
TEST_P(CudaRoutingData, CopiesRowsInTheirOrder) {
  const RoutingCase& spec = GetParam();
  const Tensor ids = make_ids(spec, 1), map = make_map(spec);
  const Tensor gpu_ids = to_gpu(ids), gpu_map = map ? to_gpu(map) : Tensor();
  const std::int64_t slots = ids.numel(), experts = spec.num_local_experts;
  const Ints expected = expected_words(ids, map, experts);
  for (const std::int64_t row_bytes : {16, 48, 5760}) {  // 5760: 2880 of bf16
    if (slots * row_bytes > (std::int64_t{16} << 20)) continue;
    SCOPED_TRACE(row_bytes);
    const std::int64_t row_words = row_bytes / 4;
    const std::int64_t pitch_words = row_words + (row_bytes == 48 ? 4 : 0);  // a gap between rows
    Tensor rows = Tensor::empty({spec.num_tokens, pitch_words}, DType::kI32);
    Random random(4);
    for (std::int64_t i = 0; i < rows.numel(); ++i) {
      rows.as<std::int32_t>()[i] = static_cast<std::int32_t>(random.bits());
    }
    const Tensor gpu_rows = to_gpu(rows);
    const Guarded memory(std::ssize(expected)), zeroed(spec.num_zeroed);
    const Guarded permuted(slots * row_words);
    cuda::RoutingDataExtras extras;
    extras.zeroed = zeroed.data();
    extras.num_zeroed = zeroed.count;
    extras.rows.rows = gpu_rows.data();
    extras.rows.to = permuted.data();
    extras.rows.row_bytes = extras.rows.to_pitch = row_bytes;
    extras.rows.row_pitch = 4 * pitch_words;
    cuda::build_routing_data(gpu_ids, gpu_map, experts, memory.data(), extras, Stream{kGpu});
    synchronize(Stream{kGpu});
    expect_equal(memory.words("routing data"), expected);
    EXPECT_EQ(zeroed.words("zeroed"), Ints(static_cast<std::size_t>(spec.num_zeroed), 0));

    const Ints actual = permuted.words("permuted rows");
    const std::int32_t* permuted_to_slot = expected.data() + 2 * experts + 1;
    for (std::int64_t row = 0; row < slots && permuted_to_slot[row] >= 0; ++row) {
      const std::int64_t token = permuted_to_slot[row] / spec.topk;
      const auto* source = rows.as<const std::int32_t>() + token * pitch_words;
      ASSERT_TRUE(std::equal(source, source + row_words, actual.data() + row * row_words))
          << "row " << row << " of token " << token;
    }
  }
}

// None may overtake the one before it, and none depends on what the memory held.
TEST_P(CudaRoutingData, TheLastOfManyWins) {
  const RoutingCase& spec = GetParam();
  const Tensor first = make_ids(spec, 2), last = make_ids(spec, 3), map = make_map(spec);
  const Tensor gpu_first = to_gpu(first), gpu_last = to_gpu(last);
  const Tensor gpu_map = map ? to_gpu(map) : Tensor();
  const Ints expected = expected_words(last, map, spec.num_local_experts);
  const Guarded memory(std::ssize(expected)), zeroed(spec.num_zeroed);
  const OwnedStream stream(kGpu);
  for (int i = 0; i < 10; ++i) {
    for (const Tensor* ids : {&gpu_first, &gpu_last}) {
      build(*ids, gpu_map, spec.num_local_experts, memory, zeroed, stream);
    }
  }
  synchronize(stream);
  expect_equal(memory.words("routing data"), expected);
  EXPECT_EQ(zeroed.words("zeroed"), Ints(static_cast<std::size_t>(zeroed.count), 0));
}

// Needs no device: nothing is launched.
TEST(CudaRoutingDataSizesTest, TooManyExpertsAreAnError) {
  std::int32_t id = 0;
  const TensorView ids(&id, DType::kI32, {1, 1}, kGpu);
  EXPECT_THROW(cuda::build_routing_data(ids, {}, 16385, &id, {}, Stream{kGpu}), Error);
}

}  // namespace
}  // namespace fusedmoe
