// CUTLASS's grouped GEMM for Hopper on the GEMMs of bf16 layers: the opponent of the library's own.
// A group is an expert: D (rows, n) = A (rows, k) W (n, k)^T in bf16 with fp32 sums, the number of
// rows known on the device only. No gather, activation or combine: what those cost comes on top.
//
// Built from CUTLASS's collectives: pointer arrays, TMA, cooperative warp specialization. Each run
// is timed by events after 256 MiB were written, so that the L2 is cold.
//
//   cutlass_grouped_gemm_bench [tokens ...]
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace {

using namespace fusedmoe;
using cute::Int;

const Device kGpu{DeviceKind::kCuda, 0};
constexpr std::int64_t kFlushBytes = std::int64_t{256} << 20;
constexpr int kSamples = 21;

/// The GEMM with tiles of kTileM rows by kTileN outputs by 64 of K, in clusters of two.
template <int kTileM, int kTileN>
struct Cutlass {
  using Tile = cute::Shape<Int<kTileM>, Int<kTileN>, Int<64>>;
  using Cluster = cute::Shape<Int<2>, Int<1>, Int<1>>;
  using Problem = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
  using Element = cutlass::bfloat16_t;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  static constexpr int kAlignment = 8;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor*, kAlignment,
      Element, RowMajor*, kAlignment,
      cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor*, kAlignment, Element,
      ColumnMajor*, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};

/// A trivially copyable array on the GPU.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) {
    const Shape bytes{static_cast<std::int64_t>(values.size() * sizeof(T))};
    memory_ = to_device(Tensor(TensorView(values.data(), DType::kU8, bytes), nullptr), kGpu);
  }
  T* data() const { return memory_.template as<T>(); }

 private:
  Tensor memory_;
};

__global__ void fill_random_kernel(__nv_bfloat16* values, std::int64_t count, std::uint32_t seed) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    std::uint32_t bits = static_cast<std::uint32_t>(i) * 2654435761U ^ seed;
    bits = (bits ^ bits >> 15) * 2246822519U;
    bits ^= bits >> 13;
    values[i] = __float2bfloat16(static_cast<float>(bits >> 8) * 0x1p-23F - 1);
  }
}

Tensor random_bf16(std::int64_t rows, std::int64_t columns, std::uint32_t seed) {
  Tensor result = Tensor::empty({rows, columns}, DType::kBF16, kGpu);
  fill_random_kernel<<<1024, 256>>>(result.as<__nv_bfloat16>(), result.numel(), seed);
  synchronize(Stream{kGpu});
  return result;
}

/// One grouped GEMM with its operands. Every expert has n rows of weights.
struct Operands {
  std::int64_t n, k;
  std::vector<std::int64_t> offsets;  // of the experts' rows; (experts + 1)
  Tensor a, w, d;

  Operands(const std::vector<std::int64_t>& rows, std::int64_t outputs, std::int64_t inputs)
      : n(outputs), k(inputs), offsets(rows.size() + 1) {
    std::partial_sum(rows.begin(), rows.end(), offsets.begin() + 1);
    a = random_bf16(offsets.back(), k, 1);
    w = random_bf16(std::ssize(rows) * n, k, 2);
    d = Tensor::empty({offsets.back(), n}, DType::kBF16, kGpu);
  }
  std::int64_t experts() const { return std::ssize(offsets) - 1; }
};

void check(cutlass::Status status, const char* what) {
  if (status != cutlass::Status::kSuccess) {
    throw Error(what, cutlassGetStatusString(status), "successful");
  }
}

/// Median time of one run.
template <typename Config>
double time_us(const Operands& operands, const Tensor& flushed) {
  using Gemm = typename Config::Gemm;
  using Element = typename Config::Element;
  using StrideA = typename Gemm::GemmKernel::InternalStrideA;
  using StrideB = typename Gemm::GemmKernel::InternalStrideB;
  using StrideD = typename Gemm::GemmKernel::InternalStrideD;
  std::vector<cute::Shape<int, int, int>> shapes;
  std::vector<const Element*> a, w;
  std::vector<Element*> d;
  for (std::int64_t e = 0; e < operands.experts(); ++e) {
    const std::int64_t first = operands.offsets[static_cast<std::size_t>(e)];
    const std::int64_t rows = operands.offsets[static_cast<std::size_t>(e) + 1] - first;
    shapes.emplace_back(static_cast<int>(rows), static_cast<int>(operands.n),
                        static_cast<int>(operands.k));
    a.push_back(operands.a.as<Element>() + first * operands.k);
    w.push_back(operands.w.as<Element>() + e * operands.n * operands.k);
    d.push_back(operands.d.as<Element>() + first * operands.n);
  }
  StrideA stride_a{};
  StrideB stride_b{};
  StrideD stride_d{};
  cute::get<0>(stride_a) = operands.k;
  cute::get<0>(stride_b) = operands.k;
  cute::get<0>(stride_d) = operands.n;
  const std::size_t experts = shapes.size();
  const DeviceArray there_shapes(shapes);
  const DeviceArray there_a(a), there_w(w);
  const DeviceArray there_d(d);
  const DeviceArray strides_a(std::vector(experts, stride_a));
  const DeviceArray strides_b(std::vector(experts, stride_b));
  const DeviceArray strides_d(std::vector(experts, stride_d));

  typename Gemm::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  args.problem_shape = {static_cast<int>(experts), there_shapes.data(), nullptr};
  args.mainloop = {there_a.data(), strides_a.data(), there_w.data(), strides_b.data()};
  args.epilogue.thread.alpha = 1;
  args.epilogue.thread.beta = 0;
  args.epilogue.ptr_D = there_d.data();
  args.epilogue.dD = strides_d.data();
  args.hw_info.device_id = kGpu.index;
  args.hw_info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count();
  const OwnedStream owned(kGpu);
  const Stream stream = owned;
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  const Tensor workspace =
      Tensor::empty({static_cast<std::int64_t>(Gemm::get_workspace_size(args))}, DType::kU8, kGpu);
  Gemm gemm;
  check(Gemm::can_implement(args), "can_implement");
  check(gemm.initialize(args, workspace.data(), handle), "initialize");

  fill_bytes(operands.d, 0xff, stream);  // NaN: what is not written shows
  std::vector<double> times;
  for (int sample = 0; sample < kSamples; ++sample) {
    Event start(kGpu), end(kGpu);
    fill_bytes(flushed, 0, stream);
    start.record(stream);
    check(gemm.run(handle), "run");
    end.record(stream);
    times.push_back(1e3 * elapsed_ms(start, end));
  }
  std::nth_element(times.begin(), times.begin() + kSamples / 2, times.end());
  return times[kSamples / 2];
}

