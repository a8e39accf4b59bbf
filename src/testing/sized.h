// A case by its sizes: tables of cases have a line for each.
#pragma once

#include <cstdint>

#include "testing/case.h"

namespace fusedmoe::testing {

/// `more`: what else differs from a default.
inline Case sized(const char* name, std::int64_t num_tokens, std::int64_t num_experts,
                  std::int64_t topk, std::int64_t hidden, std::int64_t intermediate,
                  Case more = {}) {
  more.name = name;
  more.num_tokens = num_tokens;
  more.num_experts = num_experts;
  more.topk = topk;
  more.hidden = hidden;
  more.intermediate = intermediate;
  return more;
}

}  // namespace fusedmoe::testing
