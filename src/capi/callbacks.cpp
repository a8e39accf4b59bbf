#include "capi/callbacks.h"

#include <string>

#include "capi/convert.h"
#include "fusedmoe/log.h"

namespace fusedmoe::capi {
namespace {

[[noreturn]] void give_up(const std::string& callback, std::int32_t result) {
  throw Error::cancelled(
      callback, callback + " returned " + std::to_string(result) + ", which gives the call up");
}

fusedmoe_hook_args to_c(const HookArgs& args) {
  fusedmoe_hook_args result{};
  result.struct_size = sizeof result;
  result.input = from_view(args.input);
  result.output = from_view(args.output);
  result.expert_offsets = from_view(args.expert_offsets);
  result.permuted_to_slot = from_view(args.permuted_to_slot);
  result.topk = args.topk;
  if (!args.stream.device.is_cpu()) result.stream = args.stream.handle;
  result.origin_numbers = from_view(args.origins.numbers);
  result.origin_counts = args.origins.counts.data();
  result.num_origins = args.origins.counts.size();
  return result;
}

constexpr const char* kSteps[] = {"after_gemm1", "after_activation", "after_gemm2"};

/// Captures no more than std::function holds without memory of its own.
template <int kStep>
std::function<void(const HookArgs&)> to_hook(std::int32_t (*hook)(void*, const fusedmoe_hook_args*),
                                             void* context) {
  if (!hook) return nullptr;
  return [hook, context](const HookArgs& args) {
    const fusedmoe_hook_args values = to_c(args);
    const std::int32_t result = hook(context, &values);
    if (result != 0) give_up(std::string("hooks.") + kSteps[kStep], result);
  };
}

}  // namespace

CallerExecutor::CallerExecutor(const fusedmoe_executor* executor, const char* name)
    : executor_(read_struct(executor, name)), name_(name) {
  const std::string prefix = std::string(name) + ".";
  if (!executor_.run) throw Error(prefix + "run", "NULL", "a function", Fault::kNull);
  if (executor_.concurrency < 1) {
    throw Error(prefix + "concurrency", std::to_string(executor_.concurrency), "at least 1");
  }
}

void CallerExecutor::run(int num_tasks, Task task) {
  const auto call = [](void* data, std::int32_t index) {
    (*static_cast<const Task*>(data))(index);
  };
  const std::int32_t result = executor_.run(executor_.context, num_tasks, call, &task);
  if (result != 0) give_up(std::string(name_) + ".run", result);
}

ExpertsHooks to_hooks(const fusedmoe_hooks* hooks, const char* name) {
  const fusedmoe_hooks given = read_struct(hooks, name);
  return {to_hook<0>(given.after_gemm1, given.context),
          to_hook<1>(given.after_activation, given.context),
          to_hook<2>(given.after_gemm2, given.context)};
}

}  // namespace fusedmoe::capi

fusedmoe_status fusedmoe_set_log(void (*log)(void* context, int32_t level, const char* message),
                                 void* context) {
  return fusedmoe::capi::guarded([&] {
    if (!log) return fusedmoe::set_log_hook(nullptr);
    fusedmoe::set_log_hook([log, context](fusedmoe::LogLevel level, std::string_view message) {
      log(context, static_cast<int32_t>(level), std::string(message).c_str());
    });
  });
}
