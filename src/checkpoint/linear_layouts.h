// How published checkpoints store one quantized linear layer: a table of layouts, each a list of
// tensors (name, dtypes, shape). Orthogonal to the families, which say where the layers are.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

/// Wider than every format of quantized values; FP8 is one of those.
inline bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

/// out and in of a linear layer.
struct LinearShape {
  std::int64_t out, in;
};

/// What of a WeightMatrix a tensor holds.
enum class Part { kValues, kScales, kZeroPoints, kGlobalScale, kInputScale, kNothing };

/// How the tensor holds it.
enum class Form {
  kSame,              ///< as WeightMatrix describes the part
  kTransposed,        ///< with its two dimensions exchanged
  kScalar,            ///< one number, of shape () or (1)
  kSingle,            ///< the same, written as (1)
  kReciprocal,        ///< kSingle; one over the number
  kVector,            ///< one per output, (out) or (out, 1)
  kColumn,            ///< the same, written as (out, 1)
  kBytes,             ///< int4 values as i8 (out, in)
  kBlocks,            ///< as kSame; also with more or fewer dimensions of 1
  kAwqValues,         ///< i32 (in, out / 8), eight outputs in a word in AWQ's order of codes
  kAwqZeros,          ///< i32 (groups, out / 8), likewise
  kZerosByRow,        ///< i32 (out / n, groups), n = 32 / bits outputs in a word
  kZerosByColumn,     ///< i32 (groups, out / n)
  kZerosMinusOne,     ///< kZerosByColumn of zero points minus one, modulo 2^bits
  kMatrixShape,       ///< i64 (2): out, in
  kTrivialGroupIndex  ///< i32 (in): the group of every column
};

enum class Presence {
  kAlways,
  kIfZeroPoints,  ///< with zero points only
  kIfStatic,      ///< with static activation scales: written, and read where it is there
  kOptional,      ///< checked where present, written where `written`
};

struct StoredTensor {
  std::string_view suffix;  ///< after the layer's name
  Part part;
  Form form;
  std::span<const DType> dtypes;  ///< accepted; the first one is written
  Presence presence = Presence::kAlways;
  bool written = true;
};

/// Whether a layer has a single number there.
inline bool is_number(const StoredTensor& stored) {
  return stored.form == Form::kScalar || stored.form == Form::kSingle ||
         stored.form == Form::kReciprocal;
}

struct LinearLayout {
  CheckpointLayout layout;
  std::span<const StoredTensor> tensors;
};

/// The row of the table; null if the layout does not store such weights. Of several ways to store
/// them, the one that is written.
const LinearLayout* find_linear_layout(CheckpointLayout layout, const QuantKey& weights);
/// All of them.
std::vector<const LinearLayout*> linear_layouts(CheckpointLayout layout, const QuantKey& weights);
/// The key that weights of `weights` are quantized to before they are written: W4A8 is stored as
/// int4 with bf16 scales of groups.
QuantKey written_key(const QuantKey& weights);

/// Whether the scheme's activations need a scale in the file: static ones and NVFP4.
bool has_input_scale(const QuantScheme& scheme);

/// Whether a layer of this scheme must have the tensor, whether it may, and whether it is written.
bool is_required(const StoredTensor& stored, const QuantScheme& scheme);
bool is_allowed(const StoredTensor& stored, const QuantScheme& scheme);
bool is_written(const StoredTensor& stored, const QuantScheme& scheme);

/// W4A8 weights with bf16 group scales, as llm-compressor publishes them, get E4M3 group scales and
/// channel scales. Other matrices stay as they are.
void split_group_scales(const QuantKey& weights, WeightMatrix& matrix,
                        std::vector<std::shared_ptr<const void>>& owners);

}  // namespace fusedmoe::checkpoint
