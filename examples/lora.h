// LoRA on experts through ExpertsHooks: y += B (A x) beside w1/w3 and beside w2, for the adapter
// that each token has selected. The expert weights may be in any format and stay as they are.
#pragma once

#include <fusedmoe/layer.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace lora {

/// One adapter of all experts; rows are the outputs of a projection.
struct Adapter {
  std::int64_t rank = 0;
  std::vector<float> a13;  ///< (num_experts, rank, hidden)
  std::vector<float> b13;  ///< (num_experts, 2 intermediate, rank): gate rows, then up rows
  std::vector<float> a2;   ///< (num_experts, rank, intermediate)
  std::vector<float> b2;   ///< (num_experts, hidden, rank)
};

class ExpertsLora {
 public:
  explicit ExpertsLora(std::vector<Adapter> adapters) : adapters_(std::move(adapters)) {
    for (const Adapter& adapter : adapters_) {
      if (static_cast<std::int64_t>(low_.size()) < adapter.rank) {
        low_.resize(static_cast<std::size_t>(adapter.rank));
      }
    }
  }

  /// The adapter of each token of the next forward; -1 is none.
  void select(std::vector<int> adapter_of_token) { selected_ = std::move(adapter_of_token); }

  /// Valid as long as this object stays where it is. One forward at a time.
  fusedmoe::ExpertsHooks hooks() {
    fusedmoe::ExpertsHooks hooks;
    hooks.after_gemm1 = [this](const fusedmoe::HookArgs& args) {
      // Quantized hidden states are not given; a caller who has them could keep them here.
      if (!args.input) throw fusedmoe::Error("hidden_states", "quantized", "of 16 or 32 bits");
      add(args, &Adapter::a13, &Adapter::b13, /*input_is_by_token=*/true);
    };
    hooks.after_gemm2 = [this](const fusedmoe::HookArgs& args) {
      add(args, &Adapter::a2, &Adapter::b2, /*input_is_by_token=*/false);
    };
    return hooks;
  }

 private:
  using Matrix = std::vector<float> Adapter::*;

  void add(const fusedmoe::HookArgs& args, Matrix a, Matrix b, bool input_is_by_token) {
    const auto* offsets = args.expert_offsets.as<const std::int32_t>();
    const auto* slots = args.permuted_to_slot.as<const std::int32_t>();
    for (std::int64_t expert = 0; expert + 1 < args.expert_offsets.size(0); ++expert) {
      for (std::int64_t row = offsets[expert]; row < offsets[expert + 1]; ++row) {
        const std::int64_t token = slots[row] / args.topk;
        const int selected = selected_[static_cast<std::size_t>(token)];
        if (selected < 0) continue;
        const Adapter& adapter = adapters_[static_cast<std::size_t>(selected)];
        const std::int64_t in = args.input.size(1), out = args.output.size(1);
        add_row({args.input, input_is_by_token ? token : row},
                (adapter.*a).data() + expert * adapter.rank * in,
                (adapter.*b).data() + expert * out * adapter.rank, adapter.rank,
                {args.output, row});
      }
    }
  }

  struct Row {
    const fusedmoe::TensorView& view;
    std::int64_t index;
    std::int64_t at(std::int64_t column) const { return index * view.size(1) + column; }
  };

  void add_row(const Row& x, const float* a, const float* b, std::int64_t rank, const Row& y) {
    const std::int64_t in = x.view.size(1), out = y.view.size(1);
    for (std::int64_t r = 0; r < rank; ++r) {
      float sum = 0;
      for (std::int64_t i = 0; i < in; ++i) {
        sum += a[r * in + i] * fusedmoe::load_f32(x.view.data(), x.view.dtype(), x.at(i));
      }
      low_[static_cast<std::size_t>(r)] = sum;
    }
    for (std::int64_t o = 0; o < out; ++o) {
      float sum = fusedmoe::load_f32(y.view.data(), y.view.dtype(), y.at(o));
      for (std::int64_t r = 0; r < rank; ++r) {
        sum += b[o * rank + r] * low_[static_cast<std::size_t>(r)];
      }
      fusedmoe::store_f32(y.view.data(), y.view.dtype(), y.at(o), sum);
    }
  }

  std::vector<Adapter> adapters_;
  std::vector<int> selected_;
  std::vector<float> low_;  // (rank) A x of one row, so that hooks allocate nothing
};

}  // namespace lora
