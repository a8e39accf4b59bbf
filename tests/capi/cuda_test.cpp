// The C interface on a GPU: device pointers, a stream and a graph of the caller's.
#include <dlfcn.h>

#include "../unit/temporary_directory.h"
#include "capi_ranks.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "testing/compare.h"

namespace fusedmoe::testing::cuda_test {

Tensor bf16(const Tensor& values) {
  Tensor result = Tensor::empty(values.shape(), DType::kBF16);
  convert(values, result);
  return result;
}

TEST(CCudaTest, AForwardOnAStreamAndInAGraph) {
  const std::string problem = fusedmoe_device_problem(FUSEDMOE_CUDA, 0);
  if (!problem.empty()) GTEST_SKIP() << problem;
  TinyLayer tiny;
  const Tensor w13 = bf16(tiny.w13), w2 = bf16(tiny.w2);
  tiny.experts.w13 = to_c(w13);
  tiny.experts.w2 = to_c(w2);
  tiny.options.dtype = FUSEDMOE_BF16;
  const auto on_cpu = tiny.create();
  tiny.options.device_type = FUSEDMOE_CUDA;
  const auto layer = tiny.create();

  const Device gpu{DeviceKind::kCuda, 0};
  const Tensor x = bf16(TinyLayer::filled({kTokens, TinyLayer::kHidden}, 7));
  const Tensor expected = Tensor::zeros(x.shape(), DType::kBF16);
  auto args = sized<fusedmoe_forward_args>();
  args.hidden_states = to_c(x);
  args.output = to_c(expected);
  const Scratch host_scratch(on_cpu.get(), kTokens, args);
  ASSERT_OK(fusedmoe_layer_forward(on_cpu.get(), &args));
  EXPECT_EQ(fusedmoe_layer_forward(layer.get(), &args), FUSEDMOE_INVALID_ARGUMENT);

  const Tensor input = to_device(x, gpu), output = to_device(x, gpu);
  ASSERT_OK(fusedmoe_layer_workspace_bytes(layer.get(), kTokens, &args.workspace_bytes));
  const Tensor scratch =
      Tensor::empty({static_cast<std::int64_t>(args.workspace_bytes)}, DType::kU8, gpu);
  const OwnedStream owned(gpu);
  const Stream stream = owned;
  args.hidden_states = to_c(input);
  args.output = to_c(output);
  args.workspace = scratch.data();
  args.stream = stream.handle;
  ASSERT_OK(fusedmoe_layer_forward(layer.get(), &args));
  synchronize(stream);
  EXPECT_LE(compare(to_device(output, {}), expected).max_norm_relative, 2e-2);

  const Graph graph(stream, [&] { EXPECT_OK(fusedmoe_layer_forward(layer.get(), &args)); });
  copy(Tensor::zeros(x.shape(), DType::kBF16), output, stream);
  graph.launch(stream);
  synchronize(stream);
  EXPECT_LE(compare(to_device(output, {}), expected).max_norm_relative, 2e-2);
}

/// Two ranks on one GPU, driven by one thread: two micro-batches are in flight on two streams.
TEST(CCudaTest, LanesOverlap) {
  const std::string problem = fusedmoe_device_problem(FUSEDMOE_CUDA, 0);
  if (!problem.empty()) GTEST_SKIP() << problem;
  constexpr int kRanks = 2, kLanes = 2;
  const Device gpu{DeviceKind::kCuda, 0};
  fusedmoe_communicator* made[kRanks] = {};
  auto meeting = sized<fusedmoe_communicator_options>();
  meeting.timeout_ms = 60000;
  meeting.device_type = FUSEDMOE_CUDA;
  meeting.peer_memory = 2;
  ASSERT_OK(fusedmoe_communicator_create_threads(kRanks, &meeting, made));
  const Handle<fusedmoe_communicator> first(made[0]), second(made[1]);
  std::vector<Handle<fusedmoe_layer>> layers(kRanks);
  on_two_threads([&](int rank) {
    TinyLayer tiny;
    const Tensor w13 = bf16(tiny.w13), w2 = bf16(tiny.w2);
    tiny.experts.w13 = to_c(w13);
    tiny.experts.w2 = to_c(w2);
    tiny.options.dtype = FUSEDMOE_BF16;
    tiny.options.device_type = FUSEDMOE_CUDA;
    tiny.options.communicator = made[rank];
    tiny.options.max_tokens_per_rank = kTokens;
    tiny.options.lanes = kLanes;
    layers[rank] = tiny.create();
  });
  ASSERT_TRUE(layers[0] && layers[1]);
  std::vector<OwnedStream> streams;
  std::vector<fusedmoe_forward_args> args;
  std::vector<Tensor> kept, outputs, expected;
  for (int lane = 0; lane < kLanes; ++lane) {
    streams.emplace_back(gpu);
    for (int rank = 0; rank < kRanks; ++rank) {
      auto& own = args.emplace_back(sized<fusedmoe_forward_args>());
      kept.push_back(
          to_device(bf16(TinyLayer::filled({kTokens, TinyLayer::kHidden}, 10 * lane + rank)), gpu));
      outputs.push_back(Tensor::empty(kept.back().shape(), DType::kBF16, gpu));
      own.hidden_states = to_c(kept.back());
      own.output = to_c(outputs.back());
      ASSERT_OK(fusedmoe_layer_workspace_bytes(layers[rank].get(), kTokens, &own.workspace_bytes));
      kept.push_back(
          Tensor::empty({static_cast<std::int64_t>(own.workspace_bytes)}, DType::kU8, gpu));
      own.workspace = kept.back().data();
      own.stream = Stream(streams.back()).handle;
      own.lane = lane;
    }
  }
  synchronize(Stream{gpu});
  /// Those of both lanes at once, or one lane behind the other.
  const auto run = [&](std::size_t begin, std::size_t end) {
    std::vector<fusedmoe_step*> steps(end - begin);
    for (std::size_t i = begin; i < end; ++i) {
      ASSERT_OK(fusedmoe_layer_begin(layers[i % kRanks].get(), &args[i], &steps[i - begin]));
    }
    for (fusedmoe_step* step : steps) EXPECT_OK(fusedmoe_step_compute(step));
    for (fusedmoe_step* step : steps) EXPECT_OK(fusedmoe_step_finish(step));
    for (fusedmoe_step* step : steps) fusedmoe_step_destroy(step);
    for (const OwnedStream& stream : streams) synchronize(stream);
  };
  run(0, kRanks);
  run(kRanks, kRanks * kLanes);
  for (const Tensor& output : outputs) expected.push_back(to_device(output, {}));
  run(0, kRanks * kLanes);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(to_device(outputs[i], {}), expected[i])) << i;
  }
}

