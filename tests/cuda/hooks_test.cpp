// ExpertsHooks on the GPU: which tensors the callbacks get, that work which they enqueue on the
// stream (a LoRA delta, say) changes the result, and that what they throw reaches the caller.
#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_test.h"
#include "experts_problem.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/router.h"

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::Case;
using testing::expect_close;
using testing::gpu_variant;
using testing::KernelRun;
using testing::kGpu;
using testing::make_problem;
using testing::Problem;
using testing::to_gpu;
using testing::to_host;

constexpr std::array kHooks{&ExpertsHooks::after_gemm1, &ExpertsHooks::after_activation,
                            &ExpertsHooks::after_gemm2};

/// Per scheme: gated with biases, remote experts and ids of -1; and non-gated.
std::vector<Case> hook_cases() {
  std::vector<Case> cases;
  for (const QuantScheme& scheme : testing::gpu_schemes()) {
    for (const bool gated : {true, false}) {
      Case spec;
      spec.name = std::string(name(scheme)) + (gated ? "_gated" : "_plain");
      spec.num_tokens = 37;
      spec.num_experts = 9;
      spec.topk = 3;
      spec.hidden = 136;
      spec.intermediate = 72;
      spec.scheme = scheme;
      spec.activation = gated ? Activation::kSwigluOai : Activation::kGeluNoMul;
      spec.bias = gated;
      spec.expert_map = spec.negative_ids = gated;
      cases.push_back(spec);
    }
  }
  return cases;
}

class CudaHooks : public testing::CudaTestWith<Case> {
 protected:
  void SetUp() override {
    testing::CudaTestWith<Case>::SetUp();
    if (IsSkipped()) return;
    problem_ = make_problem(GetParam());
    kernel_ =
        std::make_unique<ModularKernel>(testing::make_kernel(GetParam(), gpu_variant("_unfused")));
    packed_ = kernel_->experts().pack(problem_.weights);
  }
  static DType dtype() { return testing::row_dtype(GetParam().scheme); }
  std::int64_t slots() const { return problem_.topk_ids.numel(); }
  /// Columns at the three points.
  std::array<std::int64_t, 3> widths() const {
    const Case& spec = GetParam();
    const std::int64_t gate_up = is_gated(spec.activation) ? 2 : 1;
    return {gate_up * spec.intermediate, spec.intermediate, spec.hidden};
  }

