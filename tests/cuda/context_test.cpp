// Kernels in other contexts than the whole device's first one: behind a reset, and in a green
// context, which has some of the multiprocessors.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "cuda_test.h"
#include "experts_problem.h"
#include "scheme_rows.h"

namespace fusedmoe::testing {
namespace {

Case case_of(std::int64_t tokens) {
  Case spec;
  spec.num_tokens = tokens;
  spec.hidden = 360;
  spec.intermediate = 256;
  return spec;
}

/// Both kinds of kernel need more shared memory than a kernel gets without asking.
TEST(CudaContextTest, KernelsRunAgainAfterAReset) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  FUSEDMOE_SKIP_WITHOUT_KERNELS("bf16", DType::kBF16);
  for (const std::int64_t tokens : {1, 8}) {
    const Problem problem = make_problem(case_of(tokens));
    const auto output = [&] {
      const ModularKernel kernel = make_kernel(problem.spec);
      return KernelRun(problem, kernel, kernel.experts().pack(problem.weights)).run();
    };
    const Tensor before = output();
    ASSERT_EQ(cudaDeviceReset(), cudaSuccess);
    EXPECT_TRUE(bitwise_equal(output(), before)) << tokens << " tokens";
  }
}

/// A stream of a green context with 8 multiprocessors.
class GreenStream {
 public:
  GreenStream() {
    EXPECT_EQ(cudaFree(nullptr), cudaSuccess);  // the device has its first context
    CUdevResource all{}, part{}, rest{};
    CUdevResourceDesc description{};
    unsigned groups = 1;
    const auto get_device = find<decltype(&cuDeviceGet)>("cuDeviceGet", 12000);
    const auto get_all = find<decltype(&cuDeviceGetDevResource)>("cuDeviceGetDevResource");
    const auto split = find<decltype(&cuDevSmResourceSplitByCount)>("cuDevSmResourceSplitByCount");
    const auto describe = find<decltype(&cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc");
    const auto create = find<decltype(&cuGreenCtxCreate)>("cuGreenCtxCreate");
    const auto make_stream =
        find<decltype(&cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate", 12050);
    if (!get_device || !get_all || !split || !describe || !create || !make_stream) return;
    CUdevice device = 0;
    EXPECT_EQ(get_device(&device, 0), CUDA_SUCCESS);
    EXPECT_EQ(get_all(device, &all, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS);
    EXPECT_EQ(split(&part, &groups, &all, &rest, 0, 8), CUDA_SUCCESS);
    EXPECT_EQ(describe(&description, &part, 1), CUDA_SUCCESS);
    EXPECT_EQ(create(&context_, description, device, CU_GREEN_CTX_DEFAULT_STREAM), CUDA_SUCCESS);
    EXPECT_EQ(make_stream(&stream_, context_, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
  }
  ~GreenStream() {
    if (stream_) cudaStreamDestroy(stream_);
    if (context_) find<decltype(&cuGreenCtxDestroy)>("cuGreenCtxDestroy")(context_);
  }
  GreenStream(const GreenStream&) = delete;
  GreenStream& operator=(const GreenStream&) = delete;
  /// Null where the driver has no green contexts.
  Stream stream() const { return {kGpu, stream_}; }

 private:
  template <typename Function>
  static Function find(const char* name, unsigned version = 12040) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
  }
  CUgreenCtx context_ = nullptr;
  CUstream stream_ = nullptr;
};

TEST(CudaContextTest, OneTokenRunsOnTheMultiprocessorsThatItsStreamHas) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  FUSEDMOE_SKIP_WITHOUT_KERNELS("bf16", DType::kBF16);
  const GreenStream green;
  if (!green.stream().handle) GTEST_SKIP() << "the driver has no green contexts";
  Case spec = case_of(1);
  const auto run_on = [&](Stream stream) {
    const Problem problem = make_problem(spec);
    const ModularKernel kernel = make_kernel(spec);
    RunOptions options;
    options.kernel_config = kernel.experts().find_kernel_config("one token");
    const KernelRun run(problem, kernel, kernel.experts().pack(problem.weights));
    run.enqueue(stream, options);
    synchronize(stream);
    expect_close(run.output(), run_reference(problem), spec.scheme);
  };
  run_on(green.stream());
  run_on(Stream{kGpu});
  // Each of 8 thread blocks has 256 slices of GEMM 1.
  spec.hidden = 64;
  spec.intermediate = 512;
  spec.num_experts = spec.topk = 32;
  run_on(Stream{kGpu});
  try {
    run_on(green.stream());
    ADD_FAILURE() << "shared memory for 8 thread blocks";
  } catch (const Error& error) {
    EXPECT_EQ(error.reason(), Reason::kDevice) << error.what();
    EXPECT_TRUE(std::string(error.what()).starts_with("the stream has 8 of the ")) << error.what();
  }
}

}  // namespace
}  // namespace fusedmoe::testing
