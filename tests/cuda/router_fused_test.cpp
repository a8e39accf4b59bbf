// Routing of few tokens in one launch against the separate kernels, bit for bit, and against the
// CPU's router and routing data.
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "../unit/router_cases.h"
#include "cuda/device/limits.h"
#include "cuda/device/properties.h"
#include "cuda/router/fused_route.h"
#include "cuda/router/router.h"
#include "cuda/rows/permute.h"
#include "cuda_test.h"
#include "fusedmoe/error.h"
#include "fusedmoe/quant.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::kGpu;
using testing::normal_tensor;
using testing::poison;
using testing::Random;
using testing::to_gpu;
using testing::to_host;

const Stream kStream{kGpu};
constexpr std::int64_t kZeroed = 1000;

struct FusedCase {
  std::string name;
  std::int64_t num_tokens, num_experts, topk, hidden;
  ScoringFunc scoring = ScoringFunc::kSoftmax;
  DType dtype = DType::kBF16;         // of hidden states
  DType weight_dtype = DType::kBF16;  // of the router
  DType given = DType::kI32;          // of logits that are given; i32: they are computed
  bool groups = false;
  bool correction_bias = false;
  bool bias = false;
  bool map = false;          // every other expert is remote
  bool load = true;          // the histogram is asked for
  std::int64_t padding = 0;  // elements between rows of hidden states
};
void PrintTo(const FusedCase& spec, std::ostream* stream) {
  *stream << spec.name;
}

std::vector<FusedCase> fused_cases() {
  using enum ScoringFunc;
  std::vector<FusedCase> cases{
      {"gpt_oss_20b", 1, 32, 4, 2880, kTopkSoftmax, DType::kBF16, DType::kBF16, DType::kI32, false,
       false, true},
      {"gpt_oss_120b", 1, 128, 4, 2880, kTopkSoftmax, DType::kBF16, DType::kBF16, DType::kI32,
       false, false, true},
      {"qwen3_30b", 8, 128, 8, 2048, kSoftmax},
      {"deepseek_v3", 1, 256, 8, 7168, kSigmoid, DType::kBF16, DType::kF32, DType::kI32, true,
       true},
      {"deepseek_v3_16_tokens", 16, 256, 8, 7168, kSigmoid, DType::kBF16, DType::kBF16, DType::kI32,
       true, true},
      {"llama4", 3, 16, 1, 5120, kTopkSigmoid},
      {"a_cluster_of_weights", 5, 64, 6, 1024, kSoftmax, DType::kF16, DType::kF32, DType::kI32,
       false, false, true},
      {"f32_hidden_states", 2, 40, 3, 64, kSoftmax, DType::kF32, DType::kF32},
      {"mixed_dtypes", 2, 40, 3, 64, kSoftmax, DType::kF16, DType::kBF16},
      {"one_expert", 1, 1, 1, 32, kSoftmax},
      {"odd_experts", 7, 37, 5, 136, kSqrtSoftplus},
      {"three_rounds_of_tiles", 4, 300, 8, 256, kLogits},
      {"sixteen_tokens", 16, 32, 4, 2880, kTopkSoftmax, DType::kF16, DType::kF16},
      {"seventeen_tokens", 17, 32, 4, 2880, kTopkSoftmax},
      {"most_tokens", 32, 64, 16, 720, kSigmoid},
      {"topk_64", 8, 256, 64, 512, kSoftmax},
      {"row_stride", 9, 64, 4, 720, kSoftmax, DType::kBF16, DType::kBF16, DType::kI32, false, false,
       false, false, true, 24},
      {"expert_map", 6, 96, 6, 512, kSigmoid, DType::kBF16, DType::kBF16, DType::kI32, false, true,
       false, true, false},
  };
  for (const DType given : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::int64_t num_tokens : {1, 13, 32}) {
      FusedCase spec{"", num_tokens, 128, 8, 1024, kSoftmax};
      spec.given = given;
      spec.groups = num_tokens == 13;
      spec.map = num_tokens == 32;
      spec.name = "given_" + std::string(name(given)) + "_" + std::to_string(num_tokens);
      cases.push_back(spec);
    }
  }
  return cases;
}

