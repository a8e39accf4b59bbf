// What forward() is made of allocates nothing: operator new is replaced and counts.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/router.h"
#include "fusedmoe/runtime.h"
#include "testing/cases.h"

namespace {

std::atomic<std::int64_t> allocations{0};

}  // namespace

// Not inlined: else GCC sees memory from operator new go to free(), and warns of a mismatch.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}

[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace fusedmoe::allocation_test {

/// Not counted: what happens once, the choice of the instruction set and the threads that a calling
/// thread's first parallel step starts.
void warm_up() {
  cpu_isa();
  const auto nothing = [](int) {};
  default_executor().run(num_threads(), Executor::Task(nothing));
}

template <typename Call>
std::int64_t allocations_in(Call call) {
  warm_up();
  const std::int64_t before = allocations;
  call();
  return allocations - before;
}

TEST(AllocationTest, TheCounterCounts) {
  // By its name: a compiler may leave out an allocation that a new expression or a vector makes.
  EXPECT_EQ(allocations_in([] { ::operator delete(::operator new(100)); }), 1);
}

TEST(AllocationTest, Router) {
  const Tensor x = Tensor::zeros({64, 96}, DType::kBF16);
  const RouterWeights weights{Tensor::zeros({256, 96}, DType::kF32), {}, {}};
  const Tensor logits = Tensor::zeros({64, 256}, DType::kF32);
  const Tensor bias = Tensor::zeros({256}, DType::kF32);
  const Tensor ids = Tensor::zeros({64, 8}, DType::kI32);
  const Tensor topk_weights = Tensor::zeros({64, 8}, DType::kF32);
  RouterConfig config;
  config.num_experts = 256;
  config.topk = 8;
  config.scoring = ScoringFunc::kSigmoid;
  config.num_expert_group = 8;
  config.topk_group = 4;
  EXPECT_EQ(allocations_in([&] {
              router_logits(weights, x, logits);
              route(config, logits, bias, {ids, topk_weights});
            }),
            0);
}

TEST(AllocationTest, RoutingData) {
  const Tensor ids = Tensor::zeros({64, 8}, DType::kI32);
  const Tensor bitmatrix = Tensor::zeros({64, 1}, DType::kI32);
  std::vector<char> memory(routing_data_bytes(64, 8, 32));
  EXPECT_EQ(allocations_in([&] {
              build_routing_data(ids, {}, 32, memory.data(), memory.size());
              build_bitmatrix(ids, {}, 32, bitmatrix);
            }),
            0);
}

TEST(AllocationTest, KernelWithTheReferenceInBothFormats) {
  const testing::Problem problem = testing::make_problem({.num_tokens = 9, .bias = true});
  for (const char* variant : {"reference", "reference_batched"}) {
    const ModularKernel kernel =
        testing::find_variant(variant).create(testing::make_config(problem.spec, DType::kF32));
    const auto packed = kernel.experts().pack(problem.weights);
    const Tensor output = Tensor::zeros(problem.hidden_states.shape(), DType::kF32);
    ForwardArgs args;
    args.weights = packed.get();
    args.output = output;
    args.hidden_states = problem.hidden_states;
    args.topk_ids = problem.topk_ids;
    args.topk_weights = problem.topk_weights;
    const auto bytes = static_cast<std::int64_t>(kernel.workspace_bytes(9));
    const Tensor workspace = Tensor::empty({bytes}, DType::kU8);
    EXPECT_EQ(allocations_in([&] {
                kernel.apply(args, {workspace.data(), static_cast<std::size_t>(bytes)});
              }),
              0);
  }
}

}  // namespace fusedmoe::allocation_test