/// One rank suffices to see that the communicator is made of what the caller brings.
TEST(CCudaTest, ARankBringsItsNccl) {
  const std::string problem = fusedmoe_device_problem(FUSEDMOE_CUDA, 0);
  if (!problem.empty()) GTEST_SKIP() << problem;
  const NcclInfo nccl = nccl_info();
  if (!nccl.problem.empty()) GTEST_SKIP() << nccl.problem;
  struct UniqueId {
    char bytes[FUSEDMOE_NCCL_UNIQUE_ID_BYTES];
  };
  using Comm = void*;
  void* const library = dlopen(nccl.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_TRUE(library) << dlerror();
  const auto init =
      reinterpret_cast<int (*)(Comm*, int, UniqueId, int)>(dlsym(library, "ncclCommInitRank"));
  const auto destroy = reinterpret_cast<int (*)(Comm)>(dlsym(library, "ncclCommDestroy"));
  const CurrentDevice current({DeviceKind::kCuda, 0});
  UniqueId ids[2];
  for (UniqueId& id : ids) ASSERT_OK(fusedmoe_make_nccl_unique_id(&id, sizeof id));
  Comm comm = nullptr;
  ASSERT_EQ(init(&comm, 1, ids[0], 0), 0);
  auto options = sized<fusedmoe_communicator_options>();
  options.device_type = FUSEDMOE_CUDA;
  auto gather = sized<fusedmoe_gather>();
  gather.run = [](void*, const char* text, size_t bytes,
                  void (*give)(void*, int32_t, const char*, size_t), void* data) -> int32_t {
    give(data, 0, text, bytes);
    return 0;
  };
  for (const bool has_comm : {true, false}) {
    auto at = sized<fusedmoe_rendezvous>();
    at.gather = &gather;
    at.nccl_comm = has_comm ? comm : nullptr;
    at.nccl_unique_id = has_comm ? nullptr : &ids[1];
    fusedmoe_communicator* made = nullptr;
    ASSERT_OK(fusedmoe_communicator_create_at(0, 1, &at, &options, &made));
    const Handle<fusedmoe_communicator> communicator(made);
    auto info = sized<fusedmoe_communicator_info>();
    EXPECT_OK(fusedmoe_communicator_get_info(made, &info));
    EXPECT_STREQ(info.backend, "nccl");
    EXPECT_OK(fusedmoe_communicator_barrier(made));
  }
  // The caller's communicator is the one that is asked: it has one rank.
  const TemporaryDirectory folder;
  auto at = sized<fusedmoe_rendezvous>();
  at.folder = folder.path().c_str();
  at.nccl_comm = comm;
  fusedmoe_communicator* made = nullptr;
  EXPECT_EQ(fusedmoe_communicator_create_at(1, 2, &at, &options, &made), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_STREQ(fusedmoe_last_error(),
               "nccl_comm: was rank 0 of 1 on GPU 0; must be rank 1 of 2 on GPU 0");
  EXPECT_EQ(destroy(comm), 0);  // still the caller's
}

}  // namespace fusedmoe::testing::cuda_test
