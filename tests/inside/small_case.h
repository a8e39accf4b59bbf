// What the tests of packed weights pack: three small experts, by the CPU's implementation.
#ifndef FUSEDMOE_TESTS_INSIDE_SMALL_CASE_H_
#define FUSEDMOE_TESTS_INSIDE_SMALL_CASE_H_

#include <memory>

#include "cpu/experts.h"
#include "testing/cases.h"

namespace fusedmoe::testing {

inline Case small_case(const QuantScheme& scheme) {
  Case spec;
  spec.num_tokens = 5;
  spec.num_experts = 3;
  spec.hidden = 160;  // neither size is a multiple of a tile or of 128
  spec.intermediate = 72;
  spec.scheme = scheme;
  spec.bias = true;
  return spec;
}

inline std::shared_ptr<const Experts> make_experts(const Case& spec, DType dtype = DType::kBF16) {
  return cpu::descriptor().create(make_config(spec, dtype), {});
}

}  // namespace fusedmoe::testing

#endif  // FUSEDMOE_TESTS_INSIDE_SMALL_CASE_H_
