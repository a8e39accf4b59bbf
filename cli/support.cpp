#include "support.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "checkpoint/problems.h"
#include "files/output.h"
#include "fusedmoe/safetensors.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe::cli {

void check_experts_name(const std::string& require) {
  const std::string wanted = require.substr(0, require.find('+'));
  std::vector<std::string_view> names;
  for (const ExpertsDescriptor* experts : all_experts()) names.push_back(experts->name());
  if (require.empty() || std::find(names.begin(), names.end(), wanted) != names.end()) return;
  std::sort(names.begin(), names.end());
  throw UsageError(fmt::format("--experts {}: no such implementation; there are: {}", wanted,
                               fmt::join(names, ", ")));
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array kUnits{"B", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1000 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return unit ? fmt::format("{:.1f} {}", value, kUnits[unit]) : fmt::format("{} B", bytes);
}

DType parse_float_dtype(const std::string& text) {
  const auto dtype = parse_dtype(text);
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) {
    throw Error("--dtype", fmt::format("\"{}\"", text), "f32, bf16 or f16");
  }
  return *dtype;
}

Tensor load_tensor(const std::string& path, const std::string& name, std::int64_t columns) {
  Tensor tensor = SafetensorsFile::open(path).tensor(name);
  const std::string what = fmt::format("{} of {}", name, path);
  if (tensor.rank() != 2 || tensor.size(1) != columns) {
    throw Error(what, to_string(tensor.shape()), fmt::format("[num_tokens, {}]", columns));
  }
  const DType dtype = tensor.dtype();
  if (dtype != DType::kF64 && dtype != DType::kF32 && dtype != DType::kF16 &&
      dtype != DType::kBF16) {
    throw Error(what, std::string(fusedmoe::name(dtype)), "f32, bf16, f16 or f64");
  }
  return tensor;
}

std::string read_text(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.is_open() && !file.bad()) return text;
  std::string reason = std::strerror(errno);
  if (!reason.empty()) reason[0] = static_cast<char>(std::tolower(reason[0]));
  throw Error::io(path, fmt::format("cannot open {}: {}", path, reason));
}

Tensor random_hidden_states(std::int64_t rows, std::int64_t columns, DType dtype,
                            std::uint64_t seed) {
  Tensor x = Tensor::empty({rows, columns}, dtype);
  testing::Random random(seed + 2);  // layers of random weights take the seed itself
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    store_f32(x.data(), dtype, i, static_cast<float>(random.normal()));
  }
  return x;
}

std::vector<std::int64_t> moe_layers_of(const Checkpoint& checkpoint, const std::string& path) {
  std::vector<std::int64_t> layers = checkpoint.moe_layers();
  if (layers.empty()) throw Error::invalid(path, fmt::format("{} has no MoE layers", path));
  return layers;
}

std::int64_t chosen_layer(std::int64_t layer, const std::vector<std::int64_t>& layers) {
  if (layer < 0) return layers.front();
  if (std::find(layers.begin(), layers.end(), layer) != layers.end()) return layer;
  throw Error("--layer", fmt::to_string(layer),
              fmt::format("a layer with experts: {}", checkpoint::number_ranges(layers)));
}

Option add_family_option(Command& command, std::string& family) {
  return command
      .add_option("--family", family,
                  "Read the model as one of this family: a name that families lists, or a JSON "
                  "file with a description")
      .kind("FAMILY");
}

Checkpoint open_checkpoint(const std::string& path, const std::string& family) {
  CheckpointOptions options;
  if (!family.empty()) options.family = Family::named(family);
  return Checkpoint::open(path, options);
}

void write_text(const std::string& path, const std::string& text) {
  files::OutputFile file(path);
  file.write(text);
  file.finish();
}

std::string describe_router(const RouterConfig& router) {
  std::string text =
      fmt::format("{}, top-{} of {}", name(router.scoring), router.topk, router.num_experts);
  if (router.num_zero_experts > 0) {
    text += fmt::format(" and {} zero experts", router.num_zero_experts);
  }
  if (router.num_expert_group > 0) {
    text += fmt::format(", {} groups keep {}", router.num_expert_group, router.topk_group);
  }
  if (router.renormalize) text += ", renormalized";
  if (router.routed_scaling_factor != 1) {
    text += fmt::format(", times {}", router.routed_scaling_factor);
  }
  if (router.apply_router_weight_on_input) text += ", weight on the input";
  return text;
}

double time_ms(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - start;
  return passed.count();
}

}  // namespace fusedmoe::cli
