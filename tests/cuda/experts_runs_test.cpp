// How the experts run: captured and replayed, on several streams and threads, in exactly the
// memory they planned whatever it holds.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda_test.h"
#include "experts_problem.h"
#include "fusedmoe/modular_kernel.h"

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::Case;
using testing::gpu_variant;
using testing::KernelRun;
using testing::kGpu;
using testing::make_problem;
using testing::Problem;
using testing::RoutingSkew;
using testing::to_gpu;
using testing::to_host;

struct Implementation {
  QuantScheme scheme;
  std::string suffix;
};
void PrintTo(const Implementation& each, std::ostream* stream) {
  *stream << name(each.scheme) << each.suffix;
}

std::vector<Implementation> implementations() {
  std::vector<Implementation> all;
  for (const QuantScheme& scheme : testing::gpu_schemes()) {
    for (const char* suffix : {"", "_batch_invariant", "_batched", "_unfused"}) {
      all.push_back({scheme, suffix});
    }
  }
  return all;
}

/// A kernel and packed weights, and problems for them.
class CudaExpertsRuns : public testing::CudaTestWith<Implementation> {
 protected:
  void SetUp() override {
    testing::CudaTestWith<Implementation>::SetUp();
    if (IsSkipped()) return;
    kernel_ = std::make_unique<ModularKernel>(
        testing::make_kernel(spec(1), gpu_variant(GetParam().suffix)));
    packed_ = kernel_->experts().pack(make_problem(spec(1)).weights);
  }
  /// Sizes that end inside tiles and packed blocks. Weights depend on the seed of hidden states
  /// too, so only those of spec(1) are packed.
  static Case spec(std::int64_t num_tokens, std::uint64_t seed = 1,
                   RoutingSkew skew = RoutingSkew::kBalanced) {
    Case result;
    result.num_tokens = num_tokens;
    result.num_experts = 12;
    result.topk = 3;
    result.hidden = 296;
    result.intermediate = 104;
    result.scheme = GetParam().scheme;
    result.activation = Activation::kSwigluOai;
    result.bias = true;
    result.negative_ids = seed % 2 == 0;
    result.skew = skew;
    result.seed = seed;
    return result;
  }
  KernelRun make_run(const Problem& problem) const { return {problem, *kernel_, packed_}; }

  std::unique_ptr<ModularKernel> kernel_;
  std::shared_ptr<const PackedWeights> packed_;
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaExpertsRuns);
INSTANTIATE_TEST_SUITE_P(All, CudaExpertsRuns, ::testing::ValuesIn(implementations()),
                         [](const auto& info) {
                           return std::string(name(info.param.scheme)) + info.param.suffix;
                         });

TEST_P(CudaExpertsRuns, AGraphReadsWhatIsThereWhenItRuns) {
  for (const std::int64_t num_tokens : {1, 33, 700}) {
    SCOPED_TRACE(num_tokens);
    const Problem first = make_problem(spec(num_tokens));
    const KernelRun run = make_run(first);
    const Tensor expected = run.run();
    const OwnedStream stream(kGpu);
    run.poison(0xff);
    const Graph graph(stream, [&] { run.enqueue(stream); });
    for (int launch = 0; launch < 3; ++launch) {
      run.poison(launch == 1 ? 0x00 : 0xff);
      graph.launch(stream);
      synchronize(stream);
      EXPECT_TRUE(bitwise_equal(run.output(), expected)) << "launch " << launch;
    }
    // Other ids, weights and hidden states in place: from few experts to all and back, so that the
    // number of tiles differs from that of the capture.
    const Problem others[] = {make_problem(spec(num_tokens, 2, RoutingSkew::kOneExpert)),
                              make_problem(spec(num_tokens, 3, RoutingSkew::kZipf)),
                              make_problem(spec(num_tokens, 4, RoutingSkew::kSparse)), first};
    for (const Problem& other : others) {
      run.set(other);
      run.poison(0xff);
      graph.launch(stream);
      synchronize(stream);
      EXPECT_TRUE(bitwise_equal(run.output(), make_run(other).run())) << "seed " << other.spec.seed;
    }
    EXPECT_TRUE(bitwise_equal(run.output(), expected)) << "the first inputs again";
  }
}

