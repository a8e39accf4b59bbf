// Reading and writing safetensors files. Every byte of a file is treated as hostile.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// One memory-mapped safetensors file. Tensors are views that keep the mapping alive. The whole
/// header is checked on opening: length, JSON, dtypes, shapes, and offsets that neither overlap,
/// leave holes, nor leave the file. Throws Error naming the file and the fault. Tensors are aligned
/// to their element size: the rare one that the file misaligns is copied on opening.
class FUSEDMOE_API SafetensorsFile {
 public:
  static SafetensorsFile open(const std::filesystem::path& path);
  /// The same checks on bytes in memory, which must outlive the tensors (used by the fuzzer).
  static SafetensorsFile parse(const void* data, std::size_t size, std::string label);

  /// Names in the file, sorted.
  std::vector<std::string> names() const;
  bool contains(std::string_view name) const;
  /// Throws Error if there is none.
  Tensor tensor(std::string_view name) const;
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  /// The `__metadata__` strings.
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }

 private:
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

/// Writes contiguous host tensors (wide elements first, then by name; data aligned to 64 bytes) to
/// a temporary name beside `path`, flushes, then renames: a reader never sees half a file. Throws
/// Error for what exists and is not a regular file.
FUSEDMOE_API void save_safetensors(const std::filesystem::path& path,
                                   const std::map<std::string, TensorView>& tensors,
                                   const std::map<std::string, std::string>& metadata = {});

}  // namespace fusedmoe
