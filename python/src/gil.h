// The GIL, released and taken, in threads that may outlive the interpreter.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace fusedmoe::python {

/// Calls `take`, which waits for the GIL. When the interpreter ends, CPython ends a daemon thread
/// there by pthread_exit(), whose unwinding C++ code with destructors and handlers does not
/// survive. Such a thread sleeps here instead, until the process has ended.
template <typename Take>
void take_gil(const Take& take) {
  try {
    take();
  } catch (const abi::__forced_unwind&) {
    while (true) ::pause();
  }
}

/// Without the GIL in its scope.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    take_gil([this] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

/// With the GIL in its scope, in any thread.
class WithGil {
 public:
  WithGil() {
    take_gil([this] { state_ = PyGILState_Ensure(); });
  }
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_{};
};

}  // namespace fusedmoe::python
