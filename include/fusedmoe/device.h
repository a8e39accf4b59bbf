// Where work runs and in which order.
#pragma once

#include <string>
#include <string_view>

#include "fusedmoe/export.h"

namespace fusedmoe {

enum class DeviceKind { kCpu, kCuda };

/// `cpu` or `cuda:i`.
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;

  bool is_cpu() const { return kind == DeviceKind::kCpu; }
  bool operator==(const Device&) const = default;
};

/// "cpu" or "cuda:0".
FUSEDMOE_API std::string to_string(Device device);

/// Accepts "cpu", "cuda" (= "cuda:0") and "cuda:i"; throws Error otherwise.
FUSEDMOE_API Device parse_device(std::string_view text);

/// An ordered queue of work on a device. On the CPU work is synchronous and the handle unused; on
/// CUDA the handle is a `cudaStream_t`, null for the device's default stream.
struct Stream {
  Device device;
  void* handle = nullptr;
};

/// CUDA devices this build can see; 0 without CUDA, without a driver, or without a GPU.
FUSEDMOE_API int cuda_device_count();

/// Why the kernels of this build cannot run on the device: "built without CUDA", what the driver
/// says, "compute capability 8.0, needs 9.0", ... Empty if they can; always so for the CPU. Never
/// throws.
FUSEDMOE_API std::string device_problem(Device device);

/// The device's own name: "NVIDIA H200"; "cpu". Empty where device_problem() has an answer. Lives
/// as long as the program. Never throws.
FUSEDMOE_API std::string_view device_name(Device device);

/// One line per device: name, compute capability, memory; or one line "none: <why>".
FUSEDMOE_API std::string cuda_device_summary();

/// Threads used by CPU work of this process; 0 restores the default (OMP_NUM_THREADS, else all
/// cores given to it). Parallel regions take the number from num_threads(), whichever thread of
/// the caller they start on.
FUSEDMOE_API void set_num_threads(int num_threads);
FUSEDMOE_API int num_threads();

/// Name of the instruction set the CPU kernels run with: "generic", "avx2", "avx512",
/// "avx512_bf16" or "amx". Chosen once from the processor; the environment variable
/// FUSEDMOE_CPU_ISA may name a lower one.
FUSEDMOE_API std::string_view cpu_isa();

}  // namespace fusedmoe
