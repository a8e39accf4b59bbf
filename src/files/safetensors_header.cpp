#include "files/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/check.h"

namespace fusedmoe::files {
namespace {

struct DTypeName {
  std::string_view text;
  DType dtype;
};
// F4 holds two elements per byte, the first in the low nibble.
constexpr std::array<DTypeName, 14> kDTypeNames{{{"F64", DType::kF64},
                                                 {"F32", DType::kF32},
                                                 {"F16", DType::kF16},
                                                 {"BF16", DType::kBF16},
                                                 {"F8_E4M3", DType::kE4M3},
                                                 {"F8_E5M2", DType::kE5M2},
                                                 {"F8_E8M0", DType::kE8M0},
                                                 {"F4", DType::kE2M1},
                                                 {"I8", DType::kI8},
                                                 {"U8", DType::kU8},
                                                 {"I16", DType::kI16},
                                                 {"I32", DType::kI32},
                                                 {"I64", DType::kI64},
                                                 {"BOOL", DType::kBool}}};

std::string dtype_list() {
  std::string list;
  for (const DTypeName& entry : kDTypeNames) {
    list += (list.empty() ? "" : ", ") + std::string(entry.text);
  }
  return list;
}

// Fills a Header while the parser runs, so that hostile JSON never becomes a tree: memory stays
// proportional to the tensors that are well formed, and nesting beyond three levels is refused.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(Header& header, const std::string& label) : header_(header), label_(label) {}

  bool null() override { return reject("null"); }
  bool boolean(bool value) override { return reject(value ? "true" : "false"); }
  bool number_float(number_float_t, const string_t& text) override { return reject(text); }
  bool binary(binary_t&) override { return reject("binary data"); }

  // The parser calls this for negative integers (and -0).
  bool number_integer(number_integer_t value) override {
    if (value < 0) return reject(std::to_string(value));
    return number_unsigned(static_cast<number_unsigned_t>(value));
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (level_ != kArray ||
        value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max())) {
      return reject(std::to_string(value));
    }
    const std::size_t limit = field_ == kShape ? Shape::kMaxRank : 2;
    if (num_values_ == limit) fail(where(), core::format("more than {} values", limit), wanted());
    values_[num_values_++] = static_cast<std::int64_t>(value);
    return true;
  }

  bool string(string_t& text) override {
    if (level_ == kMetadata) {
      if (!header_.metadata.emplace(key_, text).second) {
        fail_twice("__metadata__." + quote(key_));
      }
      return true;
    }
    if (level_ != kTensor || field_ != kDType) return reject(quote(text));
    const auto* found = std::find_if(kDTypeNames.begin(), kDTypeNames.end(),
                                     [&](const DTypeName& entry) { return entry.text == text; });
    if (found == kDTypeNames.end()) fail(where(), quote(text), "one of " + dtype_list());
    entry_.dtype = found->dtype;
    return true;
  }

  bool start_object(std::size_t) override {
    if (level_ == kNothing) {
      level_ = kTop;
    } else if (level_ == kTop) {
      level_ = key_ == "__metadata__" ? kMetadata : kTensor;
      if (level_ == kMetadata && metadata_seen_) fail_twice("__metadata__");
      metadata_seen_ |= level_ == kMetadata;
      entry_ = HeaderEntry{};
      entry_.name = level_ == kTensor ? key_ : "";
      seen_ = 0;
    } else {
      return reject("an object");
    }
    return true;
  }

  bool key(string_t& text) override {
    key_ = text;
    if (level_ != kTensor) return true;
    field_ = text == "dtype"          ? kDType
             : text == "shape"        ? kShape
             : text == "data_offsets" ? kOffsets
                                      : kUnknown;
    if (field_ == kUnknown) {
      fail_with(tensor_label(), core::format("has the key {}, but a tensor has dtype, shape and "
                                             "data_offsets only",
                                             quote(text)));
    }
    if (seen_ & field_) fail_twice(where());
    seen_ |= field_;
    return true;
  }