  Problem problem_;
  std::shared_ptr<const PackedWeights> packed_;
  std::unique_ptr<ModularKernel> kernel_;
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaHooks);
INSTANTIATE_TEST_SUITE_P(Cases, CudaHooks, ::testing::ValuesIn(hook_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CudaHooks, CallbacksSeeEveryStepInOrder) {
  const Case& spec = GetParam();
  const KernelRun run(problem_, *kernel_, packed_);
  const OwnedStream stream(kGpu);
  run.enqueue(stream);
  synchronize(stream);
  const Tensor expected = run.output();
  run.poison(0xff);

  std::vector<HookArgs> seen;
  Tensor offsets = Tensor::empty({packed_->info().num_experts + 1}, DType::kI32, kGpu);
  Tensor rows = Tensor::empty({slots()}, DType::kI32, kGpu);
  ExpertsHooks hooks;
  for (std::size_t step = 0; step < kHooks.size(); ++step) {
    hooks.*kHooks[step] = [&, step](const HookArgs& args) {
      EXPECT_EQ(seen.size(), step);
      seen.push_back(args);
      copy(args.expert_offsets, offsets, args.stream);
      copy(args.permuted_to_slot, rows, args.stream);
    };
  }
  run.enqueue(stream, {.hooks = &hooks});
  synchronize(stream);
  EXPECT_TRUE(bitwise_equal(run.output(), expected)) << "looking changes nothing";

  ASSERT_EQ(seen.size(), kHooks.size());
  for (std::size_t step = 0; step < seen.size(); ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const HookArgs& args = seen[step];
    EXPECT_EQ(args.stream.handle, Stream(stream).handle);
    EXPECT_EQ(args.stream.device, kGpu);
    EXPECT_EQ(args.topk, spec.topk);
    EXPECT_EQ(args.output.shape(), (Shape{slots(), widths()[step]}));
    EXPECT_EQ(args.output.dtype(), dtype());
    EXPECT_EQ(args.output.device(), kGpu);
    EXPECT_TRUE(args.output.contiguous());
    EXPECT_EQ(args.input.data(),
              step == 0 ? run.hidden_states().data() : seen[step - 1].output.data());
  }
  EXPECT_EQ(seen[0].input.shape(), run.hidden_states().shape());

  // The same rows as on the CPU; those that belong to nobody have slot -1.
  const std::int64_t experts = packed_->info().num_experts;
  std::vector<std::int32_t> memory(routing_data_bytes(spec.num_tokens, spec.topk, experts) / 4);
  const RoutingData routing = build_routing_data(problem_.topk_ids, problem_.expert_map, experts,
                                                 memory.data(), memory.size() * 4);
  EXPECT_TRUE(bitwise_equal(to_host(offsets), routing.expert_offsets));
  EXPECT_TRUE(bitwise_equal(to_host(rows), routing.permuted_to_slot));
}

/// What is added to element (slot, column) at a point: of order one, and different everywhere.
float delta(std::size_t step, std::int64_t slot, std::int64_t column) {
  return static_cast<float>((slot * 7 + column * 3 + static_cast<std::int64_t>(step)) % 11 - 5) / 4;
}

/// Adds the deltas of a point to host rows, as a kernel of the caller would.
void add_deltas(std::size_t step, const TensorView& rows, const TensorView& permuted_to_slot) {
  const std::int64_t width = rows.size(1);
  for (std::int64_t r = 0; r < rows.size(0); ++r) {
    const std::int32_t slot = permuted_to_slot.as<const std::int32_t>()[r];
    if (slot < 0) continue;
    for (std::int64_t c = r * width; c < (r + 1) * width; ++c) {
      store_f32(rows.data(), rows.dtype(), c,
                load_f32(rows.data(), rows.dtype(), c) + delta(step, slot, c - r * width));
    }
  }
}

/// The rows of the GPU are read back, changed on the host, and in the next run written in their
/// place by the hook: point by point, as each changes what the next one sees.
TEST_P(CudaHooks, WhatCallbacksEnqueueIsUsed) {
  const KernelRun run(problem_, *kernel_, packed_);
  const OwnedStream stream(kGpu);
  const Tensor slots_of_rows = Tensor::empty({slots()}, DType::kI32, kGpu);
  std::array<Tensor, 3> changed;
  for (std::size_t step = 0; step <= kHooks.size(); ++step) {
    Tensor snapshot;
    ExpertsHooks hooks;
    for (std::size_t before = 0; before < step; ++before) {
      hooks.*kHooks[before] = [&, before](const HookArgs& args) {
        copy(changed[before], args.output, args.stream);
      };
    }
    if (step < kHooks.size()) {
      snapshot = Tensor::empty({slots(), widths()[step]}, dtype(), kGpu);
      hooks.*kHooks[step] = [&](const HookArgs& args) {
        copy(args.output, snapshot, args.stream);
        copy(args.permuted_to_slot, slots_of_rows, args.stream);
      };
    }
    run.poison(0xff);
    run.enqueue(stream, {.hooks = &hooks});
    synchronize(stream);
    if (step == kHooks.size()) break;
    const Tensor rows = to_host(snapshot);
    add_deltas(step, rows, to_host(slots_of_rows));
    changed[step] = to_gpu(rows);
  }
  const Tensor actual = run.output();

  const auto expected = [&](bool with_deltas) {
    ExpertsHooks hooks;
    for (std::size_t step = 0; with_deltas && step < kHooks.size(); ++step) {
      hooks.*kHooks[step] = [step](const HookArgs& args) {
        add_deltas(step, args.output, args.permuted_to_slot);
      };
    }
    return testing::run_reference(problem_, true, {.hooks = &hooks});
  };
  expect_close(actual, expected(true));
  EXPECT_GT(testing::compare(actual, expected(false)).max_norm_relative, 0.1)
      << "the deltas are too small to tell";
}

TEST_P(CudaHooks, AGraphHoldsWhatCallbacksEnqueue) {
  const KernelRun run(problem_, *kernel_, packed_);
  const OwnedStream stream(kGpu);
  const Tensor zeros = Tensor::zeros({slots(), widths()[2]}, dtype(), kGpu);
  int calls = 0;
  ExpertsHooks hooks;
  hooks.after_gemm2 = [&](const HookArgs& args) {
    ++calls;
    copy(zeros, args.output, args.stream);
  };
  const Graph graph(stream, [&] { run.enqueue(stream, {.hooks = &hooks}); });
  for (int i = 0; i < 2; ++i) {
    run.poison(0xff);
    graph.launch(stream);
    synchronize(stream);
    // Sums of products with 0; the sign of a zero has no meaning.
    const Tensor output = run.output();
    EXPECT_EQ(testing::compare(output, Tensor::zeros(output.shape(), output.dtype())).max_element,
              0);
  }
  EXPECT_EQ(calls, 1) << "callbacks run when the graph is made";
}

TEST_P(CudaHooks, WhatTheyThrowLeavesTheOutputAlone) {
  const KernelRun run(problem_, *kernel_, packed_);
  const Tensor untouched = Tensor::empty(problem_.hidden_states.shape(), dtype());
  fill_bytes(untouched, 0xff, {});
  for (const auto hook : kHooks) {
    ExpertsHooks hooks;
    hooks.*hook = [](const HookArgs&) { throw std::runtime_error("from a hook"); };
    EXPECT_THROW(run.enqueue(Stream{kGpu}, {.hooks = &hooks}), std::runtime_error);
    synchronize(Stream{kGpu});
    EXPECT_TRUE(bitwise_equal(run.output(), untouched));
  }
  // And the memory is good for the next forward.
  const Tensor expected = KernelRun(problem_, *kernel_, packed_).run();
  EXPECT_TRUE(bitwise_equal(run.run(), expected));
}

TEST_P(CudaHooks, UnfusedExpertsAgreeWithFusedOnes) {
  const testing::Variant fused = gpu_variant(), unfused = gpu_variant("_unfused");
  // Rows of GEMM 1 are rounded to bf16 before the activation.
  expect_close(testing::run_rows(problem_, unfused), testing::run_rows(problem_, fused));
  const ExpertsHooks none;
  const testing::RunOptions options{.hooks = &none};
  EXPECT_TRUE(bitwise_equal(testing::run_rows(problem_, unfused, options),
                            testing::run_rows(problem_, unfused)));
  EXPECT_EQ(testing::argument_of([&] { testing::run_rows(problem_, fused, options); }), "hooks");
}

}  // namespace
}  // namespace fusedmoe
