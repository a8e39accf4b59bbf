#include "files/gguf.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/check.h"
#include "files/json.h"
#include "files/safetensors_header.h"

namespace fusedmoe::files {
namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr std::uint64_t kMaxName = 256, kMaxKey = 65535, kMaxText = 4096, kMaxList = 1024;

constexpr std::array<GgmlType, 34> kTypes{{
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},
    {3, "Q4_1", 32, 20},      {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},
    {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 36},      {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66},
    {17, "IQ2_XS", 256, 74},  {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},  {22, "IQ2_S", 256, 82},
    {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},
    {29, "IQ1_M", 256, 56},   {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},    {40, "NVFP4", 64, 36},
    {41, "Q1_0", 128, 18},
}};

std::optional<DType> plain_dtype(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, DType>, 8> kPlain{{{"F32", DType::kF32},
                                                                      {"F16", DType::kF16},
                                                                      {"BF16", DType::kBF16},
                                                                      {"F64", DType::kF64},
                                                                      {"I8", DType::kI8},
                                                                      {"I16", DType::kI16},
                                                                      {"I32", DType::kI32},
                                                                      {"I64", DType::kI64}}};
  const auto* found = std::find_if(kPlain.begin(), kPlain.end(),
                                   [&](const auto& entry) { return entry.first == name; });
  return found == kPlain.end() ? std::nullopt : std::optional(found->second);
}

/// The header's bytes from front to back. A read past the end is an Error.
class Reader {
 public:
  Reader(const unsigned char* data, std::size_t size, const std::string& label)
      : begin_(data), next_(data), end_(data + size), label_(label) {}

  std::size_t position() const { return static_cast<std::size_t>(next_ - begin_); }
  std::size_t left() const { return static_cast<std::size_t>(end_ - next_); }

  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }

  std::string_view text(std::uint64_t most, const char* what) {
    const auto length = number<std::uint64_t>();
    check(length <= most, what, core::format("{} bytes long", length),
          core::format("at most {} bytes", most));
    return {reinterpret_cast<const char*>(take(length)), length};
  }

  void check(bool condition, std::string_view what, const std::string& was,
             const std::string& must_be) const {
    if (!condition) {
      throw Error::malformed(core::format("{}: {}", label_, what), was, must_be);
    }
  }

  void check_new(bool is_new, const std::string& what) const {
    const std::string part = core::format("{}: {}", label_, what);
    FUSEDMOE_CHECK_IO(is_new, part, part + " is there twice");
  }

  const unsigned char* take(std::uint64_t bytes) {
    check(bytes <= left(), "header", core::format("cut off at byte {}", position() + left()),
          "complete");
    const unsigned char* result = next_;
    next_ += bytes;
    return result;
  }

 private:
  const unsigned char *begin_, *next_, *end_;
  const std::string& label_;
};

/// A value type of the metadata.
enum class ValueType : std::uint32_t { kBool = 7, kText = 8, kList = 9, kLast = 12 };

/// Bytes of a number; 0 for texts, lists and what is no type.
std::uint64_t number_bytes(std::uint32_t type) {
  constexpr std::array<std::uint8_t, 13> kBytes{1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return type < kBytes.size() ? kBytes[type] : 0;
}

nlohmann::json number_of(Reader& reader, std::uint32_t type) {
  switch (type) {
    case 0:
      return reader.number<std::uint8_t>();
    case 1:
      return reader.number<std::int8_t>();
    case 2:
      return reader.number<std::uint16_t>();
    case 3:
      return reader.number<std::int16_t>();
    case 4:
      return reader.number<std::uint32_t>();
    case 5:
      return reader.number<std::int32_t>();
    case 6:
      return number_json(reader.number<float>());
    case 7:
      return reader.number<std::uint8_t>() != 0;
    case 10:
      return reader.number<std::uint64_t>();
    case 11:
      return reader.number<std::int64_t>();
    default:
      return number_json(reader.number<double>());
  }
}

/// One value. Long texts, lists of texts and long lists (a tokenizer's) are passed over: null.
nlohmann::json read_value(Reader& reader, std::string_view key) {
  const auto is = [](std::uint32_t type, ValueType wanted) {
    return type == static_cast<std::uint32_t>(wanted);
  };
  const auto check_type = [&](bool known, std::uint32_t type) {
    reader.check(known, quote(key), core::format("of type {}", type), "of a type that GGUF has");
  };
  const auto type = reader.number<std::uint32_t>();
  if (is(type, ValueType::kText)) {
    const std::string_view text = reader.text(reader.left(), "text");
    return text.size() <= kMaxText ? nlohmann::json(text) : nlohmann::json();
  }
  if (!is(type, ValueType::kList)) {
    check_type(number_bytes(type) > 0, type);
    return number_of(reader, type);
  }
  const auto element = reader.number<std::uint32_t>();
  const auto count = reader.number<std::uint64_t>();
  const std::uint64_t bytes = number_bytes(element);
  check_type(bytes > 0 || is(element, ValueType::kText), element);
  // A text takes 8 bytes at least.
  reader.check(count <= reader.left() / std::max<std::uint64_t>(bytes, bytes ? 1 : 8), quote(key),
               core::format("a list of {} entries", count), "within the file");
  if (bytes == 0) {
    for (std::uint64_t i = 0; i < count; ++i) reader.text(reader.left(), "text");
    return {};
  }
  if (count > kMaxList) {
    reader.take(count * bytes);
    return {};
  }
  nlohmann::json list = nlohmann::json::array();
  for (std::uint64_t i = 0; i < count; ++i) list.push_back(number_of(reader, element));
  return list;
}

nlohmann::json read_metadata(Reader& reader, std::uint64_t count) {
  nlohmann::json metadata = nlohmann::json::object();
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string key(reader.text(kMaxKey, "key of the metadata"));
    nlohmann::json value = read_value(reader, key);
    const auto [entry, is_new] = metadata.emplace(key, std::move(value));
    reader.check_new(is_new, quote(key));
  }
  return metadata;
}

