// GGUF files, as llama.cpp writes them: metadata, and tensors as they lie in the mapped file. Every
// byte of a file is treated as hostile.
//
// File = "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries, the entries
// (text key, u32 type, value), the tensors (text name, u32 rank, u64 extents with the fastest
// first, u32 type, u64 offset in the data), then from the next multiple of the alignment on the
// data. Texts are a u64 length and bytes; all numbers are little-endian. Source: ggml's description
// of GGUF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "files/file.h"
#include "fusedmoe/safetensors.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::files {

/// How ggml stores the elements of a tensor: in blocks along the rows.
struct GgmlType {
  std::uint32_t id;
  std::string_view name;  ///< "Q4_K"
  std::int64_t elements;  ///< of a block
  std::int64_t bytes;     ///< of a block
};

/// One tensor of a file. Plain types (F32, BF16, I8, ...) are a tensor of their dtype; quantized
/// ones the bytes of their blocks, u8 with the bytes of a row as its last dimension.
struct GgufTensor {
  Tensor tensor;
  Shape shape;           ///< of the elements, row-major: the last one is the fastest
  const GgmlType* type;  ///< a row of the table
  bool quantized() const { return type->elements > 1; }
};

class GgufFile {
 public:
  static GgufFile open(const std::filesystem::path& path, OpenOptions options = {});
  /// The same checks on bytes in memory, which must outlive the tensors.
  static GgufFile parse(const void* data, std::size_t size, const std::string& label);

  /// The metadata as a JSON object: single values, and lists of numbers up to 1024 entries.
  const std::string& metadata_json() const { return metadata_json_; }
  const std::map<std::string, GgufTensor, std::less<>>& tensors() const { return tensors_; }
  /// The tensor's memory: a view of the mapped file, or with kRead memory of its own. Throws Error
  /// if the file has changed since it was opened.
  Tensor read(const Tensor& tensor) const;

 private:
  std::shared_ptr<const MappedFile> file_;  // null: bytes in memory
  FileAccess access_ = FileAccess::kMap;
  std::string metadata_json_;
  std::map<std::string, GgufTensor, std::less<>> tensors_;
};

/// Whether the file begins like a GGUF file.
bool is_gguf(const std::filesystem::path& path);

}  // namespace fusedmoe::files
