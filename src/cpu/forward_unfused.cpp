// What a forward of the CPU experts does between its GEMMs where hooks see the rows: the epilogues
// as steps of their own, with rows of the layer's dtype between them.
#include <algorithm>
#include <cstring>

#include "core/ceil_div.h"
#include "cpu/forward.h"

namespace fusedmoe::cpu {

using core::round_up;

/// Rounds fp32 values to the dtype of the layer.
void Forward::to_layer_dtype(const float* source, std::int64_t count, std::byte* target) const {
  const std::int32_t index = 0;
  ReduceJob job;
  job.rows = reinterpret_cast<const std::byte*>(source);
  job.indices = &index;
  job.num_indices = 1;
  job.end = count;
  job.output = target;
  job.dtype = rounding_of(problem_.dtype);
  isa_.reduce(job);
}

void Forward::call_hook(const std::function<void(const HookArgs&)> ExpertsHooks::*hook,
                        const TensorView& input, const TensorView& output) const {
  if (!args_.hooks || !(args_.hooks->*hook)) return;
  HookArgs hook_args;
  hook_args.input = input;
  hook_args.output = output;
  hook_args.expert_offsets = TensorView(const_cast<std::int32_t*>(expert_offsets_), DType::kI32,
                                        {problem_.num_local_experts + 1});
  hook_args.permuted_to_slot =
      TensorView(const_cast<std::int32_t*>(slots_), DType::kI32, {num_rows()});
  hook_args.topk = problem_.topk;
  hook_args.origins = args_.origins;
  hook_args.stream = args_.stream;
  (args_.hooks->*hook)(hook_args);
}

/// GEMM 1's fp32 output is in tile order. Rounds it to rows of the layer's dtype, calls the hook,
/// activates, calls the hook, and converts the activated rows to what the next step reads.
void Forward::unfused_activation() const {
  const Epilogue epilogue = epilogue_of(weights_.info().activation, problem_.dtype, true);
  const std::int64_t intermediate = problem_.intermediate;
  const std::int64_t width = epilogue.gated ? 2 * intermediate : intermediate;
  const std::int64_t outputs = epilogue.gated ? kTileColumns / 2 : kTileColumns;
  const std::int64_t element = bytes(problem_.dtype, 1);
  auto* gate_up = static_cast<std::byte*>(layout_.hook_rows[0]);
  auto* activated = static_cast<std::byte*>(layout_.hook_rows[1]);
  const TensorView gate_up_rows(gate_up, problem_.dtype, {num_rows(), width});
  const TensorView activated_view(activated, problem_.dtype, {num_rows(), intermediate});
  const auto to_f32 = isa_.convert[static_cast<int>(Compute::kF32)];
  const std::int64_t rows = num_rows();
  for_rows(rows, rows * width, [&](std::int64_t row, const TaskScratch& scratch) {
    const auto* tiles = reinterpret_cast<const float*>(gemm1_rows_ + row * gemm1_bytes_);
    for (std::int64_t part = 0; part * intermediate < width; ++part) {
      for (std::int64_t i = 0; i < intermediate; i += outputs) {
        const float* source = tiles + i / outputs * kTileColumns + part * outputs;
        std::memcpy(scratch.row() + i, source,
                    static_cast<std::size_t>(std::min(outputs, intermediate - i)) * 4);
      }
      to_layer_dtype(scratch.row(), intermediate,
                     gate_up + (row * width + part * intermediate) * element);
    }
  });
  const TensorView hidden = hidden_quantized_ ? TensorView() : args_.hidden_states;
  call_hook(&ExpertsHooks::after_gemm1, hidden, gate_up_rows);
  for_rows(rows, rows * width, [&](std::int64_t row, const TaskScratch& scratch) {
    float* values = scratch.row();
    const auto half_row = [&](std::int64_t part, float* target) {
      to_f32(gate_up + (row * width + part * intermediate) * element, rounding_of(problem_.dtype),
             intermediate, round_up(intermediate, kTileColumns), target);
    };
    auto* up = reinterpret_cast<float*>(gemm1_rows_ + row * gemm1_bytes_);
    half_row(0, values);
    if (epilogue.gated) half_row(1, up);
    isa_.activate(epilogue, values, up, round_up(intermediate, kTileColumns), values);
    to_layer_dtype(values, intermediate, activated + row * intermediate * element);
  });
  call_hook(&ExpertsHooks::after_activation, gate_up_rows, activated_view);
  for_rows(rows, rows * intermediate, [&](std::int64_t row, const TaskScratch&) {
    const Compute target = key_ ? Compute::kF32 : compute_;
    isa_.convert[static_cast<int>(target)](activated + row * intermediate * element,
                                           rounding_of(problem_.dtype), intermediate,
                                           weights_.gemm2().k, gemm1_rows_ + row * gemm1_bytes_);
  });
}

/// Rounds GEMM 2's output to the layer's dtype, calls the hook, and converts it back to fp32.
void Forward::unfused_output() const {
  const std::int64_t hidden = problem_.hidden, element = bytes(problem_.dtype, 1);
  auto* rows = static_cast<std::byte*>(layout_.hook_rows[0]);
  const std::int64_t elements = num_rows() * hidden;
  for_rows(num_rows(), elements, [&](std::int64_t row, const TaskScratch&) {
    to_layer_dtype(reinterpret_cast<const float*>(layout_.gemm2_rows + row * gemm2_bytes_), hidden,
                   rows + row * hidden * element);
  });
  call_hook(&ExpertsHooks::after_gemm2,
            TensorView(layout_.hook_rows[1], problem_.dtype, {num_rows(), problem_.intermediate}),
            TensorView(rows, problem_.dtype, {num_rows(), hidden}));
  for_rows(num_rows(), elements, [&](std::int64_t row, const TaskScratch&) {
    isa_.convert[static_cast<int>(Compute::kF32)](
        rows + row * hidden * element, rounding_of(problem_.dtype), hidden,
        weights_.gemm2().padded_columns(), layout_.gemm2_rows + row * gemm2_bytes_);
  });
}

}  // namespace fusedmoe::cpu
