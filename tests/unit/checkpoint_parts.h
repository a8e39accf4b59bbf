// Golden checkpoints, taken apart to be changed and written in other published forms.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "error_text.h"
#include "fusedmoe/safetensors.h"

namespace fusedmoe::testing {

inline std::string golden(const std::string& name) {
  return std::string(FUSEDMOE_GOLDEN_DIR) + "/" + name + ".safetensors";
}

struct Parts {
  explicit Parts(const std::string& name) : file(SafetensorsFile::open(golden(name))) {
    for (const auto& [tensor_name, tensor] : file.tensors()) {
      const bool extra = tensor_name.starts_with("io.") || tensor_name.starts_with("inmemory.") ||
                         tensor_name.starts_with("check.");
      if (!extra) tensors[tensor_name] = tensor;
    }
    config = file.metadata().at("config");
  }

  std::map<std::string, TensorView> with_prefix(const std::string& prefix) const {
    std::map<std::string, TensorView> result;
    for (const auto& [name, view] : tensors) result[prefix + name] = view;
    return result;
  }

  void save(const std::filesystem::path& path, const std::string& prefix = "") const {
    save_safetensors(path, with_prefix(prefix), {{"config", config}});
  }

  SafetensorsFile file;
  std::map<std::string, TensorView> tensors;
  std::string config;
};

}  // namespace fusedmoe::testing
