// The library and its devices.
#include "fusedmoe/runtime.h"

#include "capi/convert.h"
#include "fusedmoe/version.h"

const char* fusedmoe_version(void) {
  return fusedmoe::version();
}

const char* fusedmoe_cpu_isa(void) {
  // A wrong name in FUSEDMOE_CPU_ISA throws; calls that compute report it.
  static const std::string isa = [] {
    try {
      return std::string(fusedmoe::cpu_isa());
    } catch (...) {
      return std::string();
    }
  }();
  return isa.c_str();
}

fusedmoe_status fusedmoe_set_num_threads(int32_t num_threads) {
  return fusedmoe::capi::guarded([&] { fusedmoe::set_num_threads(num_threads); });
}

int32_t fusedmoe_num_threads(void) {
  return fusedmoe::num_threads();
}

int32_t fusedmoe_cuda_device_count(void) {
  return fusedmoe::cuda_device_count();
}

const char* fusedmoe_device_problem(int32_t device_type, int32_t device_index) {
  thread_local std::string problem;
  try {
    problem =
        fusedmoe::device_problem(fusedmoe::capi::to_device_id(device_type, device_index, "device"));
  } catch (...) {
    fusedmoe::capi::keep_current_exception();
    return fusedmoe_last_error();
  }
  return problem.c_str();
}
