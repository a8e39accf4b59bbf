// What MoeLayer holds: layer_build.cpp makes it, layer.cpp checks and cuts, layer_step.cpp runs it.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/exception_text.h"
#include "fusedmoe/layer.h"
#include "layer/expert_moves.h"
#include "layer/layer_weights.h"
#include "layer/staging.h"
#include "moe/backend.h"

namespace fusedmoe {

struct MoeLayer::Impl {
  struct Shared {
    std::string pair;
    ModularKernel kernel;
    std::shared_ptr<const PackedWeights> packed;
    Tensor gate;  // (1, hidden) on the device, or undefined
  };

  // The sizes of one chunk of a forward, computed once.
  struct Sizes {
    std::int64_t num_tokens = 0;
    ForwardSizes routed, shared;  // of the two kernels
    std::size_t kernel_bytes = 0, bytes = 0;
  };

  // The workspace of one chunk.
  struct Buffers {
    TensorView router_logits;  // (num_tokens, num_choices) f32
    Routing routing;           // (num_tokens, topk)
    Routing shared_routing;    // (num_tokens, 1): expert 0 with the gate's weight, or 1
    TensorView expert_ids;     // (num_tokens, topk): without zero experts
    TensorView zero_weights;   // (num_tokens, 1): of a token's zero experts
    TensorView latent_input, latent_output;  // (num_tokens, latent), of the routed experts
    void* projected = nullptr;  // (num_tokens, latent), later (num_tokens, hidden), f32
    TensorView beside;          // (num_tokens, hidden): of shared and zero experts
    // The routed experts' kernel; behind what it sends lies that of the shared experts, meanwhile.
    void *kernel = nullptr, *shared_kernel = nullptr;
    std::size_t bytes = 0;
  };

  // What a forward, or a chunk of it, is about.
  struct Call {
    TensorView hidden_states, output;
    Routing routing;  // of the caller; undefined: the layer routes
    ForwardOptions options;
    Stream stream;
    std::int64_t max_tokens;  // of any rank
    TensorView expert_map;    // of the options, or of the layer; undefined: all experts are here

    Call chunk(std::int64_t first, std::int64_t count) const;
  };

  /// Experts that start_move() has brought, until commit_move().
  struct Move {
    ExpertPlacement placement;
    Tensor expert_map;  // on the host
    std::vector<layer::Arrival> arrivals;
  };

  LayerOptions options;  // with what follows from the communicator, without how to pack
  MoeConfig config;
  Selection selection;
  const core::Backend& backend;
  RouterConfig router;
  RouterWeights router_weights;             // on the device
  Tensor expert_map;                        // on the device
  std::optional<LatentProjections> latent;  // on the device
  std::int64_t hidden;                      // of the layer, not of experts between projections
  ModularKernel kernel;                     // takes ids and weights
  std::optional<ModularKernel> monolithic;  // routes by itself, with the same packed weights
  /// The same on lanes 1, 2, ... of the communicator.
  struct Lane {
    ModularKernel kernel;
    std::optional<ModularKernel> monolithic;
  };
  std::vector<Lane> other_lanes;
  std::shared_ptr<PackedWeights> packed;
  std::optional<Shared> shared;
  DType output_dtype;
  bool inplace;
  bool adds_zero_experts;              // the router has some, and this rank adds what they return
  std::shared_ptr<Executor> executor;  // of the CPU; null: the default one
  Stream stream;                       // of forwards that name none
  std::int64_t chunk = std::numeric_limits<std::int64_t>::max();  // tokens at a time, at most
  std::shared_ptr<Communicator> communicator;                     // of several ranks, else null
  std::int64_t max_tokens_per_rank = 0;                           // where rows travel, else 0
  std::optional<ExpertPlacement> placement;                       // of experts that ranks share
  std::uint64_t moves = 0;                                        // how often experts have moved
  std::shared_ptr<layer::Staging> staging;                        // once experts have moved
  std::optional<Move> move;
  mutable std::atomic<int> running{0};   // steps that have begun and not ended
  std::atomic<bool> is_bringing{false};  // start_move() is at work
  bool is_torn = false;                  // a commit failed between two experts

