// Times the experts of one MoE layer in ik_llama.cpp's ggml, as ik_llama.cpp builds it: gate and up
// with SiLU in one fused operation, down, weighted sum; without biases. Weights are random, in
// pages of 2 MiB, and cold: a single token walks through all experts, more tokens draw theirs anew
// for each run.
//
//   ik_moe TYPE PLAIN_OR_REPACKED HIDDENxINTERMEDIATExEXPERTSxTOPK TOKENS,... SECONDS THREADS
//
// Prints a line "tokens median_ms samples" for each number of tokens.
#include <ggml.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// Of ik_llama.cpp's library, in a header that it does not install: interleaves the rows.
extern "C" void iqk_repack_tensor(ggml_tensor* tensor);

namespace {

using Clock = std::chrono::steady_clock;

struct Shape {
  std::int64_t hidden = 0, intermediate = 0, experts = 0, topk = 0;
};

Shape parse_shape(const std::string& text) {
  Shape shape;
  if (std::sscanf(text.c_str(), "%ldx%ldx%ldx%ld", &shape.hidden, &shape.intermediate,
                  &shape.experts, &shape.topk) != 4) {
    throw std::invalid_argument("shape " + text);
  }
  return shape;
}

std::vector<std::int64_t> parse_list(const std::string& text) {
  std::vector<std::int64_t> values;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) values.push_back(std::stoll(part));
  return values;
}

/// (experts, rows, columns) of random weights. A few experts are quantized, the others are copies.
ggml_tensor* make_weights(ggml_context* context, ggml_type type, std::int64_t columns,
                          std::int64_t rows, std::int64_t experts, bool repacked) {
  ggml_tensor* tensor = ggml_new_tensor_3d(context, type, columns, rows, experts);
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  const std::size_t bytes = (ggml_nbytes(tensor) + kHugePage - 1) / kHugePage * kHugePage;
  auto* data = static_cast<char*>(std::aligned_alloc(kHugePage, bytes));
  madvise(data, bytes, MADV_HUGEPAGE);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(columns)));
  std::vector<float> values(static_cast<std::size_t>(rows * columns));
  const std::size_t expert_bytes = tensor->nb[2];
  constexpr std::int64_t kDistinct = 2;
  for (std::int64_t e = 0; e < experts; ++e) {
    char* expert = data + static_cast<std::size_t>(e) * expert_bytes;
    if (e < kDistinct) {
      for (float& value : values) value = normal(random);
      ggml_quantize_chunk(type, values.data(), expert, 0, rows, columns, nullptr, nullptr);
    } else {
      std::memcpy(expert, data + static_cast<std::size_t>(e % kDistinct) * expert_bytes,
                  expert_bytes);
    }
  }
  tensor->data = data;
  if (repacked) {
    iqk_repack_tensor(tensor);
    if (tensor->type == type) throw std::runtime_error("ik_llama.cpp does not repack this type");
  }
  return tensor;
}

ggml_context* make_context(std::size_t bytes, bool no_alloc) {
  ggml_init_params parameters{};
  parameters.mem_size = bytes;
  parameters.no_alloc = no_alloc;
  return ggml_init(parameters);
}

