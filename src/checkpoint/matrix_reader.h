// The tensors of one block -> matrices of linear layers, each of its own or one of a stack.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/block.h"
#include "checkpoint/block_tensors.h"
#include "checkpoint/problems.h"
#include "checkpoint/stacked_experts.h"
#include "checkpoint/uncalibrated.h"

namespace fusedmoe::checkpoint {

/// Which part of a stack: an expert's, and of numbers that gate and up have each, the first or the
/// second.
struct StackPart {
  std::int64_t expert = 0, half = 0;
};

/// Reads tensors whose names, shapes and dtypes were checked. Contents that do not fit become
/// problems.
class MatrixReader {
 public:
  using Owners = std::vector<std::shared_ptr<const void>>;

  MatrixReader(const Block& block, Problems& problems) : block_(block), problems_(problems) {}

  /// By its name from the layer on; undefined for the empty name.
  Tensor tensor(const std::string& name) const;
  /// With its bias, without its input scale.
  WeightMatrix matrix(const LinearLayer& layer, const LinearStorage& storage, StackPart part,
                      Owners& owners);
  /// (out, in), decoded to f32 where it is quantized; undefined if contents do not fit.
  Tensor plain_matrix(const LinearLayer& layer, const LinearStorage& storage);
  /// Fills only what is one number, where a stack has one each for gate and up.
  void read_numbers(const LinearLayer& layer, const LinearStorage& storage, StackPart part,
                    Owners& owners, WeightMatrix& matrix);
  /// A whole tensor that several matrices share: read once.
  TensorView stack(const std::string& name, Owners& owners);
  StoredScale input_scale(const LinearLayer& layer, const LinearStorage& storage,
                          StackPart part) const;
  /// A bias that the layer does not have may lie beside it if it is zero.
  void check_no_bias(const LinearLayer& layer);

 private:
  const BlockTensor& entry(const std::string& name) const {
    return block_.tensors.find(name)->second;
  }
  TensorView view(const std::string& name, const LinearLayer& layer, Owners& owners);
  void read_values(const LinearLayer& layer, StackPart part, Owners& owners, WeightMatrix& result);
  void read_part(const StoredTensor& stored, const LinearLayer& layer, const QuantScheme& scheme,
                 StackPart part, Owners& owners, WeightMatrix& result);
  template <typename Function>
  void collect(const std::string& name, Function&& function);

  const Block& block_;
  Problems& problems_;
  std::map<std::string, Tensor> stacks_;  ///< read once
  std::map<std::string, MatrixStack> decoded_;
};

}  // namespace fusedmoe::checkpoint
