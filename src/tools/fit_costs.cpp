#include "tools/fit_costs.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace fusedmoe {

LinkCost fit_link(const LinkSample& few, const LinkSample& many, std::string source) {
  FUSEDMOE_CHECK(few.bytes > 0 && few.bytes < many.bytes && few.us > 0 && few.us < many.us,
                 "samples", core::format("{} us and {} us", few.us, many.us),
                 "more time for more bytes");
  const double bytes_per_us = (many.bytes - few.bytes) / (many.us - few.us);
  return {std::max(0.01, few.us - few.bytes / bytes_per_us), bytes_per_us, std::move(source)};
}

LinkCost each_way(LinkCost both) {
  both.floor_us /= 2;
  return both;
}

ExpertsCost fit_experts(const ExpertsSample& few, const ExpertsSample& many, std::string source) {
  // few.us = few.bytes * x + few.flops * y, and so many: Cramer's rule. Where one of them comes out
  // as nothing, the other explains the sample of its own kind alone.
  const double determinant = few.bytes * many.flops - many.bytes * few.flops;
  FUSEDMOE_CHECK(few.us > 0 && many.us > 0 && few.flops > 0 && determinant > 0, "samples",
                 core::format("{} us and {} us", few.us, many.us),
                 "few rows and many rows of the same experts");
  double us_per_byte = (few.us * many.flops - many.us * few.flops) / determinant;
  double us_per_flop = (few.bytes * many.us - many.bytes * few.us) / determinant;
  if (us_per_byte <= 0) us_per_byte = 1e-3 * few.us / few.bytes;
  if (us_per_flop <= 0) us_per_flop = 1e-3 * many.us / many.flops;
  return {1 / us_per_byte, 1 / us_per_flop, std::move(source)};
}

}  // namespace fusedmoe
