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

struct NcclFunctions {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetErrorString) get_error_string;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRank) comm_init_rank;
  decltype(&ncclCommCount) comm_count;
  decltype(&ncclCommUserRank) comm_user_rank;
  decltype(&ncclCommCuDevice) comm_cu_device;
  decltype(&ncclCommDestroy) comm_destroy;
  decltype(&ncclCommAbort) comm_abort;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) recv;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclReduceScatter) reduce_scatter;
};

/// Throws Error saying why there are none.
const NcclFunctions& nccl();
/// Throws Error of kind communication for what `call` returned.
void check_nccl(ncclResult_t result, const char* call);

}  // namespace fusedmoe::cuda

#endif
