// Which code of a build a GPU runs: machine code, or PTX that its driver compiles.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

struct DeviceCode {
  int capability = 0;  ///< that it was compiled for, as major * 10 + minor
  bool is_ptx = false;
  bool operator==(const DeviceCode&) const = default;
};

/// "machine code for 8.0", "PTX for 8.0"
std::string to_string(const DeviceCode& code);

/// What a GPU of this compute capability runs of kernels that were compiled for `architectures`,
/// as CMake names them, with spaces between: "80-real 90a-real 80-virtual". Machine code runs on
/// GPUs of the same major and no lower minor version, PTX on all later ones, and either, where the
/// name ends in "a", on its own GPU alone. None: it runs nothing.
std::optional<DeviceCode> code_for(std::string_view architectures, int capability);

/// The latest version of CUDA that the driver knows: "12.4".
std::string driver_version();

/// Why the driver cannot run a kernel on a device that is here; empty where it can. Without a
/// kernel nothing is asked: a build without CUDA has none.
std::string code_problem(const void* kernel, Device device);

}  // namespace fusedmoe::cuda
