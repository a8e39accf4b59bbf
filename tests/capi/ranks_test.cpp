// Communicators and layers on two ranks, through the C interface.
#include <algorithm>
#include <limits>
#include <string>

#include "../ranks/processes.h"
#include "capi_ranks.h"
#include "testing/compare.h"

namespace fusedmoe::testing::ranks_test {

/// The layer is not quantized: its rows travel as they are.
TEST(CRanksTest, DispatchDtypesThatALayerDoesNotHaveAreRefused) {
  fusedmoe_communicator* made[kRanks] = {};
  const auto options = patient();
  ASSERT_OK(fusedmoe_communicator_create_threads(kRanks, &options, made));
  const Handle<fusedmoe_communicator> first(made[0]), second(made[1]);
  for (const auto& [dtype, error] :
       {std::pair(FUSEDMOE_F32, ""),
        std::pair(FUSEDMOE_E4M3, "dispatch_dtype e4m3: experts of f32 read")}) {
    on_two_threads([&, dtype = dtype, error = std::string(error)](int rank) {
      TinyLayer tiny;
      tiny.options.communicator = made[rank];
      tiny.options.max_tokens_per_rank = kTokens;
      tiny.options.dispatch_dtype = dtype;
      fusedmoe_layer* layer = nullptr;
      const fusedmoe_status status = fusedmoe_layer_create(&tiny.weights, &tiny.options, &layer);
      EXPECT_EQ(status == FUSEDMOE_OK, error.empty());
      if (status != FUSEDMOE_OK) {
        EXPECT_NE(std::string(fusedmoe_last_error()).find(error), std::string::npos);
      }
      fusedmoe_layer_destroy(layer);
    });
  }
}

TEST(CRanksTest, ThreadsGiveTheBitsOfOneRank) {
  fusedmoe_communicator* made[kRanks] = {};
  const auto options = patient();
  ASSERT_OK(fusedmoe_communicator_create_threads(kRanks, &options, made));
  const Handle<fusedmoe_communicator> first(made[0]), second(made[1]);
  expect_as_one_rank(made, "threads");
  fusedmoe_communicator_abort(made[1], "enough");
  EXPECT_EQ(fusedmoe_communicator_status(made[0]), FUSEDMOE_COMMUNICATION);
  EXPECT_STREQ(fusedmoe_last_error(), "rank 1: enough");
}

TEST(CRanksTest, RanksConnectAndMapEachOtherWhenAsked) {
  fusedmoe_communicator* made[kRanks] = {};
  const auto options = patient();
  ASSERT_OK(fusedmoe_communicator_create_threads(kRanks, &options, made));
  const Handle<fusedmoe_communicator> first(made[0]), second(made[1]);
  on_two_threads([&](int rank) {
    EXPECT_OK(fusedmoe_communicator_connect(made[rank]));
    const char* why = nullptr;
    EXPECT_OK(fusedmoe_communicator_map_peers(made[rank], 1 << 20, &why));
    EXPECT_STREQ(why, "the ranks are on CPUs");
  });
  fusedmoe_communicator* lanes[kRanks] = {};
  on_two_threads([&](int rank) {
    ASSERT_OK(fusedmoe_communicator_lane(made[rank], 1, &lanes[rank]));
    EXPECT_OK(fusedmoe_communicator_barrier(lanes[rank]));
    auto info = sized<fusedmoe_communicator_info>();
    EXPECT_OK(fusedmoe_communicator_get_info(lanes[rank], &info));
    EXPECT_EQ(info.rank, rank);
    EXPECT_EQ(info.size, kRanks);
  });
  const Handle<fusedmoe_communicator> first_lane(lanes[0]), second_lane(lanes[1]);
  fusedmoe_communicator* none = nullptr;
  EXPECT_EQ(fusedmoe_communicator_lane(made[0], 0, &none), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_communicator_lane(made[0], 1, nullptr), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_communicator_map_peers(made[0], 1, nullptr), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_communicator_connect(nullptr), FUSEDMOE_INVALID_ARGUMENT);
  fusedmoe_communicator_abort(made[1], "enough");
  EXPECT_EQ(fusedmoe_communicator_connect(made[0]), FUSEDMOE_COMMUNICATION);
  EXPECT_EQ(fusedmoe_communicator_status(lanes[0]), FUSEDMOE_COMMUNICATION);
}

TEST(CRanksTest, AnEnginesCollectiveFindsTheRanks) {
  fusedmoe_communicator* threads[kRanks] = {};
  const auto options = patient();
  // What an engine has: here two threads that swap texts.
  struct Engine {
    std::string texts[2][kRanks];  // of the two calls
    fusedmoe_communicator* meet[kRanks];
  } engine;
  ASSERT_OK(fusedmoe_communicator_create_threads(kRanks, &options, threads));
  const Handle<fusedmoe_communicator> first(threads[0]), second(threads[1]);
  std::copy_n(threads, kRanks, engine.meet);
  struct Rank {
    Engine* engine;
    int rank, calls;
  };
  fusedmoe_communicator* made[kRanks] = {};
  on_two_threads([&](int rank) {
    Rank self{&engine, rank, 0};
    auto gather = sized<fusedmoe_gather>();
    gather.context = &self;
    gather.run = [](void* context, const char* text, size_t bytes,
                    void (*give)(void*, int32_t, const char*, size_t), void* data) -> int32_t {
      auto& [shared, own, calls] = *static_cast<Rank*>(context);
      auto& texts = shared->texts[calls++];
      texts[own].assign(text, bytes);
      if (fusedmoe_communicator_barrier(shared->meet[own]) != FUSEDMOE_OK) return 1;
      for (int r = 0; r < kRanks; ++r) give(data, r, texts[r].data(), texts[r].size());
      return 0;
    };
    EXPECT_OK(fusedmoe_communicator_create(rank, kRanks, &gather, &options, &made[rank]));
  });
  const Handle<fusedmoe_communicator> zero(made[0]), one(made[1]);
  ASSERT_TRUE(zero && one);
  expect_as_one_rank(made, "tcp");
}

/// A communicator of this process, which finds the others over `control`.
Handle<fusedmoe_communicator> join(int rank, const std::shared_ptr<ControlPlane>& control,
                                   const fusedmoe_communicator_options& options) {
  Communicator engine(rank, kRanks, control, nullptr);  // gathers texts
  auto gather = sized<fusedmoe_gather>();
  gather.context = &engine;
  gather.run = [](void* context, const char* text, size_t bytes,
                  void (*give)(void*, int32_t, const char*, size_t), void* data) -> int32_t {
    const auto texts = static_cast<Communicator*>(context)->gather({text, bytes}, "a test");
    for (int r = 0; r < kRanks; ++r) give(data, r, texts[r].data(), texts[r].size());
    return 0;
  };
  fusedmoe_communicator* made = nullptr;
  EXPECT_OK(fusedmoe_communicator_create(rank, kRanks, &gather, &options, &made));
  return Handle<fusedmoe_communicator>(made);
}

TEST(CRanksTest, ProcessesShareMemoryUnlessOneDoesNot) {
  for (const bool shared : {true, false}) {
    const auto run = [&](int rank, const std::shared_ptr<ControlPlane>& control) -> std::string {
      auto options = patient();
      options.no_shared_memory = !shared && rank == 1;
      const auto communicator = join(rank, control, options);
      if (!communicator) return "no communicator";
      TinyLayer tiny;
      tiny.options.communicator = communicator.get();
      tiny.options.max_tokens_per_rank = kTokens;
      const auto layer = tiny.create();
      if (!layer) return "no layer";
      const std::string files = std::to_string(mapped_files());
      return fusedmoe_communicator_barrier(communicator.get()) == FUSEDMOE_OK
                 ? files
                 : fusedmoe_last_error();
    };
    const std::string files = shared ? "2" : "0";
    EXPECT_EQ(texts_of_processes(kRanks, run), std::vector<std::string>(kRanks, files));
  }
}

TEST(CRanksTest, PeerMemoryIsOneOfFourNumbers) {
  for (const std::int32_t value : {-2, -1, 0, 1, 2, 3}) {
    fusedmoe_communicator* made[kRanks] = {};
    auto options = patient();
    options.peer_memory = value;
    const fusedmoe_status status = fusedmoe_communicator_create_threads(kRanks, &options, made);
    const bool known = value >= -1 && value <= 2;
    EXPECT_EQ(status, known ? FUSEDMOE_OK : FUSEDMOE_INVALID_ARGUMENT) << value;
    EXPECT_EQ(made[0] != nullptr, known);
    if (!known) {
      EXPECT_NE(std::string(fusedmoe_last_error()).find("options.peer_memory"), std::string::npos);
    }
    for (fusedmoe_communicator* each : made) fusedmoe_communicator_destroy(each);
  }
}

TEST(CRanksTest, RowsThatDoNotFitAreCounted) {
  fusedmoe_communicator* made[kRanks] = {};
  const auto options = patient();
  ASSERT_OK(fusedmoe_communicator_create_threads(kRanks, &options, made));
  const Handle<fusedmoe_communicator> first(made[0]), second(made[1]);
  on_two_threads([&](int rank) {
    TinyLayer tiny;
    tiny.options.require = "cpu+all2all";
    tiny.options.communicator = made[rank];
    tiny.options.max_tokens_per_rank = kTokens;
    tiny.options.receive_capacity = 3;
    tiny.options.drop_rows = 1;
    const auto layer = tiny.create();
    // All tokens go to rank 0, which takes the first three of its own.
    const std::int64_t tokens = rank == 0 ? 4 : 2;
    const Tensor x = TinyLayer::filled({tokens, TinyLayer::kHidden}, 7);
    const Tensor output = TinyLayer::filled(x.shape(), 8);
    const Tensor ids = Tensor::zeros({tokens, TinyLayer::kTopk}, DType::kI32);
    const Tensor weights = TinyLayer::filled(ids.shape(), 9);
    const Tensor dropped = Tensor::empty({1}, DType::kI32);
    *dropped.as<std::int32_t>() = 77;
    auto args = sized<fusedmoe_forward_args>();
    Scratch scratch(layer.get(), kTokens, args);
    args.hidden_states = to_c(x);
    args.output = to_c(output);
    args.topk_ids = to_c(ids);
    args.topk_weights = to_c(weights);
    args.dropped_rows = to_c(dropped);
    EXPECT_OK(fusedmoe_layer_forward_routed(layer.get(), &args));
    EXPECT_EQ(*dropped.as<std::int32_t>(), rank == 0 ? 1 : 2);
    const Tensor nothing = Tensor::zeros({1, TinyLayer::kHidden}, DType::kF32);
    EXPECT_TRUE(bitwise_equal(output.slice(0, tokens - 1, tokens), nothing));
    EXPECT_EQ(bitwise_equal(output.slice(0, 0, 1), nothing), rank == 1);
  });
}

/// With exact sizes and with fixed ones, of which the layer's options know nothing.
TEST(CRanksTest, AForwardInThreePartsGivesTheSameBits) {
  fusedmoe_communicator* made[kRanks] = {};
  const auto options = patient();
  ASSERT_OK(fusedmoe_communicator_create_threads(kRanks, &options, made));
  const Handle<fusedmoe_communicator> first(made[0]), second(made[1]);
  on_two_threads([&](int rank) {
    TinyLayer tiny;
    tiny.options.communicator = made[rank];
    tiny.options.max_tokens_per_rank = kTokens;
    const auto layer = tiny.create();
    const Tensor x = TinyLayer::filled({kTokens - rank, TinyLayer::kHidden}, 7);
    std::size_t exact = 0, fixed = 0;
    EXPECT_OK(fusedmoe_layer_workspace_bytes(layer.get(), kTokens, &exact));
    EXPECT_OK(fusedmoe_layer_fixed_workspace_bytes(layer.get(), kTokens, &fixed));
    auto args = sized<fusedmoe_forward_args>();
    args.workspace_bytes = std::max(exact, fixed);
    const Tensor workspace =
        Tensor::empty({static_cast<std::int64_t>(args.workspace_bytes)}, DType::kU8);
    args.workspace = workspace.data();
    args.hidden_states = to_c(x);
    for (const int fixed_sizes : {0, 1}) {
      args.fixed_sizes = fixed_sizes;
      const Tensor whole = TinyLayer::filled(x.shape(), 8), parts = TinyLayer::filled(x.shape(), 9);
      args.output = to_c(whole);
      EXPECT_OK(fusedmoe_layer_forward(layer.get(), &args));
      args.output = to_c(parts);
      fusedmoe_step* step = nullptr;
      ASSERT_EQ(fusedmoe_layer_begin(layer.get(), &args, &step), FUSEDMOE_OK);
      EXPECT_NE(fusedmoe_layer_begin(layer.get(), &args, nullptr), FUSEDMOE_OK);
      EXPECT_OK(fusedmoe_step_compute(step));
      EXPECT_OK(fusedmoe_step_finish(step));
      EXPECT_TRUE(bitwise_equal(parts, whole));
      fusedmoe_step_destroy(step);
      EXPECT_NE(fusedmoe_step_finish(nullptr), FUSEDMOE_OK);
    }
  });
}

/// The others would wait for it until the deadline.
TEST(CRanksTest, ARankThatCannotLoadTellsTheOthers) {
  fusedmoe_communicator* made[kRanks] = {};
  const auto options = patient();
  ASSERT_OK(fusedmoe_communicator_create_threads(kRanks, &options, made));
  const Handle<fusedmoe_communicator> first(made[0]), second(made[1]);
  std::string errors[2][kRanks];
  on_two_threads([&](int rank) {
    TinyLayer tiny;
    tiny.options.communicator = made[rank];
    tiny.options.max_tokens_per_rank = kTokens;
    fusedmoe_layer* layer = nullptr;
    EXPECT_EQ(fusedmoe_layer_create(rank == 1 ? nullptr : &tiny.weights, &tiny.options, &layer),
              FUSEDMOE_COMMUNICATION);
    errors[0][rank] = fusedmoe_last_error();
    if (rank == 0) tiny.options.placement = "{}";
    EXPECT_EQ(fusedmoe_layer_create(&tiny.weights, &tiny.options, &layer), FUSEDMOE_COMMUNICATION);
    errors[1][rank] = fusedmoe_last_error();
    tiny.options.placement = nullptr;
    EXPECT_TRUE(tiny.create()) << "the communicator still works";
  });
  EXPECT_EQ(errors[0][0], "rank 1: weights: was NULL; must be given");
  EXPECT_EQ(errors[0][1], errors[0][0]);
  EXPECT_EQ(errors[1][0].find("rank 0: "), 0) << errors[1][0];
  EXPECT_EQ(errors[1][1], errors[1][0]);
}

TEST(CRanksTest, WrongCallsSayWhatIsWrong) {
  fusedmoe_communicator* made[kRanks] = {};
  EXPECT_EQ(fusedmoe_communicator_create_threads(0, nullptr, made), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_communicator_create_threads(2, nullptr, nullptr), FUSEDMOE_INVALID_ARGUMENT);
  auto endless = patient();
  for (const std::int64_t timeout : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::max()}) {
    endless.timeout_ms = timeout;
    EXPECT_EQ(fusedmoe_communicator_create_threads(2, &endless, made), FUSEDMOE_INVALID_ARGUMENT);
  }
  EXPECT_EQ(fusedmoe_communicator_join(2, 2, "127.0.0.1", 1, nullptr, made),
            FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_communicator_create(0, 2, nullptr, nullptr, made), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_communicator_barrier(nullptr), FUSEDMOE_INVALID_ARGUMENT);
  TinyLayer tiny;
  tiny.options.placement = "{}";
  fusedmoe_layer* layer = nullptr;
  EXPECT_EQ(fusedmoe_layer_create(&tiny.weights, &tiny.options, &layer), FUSEDMOE_INVALID_ARGUMENT);
}

}  // namespace fusedmoe::testing::ranks_test
