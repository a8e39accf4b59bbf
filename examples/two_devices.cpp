// One layer whose experts lie in two places: half of them on a GPU, half on the CPU. Both halves
// get the same ids and work at the same time. The expert map of each says which experts it has; the
// program adds the two sums in f32. Without a GPU both halves are on the CPU. Usage: two_devices
#include <fusedmoe/layer.h>
#include <fusedmoe/runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>

namespace {

using namespace fusedmoe;

constexpr std::int64_t kExperts = 8, kTopk = 2, kHidden = 512, kIntermediate = 256, kTokens = 16;

Tensor values(Shape shape, DType dtype, float scale) {
  Tensor tensor = Tensor::empty(shape, dtype);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    store_f32(tensor.data(), dtype, i, scale * std::sin(static_cast<float>(i % 9973)));
  }
  return tensor;
}

/// The experts [begin, end) of the layer on one device, and what a forward there needs.
class Part {
 public:
  Part(const ExpertWeights& whole, std::int64_t begin, std::int64_t end, Device device)
      : stream_(device),
        layer_(weights(whole, begin, end),
               {.device = device, .dtype = DType::kBF16, .output_dtype = DType::kF32}),
        x_(Tensor::empty({kTokens, kHidden}, DType::kBF16, device)),
        ids_(Tensor::empty({kTokens, kTopk}, DType::kI32, device)),
        weights_(Tensor::empty({kTokens, kTopk}, DType::kF32, device)),
        output_(Tensor::empty({kTokens, kHidden}, DType::kF32, device)),
        scratch_(Tensor::empty({static_cast<std::int64_t>(layer_.workspace_bytes(kTokens))},
                               DType::kU8, device)) {
    std::printf("experts %d to %d: %s\n", static_cast<int>(begin), static_cast<int>(end - 1),
                layer_.plan_line().c_str());
  }

  /// On a GPU: enqueues and returns.
  void forward(const Tensor& x, const Tensor& ids, const Tensor& topk_weights) const {
    copy(x, x_, stream_);
    copy(ids, ids_, stream_);
    copy(topk_weights, weights_, stream_);
    layer_.forward_routed(x_, {ids_, weights_}, output_,
                          {scratch_.data(), static_cast<std::size_t>(scratch_.nbytes())},
                          {.stream = stream_});
  }
  /// Waits, and copies the part of the sum to host memory.
  void read(const Tensor& output) const {
    copy(output_, output, stream_);
    synchronize(stream_);
  }

 private:
  static LayerWeights weights(const ExpertWeights& whole, std::int64_t begin, std::int64_t end) {
    LayerWeights part;
    part.router.num_experts = kExperts;  // the ids are global ones
    part.router.topk = kTopk;
    part.experts = whole;  // views: nothing is copied
    part.experts.experts.assign(whole.experts.begin() + begin, whole.experts.begin() + end);
    part.expert_map = Tensor::empty({kExperts}, DType::kI32);
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const bool here = e >= begin && e < end;
      part.expert_map.as<std::int32_t>()[e] = here ? static_cast<std::int32_t>(e - begin) : -1;
    }
    return part;
  }

  OwnedStream stream_;
  MoeLayer layer_;
  Tensor x_, ids_, weights_, output_, scratch_;
};

}  // namespace

int main() try {
  ExpertWeights::Stacked stacked;
  stacked.w13 = values({kExperts, 2 * kIntermediate, kHidden}, DType::kBF16, 0.1F);
  stacked.w2 = values({kExperts, kHidden, kIntermediate}, DType::kBF16, 0.1F);
  const ExpertWeights experts =
      ExpertWeights::from_stacked(stacked, schemes::unquantized(DType::kBF16), Activation::kSilu);

  const Device gpu{DeviceKind::kCuda, 0};
  const bool has_gpu = device_problem(gpu).empty();
  const Part first(experts, 0, kExperts / 2, has_gpu ? gpu : Device{});
  const Part second(experts, kExperts / 2, kExperts, {});
  const Part whole(experts, 0, kExperts, {});

  const Tensor x = values({kTokens, kHidden}, DType::kBF16, 1);
  const Tensor ids = Tensor::empty({kTokens, kTopk}, DType::kI32);
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(3 * i % kExperts);
  }
  const Tensor topk_weights = values({kTokens, kTopk}, DType::kF32, 1);
  const Tensor sum = Tensor::empty({kTokens, kHidden}, DType::kF32),
               part = Tensor::empty({kTokens, kHidden}, DType::kF32),
               expected = Tensor::empty({kTokens, kHidden}, DType::kF32);

  // The GPU has its work before the CPU begins with its own.
  const auto both = [&] {
    first.forward(x, ids, topk_weights);
    second.forward(x, ids, topk_weights);
    second.read(sum);
    first.read(part);
    for (std::int64_t i = 0; i < sum.numel(); ++i) sum.as<float>()[i] += part.as<float>()[i];
  };
  both();
  whole.forward(x, ids, topk_weights);
  whole.read(expected);
  float largest = 0, difference = 0;
  for (std::int64_t i = 0; i < sum.numel(); ++i) {
    const float wanted = expected.as<float>()[i];
    largest = std::max(largest, std::abs(wanted));
    difference = std::max(difference, std::abs(sum.as<float>()[i] - wanted));
  }
  std::printf("differs from one layer by %.1e of the largest output\n",
              static_cast<double>(difference / largest));

  const auto start = std::chrono::steady_clock::now();
  constexpr int kForwards = 100;
  for (int i = 0; i < kForwards; ++i) both();
  const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
  std::printf("%.0f us for a forward of %d tokens\n", time.count() / kForwards,
              static_cast<int>(kTokens));
  return difference <= 0.01F * largest ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
