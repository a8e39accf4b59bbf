// What core::Backend on the GPU does to rows that travel between ranks, against the CPU bit for
// bit.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend_cases.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/quant.h"
#include "layer/backend.h"
#include "moe/backend.h"

namespace fusedmoe::testing {
namespace {

using layer::backend_of;

class CudaTravellingRows : public BackendRows {};
INSTANTIATE_TEST_SUITE_P(Rows, CudaTravellingRows, ::testing::ValuesIn(row_cases()));

/// As rows travel between ranks: codes and scales, and the values of the codes.
TEST_P(CudaTravellingRows, QuantizeAndDequantize) {
  const Tensor x = Tensor::empty(shape_, c_.dtype);
  if (c_.hidden % 8 != 0) {  // rows between ranks are in pieces of 8
    const Tensor codes = Tensor::empty(shape_, DType::kE4M3, kGpu);
    const Tensor scales = Tensor::empty({c_.num_tokens, 1}, DType::kF32, kGpu);
    EXPECT_THROW(
        backend_of(kGpu).quantize(gpu(x), keys::e4m3_row(true), {}, codes, scales, kGpuStream),
        Error);
    return;
  }
  Random random(23);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    // Sizes from group to group far apart, and groups of zeros.
    const auto size = static_cast<int>(i / 32 * 7 % 23);
    const double value = size == 5 ? 0 : random.normal() * std::ldexp(1.0, size - 12);
    store_f32(x.data(), c_.dtype, i, static_cast<float>(value));
  }
  if (x.numel() > 1) {
    store_f32(x.data(), c_.dtype, 1, std::numeric_limits<float>::quiet_NaN());
  }
  using Rule = MxScaleRule;
  for (const QuantKey& key :
       {keys::e4m3_tensor(), keys::e4m3_row(true), keys::e4m3_group(), keys::e4m3_group(true),
        keys::mxfp8(true), keys::mxfp4(true), keys::mxfp4(true, Rule::kEven),
        keys::mxfp4(true, Rule::kCeil), keys::mxfp4(true, Rule::kFloor)}) {
    SCOPED_TRACE(name(QuantScheme{key, {}}));
    const std::optional<float> scale = key.dynamic ? std::nullopt : std::optional(0.01F);
    const QuantizedShape shape = quantized_shape(key, c_.num_tokens, c_.hidden);
    const auto views = [&](Device device) {
      return std::pair(Tensor::zeros(shape.values, shape.values_dtype, device),
                       Tensor::zeros(shape.scales, shape.scales_dtype, device));
    };
    const auto [codes, scales] = views(kHost);
    const auto [gpu_codes, gpu_scales] = views(kGpu);
    backend_of(kHost).quantize(x, key, scale, codes, scales, {});
    backend_of(kGpu).quantize(gpu(x), key, scale, gpu_codes, gpu_scales, kGpuStream);
    EXPECT_TRUE(bitwise_equal(to_host(gpu_codes), codes));
    EXPECT_TRUE(bitwise_equal(to_host(gpu_scales), scales));  // a static one without rows, too

    const Tensor values = poisoned(shape_), gpu_values = to_gpu(poisoned(shape_));
    backend_of(kHost).dequantize(codes, scales, key, values, {});
    backend_of(kGpu).dequantize(gpu_codes, gpu_scales, key, gpu_values, kGpuStream);
    if (x.numel() > 1) {  // e2m1 has no NaN; elsewhere it has many codes
      for (const Tensor& each : {values, to_host(gpu_values)}) {
        EXPECT_EQ(std::isnan(load_f32(each.data(), c_.dtype, 1)), key.value == DType::kE4M3);
      }
      store_f32(values.data(), c_.dtype, 1, 0);
    }
    const Tensor actual = to_host(gpu_values);
    if (x.numel() > 1) store_f32(actual.data(), c_.dtype, 1, 0);
    EXPECT_TRUE(bitwise_equal(actual, values));
  }
}

using CudaRankRowsTest = CudaTest;

Tensor of_numbers(const std::vector<std::int32_t>& numbers) {
  Tensor result = Tensor::empty({static_cast<std::int64_t>(numbers.size())}, DType::kI32);
  std::copy(numbers.begin(), numbers.end(), result.as<std::int32_t>());
  return result;
}

/// What a rank does with ids before and behind a dispatch, on one device.
struct RankRows {
  Tensor physical_ids, send_rows, send_counts, send_tokens, dropped;  // of its own tokens
  Tensor slots_back;                                 // rows that come back for each slot
  Tensor slot_rows, row_ids;                         // of the same ids, as if received
  std::vector<std::int64_t> counts_back, counts_in;  // of those two, for each rank

