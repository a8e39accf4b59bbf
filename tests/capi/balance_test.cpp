// Loads, balanced placements, experts that move and layers of survivors, through the C interface.
#include <string>

#include "capi_ranks.h"

namespace fusedmoe::testing::balance_test {

constexpr const char* kApart =
    R"({"num_experts":4,"num_ranks":2,"physical_to_logical":[0,1,2,3],"rank_of":[0,1,0,1]})";
constexpr const char* kAll =
    R"({"num_experts":4,"num_ranks":1,"physical_to_logical":[3,2,1,0],"rank_of":[0,0,0,0]})";

struct Communicators {
  fusedmoe_communicator* made[kRanks] = {};
  Handle<fusedmoe_communicator> first, second;
  Communicators() {
    const auto options = patient();
    EXPECT_OK(fusedmoe_communicator_create_threads(kRanks, &options, made));
    first.reset(made[0]);
    second.reset(made[1]);
  }
};

Handle<fusedmoe_layer> create_on(fusedmoe_communicator* communicator) {
  TinyLayer tiny;
  tiny.options.communicator = communicator;
  tiny.options.max_tokens_per_rank = kTokens;
  tiny.options.combine = 2;
  return tiny.create();
}

/// Every rank has all tokens, and fills `load` if it is given.
void expect_as_alone(const fusedmoe_layer* layer, const Tensor& load = {}) {
  const TinyLayer tiny;
  const Tensor x = TinyLayer::filled({kTokens, TinyLayer::kHidden}, 7);
  const Tensor output = Tensor::zeros(x.shape(), DType::kF32);
  auto args = sized<fusedmoe_forward_args>();
  const Scratch scratch(layer, kTokens, args);
  args.hidden_states = to_c(x);
  args.output = to_c(output);
  args.expert_load = to_c(load);
  EXPECT_OK(fusedmoe_layer_forward(layer, &args));
  EXPECT_TRUE(bitwise_equal(output, forward_alone(tiny)));
}

std::string placement_of(const fusedmoe_layer* layer) {
  const char* placement = nullptr;
  EXPECT_OK(fusedmoe_layer_placement(layer, &placement));
  return placement ? placement : "none";
}

TEST(CBalanceTest, LoadsOfAllRanksBecomeAMove) {
  const Communicators comms, over;
  on_two_threads([&](int rank) {
    const auto layer = create_on(comms.made[rank]);
    fusedmoe_load_window* made = nullptr;
    ASSERT_OK(fusedmoe_load_window_create(2, 4, 3, &made));
    const Handle<fusedmoe_load_window> window(made);
    const Tensor load = Tensor::zeros({4}, DType::kI32);
    const fusedmoe_tensor c_load = to_c(load);
    for (int step = 0; step < 4; ++step) {
      expect_as_alone(layer.get(), load);
      EXPECT_OK(fusedmoe_load_window_add(window.get(), 1, &c_load));
    }
    double own[8], all[8];
    EXPECT_OK(fusedmoe_load_window_get(window.get(), nullptr, own, 8));
    EXPECT_OK(fusedmoe_load_window_get(window.get(), comms.made[rank], all, 8));
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(own[i], i < 4 ? 0 : 3 * load.as<std::int32_t>()[i - 4]);
      EXPECT_EQ(all[i], kRanks * own[i]);
    }
    EXPECT_EQ(fusedmoe_load_window_get(window.get(), nullptr, own, 7), FUSEDMOE_INVALID_ARGUMENT);

    const std::string now = placement_of(layer.get());
    const char* placements[] = {now.c_str()};
    auto options = sized<fusedmoe_balance_options>();
    options.num_ranks = kRanks;
    options.placements = placements;
    options.num_placements = 1;
    fusedmoe_balanced* result = nullptr;
    ASSERT_OK(fusedmoe_balance(all, 2, 4, &options, &result));
    const Handle<fusedmoe_balanced> balanced(result);
    auto values = sized<fusedmoe_balanced_layer>();
    EXPECT_OK(fusedmoe_balanced_get(balanced.get(), 1, &values));
    EXPECT_GE(values.before, values.after);
    EXPECT_GE(values.after, 1);
    EXPECT_EQ(fusedmoe_balanced_get(balanced.get(), 2, &values), FUSEDMOE_INVALID_ARGUMENT);
    EXPECT_OK(fusedmoe_layer_start_move(layer.get(), values.placement));
    expect_as_alone(layer.get());
    EXPECT_OK(fusedmoe_layer_commit_move(layer.get()));
    EXPECT_EQ(placement_of(layer.get()), values.placement);
    expect_as_alone(layer.get());

    EXPECT_OK(fusedmoe_layer_start_move_over(layer.get(), kApart, over.made[rank]));
    EXPECT_OK(fusedmoe_layer_commit_move(layer.get()));
    EXPECT_EQ(placement_of(layer.get()), kApart);
    EXPECT_EQ(fusedmoe_layer_start_move_over(layer.get(), kApart, nullptr),
              FUSEDMOE_INVALID_ARGUMENT);

    EXPECT_OK(fusedmoe_load_window_clear(window.get()));
    EXPECT_OK(fusedmoe_load_window_get(window.get(), nullptr, own, 8));
    EXPECT_EQ(own[4], 0);
  });
}

