// A hash of every implementation's output, bit for bit: what a change that must not change results
// is held against. Prints a line per case, with a hash for each experts over all dtypes:
//
//   output_hashes --list | [DEVICE [PART PARTS]]
//
// PART of PARTS: every PARTS-th case from PART on, as several programs share a GPU.
// Those of this tree lie beside this file; scripts/output-hashes.sh makes and compares them.
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>

#include "../unit/layer_problem.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace {

using namespace fusedmoe;

/// FNV-1a of every output of one case, by experts.
class Hashes {
 public:
  void add(const std::string& experts, const TensorView& output) {
    std::uint32_t& hash = hashes_.try_emplace(experts, 0x811c9dc5U).first->second;
    const auto* bytes = output.as<const unsigned char>();
    for (std::int64_t i = 0; i < output.nbytes(); ++i) hash = (hash ^ bytes[i]) * 0x01000193U;
  }
  void print(const std::string& name) const {
    std::printf("%s", name.c_str());
    for (const auto& [experts, hash] : hashes_) std::printf(" %s=%08x", experts.c_str(), hash);
    std::printf("\n");
  }

 private:
  std::map<std::string, std::uint32_t> hashes_;
};

void hash_case(const testing::Case& spec, Device device) {
  const testing::Problem problem = testing::make_problem(spec);
  Hashes hashes;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const MoeConfig config = testing::make_config(spec, dtype, device);
    for (const testing::Variant& variant : testing::variants_for(config)) {
      // On the host every variant is batch invariant: it would be the same once more.
      if (variant.batch_invariant && device.is_cpu()) continue;
      hashes.add(variant.name(), testing::run_variant(problem, variant, dtype, device));
    }
  }
  hashes.print(spec.name);
}

/// A whole layer: router, routed and shared experts.
void hash_layer(const testing::Case& spec, bool gate, Device device) {
  Hashes hashes;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    testing::LayerSpec layer_spec{spec, true, gate};
    LayerOptions options;
    options.dtype = dtype;
    options.device = device;
    for (const char* require : {"", "reference"}) {
      options.require = require;
      try {
        const MoeLayer layer(testing::make_layer_weights(layer_spec), options);
        const Tensor x =
            to_device(testing::make_hidden_states(dtype, spec.num_tokens, spec.hidden), device);
        hashes.add(*require ? require : "layer", to_device(layer.forward(x), {}));
      } catch (const Error&) {  // not served: the same before and after
      }
    }
  }
  hashes.print(spec.name + (gate ? "_gate" : ""));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 &&
      std::string_view(argv[1]) == "--list") {  // whether the instruction set can run here
    std::printf("%s\n", std::string(cpu_isa()).c_str());
    return 0;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);  // several programs share a pipe: whole lines
  const Device device = argc > 1 ? parse_device(argv[1]) : Device{};
  const std::size_t part = argc > 3 ? std::stoul(argv[2]) : 0;
  const std::size_t parts = argc > 3 ? std::stoul(argv[3]) : 1;
  std::vector<testing::Case> cases = testing::awkward_cases();
  if (!device.is_cpu()) {
    const std::vector<testing::Case> plain = cases;
    for (const QuantScheme& scheme : {schemes::unquantized(DType::kF16), schemes::mxfp4_w4a16()}) {
      for (testing::Case spec : plain) {
        if (spec.hidden % 2 != 0 || spec.intermediate % 2 != 0) continue;
        spec.scheme = scheme;
        spec.transposed = false;
        spec.name += "_" + name(scheme);
        cases.push_back(spec);
      }
    }
  }
  const std::vector<testing::Case> more = testing::scheme_cases();
  cases.insert(cases.end(), more.begin(), more.end());
  for (std::size_t i = part; i < cases.size(); i += parts) hash_case(cases[i], device);
  if (part != 0) return 0;  // the few layers belong to the first
  for (const std::int64_t num_tokens : {1, 5, 70}) {
    for (const bool gate : {false, true}) {
      testing::Case spec;
      spec.name = "layer_" + std::to_string(num_tokens);
      spec.num_tokens = num_tokens;
      hash_layer(spec, gate, device);
      spec.name += "_mxfp4";
      spec.scheme = schemes::mxfp4_w4a16();
      hash_layer(spec, gate, device);
    }
  }
}
