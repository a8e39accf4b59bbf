#include "cuda/nccl/functions.h"

#include <dlfcn.h>

#include <cstdlib>

#include "core/check.h"

namespace fusedmoe {
#if FUSEDMOE_HAVE_NCCL
namespace cuda {
namespace {

/// From here on ncclCommAbort frees a communicator at the end of the group that it is called in.
/// Before, it frees it at once, under threads that are still in it.
constexpr int kOldest = NCCL_VERSION(2, 22, 3);

struct Library {
  NcclInfo info;
  NcclFunctions functions{};
};

std::string version_text(int version) {
  const int major = version < 10000 ? 1000 : 10000;  // until 2.8, and from 2.9 on
  return core::format("{}.{}.{}", version / major, version % major / 100, version % 100);
}

/// FUSEDMOE_NCCL names another file.
Library open_library() {
  Library library;
  library.info.compiled = NCCL_VERSION_CODE;
  const char* name = std::getenv("FUSEDMOE_NCCL");
  if (!name || !*name) name = "libnccl.so.2";
  // Never closed: its threads outlive whoever closes it.
  void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    library.info.problem = core::format("{} cannot be opened: {}", name, dlerror());
    return library;
  }
  std::string missing;
  const auto find = [&](auto& function, const char* symbol) {
    void* address = dlsym(handle, symbol);
    if (!address) missing += (missing.empty() ? "" : ", ") + std::string(symbol);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  NcclFunctions& f = library.functions;
  find(f.ncclGetVersion, "ncclGetVersion");
  find(f.ncclGetErrorString, "ncclGetErrorString");
  find(f.ncclGetUniqueId, "ncclGetUniqueId");
  find(f.ncclCommInitRank, "ncclCommInitRank");
  find(f.ncclCommCount, "ncclCommCount");
  find(f.ncclCommUserRank, "ncclCommUserRank");
  find(f.ncclCommCuDevice, "ncclCommCuDevice");
  find(f.ncclCommDestroy, "ncclCommDestroy");
  find(f.ncclCommAbort, "ncclCommAbort");
  find(f.ncclGroupStart, "ncclGroupStart");
  find(f.ncclGroupEnd, "ncclGroupEnd");
  find(f.ncclSend, "ncclSend");
  find(f.ncclRecv, "ncclRecv");
  find(f.ncclAllGather, "ncclAllGather");
  find(f.ncclReduceScatter, "ncclReduceScatter");
  Dl_info place{};
  if (f.ncclGetVersion && dladdr(reinterpret_cast<void*>(f.ncclGetVersion), &place) &&
      place.dli_fname) {
    library.info.path = place.dli_fname;
  }
  if (!missing.empty()) {
    library.info.problem = core::format("{} lacks {}", name, missing);
    return library;
  }
  f.ncclGetVersion(&library.info.found);
  if (library.info.found < kOldest) {
    library.info.problem = core::format("{} is NCCL {}; {} or later is needed", name,
                                        version_text(library.info.found), version_text(kOldest));
  }
  return library;
}

/// Never destroyed: threads that stay in NCCL may outlive the end of main().
const Library& library() {
  static const Library& library = *new Library(open_library());
  return library;
}

}  // namespace

const NcclFunctions& nccl() {
  const NcclInfo& info = library().info;
  if (!info.problem.empty()) throw Error::unsupported(Reason::kOperation, "nccl", info.problem);
  return library().functions;
}

void check_nccl(ncclResult_t result, const char* function) {
  if (result == ncclSuccess) return;
  throw Error::communication(core::format("{}: {}", function, nccl().ncclGetErrorString(result)));
}

}  // namespace cuda

NcclInfo nccl_info() {
  return cuda::library().info;
}

#else

NcclInfo nccl_info() {
  return {.problem = "compiled without nccl.h"};
}

#endif
}  // namespace fusedmoe
