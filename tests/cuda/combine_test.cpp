// The weighted sum of GEMM 2's rows on the GPU against a plain loop in the same order, bit for bit.
#include "cuda/rows/combine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cuda_test.h"
#include "fusedmoe/quant.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

using testing::kGpu;
using testing::Random;
using testing::to_gpu;
using testing::to_host;

constexpr std::int64_t kGuardRows = 2;     // of output, before and behind
constexpr std::int64_t kSplitPadding = 8;  // elements between splits that belong to nobody

struct CombineCase {
  std::string name;
  std::int64_t num_tokens, topk, hidden;
  bool rows_f32 = true;
  int splits = 1;
  bool weights = true;
  bool missing = false;  // every third slot has no row
  DType dtype = DType::kBF16;
  bool by_slot = false;  // rows in the order of the slots, which ids tell of
  DType output = DType::kBF16;
  bool accumulate = false;
  std::int64_t padding = 0;  // elements between rows of the output
};
void PrintTo(const CombineCase& spec, std::ostream* stream) {
  *stream << spec.name;
}

std::vector<CombineCase> combine_cases() {
  std::vector<CombineCase> cases;
  struct Sizes {
    std::int64_t num_tokens, topk, hidden;
  };
  // Hidden sizes: the smallest, around a multiple of the columns of a block, and those of models.
  const Sizes sizes[] = {{1, 1, 8},    {3, 2, 24},    {5, 8, 1016},   {2, 3, 1024},  {7, 4, 1032},
                         {1, 4, 2880}, {33, 8, 7168}, {300, 4, 2880}, {4, 64, 2048}, {1000, 1, 64}};
  for (const Sizes& size : sizes) {
    for (const bool rows_f32 : {true, false}) {
      for (const int splits : {1, 2, 4}) {
        if (splits > 1 && !rows_f32) continue;  // partial sums are in f32
        for (const bool weights : {true, false}) {
          for (const bool missing : {false, true}) {
            CombineCase spec{"",       size.num_tokens, size.topk, size.hidden,
                             rows_f32, splits,          weights,   missing};
            spec.dtype = cases.size() % 3 == 0 ? DType::kF16 : DType::kBF16;
            spec.output = cases.size() % 5 == 0 ? DType::kF32 : spec.dtype;
            spec.accumulate = cases.size() % 4 == 1;
            spec.padding = cases.size() % 7 == 2 ? 24 : 0;
            spec.name = std::to_string(size.num_tokens) + "x" + std::to_string(size.topk) + "x" +
                        std::to_string(size.hidden) + "_" + std::string(name(spec.dtype)) +
                        (rows_f32 ? "_from_f32" : "") + "_splits" + std::to_string(splits) +
                        (weights ? "" : "_unweighted") + (missing ? "_missing" : "") +
                        (spec.output == DType::kF32 ? "_to_f32" : "") +
                        (spec.accumulate ? "_added" : "") + (spec.padding > 0 ? "_strided" : "");
            cases.push_back(spec);
            if (!rows_f32) continue;
            spec.by_slot = true;
            spec.name += "_by_slot";
            cases.push_back(spec);
          }
        }
      }
    }
  }
  return cases;
}

/// Rows in a random order; what no slot names is NaN, and so are the weights of missing slots.
struct CombineProblem {
  CombineCase spec;
  std::int64_t rows, split_pitch;
  Tensor values;            // (splits * split_pitch) f32 or as the output
  Tensor slot_to_permuted;  // (num_tokens * topk)
  Tensor weights;           // (num_tokens, topk)
  Tensor before;            // (num_tokens, hidden): what the output holds

  explicit CombineProblem(const CombineCase& wanted) : spec(wanted) {
    Random random(5);
    rows = spec.num_tokens * spec.topk;
    split_pitch = rows * spec.hidden + (spec.splits > 1 ? kSplitPadding : 0);
    values = Tensor::empty({spec.splits * split_pitch}, spec.rows_f32 ? DType::kF32 : spec.dtype);
    testing::poison(values);
    slot_to_permuted = Tensor::empty({rows}, DType::kI32);
    weights = Tensor::empty({spec.num_tokens, spec.topk}, DType::kF32);
    auto* map = slot_to_permuted.as<std::int32_t>();
    for (std::int64_t slot = 0; slot < rows; ++slot) map[slot] = static_cast<std::int32_t>(slot);
    for (std::int64_t slot = spec.by_slot ? 0 : rows - 1; slot > 0; --slot) {
      std::swap(map[slot], map[random.below(slot + 1)]);
    }
    before = Tensor::empty({spec.num_tokens, spec.hidden}, spec.output);
    testing::poison(before);
    for (std::int64_t i = 0; spec.accumulate && i < before.numel(); ++i) {
      store_f32(before.data(), spec.output, i, static_cast<float>(random.normal()));
    }
    for (std::int64_t slot = 0; slot < rows; ++slot) {
      weights.as<float>()[slot] = static_cast<float>(random.uniform() * 1.5 - 0.25);
      if (spec.missing && slot % 3 == 1) {
        map[slot] = -1;
        weights.as<float>()[slot] = std::numeric_limits<float>::quiet_NaN();
        continue;
      }
      for (int split = 0; split < spec.splits; ++split) {
        const std::int64_t first = split * split_pitch + map[slot] * spec.hidden;
        for (std::int64_t c = 0; c < spec.hidden; ++c) {
          store_f32(values.data(), values.dtype(), first + c, static_cast<float>(random.normal()));
        }
      }
    }
  }

