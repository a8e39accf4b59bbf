// Packed weights on disk: packing happens once, and every later start maps the file.
#pragma once

#include <filesystem>
#include <memory>

#include "fusedmoe/experts.h"
#include "fusedmoe/export.h"
#include "fusedmoe/safetensors.h"

namespace fusedmoe {

/// A file that save_packed() wrote, and how it is read.
struct PackedFile {
  std::filesystem::path path;
  /// kMap: experts on the CPU read the mapped file, of which processes of one host share the pages,
  /// and which must stay as it is (see SafetensorsFile); no repack(). kRead: memory of their own,
  /// in large pages. On CUDA the weights are copied to the device in both cases.
  FileAccess access = FileAccess::kMap;
  /// Compare the checksum of all bytes, which reads all of them; false: only of what describes
  /// them.
  bool verify = true;
};

/// Writes packed weights of `experts` to a safetensors file: PackedWeights::parts(), and as
/// metadata what they are, the layout and its version, and a checksum. A reader never sees half a
/// file. Throws Error for weights that are not of these experts, and where save_safetensors() does.
FUSEDMOE_API void save_packed(const Experts& experts, const PackedWeights& packed,
                              const std::filesystem::path& path);

/// The weights of such a file. Throws Error, which names the file and the cause, for a file of
/// another implementation, layout version, scheme, size, activation or dtype than those of
/// `experts`, for a checksum that differs, and for parts that do not fit. Whose weights they are
/// the caller must know: the file does not say which checkpoint they were.
FUSEDMOE_API std::shared_ptr<PackedWeights> load_packed(const Experts& experts,
                                                        const PackedFile& file);

}  // namespace fusedmoe
