// NCCL's functions, found in libnccl.so.2 at run time: one binary runs where there is none, and
// shares the library that the process has loaded already.
#pragma once

#if __has_include(<nccl.h>)
#define FUSEDMOE_HAVE_NCCL 1
#include <nccl.h>
#else
#define FUSEDMOE_HAVE_NCCL 0
#endif

#include "fusedmoe/comm.h"

#if FUSEDMOE_HAVE_NCCL

namespace fusedmoe::cuda {

/// Under NCCL's names.
struct NcclFunctions {
  decltype(&::ncclGetVersion) ncclGetVersion;
  decltype(&::ncclGetErrorString) ncclGetErrorString;
  decltype(&::ncclGetUniqueId) ncclGetUniqueId;
  decltype(&::ncclCommInitRank) ncclCommInitRank;
  decltype(&::ncclCommCount) ncclCommCount;
  decltype(&::ncclCommUserRank) ncclCommUserRank;
  decltype(&::ncclCommCuDevice) ncclCommCuDevice;
  decltype(&::ncclCommDestroy) ncclCommDestroy;
  decltype(&::ncclCommAbort) ncclCommAbort;
  decltype(&::ncclGroupStart) ncclGroupStart;
  decltype(&::ncclGroupEnd) ncclGroupEnd;
  decltype(&::ncclSend) ncclSend;
  decltype(&::ncclRecv) ncclRecv;
  decltype(&::ncclAllGather) ncclAllGather;
  decltype(&::ncclReduceScatter) ncclReduceScatter;
};

/// Throws Error saying why there are none.
const NcclFunctions& nccl();
/// Throws Error of kind communication naming the function if its result is an error.
void check_nccl(ncclResult_t result, const char* function);
#define FUSEDMOE_NCCL_CHECK(function, ...) \
  ::fusedmoe::cuda::check_nccl(::fusedmoe::cuda::nccl().function(__VA_ARGS__), #function)

}  // namespace fusedmoe::cuda

#endif