  bool end_object() override {
    if (level_ == kTensor) {
      if (seen_ != (kDType | kShape | kOffsets)) {
        const char* missing = !(seen_ & kDType)   ? "dtype"
                              : !(seen_ & kShape) ? "shape"
                                                  : "data_offsets";
        fail_with(tensor_label(), core::format("has no {}", missing));
      }
      header_.tensors.push_back(std::move(entry_));
    }
    level_ = level_ == kTop ? kNothing : kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (level_ != kTensor || (field_ != kShape && field_ != kOffsets)) return reject("an array");
    level_ = kArray;
    num_values_ = 0;
    return true;
  }

  bool end_array() override {
    level_ = kTensor;
    if (field_ == kShape) {
      entry_.shape = Shape(std::span<const std::int64_t>(values_.data(), num_values_));
    } else {
      if (num_values_ != 2) fail(where(), core::format("{} values", num_values_), wanted());
      entry_.begin = values_[0];
      entry_.end = values_[1];
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    fail("header", core::format("at byte {}: {}", position, quote(error.what())), "valid JSON");
  }

 private:
  enum Level { kNothing, kTop, kMetadata, kTensor, kArray };
  enum Field : unsigned { kUnknown = 0, kDType = 1, kShape = 2, kOffsets = 4 };

  [[noreturn]] void fail(const std::string& what, std::string was, std::string must_be) const {
    throw Error::malformed(core::format("{}: {}", label_, what), std::move(was),
                           std::move(must_be));
  }

  [[noreturn]] void fail_with(const std::string& what, const std::string& predicate) const {
    const std::string part = core::format("{}: {}", label_, what);
    throw Error::io(part, core::format("{} {}", part, predicate));
  }
  [[noreturn]] void fail_twice(const std::string& what) const { fail_with(what, "is there twice"); }

  // A value where none of its kind may stand.
  bool reject(std::string was) const { fail(where(), std::move(was), wanted()); }

  std::string tensor_label() const { return "tensor " + quote(entry_.name); }

  std::string where() const {
    if (level_ == kNothing) return "header";
    if (level_ == kTop) return "entry " + quote(key_);
    if (level_ == kMetadata) return "__metadata__." + quote(key_);
    const char* field = field_ == kDType ? "dtype" : field_ == kShape ? "shape" : "data_offsets";
    return tensor_label() + ": " + field;
  }

  std::string wanted() const {
    if (level_ == kNothing || level_ == kTop) return "an object";
    if (level_ == kMetadata) return "a string";
    if (field_ == kDType) return "a string, one of " + dtype_list();
    return field_ == kShape
               ? core::format("an array of at most {} non-negative integers", Shape::kMaxRank)
               : std::string("an array of two non-negative integers");
  }

  Header& header_;
  const std::string& label_;
  Level level_ = kNothing;
  Field field_ = kUnknown;
  unsigned seen_ = 0;
  bool metadata_seen_ = false;
  std::string key_;
  HeaderEntry entry_;
  std::array<std::int64_t, Shape::kMaxRank> values_{};
  std::size_t num_values_ = 0;
};

// Size in bytes, or nothing if it is absurd. Zero extents do not hide the others: strides of an
// empty tensor must not overflow either.
std::optional<std::int64_t> tensor_bytes(const HeaderEntry& entry) {
  constexpr std::int64_t kMaxElements = std::int64_t{1} << 56;
  std::int64_t elements = 1;
  bool empty = false;
  for (std::int64_t extent : entry.shape) {
    empty |= extent == 0;
    if (__builtin_mul_overflow(elements, std::max<std::int64_t>(extent, 1), &elements) ||
        elements > kMaxElements) {
      return std::nullopt;
    }
  }
  if (empty) return 0;
  const std::int64_t num_bits = elements * bits(entry.dtype);
  if (num_bits % 8 != 0) return std::nullopt;
  return num_bits / 8;
}

void check_entry(const HeaderEntry& entry, std::int64_t data_bytes, const std::string& label) {
  const auto where = [&](const char* field) {
    return core::format("{}: tensor {}: {}", label, quote(entry.name), field);
  };
  const std::optional<std::int64_t> size = tensor_bytes(entry);
  FUSEDMOE_CHECK_FILE(size.has_value(), where("shape"),
                      core::format("{} of {}", to_string(entry.shape), name(entry.dtype)),
                      "of at most 2^56 elements in whole bytes");
  const std::string offsets = core::format("[{}, {}]", entry.begin, entry.end);
  FUSEDMOE_CHECK_FILE(entry.begin <= entry.end, where("data_offsets"), offsets,
                      "in ascending order");
  FUSEDMOE_CHECK_FILE(entry.end <= data_bytes, where("data_offsets"), offsets,
                      core::format("within the {} bytes of data in the file", data_bytes));
  FUSEDMOE_CHECK_FILE(
      entry.end - entry.begin == *size, where("data_offsets"),
      core::format("{}, {} bytes", offsets, entry.end - entry.begin),
      core::format("{} bytes for {} of {}", *size, to_string(entry.shape), name(entry.dtype)));
}

}  // namespace

