// RouterConfig: what validate() refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <string_view>

#include "router_cases.h"

namespace fusedmoe::router_config_test {

using testing::make_router;

TEST(RouterConfigTest, ValidateNamesTheField) {
  const auto fault = [](auto change) {
    RouterConfig config = make_router(8, 2, ScoringFunc::kSigmoid);
    config.num_expert_group = 4;
    config.topk_group = 2;
    change(config);
    return testing::argument_of([&] { config.validate(); });
  };
  using C = RouterConfig;
  EXPECT_EQ(fault([](C&) {}), "no error");
  EXPECT_EQ(fault([](C& c) { c.num_experts = 0; }), "router.num_experts");
  EXPECT_EQ(fault([](C& c) { c.num_experts = 4100; }), "router.num_experts");
  EXPECT_EQ(fault([](C& c) { c.topk = 0; }), "router.topk");
  EXPECT_EQ(fault([](C& c) { c.topk = 9; }), "router.topk");
  EXPECT_EQ(fault([](C& c) { c.topk = 5; }), "router.topk");  // two groups of two hold four
  EXPECT_EQ(fault([](C& c) { c.num_expert_group = 3; }), "router.num_expert_group");
  EXPECT_EQ(fault([](C& c) { c.num_expert_group = -1; }), "router.num_expert_group");
  EXPECT_EQ(fault([](C& c) { c.topk_group = 0; }), "router.topk_group");
  EXPECT_EQ(fault([](C& c) { c.topk_group = 5; }), "router.topk_group");
  EXPECT_EQ(fault([](C& c) { c.routed_scaling_factor = NAN; }), "router.routed_scaling_factor");
  EXPECT_EQ(fault([](C& c) { c.apply_router_weight_on_input = true; }),
            "router.apply_router_weight_on_input");
  EXPECT_EQ(fault([](C& c) { c.scoring = ScoringFunc::kSparsemixer; }), "router.num_expert_group");
  EXPECT_EQ(fault([](C& c) { c.sparsemixer_jitter = -1; }), "router.sparsemixer_jitter");
  EXPECT_EQ(fault([](C& c) { c.num_zero_experts = 4089; }), "router.num_zero_experts");
  EXPECT_EQ(fault([](C& c) { c.scoring = static_cast<ScoringFunc>(77); }), "router.scoring");
}

TEST(RouterConfigTest, NamesAreDistinct) {
  std::set<std::string_view> names;
  for (int i = 0; i <= static_cast<int>(ScoringFunc::kSparsemixer); ++i) {
    names.insert(name(static_cast<ScoringFunc>(i)));
  }
  EXPECT_EQ(names.size(), 7U);
  EXPECT_FALSE(names.contains(""));
}

}  // namespace fusedmoe::router_config_test