  Impl(const LayerWeights& weights, const LayerOptions& options, const Selection& chosen);
  /// What a layer becomes on other ranks.
  struct Rebinding {
    LayerOptions options;
    MoeConfig config;
    Selection selection;
  };
  void start_move(const ExpertPlacement& wanted, Communicator& ranks,
                  const std::function<void()>& check);
  Rebinding rebinding(std::shared_ptr<Communicator> ranks, const ExpertPlacement& wanted) const;
  /// The same layer there, still without the weights of the routed experts.
  Impl(const Impl& before, const Rebinding& there);
  void fill(const Impl& before, const layer::Holdings& held, const ExpertSource& lost);
  void bind();
  void pack(const LayerWeights& weights, const LayerOptions& options);
  void limit_chunk();
  void limit_chunk(std::size_t max_bytes);
  /// Throws Error unless ranks with a communicator share the experts.
  void check_shares_experts(const char* call) const;
  /// Throws Error while a step has begun and not ended.
  void check_between_forwards(const char* call) const;
  /// Throws Error while start_move() is at work.
  void check_not_bringing(const char* call) const;

  Plan plan() const;
  bool adds_beside() const { return shared || adds_zero_experts; }
  /// max_tokens: of any rank; 0: num_tokens.
  Sizes sizes(const ModularKernel& routed, std::int64_t num_tokens, std::int64_t max_tokens,
              bool fixed_sizes) const;
  /// Of the kernel that needs most.
  std::size_t workspace_bytes(std::int64_t num_tokens, bool fixed_sizes) const;
  /// With a null workspace only `bytes` is meaningful.
  Buffers cut(const Sizes& sizes, void* workspace) const;
  /// `routing`: the caller's; null: the layer routes.
  Call call(const TensorView& hidden_states, const TensorView& output, const Routing* routing,
            const ForwardOptions& options) const;
  const ModularKernel& kernel_of(const Call& call) const {
    const bool routes = monolithic && !call.routing.topk_ids;
    if (call.options.lane == 0) return routes ? *monolithic : kernel;
    const Lane& lane = other_lanes[static_cast<std::size_t>(call.options.lane) - 1];
    return routes ? *lane.monolithic : lane.kernel;
  }
  void check_tokens(const Call& call) const;
  void check_results(const Call& call, Workspace workspace) const;
  void check_map(const TensorView& given) const;  // of the caller, for one forward
  /// Checks every argument. Returns the sizes of the first chunk.
  Sizes check(const Call& call, Workspace workspace) const;
  void forward(const Call& call, Workspace workspace) const;
  MoeLayer::Step begin(const Call& call, Workspace workspace) const;
  /// What throws here ends the communicator: other ranks may wait already.
  template <typename Part>
  void ending_ranks(const Part& part) const;
};

/// One chunk between its parts. The layer outlives it.
struct MoeLayer::Step::Impl {
  using Call = MoeLayer::Impl::Call;
  Impl(const MoeLayer::Impl& layer, const Call& call, const MoeLayer::Impl::Sizes& sizes,
       void* workspace);
  ~Impl() { end(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  /// `undivided`: see ForwardArgs.
  void begin(bool undivided);
  void compute();
  void finish();

  enum class Part { kBegin, kCompute, kFinish };
  Part done = Part::kBegin;  // begun is what a caller gets
  const MoeLayer::Impl& layer;
  const Call call;
  const MoeLayer::Impl::Sizes sizes;
  const MoeLayer::Impl::Buffers buffers;
  const Routing routing;
  std::optional<ModularKernel::Step> kernel;

  /// The layer counts the step no longer.
  void end() {
    if (std::exchange(runs_, false)) --layer.running;
  }

 private:
  bool runs_ = true;
  void begin_kernel(const ForwardArgs& args);
  /// to.target = or += x weight^T, summed in f32 first.
  void project(const Tensor& weight, const TensorView& x, core::AddArgs to) const;
  void run_shared() const;
};

template <typename Part>
void MoeLayer::Impl::ending_ranks(const Part& part) const {
  if (!communicator) return part();
  try {
    part();
  } catch (...) {
    communicator->abort(core::current_exception_text());
    throw;
  }
}

}  // namespace fusedmoe