class Layer {
 public:
  Layer(ggml_type type, bool repacked, Shape shape) : shape_(shape), order_(shape.experts) {
    context_ = make_context(std::size_t{1} << 20, true);
    const auto [hidden, intermediate, experts, topk] = shape;
    up_ = make_weights(context_, type, hidden, intermediate, experts, repacked);
    gate_ = make_weights(context_, type, hidden, intermediate, experts, repacked);
    down_ = make_weights(context_, type, intermediate, hidden, experts, repacked);
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), random_);
  }

  /// Milliseconds of each run.
  std::vector<double> times(std::int64_t num_tokens, double seconds, int threads) {
    const std::size_t rows = static_cast<std::size_t>(num_tokens * (shape_.topk + 1));
    const std::size_t row = static_cast<std::size_t>(shape_.hidden + shape_.intermediate) * 4;
    ggml_context* context = make_context((std::size_t{16} << 20) + 4 * rows * row, false);
    ggml_tensor* x = ggml_new_tensor_3d(context, GGML_TYPE_F32, shape_.hidden, 1, num_tokens);
    ggml_tensor* ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, shape_.topk, num_tokens);
    ggml_tensor* weights = ggml_new_tensor_3d(context, GGML_TYPE_F32, 1, shape_.topk, num_tokens);
    std::normal_distribution<float> normal;
    auto* values = static_cast<float*>(x->data);
    std::generate(values, values + ggml_nelements(x), [&] { return normal(random_); });
    auto* router_weights = static_cast<float*>(weights->data);
    std::fill(router_weights, router_weights + ggml_nelements(weights),
              1 / static_cast<float>(shape_.topk));
    ggml_tensor* activated = ggml_moe_up_gate(context, up_, gate_, x, ids, GGML_UNARY_OP_SILU);
    ggml_tensor* rows_out = ggml_mul_mat_id(context, down_, activated, ids);
    ggml_tensor* output = ggml_mul_multi_add(context, rows_out, weights);
    ggml_cgraph* graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, output);
    ggml_cplan plan = ggml_graph_plan(graph, threads);
    std::vector<std::uint8_t> work(plan.work_size);
    plan.work_data = work.data();

    std::vector<double> result;
    const Clock::time_point start = Clock::now();
    const auto since = [](Clock::time_point begin) {
      return std::chrono::duration<double>(Clock::now() - begin).count();
    };
    while (since(start) < seconds || result.size() < 4) {
      draw(static_cast<std::int32_t*>(ids->data), num_tokens);
      const Clock::time_point begin = Clock::now();
      ggml_graph_compute(graph, &plan);
      result.push_back(1e3 * since(begin));
    }
    const auto* sums = static_cast<const float*>(output->data);
    if (!std::all_of(sums, sums + ggml_nelements(output),
                     [](float v) { return std::isfinite(v); })) {
      throw std::runtime_error("the output is not finite");
    }
    ggml_free(context);
    result.erase(result.begin());  // pages and threads
    return result;
  }

 private:
  void draw(std::int32_t* ids, std::int64_t num_tokens) {
    std::uniform_int_distribution<std::int32_t> any(0,
                                                    static_cast<std::int32_t>(shape_.experts) - 1);
    for (std::int64_t token = 0; token < num_tokens; ++token, ids += shape_.topk) {
      for (std::int64_t j = 0; j < shape_.topk;) {
        ids[j] = num_tokens == 1 ? order_[next_++ % order_.size()] : any(random_);
        if (std::find(ids, ids + j, ids[j]) == ids + j) ++j;
      }
    }
  }

  Shape shape_;
  ggml_context* context_ = nullptr;
  ggml_tensor *up_ = nullptr, *gate_ = nullptr, *down_ = nullptr;
  std::vector<std::int32_t> order_;
  std::size_t next_ = 0;
  std::mt19937 random_{2};
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: see the first lines of ik_moe.cpp\n");
    return 2;
  }
  const std::map<std::string, ggml_type> types{
      {"mxfp4", GGML_TYPE_MXFP4}, {"q4_0", GGML_TYPE_Q4_0}, {"bf16", GGML_TYPE_BF16}};
  Layer layer(types.at(argv[1]), std::string(argv[2]) == "repacked", parse_shape(argv[3]));
  for (const std::int64_t tokens : parse_list(argv[4])) {
    std::vector<double> ms = layer.times(tokens, std::atof(argv[5]), std::atoi(argv[6]));
    std::sort(ms.begin(), ms.end());
    std::printf("%ld %.5f %zu\n", tokens, ms[ms.size() / 2], ms.size());
  }
}
