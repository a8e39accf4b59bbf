#include "cuda/device/mapped_memory.h"

#include <cuda.h>

#include <cstdint>
#include <string>

#include "core/ceil_div.h"
#include "core/device_runtime.h"
#include "core/format.h"
#include "cuda/device/check.h"

namespace fusedmoe::cuda {
namespace {

/// A function of the driver, found at run time: a build must start where there is none.
template <typename Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  FUSEDMOE_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess) {
    throw Error::device(result, core::format("the driver has no {}", name));
  }
  return reinterpret_cast<Function>(function);
}

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  static const auto text_of = driver_function<decltype(&cuGetErrorString)>("cuGetErrorString");
  const char* text = nullptr;
  if (text_of(result, &text) != CUDA_SUCCESS) text = "a CUresult that has no text";
  throw Error::device(result, core::format("{} failed: {}", call, text));
}

// The names as text: the headers rename some of them.
#define FUSEDMOE_DRIVER(name, ...)                                        \
  do {                                                                    \
    static const auto function = driver_function<decltype(&name)>(#name); \
    check(function(__VA_ARGS__), #name);                                  \
  } while (false)

CUmemAllocationProp properties(Device device) {
  CUmemAllocationProp result{};
  result.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  result.location = {CU_MEM_LOCATION_TYPE_DEVICE, device.index};
  result.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return result;
}

}  // namespace

MappedMemory::MappedMemory(std::size_t bytes, Device device) {
  const core::CurrentDevice current(device);
  const CUmemAllocationProp wanted = properties(device);
  std::size_t unit = 0;
  FUSEDMOE_DRIVER(cuMemGetAllocationGranularity, &unit, &wanted,
                  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  bytes_ = core::ceil_div(bytes, unit) * unit;
  static const auto create = driver_function<decltype(&cuMemCreate)>("cuMemCreate");
  const CUresult result = create(&handle_, bytes_, &wanted, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) throw Error::out_of_memory(bytes, to_string(device));
  check(result, "cuMemCreate");
  map(device);
}

MappedMemory::MappedMemory(int descriptor, std::size_t bytes, Device device) : bytes_(bytes) {
  const core::CurrentDevice current(device);
  FUSEDMOE_DRIVER(cuMemImportFromShareableHandle, &handle_,
                  reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  map(device);
}

/// With the handle made: what is thrown from here on gives it back.
void MappedMemory::map(Device device) {
  try {
    FUSEDMOE_DRIVER(cuMemAddressReserve, &address_, bytes_, 0, 0, 0);
    FUSEDMOE_DRIVER(cuMemMap, address_, bytes_, 0, handle_, 0);
    is_mapped_ = true;
    allow(device);
  } catch (...) {
    release();
    throw;
  }
}

MappedMemory::~MappedMemory() {
  release();
}

/// At the end of the process the driver may be gone already: what it returns does not matter.
void MappedMemory::release() noexcept {
  try {
    if (is_mapped_) FUSEDMOE_DRIVER(cuMemUnmap, address_, bytes_);
  } catch (...) {
  }
  try {
    if (address_ != 0) FUSEDMOE_DRIVER(cuMemAddressFree, address_, bytes_);
  } catch (...) {
  }
  try {
    FUSEDMOE_DRIVER(cuMemRelease, handle_);
  } catch (...) {
  }
}

int MappedMemory::descriptor() const {
  int result = -1;
  FUSEDMOE_DRIVER(cuMemExportToShareableHandle, &result, handle_,
                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  return result;
}

/// Once for each GPU, and one thread at a time: where ranks that share a GPU did it side by side,
/// the driver said that the block is mapped already, and their kernels found nothing there.
void MappedMemory::allow(Device device) {
  const std::lock_guard lock(mutex_);
  if (allowed_.contains(device.index)) return;
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device.index};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  FUSEDMOE_DRIVER(cuMemSetAccess, address_, bytes_, &access, 1);
  allowed_.insert(device.index);
}

#undef FUSEDMOE_DRIVER

}  // namespace fusedmoe::cuda