/// A tensor of the header.
struct Entry {
  std::string name;
  const GgmlType* type;
  Shape shape;
  std::uint64_t offset;  ///< in the data
};

Entry read_entry(Reader& reader) {
  constexpr std::uint32_t kMaxRank = 4;
  Entry entry;
  entry.name = reader.text(kMaxName, "name of a tensor");
  const std::string label = quote(entry.name);
  const auto rank = reader.number<std::uint32_t>();
  reader.check(rank >= 1 && rank <= kMaxRank, label, core::format("of rank {}", rank),
               "of rank 1 to 4");
  std::array<std::int64_t, kMaxRank> extents{};
  std::int64_t elements = 1;
  for (std::uint32_t i = 0; i < rank; ++i) {
    const auto extent = reader.number<std::uint64_t>();
    constexpr std::int64_t kMost = std::int64_t{1} << 46;
    reader.check(extent > 0 && extent <= static_cast<std::uint64_t>(kMost / elements), label,
                 core::format("with an extent of {}", extent), "positive and of a size that fits");
    extents[rank - 1 - i] = static_cast<std::int64_t>(extent);
    elements *= static_cast<std::int64_t>(extent);
  }
  entry.shape = Shape(std::span(extents.data(), rank));
  const auto id = reader.number<std::uint32_t>();
  const auto* type =
      std::find_if(kTypes.begin(), kTypes.end(), [&](const GgmlType& row) { return row.id == id; });
  reader.check(type != kTypes.end(), label, core::format("of the ggml type {}", id),
               "of a type that is known here");
  entry.type = type;
  const std::int64_t row = entry.shape[static_cast<int>(rank) - 1];
  reader.check(row % type->elements == 0, label,
               core::format("{} with rows of {} elements", type->name, row),
               core::format("with rows of whole blocks of {}", type->elements));
  entry.offset = reader.number<std::uint64_t>();
  return entry;
}

std::int64_t bytes_of(const Entry& entry) {
  return entry.shape.numel() / entry.type->elements * entry.type->bytes;
}

/// Data within the file, one tensor behind the other in the header's order, as llama.cpp demands.
void check_places(const Reader& reader, const std::vector<Entry>& entries, std::uint64_t data_bytes,
                  std::uint64_t alignment) {
  std::uint64_t end = 0;
  for (const Entry& entry : entries) {
    const auto bytes = static_cast<std::uint64_t>(bytes_of(entry));
    reader.check(entry.offset == end, quote(entry.name), core::format("at offset {}", entry.offset),
                 core::format("at {}, behind the tensor before it", end));
    reader.check(entry.offset <= data_bytes && bytes <= data_bytes - entry.offset,
                 quote(entry.name), core::format("{} bytes from offset {} on", bytes, entry.offset),
                 core::format("within the {} bytes of data", data_bytes));
    end = (entry.offset + bytes + alignment - 1) / alignment * alignment;
  }
  // More data than the tensors have: the header is not the one that was written with it.
  reader.check(data_bytes <= end, "data", core::format("{} bytes", data_bytes),
               core::format("the {} bytes of the tensors", end));
}