/// Largest error of some elements of D, over the size of a sum of k products.
double sampled_error(const Operands& operands) {
  const auto row_of = [](const Tensor& matrix, std::int64_t row) {
    return to_device(Tensor(matrix.select(0, row), matrix.owner()), {});
  };
  testing::Random random(3);
  double worst = 0;
  for (int sample = 0; sample < 32; ++sample) {
    const std::int64_t row = random.below(operands.offsets.back()),
                       column = random.below(operands.n);
    const auto next = std::upper_bound(operands.offsets.begin(), operands.offsets.end(), row);
    const std::int64_t expert = next - operands.offsets.begin() - 1;
    const Tensor a = row_of(operands.a, row), w = row_of(operands.w, expert * operands.n + column);
    const Tensor d = row_of(operands.d, row);
    double sum = 0;
    for (std::int64_t i = 0; i < operands.k; ++i) {
      sum += double{__bfloat162float(a.as<const __nv_bfloat16>()[i])} *
             double{__bfloat162float(w.as<const __nv_bfloat16>()[i])};
    }
    const double actual = __bfloat162float(d.as<const __nv_bfloat16>()[column]);
    const double error = std::abs(actual - sum) / std::sqrt(static_cast<double>(operands.k));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

struct Model {
  const char* name;
  std::int64_t experts, topk, hidden, intermediate;
};
constexpr Model kModels[] = {
    {"gpt-oss-20b", 32, 4, 2880, 2880},      {"gpt-oss-120b", 128, 4, 2880, 2880},
    {"mixtral-8x7b", 8, 2, 4096, 14336},     {"qwen3-30b-a3b", 128, 8, 2048, 768},
    {"qwen3-235b-a22b", 128, 8, 4096, 1536}, {"deepseek-v3", 256, 8, 7168, 2048},
};

/// Rows of each expert when every token draws topk distinct ones at random.
std::vector<std::int64_t> draw_rows(const Model& model, std::int64_t num_tokens) {
  testing::Random random(1);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(model.experts)), order(rows.size());
  std::iota(order.begin(), order.end(), 0);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (std::int64_t j = 0; j < model.topk; ++j) {
      std::swap(order[static_cast<std::size_t>(j)],
                order[static_cast<std::size_t>(j + random.below(model.experts - j))]);
      ++rows[static_cast<std::size_t>(order[static_cast<std::size_t>(j)])];
    }
  }
  return rows;
}

void measure(const Model& model, std::int64_t num_tokens, const Tensor& flushed) {
  const std::vector<std::int64_t> rows = draw_rows(model, num_tokens);
  for (const bool first : {true, false}) {
    const Operands operands(rows, first ? 2 * model.intermediate : model.hidden,
                            first ? model.hidden : model.intermediate);
    const double wide = time_us<Cutlass<128, 256>>(operands, flushed);
    const double error = sampled_error(operands);
    const double narrow = time_us<Cutlass<128, 128>>(operands, flushed);
    const double flop =
        2.0 * static_cast<double>(operands.offsets.back() * operands.n * operands.k);
    const auto tflops = [&](double us) { return flop / us * 1e-6; };
    std::printf(
        "%-16s %6lld GEMM %d  128x256: %9.1f us %6.1f TFLOP/s  128x128: %9.1f us %6.1f TFLOP/s  "
        "error %.2g\n",
        model.name, static_cast<long long>(num_tokens), first ? 1 : 2, wide, tflops(wide), narrow,
        tflops(narrow), std::max(error, sampled_error(operands)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (const std::string problem = device_problem(kGpu); !problem.empty()) {
    std::fprintf(stderr, "cutlass_grouped_gemm_bench: %s\n", problem.c_str());
    return 1;
  }
  std::vector<std::int64_t> tokens;
  for (int i = 1; i < argc; ++i) tokens.push_back(std::atoll(argv[i]));
  if (tokens.empty()) tokens = {1, 128, 2048, 8192};
  try {
    const Tensor flushed = Tensor::empty({kFlushBytes}, DType::kU8, kGpu);
    for (const Model& model : kModels) {
      for (const std::int64_t num_tokens : tokens) measure(model, num_tokens, flushed);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cutlass_grouped_gemm_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