RouterConfig config_of(const FusedCase& spec) {
  RouterConfig config;
  config.num_experts = spec.num_experts;
  config.topk = spec.topk;
  config.scoring = spec.scoring;
  config.renormalize = spec.num_tokens % 2 == 1;
  config.routed_scaling_factor = spec.groups ? 2.5F : 1.0F;
  config.num_expert_group = spec.groups ? 8 : 0;
  config.topk_group = spec.groups ? 4 : 0;
  return config;
}

Tensor poisoned(const Shape& shape, DType dtype) {
  const Tensor tensor = Tensor::empty(shape, dtype, kGpu);
  poison(tensor);
  return tensor;
}

/// Inputs on the GPU.
struct Inputs {
  FusedCase spec;
  RouterConfig config;
  std::int64_t num_local_experts;
  Tensor memory, hidden_states, weight, bias, correction_bias, given, map;

  explicit Inputs(const FusedCase& wanted, std::uint64_t seed)
      : spec(wanted), config(config_of(wanted)), num_local_experts(wanted.num_experts) {
    memory = to_gpu(normal_tensor({spec.num_tokens, spec.hidden + spec.padding}, spec.dtype, seed));
    hidden_states = Tensor(memory.slice(1, 0, spec.hidden), memory.owner());
    weight = to_gpu(normal_tensor({spec.num_experts, spec.hidden}, spec.weight_dtype, seed + 1));
    if (spec.bias) bias = to_gpu(normal_tensor({spec.num_experts}, DType::kBF16, seed + 2));
    if (spec.correction_bias) {
      correction_bias = to_gpu(normal_tensor({spec.num_experts}, DType::kF32, seed + 3));
    }
    if (is_given()) {
      given = to_gpu(normal_tensor({spec.num_tokens, spec.num_experts}, spec.given, seed + 4));
    }
    if (!spec.map) return;
    num_local_experts = (spec.num_experts + 1) / 2;
    const Tensor host = Tensor::empty({spec.num_experts}, DType::kI32);
    for (std::int64_t e = 0; e < spec.num_experts; ++e) {
      host.as<std::int32_t>()[e] =
          e % 2 == 1 ? -1 : static_cast<std::int32_t>(num_local_experts - 1 - e / 2);
    }
    map = to_gpu(host);
  }
  bool is_given() const { return spec.given != DType::kI32; }
  std::int64_t row_bytes() const { return bytes(spec.dtype, spec.hidden); }
};

/// Everything that routing writes, on the GPU and poisoned.
struct Results {
  Tensor logits, ids, weights, load, routing_data, zeroed, permuted;

  explicit Results(const Inputs& in) {
    const FusedCase& spec = in.spec;
    const std::int64_t slots = spec.num_tokens * spec.topk;
    logits = poisoned({spec.num_tokens, spec.num_experts}, DType::kF32);
    ids = poisoned({spec.num_tokens, spec.topk}, DType::kI32);
    weights = poisoned({spec.num_tokens, spec.topk}, DType::kF32);
    load = to_gpu(Tensor::zeros({spec.num_experts}, DType::kI32));  // the histogram is added
    routing_data = poisoned({2 * in.num_local_experts + 1 + 2 * slots}, DType::kI32);
    zeroed = poisoned({kZeroed + 1}, DType::kI32);
    permuted = poisoned({slots, spec.hidden}, spec.dtype);
  }
  cuda::RoutingDataExtras extras(const Inputs& in) const {
    cuda::RoutingDataExtras extras;
    extras.zeroed = zeroed.as<std::int32_t>();
    extras.num_zeroed = kZeroed;
    extras.rows = copy_of(in, permuted);
    return extras;
  }
  static cuda::RowTransform copy_of(const Inputs& in, const Tensor& to) {
    cuda::RowTransform rows;
    rows.rows = in.hidden_states.data();
    rows.row_pitch = bytes(in.spec.dtype, in.hidden_states.stride(0));
    rows.to = to.data();
    rows.row_bytes = rows.to_pitch = in.row_bytes();
    return rows;
  }
  std::vector<Tensor> on_host() const {
    return {to_host(logits),       to_host(ids),    to_host(weights), to_host(load),
            to_host(routing_data), to_host(zeroed), to_host(permuted)};
  }
};