  /// fp32, slots in order, the splits of a slot first; one rounding at the end.
  Tensor expected() const {
    Tensor output = Tensor::empty({spec.num_tokens, spec.hidden}, spec.output);
    const auto* map = slot_to_permuted.as<const std::int32_t>();
    for (std::int64_t token = 0; token < spec.num_tokens; ++token) {
      for (std::int64_t c = 0; c < spec.hidden; ++c) {
        float sum = 0;
        for (std::int64_t slot = token * spec.topk; slot < (token + 1) * spec.topk; ++slot) {
          if (map[slot] < 0) continue;
          const std::int64_t index = map[slot] * spec.hidden + c;
          float value = load_f32(values.data(), values.dtype(), index);
          for (int split = 1; split < spec.splits; ++split) {
            value += load_f32(values.data(), values.dtype(), split * split_pitch + index);
          }
          // One rounding for product and sum, as the GPU's multiply-add has.
          sum = std::fmaf(spec.weights ? weights.as<const float>()[slot] : 1.0F, value, sum);
        }
        const std::int64_t index = token * spec.hidden + c;
        if (spec.accumulate) sum += load_f32(before.data(), spec.output, index);
        store_f32(output.data(), spec.output, index, sum);
      }
    }
    return output;
  }
};

class CudaCombine : public testing::CudaTestWith<CombineCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, CudaCombine, ::testing::ValuesIn(combine_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CudaCombine, EqualsAPlainLoop) {
  const CombineProblem problem(GetParam());
  const CombineCase& spec = problem.spec;
  const Tensor values = to_gpu(problem.values), map = to_gpu(problem.slot_to_permuted);
  const Tensor weights = to_gpu(problem.weights);
  // Guards before and behind the output, and between its rows.
  const std::int64_t pitch = spec.hidden + spec.padding;
  const Tensor host = Tensor::empty({spec.num_tokens + 2 * kGuardRows, pitch}, spec.output);
  testing::poison(host);
  const auto row_of = [&](const Tensor& tensor, std::int64_t token) {
    return tensor.as<char>() + bytes(spec.output, (kGuardRows + token) * pitch);
  };
  const auto row_bytes = static_cast<std::size_t>(bytes(spec.output, spec.hidden));
  for (std::int64_t token = 0; token < spec.num_tokens; ++token) {
    std::memcpy(row_of(host, token), problem.before.as<char>() + token * row_bytes, row_bytes);
  }
  const Tensor memory = to_gpu(host);

  cuda::Combine args;
  args.output = memory.slice(0, kGuardRows, kGuardRows + spec.num_tokens).slice(1, 0, spec.hidden);
  args.accumulate = spec.accumulate;
  args.rows = values.data();
  args.rows_dtype = spec.rows_f32 ? DType::kF32 : spec.dtype;
  args.splits = spec.splits;
  args.split_pitch = problem.split_pitch;
  constexpr std::int32_t kExperts = 7;
  Tensor ids = Tensor::empty({spec.num_tokens, spec.topk}, DType::kI32);
  for (std::int64_t slot = 0; slot < problem.rows; ++slot) {
    const bool has_row = problem.slot_to_permuted.as<const std::int32_t>()[slot] >= 0;
    ids.as<std::int32_t>()[slot] = has_row    ? static_cast<std::int32_t>(slot % kExperts)
                                   : slot % 2 ? -1
                                              : kExperts;
  }
  const Tensor gpu_ids = to_gpu(ids);
  if (spec.by_slot) {
    args.topk_ids = gpu_ids;
    args.local_experts = core::LocalExperts(TensorView(), kExperts);
  } else {
    args.slot_to_permuted = map;
  }
  args.topk_weights = spec.weights ? weights.as<const float>() : nullptr;
  args.topk = spec.topk;
  const OwnedStream stream(kGpu);
  cuda::combine(args, stream);
  synchronize(stream);

