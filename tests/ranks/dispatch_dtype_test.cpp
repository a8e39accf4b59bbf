// RankOptions::dispatch_dtype: rows travel as codes or as they are, and the output is the same.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "fusedmoe/quant.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/tensor.h"
#include "rank_layers.h"

namespace fusedmoe::dispatch_dtype_test {

using testing::bitwise_equal;
using testing::Case;
using testing::forward_exactly;
using testing::kPatient;
using testing::make_communicators;
using testing::make_layer_weights;
using testing::random_tensor;
using testing::rank_options;
using testing::RankCase;
using testing::run_ranks;

constexpr std::int64_t kMost = 9, kHidden = 192;

Case small_case(const char* scheme) {
  Case spec;
  spec.num_experts = 7;
  spec.topk = 3;
  spec.hidden = kHidden;  // one group of 128 and a half
  spec.intermediate = 128;
  spec.scheme = parse_scheme(scheme);
  return spec;
}

std::int64_t tokens_of(int rank) {
  return rank == 1 ? 0 : kMost - 2 * rank;
}

/// Values of very different sizes, so that every group has a scale of its own. Those of f16 stay
/// above its subnormals, where a row that is quantized twice may change.
Tensor hidden_states_of(int rank, DType dtype) {
  const Tensor x = random_tensor(DType::kF32, {tokens_of(rank), kHidden}, 1,
                                 40 + static_cast<std::uint64_t>(rank));
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    float& value = x.as<float>()[i];
    if (dtype == DType::kF16) {
      value = std::copysign(std::max(std::abs(value), 0x1p-4F), value) *
              std::ldexp(1.0F, static_cast<int>(i / 32 * 7 % 23) - 9);
    } else {
      value *= std::ldexp(1.0F, static_cast<int>(i / 32 * 7 % 23) - 12);
    }
  }
  const Tensor result = Tensor::empty(x.shape(), dtype);
  convert(x, result);
  return result;
}

struct SchemeCase {
  const char* scheme;
  DType activations;
};
/// Of the CPU's experts the last two quantize rows themselves; the others read codes.
constexpr SchemeCase kSchemes[] = {
    {"fp8_block", DType::kE4M3}, {"fp8_channel_token", DType::kE4M3},
    {"int8_w8a8", DType::kI8},   {"fp8_tensor_static", DType::kE4M3},
    {"mxfp8", DType::kE4M3},     {"w4a8", DType::kE4M3},
    {"mxfp4:ocp", DType::kE2M1}, {"mxfp4:even", DType::kE2M1},
};

void expect_same_bits(RankCase all, const SchemeCase& scheme, DType dtype = DType::kBF16) {
  SCOPED_TRACE(std::string(all.transport) + " " + scheme.scheme + " " + std::string(name(dtype)));
  const LayerWeights weights = make_layer_weights({small_case(scheme.scheme)});
  all.size = 3;
  const auto comms = make_communicators(all.size, all.lend, {kPatient}, all.cut);
  run_ranks(all.size, [&](int rank) {
    RankCase how = all;
    const Tensor x = hidden_states_of(rank, dtype);
    Tensor expected;
    for (const std::optional<DType> sent :
         {std::optional<DType>(), std::optional(dtype), std::optional(scheme.activations)}) {
      how.dispatch_dtype = sent;
      const MoeLayer layer(weights, rank_options(how, dtype, kMost, comms[rank]));
      const Tensor output = forward_exactly(how, layer, x, kMost);
      if (!expected) expected = output;
      EXPECT_TRUE(bitwise_equal(output, expected))
          << "rank " << rank << (sent ? name(*sent) : std::string_view());
      EXPECT_TRUE(bitwise_equal(output, forward_exactly(how, layer, x, kMost)));
    }
    if (!how.batch_invariant) return;
    const MoeLayer alone(weights, testing::one_rank_options(how, dtype));
    EXPECT_TRUE(bitwise_equal(forward_exactly(alone, x, 0), expected)) << "rank " << rank;
  });
}

class DispatchDtype : public ::testing::TestWithParam<testing::Way> {
 protected:
  RankCase how() const { return {.transport = GetParam().transport, .lend = GetParam().lend}; }
};
INSTANTIATE_TEST_SUITE_P(Ranks, DispatchDtype, ::testing::ValuesIn(testing::kWays),
                         testing::name_of);

TEST_P(DispatchDtype, ChangesNoBit) {
  for (const SchemeCase& scheme : kSchemes) {
    for (const bool batch_invariant : {false, true}) {
      RankCase each = how();
      each.batch_invariant = batch_invariant;
      expect_same_bits(each, scheme);
    }
  }
}

TEST_P(DispatchDtype, ChangesNoBitOfOtherExpertsSizesAndMessages) {
  for (const SchemeCase& scheme : {kSchemes[0], kSchemes[6]}) {
    RankCase each = how();
    each.experts = "reference";
    expect_same_bits(each, scheme);
    each = how();
    each.fixed_sizes = true;
    expect_same_bits(each, scheme);
    each.fixed_sizes = false;
    each.cut = !each.lend;
    expect_same_bits(each, scheme);
  }
}

TEST_P(DispatchDtype, ChangesNoBitOfRowsInF16) {
  for (const SchemeCase& scheme : kSchemes) {
    RankCase each = how();
    each.batch_invariant = true;
    expect_same_bits(each, scheme, DType::kF16);
    if (each.lend) continue;
    each.cut = true;
    expect_same_bits(each, scheme, DType::kF16);
  }
}

