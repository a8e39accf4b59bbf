// The experts in an engine that has everything else: its own tensors, routing and threads. Memory
// is known before anything is packed; packed weights are kept in a file; more experts are served
// than fit into memory; and a forward can be given up. Usage: engine
#include <fusedmoe/packed_file.h>
#include <fusedmoe/runtime.h>
#include <fusedmoe/selection.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <thread>
#include <vector>

namespace {

using namespace fusedmoe;

constexpr std::int64_t kExperts = 8, kTopk = 2, kHidden = 256, kIntermediate = 128, kTokens = 4;

/// The engine's threads, as far as the library sees them. cancel() ends the forward that runs: it
/// throws Cancelled, its output is what it was before, and the next forward starts afresh.
struct Cancelled : std::exception {
  const char* what() const noexcept override { return "cancelled"; }
};
class EngineThreads final : public Executor {
 public:
  int concurrency() const override { return 2; }
  void run(int num_tasks, Task task) override {
    if (cancelled_.exchange(false)) throw Cancelled();
    std::vector<std::thread> others;
    for (int i = 1; i < num_tasks; ++i) others.emplace_back([task, i] { task(i); });
    task(0);
    for (std::thread& thread : others) thread.join();
  }
  void cancel() { cancelled_ = true; }

 private:
  std::atomic<bool> cancelled_ = false;
};

/// What the engine has read from its own files: bf16 here, any scheme in the same way.
Tensor values(Shape shape, float scale) {
  Tensor tensor = Tensor::empty(shape, DType::kBF16);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    store_f32(tensor.data(), DType::kBF16, i, scale * std::sin(static_cast<float>(i % 9973)));
  }
  return tensor;
}

ExpertWeights expert(const Tensor& w13, const Tensor& w2, std::int64_t begin, std::int64_t end) {
  ExpertWeights::Stacked stacked;
  stacked.w13 = Tensor(w13.slice(0, begin, end), w13.owner());
  stacked.w2 = Tensor(w2.slice(0, begin, end), w2.owner());
  return ExpertWeights::from_stacked(stacked, schemes::unquantized(DType::kBF16),
                                     Activation::kSilu);
}

}  // namespace

int main() try {
  const Tensor w13 = values({kExperts, 2 * kIntermediate, kHidden}, 0.1F);
  const Tensor w2 = values({kExperts, kHidden, kIntermediate}, 0.1F);

  // 1. What will run, and what it takes, before anything is packed: half of the experts fit here.
  constexpr std::int64_t kSlots = kExperts / 2;
  MoeConfig config = moe_config(expert(w13, w2, 0, kSlots), kTopk, DType::kBF16);
  config.num_experts = kExperts;
  config.has_expert_map = true;
  const Selection selection = select(config);
  EngineThreads threads;
  Context context = make_context();
  context.num_threads = threads.concurrency();
  const ModularKernel kernel = selection.create(context);
  const std::size_t bytes = kernel.workspace_bytes(kTokens);
  std::printf("%s: %lld bytes of packed weights, %zu of workspace\n", selection.pair().c_str(),
              static_cast<long long>(selection.packed_bytes()), bytes);

  // 2. Packed once, and mapped at every later start.
  const Stream stream = cpu_stream(threads);
  const std::filesystem::path path = "layer0.packed.safetensors";
  if (!std::filesystem::exists(path)) {
    PackOptions options;
    options.stream = stream;  // its threads
    save_packed(kernel.experts(), *kernel.experts().pack(expert(w13, w2, 0, kSlots), options),
                path);
  }
  // Read instead of mapped, as experts will be replaced.
  const auto packed = load_packed(kernel.experts(), {path, FileAccess::kRead});

  // 3. The engine's routing, and its cache of experts: slot_of says where an expert lies.
  const Tensor slot_of = Tensor::empty({kExperts}, DType::kI32);
  for (std::int64_t e = 0; e < kExperts; ++e) {
    slot_of.as<std::int32_t>()[e] = e < kSlots ? static_cast<std::int32_t>(e) : -1;
  }
  const auto bring = [&](std::int64_t wanted, std::int64_t leaving) {
    auto* slots = slot_of.as<std::int32_t>();
    const std::int64_t slot = slots[leaving];
    kernel.experts().repack(expert(w13, w2, wanted, wanted + 1), slot, *packed);
    slots[wanted] = static_cast<std::int32_t>(slot);
    slots[leaving] = -1;
  };

  std::vector<std::int32_t> ids{0, 3, 2, 1, 2, 0, 1, -1};  // -1 selects nothing
  std::vector<float> weights(ids.size(), 0.5F);
  const Tensor x = values({kTokens, kHidden}, 1),
               y = Tensor::empty({kTokens, kHidden}, DType::kBF16);
  const Tensor scratch = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  ForwardArgs args;
  args.weights = packed.get();
  args.hidden_states = x;
  args.output = y;
  args.topk_ids = TensorView(ids.data(), DType::kI32, {kTokens, kTopk});
  args.topk_weights = TensorView(weights.data(), DType::kF32, {kTokens, kTopk});
  args.expert_map = slot_of;
  args.stream = stream;
  kernel.apply(args, {scratch.data(), bytes});
  std::printf("first output: %g\n", load_f32(y.data(), y.dtype(), 0));

  bring(6, 3);
  ids[1] = 6;  // token 0 now wants expert 6, which was not here
  kernel.apply(args, {scratch.data(), bytes});
  std::printf("with expert 6: %g\n", load_f32(y.data(), y.dtype(), 0));

  // 4. Given up, as a request that nobody waits for any more.
  threads.cancel();
  try {
    kernel.apply(args, {scratch.data(), bytes});
  } catch (const Cancelled& cancelled) {
    std::printf("%s\n", cancelled.what());
  }
  kernel.apply(args, {scratch.data(), bytes});
  std::printf("again: %g\n", load_f32(y.data(), y.dtype(), 0));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