struct GgufContents {
  std::string metadata_json;
  std::map<std::string, GgufTensor, std::less<>> tensors;
};

GgufTensor make_tensor(const Entry& entry, const unsigned char* data,
                       const std::shared_ptr<const void>& owner) {
  const std::optional<DType> plain = plain_dtype(entry.type->name);
  if (plain) return {Tensor(TensorView(data, *plain, entry.shape), owner), entry.shape, entry.type};
  Shape stored = entry.shape;
  const int last = stored.rank() - 1;
  stored[last] = stored[last] / entry.type->elements * entry.type->bytes;
  return {Tensor(TensorView(data, DType::kU8, stored), owner), entry.shape, entry.type};
}

GgufContents read(const unsigned char* data, std::size_t size, const std::string& label,
                  const std::shared_ptr<const void>& owner) {
  Reader reader(data, size, label);
  const std::string_view magic(reinterpret_cast<const char*>(reader.take(4)), 4);
  reader.check(magic == kMagic, "begin", quote(magic), "GGUF");
  const auto version = reader.number<std::uint32_t>();
  reader.check(version == 2 || version == 3, "version", core::to_string(version),
               "2 or 3, little-endian");
  const auto num_tensors = reader.number<std::uint64_t>();
  const auto num_entries = reader.number<std::uint64_t>();
  // The shortest tensor and the shortest entry have 32 and 13 bytes.
  reader.check(num_tensors <= size / 32, "number of tensors", core::to_string(num_tensors),
               "as many as the file can hold");
  reader.check(num_entries <= size / 13, "number of metadata entries", core::to_string(num_entries),
               "as many as the file can hold");
  const nlohmann::json metadata = read_metadata(reader, num_entries);
  std::uint64_t alignment = 32;
  if (const auto given = metadata.find("general.alignment"); given != metadata.end()) {
    const bool number = given->is_number_unsigned();
    alignment = number ? given->get<std::uint64_t>() : 0;
    reader.check(alignment >= 8 && alignment <= 65536 && (alignment & (alignment - 1)) == 0,
                 "general.alignment", given->dump(), "a power of two from 8 to 65536");
  }
  std::vector<Entry> entries;
  for (std::uint64_t i = 0; i < num_tensors; ++i) entries.push_back(read_entry(reader));
  const std::size_t start = (reader.position() + alignment - 1) / alignment * alignment;
  check_places(reader, entries, start < size ? size - start : 0, alignment);
  GgufContents contents;
  contents.metadata_json = metadata.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  for (const Entry& entry : entries) {
    const auto [place, is_new] = contents.tensors.emplace(
        entry.name, make_tensor(entry, data + start + entry.offset, owner));
    reader.check_new(is_new, quote(entry.name));
  }
  return contents;
}

}  // namespace

GgufFile GgufFile::open(const std::filesystem::path& path, OpenOptions options) {
  const auto mapping = std::make_shared<const MappedFile>(path);
  GgufContents contents = files::read(static_cast<const unsigned char*>(mapping->data()),
                                      mapping->size(), path.string(), mapping);
  GgufFile file;
  file.file_ = mapping;
  file.access_ = options.access;
  file.metadata_json_ = std::move(contents.metadata_json);
  file.tensors_ = std::move(contents.tensors);
  return file;
}

GgufFile GgufFile::parse(const void* data, std::size_t size, const std::string& label) {
  GgufContents contents =
      files::read(static_cast<const unsigned char*>(data), size, label, nullptr);
  GgufFile file;
  file.metadata_json_ = std::move(contents.metadata_json);
  file.tensors_ = std::move(contents.tensors);
  return file;
}

Tensor GgufFile::read(const Tensor& tensor) const {
  if (!file_) return tensor;
  file_->check_unchanged();
  if (access_ == FileAccess::kMap) return tensor;
  Tensor result = Tensor::empty(tensor.shape(), tensor.dtype());
  const auto offset = tensor.as<const char>() - static_cast<const char*>(file_->data());
  file_->read(static_cast<std::size_t>(offset), result.data(),
              static_cast<std::size_t>(tensor.nbytes()));
  return result;
}

bool is_gguf(const std::filesystem::path& path) {
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(path, unknown)) return false;  // a pipe would wait
  std::array<char, 4> begin{};
  std::ifstream file(path, std::ios::binary);
  return file.read(begin.data(), begin.size()) && std::string_view(begin.data(), 4) == kMagic;
}

}  // namespace fusedmoe::files