  RankRows(const ExpertPlacement& placement, const Tensor& ids, std::int32_t nearest,
           Device device) {
    const core::Backend& backend = backend_of(device);
    const Stream stream{device};
    const std::int64_t tokens = ids.size(0), topk = ids.size(1), ranks = placement.num_ranks();
    const auto made = [&](const Shape& shape) { return Tensor::zeros(shape, DType::kI32, device); };
    const auto there = [&](const Tensor& tensor) { return to_device(tensor, device); };
    const ExpertPlacement::Table table = placement.table();
    const Tensor offsets = there(of_numbers(table.offsets)), ids_there = there(ids);
    const Tensor replicas = there(of_numbers(table.physical));
    const Tensor ranks_of = there(of_numbers(placement.rank_of()));
    const Tensor physical = made({tokens, topk}), rows = made({tokens, ranks});
    const Tensor counts = made({ranks}), tokens_of = made({ranks, tokens}), lost = made({1});
    core::TokenDestinations destinations;
    destinations.topk_ids = ids_there;
    destinations.replica_offsets = offsets;
    destinations.replicas = replicas;
    destinations.physical_ranks = ranks_of;
    destinations.nearest_rank = nearest;
    destinations.row_stride = tokens;
    destinations.physical_ids = physical;
    destinations.send_rows = rows;
    destinations.send_counts = counts;
    destinations.send_tokens = tokens_of;
    backend.find_destinations(destinations, stream);
    send_counts = to_host(counts);
    send_tokens = to_host(tokens_of);
    // Room for all rows on the first rank, for some on the others.
    std::vector<std::int64_t> room(static_cast<std::size_t>(ranks), tokens / 3);
    room.front() = tokens;
    backend.limit_rows({rows, tokens, room, physical, ranks_of, lost}, stream);

    const Tensor back = made({tokens, topk}), scratch = made({ranks});
    counts_back.resize(static_cast<std::size_t>(ranks));
    backend.number_slots({physical, ranks_of, back, scratch}, counts_back, stream);

    std::vector<std::int32_t> map = table.local;
    for (std::size_t p = 0; p < map.size(); ++p) {
      if (placement.rank_of()[p] != 1) map[p] = -1;
    }
    const Tensor map_there = there(of_numbers(map)), expanded = made({tokens, topk});
    const Tensor ids_of_rows = made({tokens * topk, 1});
    const Tensor weights_of_rows = Tensor::zeros({tokens * topk, 1}, DType::kF32, device);
    std::vector<std::int64_t> sources(static_cast<std::size_t>(ranks), tokens / ranks);
    sources.back() += tokens % ranks;
    counts_in.resize(sources.size());
    backend.expand_slots({physical, map_there, expanded, ids_of_rows, weights_of_rows, scratch},
                         sources, counts_in, stream);
    synchronize(stream);
    physical_ids = to_host(physical);
    send_rows = to_host(rows);
    dropped = to_host(lost);
    slots_back = to_host(back);
    slot_rows = to_host(expanded);
    std::int64_t num_rows = 0;
    for (const std::int64_t count : counts_in) num_rows += count;
    const Tensor all_ids = to_host(ids_of_rows);
    row_ids = Tensor(all_ids.slice(0, 0, num_rows), all_ids.owner());
  }
};

TEST_F(CudaRankRowsTest, EqualThoseOfTheCpu) {
  for (const int ranks : {2, 3, 8}) {
    for (const std::int64_t tokens : {1, 37, 700, 5000}) {
      for (const bool nearest : {false, true}) {
        SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(tokens) + " tokens");
        const ExpertPlacement placement = ExpertPlacement::linear(61, ranks, 7);
        const Tensor ids = random_ids(tokens, 8, 61);
        const RankRows expected(placement, ids, nearest ? 1 : -1, kHost);
        const RankRows actual(placement, ids, nearest ? 1 : -1, kGpu);
        EXPECT_TRUE(bitwise_equal(actual.physical_ids, expected.physical_ids));
        EXPECT_TRUE(bitwise_equal(actual.send_rows, expected.send_rows));
        EXPECT_TRUE(bitwise_equal(actual.send_counts, expected.send_counts));
        EXPECT_TRUE(bitwise_equal(actual.send_tokens, expected.send_tokens));
        EXPECT_TRUE(bitwise_equal(actual.dropped, expected.dropped));
        EXPECT_TRUE(bitwise_equal(actual.slots_back, expected.slots_back));
        EXPECT_EQ(actual.counts_back, expected.counts_back);
        EXPECT_TRUE(bitwise_equal(actual.slot_rows, expected.slot_rows));
        EXPECT_EQ(actual.counts_in, expected.counts_in);
        EXPECT_TRUE(bitwise_equal(actual.row_ids, expected.row_ids));
      }
    }
  }
}

