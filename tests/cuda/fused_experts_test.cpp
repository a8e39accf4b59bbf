// fused_experts() while a CUDA graph records what is enqueued on its stream. Weights cannot be
// packed then, nor memory be allocated: calls that would have to are refused.
#include "../unit/error_text.h"
#include "../unit/fake_experts.h"
#include "../unit/layer_problem.h"
#include "cuda_test.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "testing/compare.h"

namespace fusedmoe {
namespace {

using testing::argument_of;
using testing::bitwise_equal;
using testing::kGpu;
using testing::make_ids;
using testing::random_tensor;
using testing::to_gpu;
using testing::to_host;

constexpr std::int64_t kTokens = 2000, kExperts = 4, kHidden = 256, kIntermediate = 128;

using CudaFusedExperts = testing::CudaTest;

/// Tensors on the GPU, and a stream that can be captured.
struct Call {
  /// Arguments for the first `num_tokens` of all.
  FusedExpertsArgs args(std::int64_t num_tokens) const {
    FusedExpertsArgs result;
    result.hidden_states = x.slice(0, 0, num_tokens);
    result.weights.w13 = w13;
    result.weights.w2 = w2;
    result.topk_ids = ids.slice(0, 0, num_tokens);
    result.topk_weights = weights.slice(0, 0, num_tokens);
    result.output = output.slice(0, 0, num_tokens);
    result.stream = stream;
    return result;
  }
  /// While a graph is recorded, makes a call that must be refused, then fills memory. The refusal
  /// must leave the graph intact: launched, it must still fill the memory.
  void expect_refused(const FusedExpertsArgs& args, PackCache& cache) const {
    const Tensor memory = Tensor::zeros({64}, DType::kU8, kGpu);
    const Graph graph(stream, [&] {
      EXPECT_EQ(argument_of([&] { fused_experts(args, cache); }), "stream");
      fill_bytes(memory, 7, stream);
    });
    graph.launch(stream);
    synchronize(stream);
    EXPECT_EQ(to_host(memory).as<const std::uint8_t>()[63], 7);
  }

  const OwnedStream stream{kGpu};
  const Tensor x = to_gpu(random_tensor(DType::kBF16, {kTokens, kHidden}, 1, 1));
  const Tensor w13 =
      to_gpu(random_tensor(DType::kBF16, {kExperts, 2 * kIntermediate, kHidden}, 0.1, 2));
  const Tensor w2 = to_gpu(random_tensor(DType::kBF16, {kExperts, kHidden, kIntermediate}, 0.1, 3));
  const Tensor ids = to_gpu(make_ids({kTokens, 1}, std::vector<std::int32_t>(kTokens, 2)));
  const Tensor weights = to_gpu(random_tensor(DType::kF32, {kTokens, 1}, 1, 4));
  const Tensor output = Tensor::empty({kTokens, kHidden}, DType::kBF16, kGpu);
};

TEST_F(CudaFusedExperts, ACaptureRefusesWhatPacksOrAllocatesAndStaysValid) {
  const Call call;
  EXPECT_FALSE(is_capturing(call.stream));
  PackCache cache;
  call.expect_refused(call.args(4), cache);
  EXPECT_EQ(cache.size(), 0u);
  fill_bytes(call.output, 0xff, call.stream);
  fused_experts(call.args(4), cache);
  synchronize(call.stream);
  const Tensor expected = to_host(call.output);
  call.expect_refused(call.args(kTokens), cache);  // more scratch memory
  const Graph graph(call.stream, [&] {
    EXPECT_TRUE(is_capturing(call.stream));
    fused_experts(call.args(4), cache);
  });
  fill_bytes(call.output, 0xff, call.stream);
  graph.launch(call.stream);
  synchronize(call.stream);
  EXPECT_TRUE(bitwise_equal(to_host(call.output), expected));
}

}  // namespace
}  // namespace fusedmoe
