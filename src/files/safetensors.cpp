// Tensors are views of the mapped file. One whose data is not aligned to its element size (the
// format does not promise it; files of old writers and crafted ones) is copied to aligned memory.
#include "fusedmoe/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/check.h"
#include "files/file.h"
#include "files/output.h"
#include "files/safetensors_header.h"

namespace fusedmoe {
namespace {

constexpr std::uint64_t kCacheLine = 64;  // where serialize_header() lets the data begin

bool aligned(const void* data, DType dtype) {
  const auto size = static_cast<std::uintptr_t>(std::max(bits(dtype) / 8, 1));
  return reinterpret_cast<std::uintptr_t>(data) % size == 0;
}

struct SafetensorsContents {
  std::map<std::string, Tensor, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> metadata;
};

/// `owner` keeps the bytes alive. Misaligned tensors are copied if `align`.
SafetensorsContents read(std::span<const unsigned char> bytes, const std::string& label,
                         const std::shared_ptr<const void>& owner, bool align) {
  const std::size_t size = bytes.size();
  constexpr std::size_t kLengthBytes = 8;
  FUSEDMOE_CHECK_FILE(size >= kLengthBytes, label, core::format("{} bytes", size),
                      "at least 8 bytes, the length of the header");
  const unsigned char* file_bytes = bytes.data();
  std::uint64_t header_bytes = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= static_cast<std::uint64_t>(file_bytes[i]) << (8 * i);
  }
  const auto length_label = [&] { return label + ": header length"; };
  FUSEDMOE_CHECK_FILE(
      header_bytes >= 2 && header_bytes <= files::kMaxHeaderBytes, length_label(),
      core::to_string(header_bytes),
      core::format("from 2 to {}, or this is no safetensors file", files::kMaxHeaderBytes));
  FUSEDMOE_CHECK_FILE(header_bytes <= size - kLengthBytes, length_label(),
                      core::to_string(header_bytes),
                      core::format("at most {}, what is left of the file", size - kLengthBytes));

  const unsigned char* body = file_bytes + kLengthBytes + header_bytes;
  const auto body_bytes = static_cast<std::int64_t>(size - kLengthBytes - header_bytes);
  files::Header header = files::parse_header(
      {reinterpret_cast<const char*>(file_bytes + kLengthBytes), header_bytes}, body_bytes, label);

  SafetensorsContents contents;
  contents.metadata = std::move(header.metadata);
  for (files::HeaderEntry& entry : header.tensors) {
    const unsigned char* begin = body + entry.begin;
    Tensor tensor;
    if (!align || aligned(begin, entry.dtype)) {
      tensor = Tensor(TensorView(begin, entry.dtype, entry.shape), owner);
    } else {
      tensor = Tensor::empty(entry.shape, entry.dtype);
      if (entry.end > entry.begin) {
        std::memcpy(tensor.data(), begin, static_cast<std::size_t>(entry.end - entry.begin));
      }
    }
    contents.tensors.emplace(std::move(entry.name), std::move(tensor));
  }
  return contents;
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path, OpenOptions options) {
  const auto mapping = std::make_shared<const files::MappedFile>(path);
  SafetensorsContents contents =
      read({static_cast<const unsigned char*>(mapping->data()), mapping->size()}, path.string(),
           mapping, options.access == FileAccess::kMap);
  SafetensorsFile file;
  file.file_ = mapping;
  file.access_ = options.access;
  file.tensors_ = std::move(contents.tensors);
  file.metadata_ = std::move(contents.metadata);
  return file;
}

SafetensorsFile SafetensorsFile::parse(const void* data, std::size_t size, std::string label) {
  SafetensorsContents contents =
      read({static_cast<const unsigned char*>(data), size}, label, nullptr, true);
  SafetensorsFile file;
  file.tensors_ = std::move(contents.tensors);
  file.metadata_ = std::move(contents.metadata);
  return file;
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> result;
  for (const auto& [name, tensor] : tensors_) result.push_back(name);
  return result;
}

bool SafetensorsFile::contains(std::string_view name) const {
  return tensors_.find(name) != tensors_.end();
}

Tensor SafetensorsFile::tensor(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    std::string held;
    constexpr std::size_t kMaxListed = 8;
    std::size_t listed = 0;
    for (const auto& [other, tensor] : tensors_) {
      if (listed == kMaxListed) break;
      held += (listed++ ? ", " : "") + files::quote(other);
    }
    if (tensors_.size() > kMaxListed) held += ", ...";
    throw Error::unknown_name("tensor", files::quote(name), held);
  }
  const Tensor& view = found->second;
  if (!file_) return view;
  file_->check_unchanged();
  if (access_ == FileAccess::kMap) return view;
  Tensor result = Tensor::empty(view.shape(), view.dtype());
  const auto offset = view.as<const char>() - static_cast<const char*>(file_->data());
  file_->read(static_cast<std::size_t>(offset), result.data(),
              static_cast<std::size_t>(view.nbytes()));
  return result;
}

void save_safetensors(const std::filesystem::path& path,
                      const std::map<std::string, TensorView>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  // OutputFile would put a file in the place of a device or a pipe.
  std::error_code failure;
  const std::filesystem::file_status status = std::filesystem::status(path, failure);
  FUSEDMOE_CHECK_IO(
      !std::filesystem::exists(status) || std::filesystem::is_regular_file(status), path.string(),
      core::format("cannot write {}: it exists and is not a regular file", path.string()));
  std::vector<files::HeaderEntry> entries;
  for (const auto& [name, view] : tensors) {
    const std::string label = "tensor " + files::quote(name);
    FUSEDMOE_CHECK(name != "__metadata__", label, "a reserved name", "another name");
    FUSEDMOE_CHECK(view.defined() && view.device().is_cpu() && view.contiguous(), label,
                   view.defined() ? "strided or not in host memory" : "undefined",
                   "a contiguous tensor in host memory");
    FUSEDMOE_CHECK(view.numel() * bits(view.dtype()) % 8 == 0, label, core::describe(view),
                   "of whole bytes");
    entries.push_back({name, view.dtype(), view.shape(), 0, 0});
  }
  // Sizes that larger powers of two divide come first, up to the size of a cache line. Then each
  // tensor begins at a multiple of its element size, without padding. Packed weights take whole
  // cache lines, so they begin at one and can be used where they are mapped.
  const auto power = [&](const files::HeaderEntry& entry) {
    const auto size = static_cast<std::uint64_t>(tensors.at(entry.name).nbytes());
    return std::min(std::countr_zero(size), std::countr_zero(kCacheLine));
  };
  std::stable_sort(entries.begin(), entries.end(),
                   [&](const auto& a, const auto& b) { return power(a) > power(b); });
  std::int64_t offset = 0;
  for (files::HeaderEntry& entry : entries) {
    entry.begin = offset;
    offset += tensors.at(entry.name).nbytes();
    entry.end = offset;
  }

  const std::string header = files::serialize_header(entries, metadata);
  files::OutputFile file(path);
  file.write(header);
  for (const files::HeaderEntry& entry : entries) {
    file.write(tensors.at(entry.name).data(), static_cast<std::size_t>(entry.end - entry.begin));
  }
  file.finish();
}

}  // namespace fusedmoe
