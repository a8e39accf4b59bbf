// A scheme in the words of compressed-tensors' QuantizationArgs.
#include "checkpoint/compressed_tensors.h"

#include <nlohmann/json.hpp>

namespace fusedmoe::checkpoint {
namespace {

constexpr const char* kE8M0 = "torch.uint8";  // how E8M0 scales are stored

nlohmann::json args_json(const QuantKey& key, bool weights) {
  const bool integer =
      key.value == DType::kI4 || key.value == DType::kU8 || key.value == DType::kI8;
  const bool four = key.value == DType::kI4 || key.value == DType::kE2M1;
  nlohmann::json args{{"num_bits", four ? 4 : 8},
                      {"type", integer ? "int" : "float"},
                      {"symmetric", key.symmetric},
                      {"dynamic", key.dynamic},
                      {"group_size", nullptr},
                      {"observer", weights || !key.dynamic ? nlohmann::json("minmax") : nullptr}};
  const GroupShape group = key.group;
  if (group == GroupShape{-1, -1}) {
    args["strategy"] = "tensor";
  } else if (group == GroupShape{1, -1}) {
    args["strategy"] = weights ? "channel" : "token";
  } else if (group.rows > 1) {
    args["strategy"] = "block";
    args["block_structure"] = {group.rows, group.cols};
  } else {
    const bool nvfp4 = key.value == DType::kE2M1 && key.scale == DType::kE4M3;
    args["strategy"] = nvfp4 ? "tensor_group" : "group";
    args["group_size"] = group.cols;
    if (nvfp4 && key.dynamic) args["dynamic"] = "local";
  }
  if (key.scale == DType::kE8M0) args["scale_dtype"] = kE8M0;
  return args;
}

const char* format_of(const QuantKey& key) {
  switch (key.value) {
    case DType::kE2M1:
      return key.scale == DType::kE8M0 ? "mxfp4-pack-quantized" : "nvfp4-pack-quantized";
    case DType::kE4M3:
      return key.scale == DType::kE8M0 ? "mxfp8-quantized" : "float-quantized";
    case DType::kI8:
      return "int-quantized";
    case DType::kI4:
      return key.scale == DType::kE4M3 ? "int-quantized" : "pack-quantized";
    default:
      return "pack-quantized";
  }
}

}  // namespace

void write_compressed_tensors(const QuantScheme& scheme, nlohmann::json& config) {
  nlohmann::json group{{"targets", {"Linear"}}, {"output_activations", nullptr}};
  group["weights"] = args_json(scheme.weights, true);
  if (scheme.weights.value == DType::kI4) group["weights"].erase("scale_dtype");
  group["input_activations"] =
      scheme.activations ? args_json(*scheme.activations, false) : nlohmann::json(nullptr);
  config["config_groups"] = {{"group_0", std::move(group)}};
  config["format"] = format_of(scheme.weights);
  config["quantization_status"] = "compressed";
  config["kv_cache_scheme"] = nullptr;
}

}  // namespace fusedmoe::checkpoint
