// The one exception type of the library. Every number in here is stable: a C interface, a log or
// another language may store it.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

#include "fusedmoe/export.h"

namespace fusedmoe {

/// What went wrong, in the terms of who has to act.
enum class ErrorKind : int {
  kInvalidArgument = 1,  ///< the call is wrong: see Error::argument() and Error::fault()
  kUnsupported = 2,      ///< the call is right, but nothing here can serve it: see Error::reason()
  kOutOfMemory = 3,      ///< host or device memory: see Error::requested_bytes()
  kIo = 4,               ///< a file is missing, cannot be read or written, or is malformed
  kDevice = 5,           ///< the CUDA runtime or driver failed: see Error::device_error()
  kCommunication = 6,    ///< a rank is missing, failed, or does something else than the others
  kCancelled = 7,        ///< a callback of the caller's, as an executor, has ended the call
  kInternal = 100,       ///< a fault of the library: no caller can do anything about it
};
/// "invalid argument", "unsupported", "out of memory", "i/o", "device", "communication",
/// "cancelled", "internal"
FUSEDMOE_API std::string_view name(ErrorKind kind);

/// What is wrong with an argument.
enum class Fault : int {
  kNone = 0,       ///< the error is no invalid argument
  kValue = 1,      ///< a number, a name or a combination of options
  kShape = 2,      ///< rank or extents
  kDType = 3,      ///< element type
  kLayout = 4,     ///< strides: not contiguous where it must be
  kAlignment = 5,  ///< address
  kOverlap = 6,    ///< memory shared with another argument
  kNull = 7,       ///< not given, or a null pointer
  kWorkspace = 8,  ///< scratch memory missing or too small
  kDevice = 9,     ///< memory or a stream of another device than the call needs
};
/// "value", "shape", ...
FUSEDMOE_API std::string_view name(Fault fault);

/// Why an implementation cannot serve a configuration.
enum class Reason : int {
  kSupported = 0,
  kDevice = 1,
  kDType = 2,
  kQuantScheme = 3,
  kActivation = 4,
  kShape = 5,
  kActivationFormat = 6,
  kRoutingMethod = 7,
  kRouterWeightOnInput = 8,
  kExpertMap = 9,
  kParallelConfig = 10,
  kBatchInvariance = 11,
  kHooks = 12,
  kPairing = 13,    ///< PrepareAndFinalize and Experts do not fit each other
  kModel = 14,      ///< a checkpoint of a model that the library does not know
  kOperation = 15,  ///< an optional operation, as unpack, that the implementation lacks
};
/// "supported", "device", "quant_scheme", ...
FUSEDMOE_API std::string_view code(Reason reason);

/// Thrown before any work starts and before any output is touched, except for device errors, which
/// CUDA may report late, and cancellation, which leaves the output as it was. what() is one
/// sentence; a list of details may follow on lines of their own, at most 15 lines in all.
class FUSEDMOE_API Error : public std::runtime_error {
 public:
  /// An invalid argument: "`argument`: was `was`; must be `must_be`".
  Error(std::string argument, std::string was, std::string must_be, Fault fault = Fault::kValue);

  /// The same where no value is at fault; `message` is the whole sentence.
  static Error invalid(std::string argument, const std::string& message,
                       Fault fault = Fault::kValue);
  /// Each is right alone: "`argument` cannot be used with `other`: `because`".
  static Error conflict(std::string argument, const std::string& other,
                        const std::string& because = {});
  /// A name that `argument` does not have: "`argument` `name`: no such name; there are: `known`".
  static Error unknown_name(std::string argument, std::string_view name, const std::string& known);
  /// What cannot be served; `message` is the whole sentence.
  static Error unsupported(Reason reason, std::string argument, const std::string& message);
  /// As for an invalid argument.
  static Error unsupported(Reason reason, std::string argument, std::string was,
                           std::string must_be);
  /// `where` names the device; 0 bytes: not known.
  static Error out_of_memory(std::size_t bytes, const std::string& where);
  /// The system refused: `message` is the whole sentence.
  static Error io(std::string path, const std::string& message);
  /// Contents of a file that are not as they must be; `part` names the file and the place in it.
  static Error malformed(std::string part, std::string was, std::string must_be);
  /// `code` is a cudaError_t or CUresult; `message` is the whole sentence.
  static Error device(int code, const std::string& message);
  /// Between ranks; `message` is the whole sentence and names them.
  static Error communication(const std::string& message);
  /// `callback` names what the caller has given; `message` is the whole sentence.
  static Error cancelled(std::string callback, const std::string& message);
  /// What only a fault of the library makes happen: "internal error: `message`".
  static Error internal(const std::string& message);

  /// The same error, of an argument or file within `context`.
  Error within(const std::string& context) const;

  ErrorKind kind() const noexcept { return kind_; }
  /// The caller's name of what is at fault: an argument, for example `topk_ids` or
  /// `weights.experts[0].gate.scales`, or a file. Empty for device and memory errors.
  const std::string& argument() const noexcept { return argument_; }
  /// Of values that are at fault, and of conflicts; empty otherwise.
  const std::string& was() const noexcept { return was_; }
  const std::string& must_be() const noexcept { return must_be_; }
  /// Of invalid arguments.
  Fault fault() const noexcept { return fault_; }
  /// Of kUnsupported; kSupported otherwise.
  Reason reason() const noexcept { return reason_; }
  /// Of kDevice: the number CUDA gave; 0 otherwise.
  int device_error() const noexcept { return device_error_; }
  /// Of kOutOfMemory.
  std::size_t requested_bytes() const noexcept { return requested_bytes_; }

 private:
  Error(ErrorKind kind, std::string argument, const std::string& message);

  ErrorKind kind_;
  Fault fault_ = Fault::kNone;
  Reason reason_ = Reason::kSupported;
  int device_error_ = 0;
  std::size_t requested_bytes_ = 0;
  std::string argument_;
  std::string was_;
  std::string must_be_;
};

}  // namespace fusedmoe
