// Functions of a C caller, called by the library. None of these allocates: forwards make them.
#pragma once

#include "capi/status.h"
#include "fusedmoe/experts.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe_hooks.h"

namespace fusedmoe::capi {

/// The caller's threads. `name`: of the argument, a literal.
class CallerExecutor final : public Executor {
 public:
  /// Throws Error for an executor that cannot run anything.
  CallerExecutor(const fusedmoe_executor* executor, const char* name);
  int concurrency() const override { return executor_.concurrency; }
  void run(int num_tasks, Task task) override;

 private:
  fusedmoe_executor executor_;
  const char* name_;
};

/// What `hooks` says; for NULL all are unset.
ExpertsHooks to_hooks(const fusedmoe_hooks* hooks, const char* name);

}  // namespace fusedmoe::capi