RoutingData run_fused(const Inputs& in, const Results& out) {
  cuda::FusedRoute args;
  args.config = &in.config;
  if (!in.is_given()) {
    args.weight = in.weight;
    args.bias = in.bias;
    args.hidden_states = in.hidden_states;
  }
  args.logits = in.is_given() ? in.given : out.logits;
  args.correction_bias = in.correction_bias;
  args.out = {out.ids, out.weights};
  if (in.spec.load) args.expert_load = out.load;
  args.expert_map = in.map;
  args.num_local_experts = in.num_local_experts;
  args.routing_data = out.routing_data.data();
  args.extras = out.extras(in);
  return cuda::fused_route(args, kStream);
}

void run_separate(const Inputs& in, const Results& out) {
  if (!in.is_given()) {
    cuda::router_logits(in.weight, in.bias, in.hidden_states, out.logits, kStream);
  }
  cuda::route(in.config, in.is_given() ? in.given : out.logits, in.correction_bias,
              {out.ids, out.weights}, in.spec.load ? TensorView(out.load) : TensorView(), kStream);
  cuda::build_routing_data(out.ids, in.map, in.num_local_experts, out.routing_data.data(),
                           out.extras(in), kStream);
}

class CudaRouterFused : public testing::CudaTestWith<FusedCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, CudaRouterFused, ::testing::ValuesIn(fused_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CudaRouterFused, EqualsTheSeparateKernels) {
  const Inputs in(GetParam(), 1);
  ASSERT_TRUE(
      cuda::may_fuse(in.config, in.spec.num_tokens, in.num_local_experts, cuda::limits_of(kGpu)));
  const Results fused(in), separate(in);
  run_fused(in, fused);
  run_separate(in, separate);
  const std::vector<Tensor> actual = fused.on_host(), expected = separate.on_host();
  const std::array names{"logits",       "ids",    "weights",      "load",
                         "routing data", "zeroed", "permuted rows"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(actual[i], expected[i])) << names[i];
  }
}

TEST_P(CudaRouterFused, EqualsTheCpu) {
  const Inputs in(GetParam(), 2);
  const FusedCase& spec = in.spec;
  const Results out(in);
  run_fused(in, out);
  // The CPU's choice from the same logits: those of the GPU are another order of the same sum.
  const Tensor source = to_host(in.is_given() ? in.given : out.logits);
  const Tensor logits = Tensor::empty(source.shape(), DType::kF32);
  for (std::int64_t i = 0; i < logits.numel(); ++i) {
    logits.as<float>()[i] = load_f32(source.data(), source.dtype(), i);
  }
  const Tensor bias = in.correction_bias ? to_host(in.correction_bias) : Tensor();
  const Tensor map = in.map ? to_host(in.map) : Tensor();
  const Tensor ids = Tensor::empty({spec.num_tokens, spec.topk}, DType::kI32);
  const Tensor weights = Tensor::empty({spec.num_tokens, spec.topk}, DType::kF32);
  route(in.config, logits, bias, {ids, weights});
  EXPECT_TRUE(bitwise_equal(to_host(out.ids), ids));
  const Tensor actual_weights = to_host(out.weights);
  for (std::int64_t i = 0; i < weights.numel(); ++i) {
    const float weight = weights.as<float>()[i];
    ASSERT_NEAR(actual_weights.as<float>()[i], weight, 1e-6 * std::abs(weight) + 1e-30)
        << "slot " << i;  // the last bits of exp and log1p
  }

  std::vector<std::int32_t> routing(static_cast<std::size_t>(out.routing_data.numel()));
  const std::size_t routing_bytes = routing.size() * sizeof(std::int32_t);
  const RoutingData data =
      build_routing_data(ids, map, in.num_local_experts, routing.data(), routing_bytes);
  EXPECT_EQ(0, std::memcmp(to_host(out.routing_data).data(), routing.data(), routing_bytes));

  std::vector<std::int32_t> load(static_cast<std::size_t>(spec.num_experts));
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    ++load[static_cast<std::size_t>(ids.as<const std::int32_t>()[i])];
  }
  const Tensor actual_load = to_host(out.load), zeroed = to_host(out.zeroed);
  const auto* counts = actual_load.as<const std::int32_t>();
  if (spec.load) {
    EXPECT_EQ(std::vector<std::int32_t>(counts, counts + spec.num_experts), load);
  }
  const auto* words = zeroed.as<const std::int32_t>();
  EXPECT_EQ(std::vector<std::int32_t>(words, words + kZeroed),
            std::vector<std::int32_t>(kZeroed, 0));
  EXPECT_NE(words[kZeroed], 0) << "written behind the counters";

  const Tensor permuted = to_host(out.permuted), hidden_states = to_host(in.memory);
  const auto row_bytes = static_cast<std::size_t>(in.row_bytes());
  const std::size_t pitch = static_cast<std::size_t>(bytes(spec.dtype, in.memory.size(1)));
  const std::int64_t rows = data.expert_offsets.as<const std::int32_t>()[in.num_local_experts];
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t token = data.permuted_to_slot.as<const std::int32_t>()[row] / spec.topk;
    ASSERT_EQ(0, std::memcmp(permuted.as<char>() + static_cast<std::size_t>(row) * row_bytes,
                             hidden_states.as<char>() + static_cast<std::size_t>(token) * pitch,
                             row_bytes))
        << "row " << row;
  }
}

