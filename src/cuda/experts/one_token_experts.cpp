#include "cuda/experts/one_token_experts.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/format.h"
#include "cuda/device/context.h"
#include "cuda/device/properties.h"

namespace fusedmoe::cuda {
namespace {

/// Throws Error unless the blocks have room for their shares: the fewer, the more each holds. The
/// stream has so many multiprocessors; CUDA has refused more blocks where these are fewer.
void check_room(const OneTokenShape& shape, std::int64_t shared_bytes, int multiprocessors,
                Device device) {
  if (shape.blocks > 0 && shape.layout().bytes <= shared_bytes) return;
  const std::string which = core::format("{} of the {} multiprocessors of {}", multiprocessors,
                                         multiprocessor_count(device), to_string(device));
  const char* too_few = "too few for the kernel of one token, whose thread blocks share their work";
  throw Error::unsupported(
      Reason::kDevice, "stream",
      shape.blocks < multiprocessors
          ? core::format("other processes use the GPU: they leave the stream, which has {}, {}",
                         which, too_few)
          : core::format("the stream has {}: {}", which, too_few));
}

}  // namespace

void OneTokenExperts::run(const ForwardArgs& args, const Scratch& scratch,
                          const FusedMlpParams& mlp, const ProblemSize& problem) const {
  OneTokenParams params;
  params.gemms[0] = mlp.gemms[0];
  params.gemms[1] = mlp.gemms[1];
  params.activation = mlp.activation;
  params.hidden = rows_.hidden(args, scratch);
  params.activated = rows_.activated(args, scratch, mlp);
  params.topk_ids = args.topk_ids.as<const std::int32_t>();
  if (!config_.apply_router_weight_on_input) {
    params.topk_weights = args.topk_weights.as<const float>();
  }
  params.topk = static_cast<int>(problem.topk);
  params.local_experts = core::LocalExperts(args.expert_map, problem.num_local_experts);
  params.output = args.fused_output.data();
  params.output_f32 = args.fused_output.dtype() == DType::kF32;
  params.accumulate = args.accumulate;

  // All thread blocks run at the same time, one on a multiprocessor.
  OneTokenShape shape = plan_.shape_of(problem);
  const int multiprocessors = multiprocessors_of(args.stream);
  shape.blocks = std::min<std::int64_t>({shape.blocks, multiprocessors, most_blocks_});
  for (bool refused = false;; refused = true, shape.blocks /= 2) {
    check_room(shape, plan_.shared_bytes(), multiprocessors, args.stream.device);
    try {
      launch_(params, shape, args.stream);
      if (refused) most_blocks_ = shape.blocks;
      return;
    } catch (const Error& error) {
      // Nobody tells how many there are where processes share the GPU.
      if (error.device_error() != cudaErrorCooperativeLaunchTooLarge) throw;
    }
  }
}

}  // namespace fusedmoe::cuda