TEST_P(CudaExpertsRuns, WhatTheWorkspaceHeldDoesNotMatter) {
  for (const std::int64_t num_tokens : {1, 17, 300}) {
    const KernelRun run = make_run(make_problem(spec(num_tokens)));
    const Tensor expected = run.run();
    for (const std::uint8_t value : {0x00, 0x7f, 0x80, 0x01}) {
      run.poison(value);
      EXPECT_TRUE(bitwise_equal(run.run(), expected)) << num_tokens << " tokens, " << int{value};
    }
    // What a run leaves behind, counters for example.
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(bitwise_equal(run.run(), expected)) << "again";
  }
}

TEST_P(CudaExpertsRuns, StreamsDoNotDisturbEachOther) {
  const KernelRun runs[] = {make_run(make_problem(spec(400))), make_run(make_problem(spec(5, 2))),
                            make_run(make_problem(spec(64, 3)))};
  std::vector<Tensor> expected;
  std::vector<OwnedStream> streams;
  for (const KernelRun& run : runs) {
    expected.push_back(run.run());
    streams.emplace_back(kGpu);
    run.poison(0xff);
  }
  for (int i = 0; i < 30; ++i) {
    for (std::size_t r = 0; r < std::size(runs); ++r) runs[r].enqueue(streams[r]);
  }
  for (const OwnedStream& stream : streams) synchronize(stream);
  for (std::size_t r = 0; r < std::size(runs); ++r) {
    EXPECT_TRUE(bitwise_equal(runs[r].output(), expected[r])) << "stream " << r;
  }
}

TEST_P(CudaExpertsRuns, ThreadsDoNotDisturbEachOther) {
  constexpr int kThreads = 4;
  std::vector<KernelRun> runs;
  std::vector<Tensor> expected;
  for (int t = 0; t < kThreads; ++t) {
    runs.push_back(make_run(make_problem(spec(1 + 60 * t, static_cast<std::uint64_t>(t) + 1))));
    expected.push_back(runs.back().run());
    runs.back().poison(0xff);
  }
  std::atomic<int> failures = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        const OwnedStream stream(kGpu);
        for (int i = 0; i < 25; ++i) runs[static_cast<std::size_t>(t)].enqueue(stream);
        synchronize(stream);
      } catch (const std::exception&) {
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  for (std::size_t t = 0; t < kThreads; ++t) {
    EXPECT_TRUE(bitwise_equal(runs[t].output(), expected[t])) << "thread " << t;
  }
}

// One after the other without a wait, the second forward reads what the first wrote.
TEST_P(CudaExpertsRuns, ForwardsOfOneStreamAreOrdered) {
  const KernelRun run = make_run(make_problem(spec(50)));
  const Tensor once = run.run();
  const Tensor start = to_gpu(to_host(run.hidden_states()));
  const OwnedStream stream(kGpu);
  const auto chain = [&](bool wait) {
    copy(start, run.hidden_states(), stream);
    for (int i = 0; i < 8; ++i) {
      run.enqueue(stream);
      copy(run.output_view(), run.hidden_states(), stream);
      if (wait) synchronize(stream);
    }
    synchronize(stream);
    return run.output();
  };
  const Tensor expected = chain(true);
  EXPECT_FALSE(bitwise_equal(expected, once)) << "the chain changes nothing";
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(bitwise_equal(chain(false), expected));
}

TEST_P(CudaExpertsRuns, WorkspacesGrowWithTheTokens) {
  Case large = spec(1);
  large.num_experts = 32;
  large.topk = 4;
  large.hidden = large.intermediate = 2880;
  const auto experts = testing::make_experts(large, gpu_variant(GetParam().suffix));
  std::size_t before = 0;
  for (std::int64_t num_tokens = 0; num_tokens <= 2000; ++num_tokens) {
    const ProblemSize problem = ProblemSize::of(experts->config(), num_tokens);
    const WorkspaceSizes sizes = experts->workspace_sizes(problem);
    const std::size_t bytes = sizes.common_bytes() + sizes.workspace2_bytes;
    ASSERT_GE(bytes, before) << num_tokens << " tokens";
    before = bytes;
  }
}

}  // namespace
}  // namespace fusedmoe