/// Counts what a rank sends.
class Counted final : public DataPlane {
 public:
  Counted(std::shared_ptr<DataPlane> plane, std::atomic<std::size_t>& bytes)
      : plane_(std::move(plane)), bytes_(bytes) {}
  std::string_view name() const override { return plane_->name(); }
  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream stream,
                Waiting& waiting) override {
    for (const Message& each : sends) bytes_ += each.bytes;
    plane_->exchange(sends, receives, stream, waiting);
  }
  void abort() noexcept override { plane_->abort(); }

 private:
  std::shared_ptr<DataPlane> plane_;
  std::atomic<std::size_t>& bytes_;
};

/// Bytes that two ranks send each other in one forward.
std::size_t bytes_sent(const char* scheme, std::optional<DType> dtype) {
  const LayerWeights weights = make_layer_weights({small_case(scheme)});
  const auto control = make_thread_control_plane();
  const auto planes = make_thread_data_planes(2);
  std::atomic<std::size_t> bytes{0};
  run_ranks(2, [&](int rank) {
    const auto communicator = std::make_shared<Communicator>(
        rank, 2, control, std::make_shared<Counted>(planes[rank], bytes),
        CommunicatorOptions{kPatient});
    const RankCase how{.transport = "allgather_reducescatter", .dispatch_dtype = dtype};
    const MoeLayer layer(weights, rank_options(how, DType::kBF16, kMost, communicator));
    communicator->barrier();
    forward_exactly(layer, random_tensor(DType::kBF16, {kMost, kHidden}, 1, 3), kMost);
  });
  return bytes;
}

TEST(DispatchDtypeTest, IsWhatTravels) {
  const std::size_t rows = 2 * kMost;  // each to the other rank
  const auto saved = [&](const char* scheme, DType dtype) {
    return bytes_sent(scheme, DType::kBF16) - bytes_sent(scheme, dtype);
  };
  // Instead of 2 bytes for each element 1 with an f32 scale for each group of 128, or for the row,
  // or half of one with a byte for each 32.
  EXPECT_EQ(saved("fp8_block", DType::kE4M3), rows * (kHidden - 2 * 4));
  EXPECT_EQ(saved("int8_w8a8", DType::kI8), rows * (kHidden - 4));
  EXPECT_EQ(saved("mxfp4:ocp", DType::kE2M1), rows * (2 * kHidden - kHidden / 2 - kHidden / 32));
  EXPECT_EQ(bytes_sent("fp8_block", std::nullopt), bytes_sent("fp8_block", DType::kE4M3));
  EXPECT_EQ(bytes_sent("mxfp4:ocp", std::nullopt), bytes_sent("mxfp4:ocp", DType::kBF16));
}

/// Why a pair does not serve the dtype.
std::string refusal(const char* scheme, DType dtype, const char* transport = "all2all",
                    Device device = {}) {
  MoeConfig config =
      moe_config(make_layer_weights({small_case(scheme)}).experts, 3, DType::kBF16, device);
  config.has_expert_map = true;
  config.parallel = transport == std::string("no_ep")
                        ? ParallelConfig::of({.tp_size = 2, .expert_parallel = true})
                        : ParallelConfig::of({.dp_size = 2, .expert_parallel = true});
  config.dispatch_dtype = dtype;
  for (const PrepareFinalizeDescriptor* each : all_prepare_finalize()) {
    if (each->name() == transport) return each->supports(config).text;
  }
  return "no such transport";
}

TEST(DispatchDtypeTest, WhatCannotTravelIsRefusedWithAReason) {
  for (const char* transport : {"all2all", "allgather_reducescatter"}) {
    EXPECT_EQ(refusal("fp8_block", DType::kE4M3, transport), "");
    EXPECT_EQ(refusal("bf16", DType::kBF16, transport), "");
    EXPECT_EQ(refusal("bf16", DType::kE4M3, transport),
              "dispatch_dtype e4m3: experts of bf16 read rows of bf16");
    EXPECT_EQ(refusal("fp8_block", DType::kI8, transport),
              "dispatch_dtype i8: experts of fp8_block read rows of bf16 or e4m3");
    EXPECT_EQ(refusal("fp8_block", DType::kF16, transport),
              "dispatch_dtype f16: experts of fp8_block read rows of bf16 or e4m3");
    EXPECT_EQ(
        refusal("fp8_tensor", DType::kBF16, transport),
        "dispatch_dtype bf16: the tensor's dynamic scale is made of the sender's rows, so they "
        "must be quantized before they travel");
    EXPECT_EQ(refusal("fp8_tensor", DType::kE4M3, transport), "");
    EXPECT_EQ(
        refusal("nvfp4", DType::kE2M1, transport),
        "dispatch_dtype e2m1: each expert scales rows by a factor of its own, so a row cannot be "
        "quantized before its expert is known");
    EXPECT_EQ(refusal("int8_w8a8", DType::kI8, transport, {DeviceKind::kCuda, 0}),
              "dispatch_dtype i8: rows of this format are quantized on the cpu only");
    EXPECT_EQ(refusal("fp8_block", DType::kE4M3, transport, {DeviceKind::kCuda, 0}), "");
  }
  EXPECT_EQ(refusal("fp8_block", DType::kE4M3, "no_ep"), "dispatch_dtype e4m3: rows do not travel");
}

TEST(DispatchDtypeTest, ALayerThatCannotSaysWhy) {
  const auto comms = make_communicators(2, true, {kPatient});
  const auto errors = testing::errors_of_ranks(2, [&](int rank) {
    const RankCase how{.dispatch_dtype = DType::kE4M3};
    const MoeLayer layer(make_layer_weights({small_case("bf16")}),
                         rank_options(how, DType::kBF16, kMost, comms[rank]));
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("dispatch_dtype e4m3: experts of bf16 read rows of bf16"),
              std::string::npos)
        << error;
  }
}

}  // namespace fusedmoe::dispatch_dtype_test