  const Tensor actual = to_host(memory), expected = problem.expected();
  for (std::int64_t token = 0; token < spec.num_tokens; ++token) {
    const char* wanted = expected.as<char>() + token * row_bytes;
    ASSERT_EQ(0, std::memcmp(row_of(actual, token), wanted, row_bytes)) << "token " << token;
    std::memcpy(row_of(host, token), wanted, row_bytes);
  }
  EXPECT_TRUE(testing::bitwise_equal(actual, host)) << "written outside of the rows";
}

class CudaCombineTest : public testing::CudaTest {};

// No row of a token is there: the output is 0, whatever was in the memory before.
TEST_F(CudaCombineTest, NoRowsAtAll) {
  const Tensor map = Tensor::empty({12}, DType::kI32, kGpu);
  fill_bytes(map, 0xff, Stream{kGpu});
  const Tensor output = Tensor::empty({3, 512}, DType::kBF16, kGpu);
  const Tensor values = Tensor::empty({12 * 512}, DType::kF32, kGpu);
  testing::poison(output);
  testing::poison(values);
  cuda::Combine args;
  args.output = output;
  args.rows = values.data();
  args.split_pitch = values.numel();
  args.slot_to_permuted = map;
  args.topk = 4;
  cuda::combine(args, Stream{kGpu});
  EXPECT_TRUE(testing::bitwise_equal(to_host(output), Tensor::zeros({3, 512}, DType::kBF16)));
}

// Three targets have room for five tokens each. A launch adds up some of the 15 tokens, each into
// its own row. It does not write the rows of tokens that chose no expert, and none at all where
// `failed` is set.
TEST_F(CudaCombineTest, RowsGoToSeveralTargets) {
  constexpr std::int64_t kEach = 5, kTargets = 3, kHidden = 1016, kTokens = kTargets * kEach;
  CombineCase spec{"", kTokens, 4, kHidden};
  spec.missing = true;
  CombineProblem problem(spec);
  for (std::int64_t j = 0; j < spec.topk; ++j) {  // token 6 has no row at all
    problem.slot_to_permuted.as<std::int32_t>()[6 * spec.topk + j] = -1;
  }
  const Tensor values = to_gpu(problem.values), weights = to_gpu(problem.weights);
  const Tensor map = to_gpu(problem.slot_to_permuted), expected = problem.expected();
  for (const bool failed : {false, true}) {
    for (const auto& [first, num_tokens] : {std::pair{0, 15}, {0, 10}, {3, 7}}) {
      SCOPED_TRACE(std::to_string(first) + " " + std::to_string(num_tokens));
      const Tensor word = Tensor::zeros({1}, DType::kI32);
      word.as<std::int32_t>()[0] = failed ? 1 : 0;
      const Tensor failed_word = to_gpu(word);
      std::vector<Tensor> there, wanted;
      cuda::Combine args;
      for (int t = 0; t < kTargets; ++t) {
        wanted.push_back(Tensor::empty({kEach, kHidden}, DType::kBF16));
        testing::poison(wanted.back());
        there.push_back(to_gpu(wanted.back()));
        args.targets.rows[t] = there.back().as<std::byte>();
      }
      args.targets.rows_each = kEach;
      args.targets.first_row = first;
      args.targets.failed = failed_word.as<const std::uint32_t>();
      const Tensor shape_only = Tensor::zeros({num_tokens, kHidden}, DType::kBF16, kGpu);
      args.output = shape_only;
      args.rows = values.data();
      args.split_pitch = problem.split_pitch;
      args.slot_to_permuted = map.slice(0, first * spec.topk, (first + num_tokens) * spec.topk);
      args.topk_weights = weights.as<const float>() + first * spec.topk;
      args.topk = spec.topk;
      cuda::combine(args, Stream{kGpu});
      for (std::int64_t token = first; !failed && token < first + num_tokens; ++token) {
        if (token == 6) continue;
        const TensorView row = expected.slice(0, token, token + 1);
        std::memcpy(wanted[token / kEach].as<std::uint16_t>() + token % kEach * kHidden, row.data(),
                    static_cast<std::size_t>(row.nbytes()));
      }
      for (int t = 0; t < kTargets; ++t) {
        EXPECT_TRUE(testing::bitwise_equal(to_host(there[t]), wanted[t])) << "target " << t;
      }
      EXPECT_TRUE(testing::bitwise_equal(to_host(shape_only),
                                         Tensor::zeros({num_tokens, kHidden}, DType::kBF16)));
    }
  }
}

}  // namespace
}  // namespace fusedmoe
