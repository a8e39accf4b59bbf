#include "fusedmoe/error.h"

#include <array>

#include "core/format.h"

namespace fusedmoe {
namespace {

std::string sentence(const std::string& argument, const std::string& was,
                     const std::string& must_be) {
  return core::format("{}: was {}; must be {}", argument, was, must_be);
}

/// The text of an enumerator; the first one is that of number `first`.
template <std::size_t kCount, typename Enum>
std::string_view text(const std::array<std::string_view, kCount>& texts, Enum value,
                      int first = 0) {
  const auto index = static_cast<std::size_t>(static_cast<int>(value) - first);
  return index < kCount ? texts[index] : "unknown";
}

}  // namespace

std::string_view name(ErrorKind kind) {
  if (kind == ErrorKind::kInternal) return "internal";
  constexpr std::array<std::string_view, 7> kTexts{
      "invalid argument", "unsupported",   "out of memory", "i/o",
      "device",           "communication", "cancelled"};
  return text(kTexts, kind, 1);
}

std::string_view name(Fault fault) {
  constexpr std::array<std::string_view, 10> kTexts{"none",      "value",     "shape",   "dtype",
                                                    "layout",    "alignment", "overlap", "null",
                                                    "workspace", "device"};
  return text(kTexts, fault);
}

std::string_view code(Reason reason) {
  constexpr std::array<std::string_view, 16> kTexts{"supported",
                                                    "device",
                                                    "dtype",
                                                    "quant_scheme",
                                                    "activation",
                                                    "shape",
                                                    "activation_format",
                                                    "routing_method",
                                                    "router_weight_on_input",
                                                    "expert_map",
                                                    "parallel_config",
                                                    "batch_invariance",
                                                    "hooks",
                                                    "pairing",
                                                    "model",
                                                    "operation"};
  return text(kTexts, reason);
}

Error::Error(ErrorKind kind, std::string argument, const std::string& message)
    : std::runtime_error(message), kind_(kind), argument_(std::move(argument)) {}

Error::Error(std::string argument, std::string was, std::string must_be, Fault fault)
    : std::runtime_error(sentence(argument, was, must_be)),
      kind_(ErrorKind::kInvalidArgument),
      fault_(fault),
      argument_(std::move(argument)),
      was_(std::move(was)),
      must_be_(std::move(must_be)) {}

Error Error::invalid(std::string argument, const std::string& message, Fault fault) {
  Error error(ErrorKind::kInvalidArgument, std::move(argument), message);
  error.fault_ = fault;
  return error;
}

Error Error::conflict(std::string argument, const std::string& other, const std::string& because) {
  const std::string message = core::format("{} cannot be used with {}{}{}", argument, other,
                                           because.empty() ? "" : ": ", because);
  Error error = invalid(std::move(argument), message);
  error.was_ = "given with " + other;
  error.must_be_ = "given without it";
  return error;
}

Error Error::unknown_name(std::string argument, std::string_view name, const std::string& known) {
  const std::string message =
      core::format("{} {}: no such name; there are: {}", argument, name, known);
  Error error = invalid(std::move(argument), message);
  error.was_ = core::format("\"{}\"", name);
  error.must_be_ = "one of " + known;
  return error;
}

Error Error::unsupported(Reason reason, std::string argument, const std::string& message) {
  Error error(ErrorKind::kUnsupported, std::move(argument), message);
  error.reason_ = reason;
  return error;
}

Error Error::unsupported(Reason reason, std::string argument, std::string was,
                         std::string must_be) {
  Error error = malformed(std::move(argument), std::move(was), std::move(must_be));
  error.kind_ = ErrorKind::kUnsupported;
  error.reason_ = reason;
  return error;
}

Error Error::out_of_memory(std::size_t bytes, const std::string& where) {
  Error error(ErrorKind::kOutOfMemory, {},
              bytes ? core::format("out of memory: cannot allocate {} bytes on {}", bytes, where)
                    : core::format("out of memory on {}", where));
  error.requested_bytes_ = bytes;
  return error;
}

Error Error::io(std::string path, const std::string& message) {
  return Error(ErrorKind::kIo, std::move(path), message);
}

Error Error::malformed(std::string part, std::string was, std::string must_be) {
  Error error(std::move(part), std::move(was), std::move(must_be), Fault::kNone);
  error.kind_ = ErrorKind::kIo;
  return error;
}

Error Error::device(int code, const std::string& message) {
  Error error(ErrorKind::kDevice, {}, message);
  error.device_error_ = code;
  return error;
}

Error Error::communication(const std::string& message) {
  return Error(ErrorKind::kCommunication, {}, message);
}

Error Error::cancelled(std::string callback, const std::string& message) {
  return Error(ErrorKind::kCancelled, std::move(callback), message);
}

Error Error::internal(const std::string& message) {
  return Error(ErrorKind::kInternal, {}, "internal error: " + message);
}

Error Error::within(const std::string& context) const {
  Error error(kind_, core::format("{}: {}", context, argument_),
              core::format("{}: {}", context, what()));
  error.fault_ = fault_;
  error.reason_ = reason_;
  error.device_error_ = device_error_;
  error.requested_bytes_ = requested_bytes_;
  error.was_ = was_;
  error.must_be_ = must_be_;
  return error;
}

}  // namespace fusedmoe
