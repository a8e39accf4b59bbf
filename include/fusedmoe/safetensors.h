// Reading and writing safetensors files. Every byte of a file is treated as hostile.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

namespace files {
class MappedFile;
}

/// How tensors of a file get to memory.
enum class FileAccess {
  kMap,   ///< views of the mapped file: no copy, and only pages that are touched are read
  kRead,  ///< read into memory of their own, tensor by tensor, when they are asked for
};

struct OpenOptions {
  FileAccess access = FileAccess::kMap;
};

/// One safetensors file. The whole header is checked on opening: length, JSON, dtypes, shapes, and
/// offsets that neither overlap, leave holes, nor leave the file. Throws Error naming the file and
/// the fault. Tensors are aligned to their element size: the rare one that the file misaligns is
/// copied on opening.
///
/// A mapped file must not be truncated or rewritten in place while one of its tensors lives: the
/// system ends the process (SIGBUS) when a page that is gone is touched. tensor() notices a change
/// that came before it and throws Error; what comes later nobody can notice. Replacing the file
/// under its name, as save_safetensors does, is safe. With FileAccess::kRead tensors are safe once
/// they are read.
class FUSEDMOE_API SafetensorsFile {
 public:
  static SafetensorsFile open(const std::filesystem::path& path, OpenOptions options = {});
  /// The same checks on bytes in memory, which must outlive the tensors (used by the fuzzer).
  static SafetensorsFile parse(const void* data, std::size_t size, std::string label);

  /// Names in the file, sorted.
  std::vector<std::string> names() const;
  bool contains(std::string_view name) const;
  /// A view that keeps the mapping alive or, with kRead, memory of its own. Throws Error if there
  /// is none, or if the file has changed since it was opened.
  Tensor tensor(std::string_view name) const;
  /// Every tensor as a view of the mapped file; with kRead only to see names, dtypes and shapes.
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  /// The `__metadata__` strings.
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }

 private:
  std::shared_ptr<const files::MappedFile> file_;  // null: bytes in memory
  FileAccess access_ = FileAccess::kMap;
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
