// How much scratch memory experts ask for, and kernels.
#include <gtest/gtest.h>

#include <memory>
#include <string_view>

#include "fake_experts.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"

namespace fusedmoe::workspace_sizes_test {

MoeConfig some_config() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 32;
  config.topk = 4;
  config.hidden = config.intermediate = 2880;
  config.scheme = schemes::mxfp4_w4a16();
  config.routing_method = RoutingMethod::kRouter;
  return config;
}

/// A quarter of the rows that so many tokens can have.
TEST(WorkspaceSizesTest, ScratchFollowsTheExpertRowsThatThereIsRoomFor) {
  for (const int capability : {0, 80, 90}) {
    MoeConfig config = some_config();
    if (capability > 0) {
      config.device = {DeviceKind::kCuda, 0};
      config.compute_capability = capability;
    }
    const ModularKernel kernel = explain(config).create(make_context());
    ProblemSize problem = ProblemSize::of(config, 4096);
    const WorkspaceSizes all = kernel.experts().workspace_sizes(problem);
    problem.max_rows = 4096 * config.topk / 4;
    const WorkspaceSizes some = kernel.experts().workspace_sizes(problem);
    EXPECT_LT(some.workspace13_bytes + some.workspace2_bytes,
              (all.workspace13_bytes + all.workspace2_bytes) / 2)
        << capability;
    EXPECT_EQ(some.output_shape, all.output_shape);
  }
}

/// Of 8 ranks with 8192 tokens each one gets up to 65536 rows. There is room for twice as many
/// expert rows as routing at random gives, which are those that one rank has of its own tokens.
TEST(WorkspaceSizesTest, ScratchOfARankIsAtMostTwoAndAHalfTimesThatOfOneGpu) {
  constexpr std::int64_t kRanks = 8, kTokens = 8192;
  for (const std::string_view scheme : {"bf16", "fp8_block", "mxfp4_w4a16"}) {
    MoeConfig config = some_config();
    config.num_experts = config.num_local_experts = 256;
    config.topk = 8;
    config.hidden = 7168;
    config.intermediate = 2048;
    config.scheme = parse_scheme(scheme);
    config.device = {DeviceKind::kCuda, 0};
    config.compute_capability = 90;
    const auto bytes = [&](const ProblemSize& problem) {
      const WorkspaceSizes sizes =
          explain(config).create(make_context()).experts().workspace_sizes(problem);
      return static_cast<double>(sizes.common_bytes() + sizes.workspace2_bytes);
    };
    const double one = bytes(ProblemSize::of(config, kTokens));
    config.num_experts = config.num_local_experts /= kRanks;  // those of the rank
    ProblemSize received = ProblemSize::of(config, kRanks * kTokens);
    received.max_rows = 2 * kTokens * config.topk;
    EXPECT_LE(bytes(received), 2.5 * one) << scheme;
  }
}

/// GEMM 1 stores the codes of its rows itself. Only the kernel of one token keeps rows of 16 bits
/// between the GEMMs, and needs memory for them.
TEST(WorkspaceSizesTest, StaticScalesTakeNoScratchForActivatedRows) {
  MoeConfig config = some_config();
  config.device = {DeviceKind::kCuda, 0};
  config.compute_capability = 90;
  config.scheme = parse_scheme("fp8_tensor_token");
  const ModularKernel dynamic = explain(config).create(make_context());
  config.scheme = parse_scheme("fp8_tensor_static");
  const ModularKernel fixed = explain(config).create(make_context());
  const std::size_t rows = std::size_t(4096 * config.topk);
  const std::size_t saved = dynamic.workspace_bytes(4096) - fixed.workspace_bytes(4096);
  EXPECT_GE(saved, rows * std::size_t(2 * config.intermediate));
  EXPECT_LE(saved, rows * std::size_t(2 * config.intermediate + 16));
  for (const std::int64_t tokens : {1, 2, 3, 64}) {
    EXPECT_LE(fixed.workspace_bytes(tokens), fixed.workspace_bytes(tokens + 1)) << tokens;
  }
}

TEST(WorkspaceSizesTest, OutputAndWorkspace13ShareMemory) {
  WorkspaceSizes sizes;
  EXPECT_EQ(sizes.common_bytes(), 0u);
  sizes.workspace13_bytes = 1;
  sizes.output_shape = {3, 5};
  sizes.output_dtype = DType::kBF16;
  EXPECT_EQ(sizes.common_bytes(), 30u) << "the output is larger than workspace13";
  sizes.workspace13_bytes = 300;
  EXPECT_EQ(sizes.common_bytes(), 300u);
}

/// A transport that is asked for its sizes alone; its rows change their rank.
class Moving : public PrepareAndFinalize {
 public:
  Moving(std::int64_t max_rows, bool output_elsewhere)
      : PrepareAndFinalize(no_ep()), max_rows_(max_rows), output_elsewhere_(output_elsewhere) {}
  bool moves_rows() const override { return true; }
  TransportSizes sizes(const ProblemSize& caller, const Preparation&) const override {
    TransportSizes sizes{caller, caller};
    sizes.experts.max_rows = max_rows_;
    sizes.output_elsewhere = output_elsewhere_;
    return sizes;
  }

 private:
  void do_start_prepare(ForwardArgs&, const TransportSizes&) const override {}
  void do_finish_prepare(ForwardArgs&) const override {}
  void do_start_finalize(const ForwardArgs&) const override {}
  void do_finish_finalize(const ForwardArgs&) const override {}

  const std::int64_t max_rows_;
  const bool output_elsewhere_;
};

/// The output of 3 tokens, 60 bytes, shares its place with workspace13 unless the experts may run
/// several times.
TEST(WorkspaceSizesTest, OutputThatLiesElsewhereTakesNoRoom) {
  testing::FakeOptions options;
  options.workspace13_per_token = 8;
  const auto experts = std::make_shared<testing::FakeExperts>(options);
  const auto bytes = [&](std::int64_t max_rows, bool output_elsewhere) {
    const ModularKernel kernel(std::make_shared<Moving>(max_rows, output_elsewhere), experts);
    return kernel.sizes(ProblemSize::of(experts->config(), 3)).common_bytes;
  };
  EXPECT_EQ(bytes(0, false), 60U);
  EXPECT_EQ(bytes(2, false), 256U + 60U);
  EXPECT_EQ(bytes(0, true), 24U);
  EXPECT_EQ(bytes(2, true), 24U);
}

}  // namespace fusedmoe::workspace_sizes_test