std::string quote(std::string_view text) {
  constexpr std::size_t kLongest = 200;
  std::string result = "\"";
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      result += core::format("\\x{:02x}", byte);
    } else {
      result += c;
    }
  }
  return result + (text.size() > kLongest ? "\"..." : "\"");
}

Header parse_header(std::string_view json, std::int64_t data_bytes, const std::string& label) {
  FUSEDMOE_CHECK_FILE(!json.empty() && json.front() == '{', label + ": header",
                      quote(json.substr(0, 16)), "JSON that starts with {");
  // The parser takes a NUL for the end and would ignore what follows.
  FUSEDMOE_CHECK_FILE(json.find('\0') == std::string_view::npos, label + ": header",
                      "with a NUL byte", "valid JSON");
  Header header;
  HeaderReader reader(header, label);
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);

  for (const HeaderEntry& entry : header.tensors) check_entry(entry, data_bytes, label);

  std::vector<HeaderEntry>& tensors = header.tensors;
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    const std::string part = core::format("{}: tensor {}", label, quote(tensors[i].name));
    FUSEDMOE_CHECK_IO(tensors[i].name != tensors[i - 1].name, part, part + " is there twice");
  }
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  std::int64_t covered = 0;
  for (const HeaderEntry& entry : tensors) {
    FUSEDMOE_CHECK_FILE(
        entry.begin == covered,
        core::format("{}: tensor {}: data_offsets", label, quote(entry.name)),
        core::format("[{}, {}]", entry.begin, entry.end),
        core::format("starting at {}, where the tensor before it ends ({} found)", covered,
                     entry.begin < covered ? "an overlap was" : "a hole was"));
    covered = entry.end;
  }
  FUSEDMOE_CHECK_FILE(covered == data_bytes, label + ": data", core::format("{} bytes", data_bytes),
                      core::format("{} bytes, the end of the last tensor", covered));
  return header;
}

std::string serialize_header(std::span<const HeaderEntry> tensors,
                             const std::map<std::string, std::string>& metadata) {
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  for (const HeaderEntry& entry : tensors) {
    const auto* found = std::find_if(kDTypeNames.begin(), kDTypeNames.end(),
                                     [&](const DTypeName& n) { return n.dtype == entry.dtype; });
    FUSEDMOE_CHECK_FAULT(found != kDTypeNames.end(), kDType, "tensor " + quote(entry.name),
                         std::string(name(entry.dtype)), "a dtype of the format: " + dtype_list());
    header[entry.name] = {
        {"dtype", found->text},
        {"shape", std::vector<std::int64_t>(entry.shape.begin(), entry.shape.end())},
        {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception& error) {
    throw Error("tensor names or metadata", error.what(), "valid UTF-8");
  }
  constexpr std::size_t kAlignment = 64;
  const std::size_t unpadded = sizeof(std::uint64_t) + text.size();
  text.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
  std::uint64_t length = text.size();
  std::string result(sizeof length, '\0');
  for (char& byte : result) {
    byte = static_cast<char>(length & 0xff);
    length >>= 8;
  }
  return result + text;
}

}  // namespace fusedmoe::files