/// A kernel that overlaps this one waits for all that it writes: the rows are permuted again, from
/// routing data that changes with every round.
TEST_P(CudaRouterFused, TheNextKernelWaits) {
  const Inputs first(GetParam(), 3), second(GetParam(), 4);
  const Results out(first);
  const FusedCase& spec = first.spec;
  const Tensor again = poisoned(out.permuted.shape(), spec.dtype);
  for (int round = 0; round < 20; ++round) {
    const Inputs& in = round % 2 == 0 ? first : second;
    const RoutingData data = run_fused(in, out);
    cuda::PermuteRows permute;
    permute.rows = Results::copy_of(in, again);
    permute.slot_to_row = data.slot_to_permuted.as<const std::int32_t>();
    permute.num_tokens = spec.num_tokens;
    permute.topk = spec.topk;
    cuda::permute_rows(permute, kStream);
  }
  EXPECT_TRUE(bitwise_equal(to_host(again), to_host(out.permuted)));
}

// Needs no device: nothing is launched.
TEST(CudaRouterFusedSizesTest, ManyTokensAreForTheSeparateKernels) {
  FusedCase spec{"", 1, 128, 8, 2048};
  RouterConfig config = config_of(spec);
  const cuda::DeviceLimits device = cuda::limits_of_capability(90);
  const auto may_fuse = [&](std::int64_t num_tokens, std::int64_t num_local_experts) {
    return cuda::may_fuse(config, num_tokens, num_local_experts, device);
  };
  EXPECT_FALSE(may_fuse(0, 128));
  EXPECT_TRUE(may_fuse(1, 128));
  EXPECT_TRUE(may_fuse(32, 128));
  EXPECT_FALSE(may_fuse(33, 128));
  config.topk = 17;  // 32 tokens: more than 512 slots
  EXPECT_FALSE(may_fuse(32, 128));
  config.topk = 8;
  config.num_experts = 2048;
  EXPECT_TRUE(may_fuse(1, 256));
  EXPECT_FALSE(may_fuse(16, 256));
  EXPECT_FALSE(may_fuse(1, 4096));
  config.num_experts = 4096;
  EXPECT_FALSE(may_fuse(1, 256));
  config = config_of(spec);
  config.custom = [](const TensorView&, const TensorView&, const TensorView&) {};
  EXPECT_FALSE(may_fuse(1, 128));
}

}  // namespace
}  // namespace fusedmoe