/// The caller's weights, of which it gives one expert.
int32_t give_expert(void* context, int64_t expert,
                    void (*give)(void* data, const fusedmoe_expert_weights* weights), void* data) {
  auto& tiny = *static_cast<TinyLayer*>(context);
  fusedmoe_expert_weights one = tiny.experts;
  one.w13 = to_c(tiny.w13.slice(0, expert, expert + 1));
  one.w2 = to_c(tiny.w2.slice(0, expert, expert + 1));
  give(data, &one);
  return 0;
}

TEST(CBalanceTest, ASurvivorGoesOn) {
  const Communicators comms;
  fusedmoe_communicator* alone = nullptr;
  const auto patience = patient();
  ASSERT_OK(fusedmoe_communicator_create_threads(1, &patience, &alone));
  const Handle<fusedmoe_communicator> left(alone);
  on_two_threads([&](int rank) {
    const auto layer = create_on(comms.made[rank]);
    EXPECT_OK(fusedmoe_layer_start_move(layer.get(), kApart));
    EXPECT_OK(fusedmoe_layer_commit_move(layer.get()));
    if (rank == 1) return fusedmoe_communicator_abort(comms.made[1], "gone");
    EXPECT_EQ(fusedmoe_layer_rebind(layer.get(), left.get(), kAll, nullptr),
              FUSEDMOE_COMMUNICATION);
    EXPECT_NE(std::string(fusedmoe_last_error()).find("expert 3, which none of these ranks has"),
              std::string::npos)
        << fusedmoe_last_error();
    TinyLayer tiny;
    auto lost = sized<fusedmoe_lost_experts>();
    EXPECT_EQ(fusedmoe_layer_rebind(layer.get(), left.get(), kAll, &lost),
              FUSEDMOE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(fusedmoe_last_error()).find("one of checkpoint and run"),
              std::string::npos);
    lost.context = &tiny;
    lost.run = [](void*, int64_t, void (*)(void*, const fusedmoe_expert_weights*),
                  void*) -> int32_t { return 0; };
    EXPECT_EQ(fusedmoe_layer_rebind(layer.get(), left.get(), kAll, &lost), FUSEDMOE_COMMUNICATION);
    EXPECT_NE(std::string(fusedmoe_last_error()).find("lost.run has not given expert 3"),
              std::string::npos)
        << fusedmoe_last_error();
    lost.run = &give_expert;
    EXPECT_OK(fusedmoe_layer_rebind(layer.get(), left.get(), kAll, &lost));
    EXPECT_EQ(placement_of(layer.get()), kAll);
    auto info = sized<fusedmoe_layer_info>();
    EXPECT_OK(fusedmoe_layer_get_info(layer.get(), &info));
    EXPECT_EQ(info.num_local_experts, 4);
    EXPECT_NE(std::string(info.plan_line).find("cpu+no_ep"), std::string::npos) << info.plan_line;
    expect_as_alone(layer.get());
  });
}

TEST(CBalanceTest, WrongCallsAreRefused) {
  const TinyLayer tiny;
  const auto layer = tiny.create();
  EXPECT_EQ(placement_of(layer.get()), "none");
  EXPECT_EQ(fusedmoe_layer_start_move(layer.get(), kAll), FUSEDMOE_UNSUPPORTED);
  EXPECT_EQ(fusedmoe_layer_start_move(layer.get(), nullptr), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_layer_start_move(layer.get(), "{"), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_layer_commit_move(layer.get()), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_layer_rebind(layer.get(), nullptr, kAll, nullptr), FUSEDMOE_INVALID_ARGUMENT);
  fusedmoe_load_window* window = nullptr;
  EXPECT_EQ(fusedmoe_load_window_create(0, 4, 1, &window), FUSEDMOE_INVALID_ARGUMENT);
  fusedmoe_balanced* balanced = nullptr;
  const double loads[] = {1, 2, 3, 4};
  EXPECT_EQ(fusedmoe_balance(loads, 0, 4, nullptr, &balanced), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_balance(nullptr, 1, 4, nullptr, &balanced), FUSEDMOE_INVALID_ARGUMENT);
  auto options = sized<fusedmoe_balance_options>();
  options.num_placements = 1;
  EXPECT_EQ(fusedmoe_balance(loads, 1, 4, &options, &balanced), FUSEDMOE_INVALID_ARGUMENT);
}

}  // namespace fusedmoe::testing::balance_test
