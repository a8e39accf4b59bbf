// A libnccl.so.2 of a release that is too old to be used.
extern "C" {

int ncclGetVersion(int* version) {
  *version = 22105;
  return 0;
}

#define FUNCTION(name) \
  int name() {         \
    return 1;          \
  }
FUNCTION(ncclGetErrorString)
FUNCTION(ncclGetUniqueId)
FUNCTION(ncclCommInitRank)
FUNCTION(ncclCommCount)
FUNCTION(ncclCommUserRank)
FUNCTION(ncclCommCuDevice)
FUNCTION(ncclCommDestroy)
FUNCTION(ncclCommAbort)
FUNCTION(ncclGroupStart)
FUNCTION(ncclGroupEnd)
FUNCTION(ncclSend)
FUNCTION(ncclRecv)
FUNCTION(ncclAllGather)
FUNCTION(ncclReduceScatter)
}