/// Rows of 300 tokens packed for three ranks, of which some get fewer than they could.
struct PackedRows {
  std::vector<Tensor> tensors;

  PackedRows(std::int64_t columns, bool by_plan, Device device) {
    constexpr std::int64_t kMost = 300, kFirst = 20;
    const std::vector<std::int32_t> counts{300, 7, 180};
    Tensor tokens = Tensor::empty({3, kMost}, DType::kI32);
    for (std::int64_t i = 0; i < tokens.numel(); ++i) {
      tokens.as<std::int32_t>()[i] = static_cast<std::int32_t>((7 * i + i / kMost) % kMost);
    }
    const Tensor tokens_there = to_device(tokens, device);
    const Tensor counts_there = to_device(of_numbers(counts), device);
    std::vector<Tensor> from;
    std::vector<core::RowPacking::Tensor> pairs;
    const auto add = [&](const Tensor& source) {
      from.push_back(to_device(source, device));
      const Tensor target = Tensor::zeros({kFirst + 3 * kMost, source.size(1)}, source.dtype());
      poison(target);
      tensors.push_back(to_device(target, device));
      pairs.push_back({from.back(), tensors.back()});
    };
    // Every second row of twice as many: rows may lie apart.
    add(random_floats(DType::kBF16, {2 * kMost, columns}, 5));
    pairs.front().from = from.front().slice(0, 0, 2 * kMost, 2);
    add(random_floats(DType::kF32, {kMost, 3}, 6));
    add(random_ids(kMost, 8, 61));
    const Tensor bytes = Tensor::empty({kMost, 5}, DType::kU8);
    for (std::int64_t i = 0; i < bytes.numel(); ++i) {
      bytes.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(i % 251);
    }
    add(bytes);
    const std::vector<core::RowPacking::Part> parts{
        {1, 0, 250, 0}, {0, 10, 290, kFirst + kMost}, {2, 100, 300, kFirst + 2 * kMost}};
    core::RowPacking packing;
    packing.tensors = pairs;
    packing.ids = tensors[2];
    if (by_plan) {
      packing.tokens = tokens_there;
      packing.counts = counts_there;
    }
    packing.parts = parts;
    backend_of(device).pack_rows(packing, Stream{device});
    synchronize(Stream{device});
    for (Tensor& tensor : tensors) tensor = to_host(tensor);
  }
};

TEST_F(CudaRankRowsTest, ArePackedAsOnTheCpu) {
  for (const std::int64_t columns : {64, 2880, 7168, 37}) {
    for (const bool by_plan : {false, true}) {
      SCOPED_TRACE(std::to_string(columns) + (by_plan ? " columns, planned" : " columns, all"));
      const PackedRows expected(columns, by_plan, kHost), actual(columns, by_plan, kGpu);
      for (std::size_t t = 0; t < expected.tensors.size(); ++t) {
        EXPECT_TRUE(bitwise_equal(actual.tensors[t], expected.tensors[t])) << "tensor " << t;
      }
    }
  }
}

/// A rank's own rows are added up where its experts have left them: the same as in one place.
TEST_F(CudaRankRowsTest, AreSummedFromTwoPlaces) {
  constexpr std::int64_t kHidden = 360, kRows = 50, kBegin = 20, kEnd = 35;
  const Tensor all = random_floats(DType::kBF16, {kRows, kHidden}, 9);
  const Tensor numbers = Tensor::empty({40, 3}, DType::kI32);
  Random random(4);
  for (std::int64_t i = 0; i < numbers.numel(); ++i) {
    numbers.as<std::int32_t>()[i] = static_cast<std::int32_t>(random.below(kRows + 1) - 1);
  }
  const Tensor all_there = to_gpu(all), numbers_there = to_gpu(numbers);
  const Tensor own = to_gpu(Tensor(all.slice(0, kBegin, kEnd), all.owner()));
  const auto sum = [&](bool two_places) {
    const Tensor rows = to_gpu(all), output = Tensor::zeros({40, kHidden}, DType::kBF16, kGpu);
    core::ReduceArgs args;
    args.fused_output = rows;
    args.output = output;
    args.topk_ids = numbers_there;
    args.router_weight_on_input = true;
    args.stream = kGpuStream;
    if (two_places) {
      fill_bytes(rows.slice(0, kBegin, kEnd), 0x7f, kGpuStream);
      args.elsewhere = own;
      args.elsewhere_begin = kBegin;
      args.elsewhere_end = kEnd;
    }
    args.follows_kernel = false;
    backend_of(kGpu).reduce(args, numbers_there);
    return to_host(output);
  };
  EXPECT_TRUE(bitwise_equal(sum(true), sum(false)));
}

}  // namespace
}  // namespace fusedmoe::testing
