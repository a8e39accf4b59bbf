// An engine's own tensors: raw pointers, top-k ids and weights in, the experts' weighted sum out.
// The cache belongs to the engine. The first call with some weights packs them, which takes long;
// later ones reuse the packed weights and the scratch memory. Usage: raw_tensors
#include <fusedmoe/layer.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

namespace {

constexpr std::int64_t kExperts = 8, kTopk = 2, kHidden = 256, kIntermediate = 128, kTokens = 4;

std::vector<float> values(std::int64_t count, float scale) {
  std::vector<float> result(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = scale * std::sin(static_cast<float>(i % 9973));
  }
  return result;
}

}  // namespace

int main() try {
  using namespace fusedmoe;
  // What an engine holds; here in f32 and in host memory.
  const std::vector<float> w13 = values(kExperts * 2 * kIntermediate * kHidden, 0.1F);
  const std::vector<float> w2 = values(kExperts * kHidden * kIntermediate, 0.1F);
  const std::vector<float> x = values(kTokens * kHidden, 1);
  const std::vector<std::int32_t> topk_ids{0, 3, 7, 1, 2, 5, 4, -1};  // -1 selects nothing
  const std::vector<float> topk_weights(kTokens * kTopk, 0.5F);
  std::vector<float> y(kTokens * kHidden);

  FusedExpertsArgs args;
  args.hidden_states = TensorView(x.data(), DType::kF32, {kTokens, kHidden});
  args.weights.w13 = borrow(w13.data(), DType::kF32, {kExperts, 2 * kIntermediate, kHidden});
  args.weights.w2 = borrow(w2.data(), DType::kF32, {kExperts, kHidden, kIntermediate});
  args.topk_ids = TensorView(topk_ids.data(), DType::kI32, {kTokens, kTopk});
  args.topk_weights = TensorView(topk_weights.data(), DType::kF32, {kTokens, kTopk});
  args.output = TensorView(y.data(), DType::kF32, {kTokens, kHidden});

  PackCache cache;
  for (int step = 0; step < 3; ++step) fused_experts(args, cache);
  std::printf("layers packed: %zu; first outputs: %g %g\n", cache.size(), y[0], y[1]);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
