// Who shares what: the table of groups, and slices of the intermediate size. Which rank holds which
// expert.
#include "fusedmoe/parallel.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/check.h"

namespace fusedmoe {

ParallelConfig ParallelConfig::of(const Deployment& deployment) {
  const auto& [tp, dp, expert_parallel, sequence_parallel, rank] = deployment;
  FUSEDMOE_CHECK(tp >= 1, "tp_size", core::to_string(tp), "at least 1");
  FUSEDMOE_CHECK(dp >= 1, "dp_size", core::to_string(dp), "at least 1");
  FUSEDMOE_CHECK(rank >= 0 && rank < tp * dp, "rank", core::to_string(rank),
                 core::format("in [0, {}), tp_size x dp_size", tp * dp));
  ParallelConfig config;
  config.dp_size = dp;
  (expert_parallel ? config.ep_size : config.tp_size) = tp * dp;
  (expert_parallel ? config.ep_rank : config.tp_rank) = rank;
  // With one rank in a group there is nothing to divide.
  config.sequence_parallel = sequence_parallel && tp > 1;
  config.validate();
  return config;
}

void ParallelConfig::validate() const {
  FUSEDMOE_CHECK(tp_size >= 1, "parallel.tp_size", core::to_string(tp_size), "at least 1");
  FUSEDMOE_CHECK(ep_size >= 1, "parallel.ep_size", core::to_string(ep_size), "at least 1");
  FUSEDMOE_CHECK(dp_size >= 1, "parallel.dp_size", core::to_string(dp_size), "at least 1");
  FUSEDMOE_CHECK(ep_rank >= 0 && ep_rank < ep_size, "parallel.ep_rank", core::to_string(ep_rank),
                 core::format("below ep_size, {}", ep_size));
  FUSEDMOE_CHECK(tp_rank >= 0 && tp_rank < tp_size, "parallel.tp_rank", core::to_string(tp_rank),
                 core::format("below tp_size, {}", tp_size));
  FUSEDMOE_CHECK(tp_size == 1 || ep_size == 1, "parallel.ep_size",
                 core::format("{} with tp_size {}", ep_size, tp_size),
                 "1: ranks share either whole experts or slices of them");
  FUSEDMOE_CHECK(num_ranks() % dp_size == 0, "parallel.dp_size",
                 core::format("{} of {} ranks", dp_size, num_ranks()),
                 "a divisor of the number of ranks");
  if (sequence_parallel && ep_size == 1) {
    throw Error::conflict("parallel.sequence_parallel", "ep_size 1",
                          "it is a way of expert parallelism");
  }
}

std::vector<int> ParallelConfig::gather_group() const {
  std::vector<int> group;
  for (int r = 0; r < num_ranks(); ++r) {
    if (sequence_parallel || r % group_size() == rank() % group_size()) group.push_back(r);
  }
  return group;
}

std::vector<int> ParallelConfig::reduce_group(Combine combine) const {
  const bool complete =
      combine == Combine::kComplete || (combine == Combine::kReduceScatter && sequence_parallel);
  std::vector<int> group;
  for (int r = 0; r < num_ranks(); ++r) {
    if (complete ? r == rank() : r / group_size() == rank() / group_size()) group.push_back(r);
  }
  return group;
}

Slice slice_of(std::int64_t size, std::int64_t unit, int num_ranks, int rank) {
  FUSEDMOE_CHECK(size >= 1 && unit >= 1, "size", core::format("{} in units of {}", size, unit),
                 "positive");
  FUSEDMOE_CHECK(num_ranks >= 1 && rank >= 0 && rank < num_ranks, "rank",
                 core::format("{} of {}", rank, num_ranks),
                 "at least 0 and below the number of ranks");
  const std::int64_t units = (size + unit - 1) / unit;
  FUSEDMOE_CHECK(units >= num_ranks, "size", core::format("{}, {} units of {}", size, units, unit),
                 core::format("at least one unit for each of {} ranks", num_ranks));
  const std::int64_t each = units / num_ranks, more = units % num_ranks;
  const auto begin_of = [&](std::int64_t r) {
    return std::min(size, (r * each + std::min(r, more)) * unit);
  };
  return {begin_of(rank), begin_of(rank + 1)};
}

namespace {

constexpr std::int64_t kMaxPhysical = 1 << 20;

std::vector<std::int32_t> identity(std::int64_t count) {
  std::vector<std::int32_t> list(static_cast<std::size_t>(count));
  std::iota(list.begin(), list.end(), 0);
  return list;
}

void check_sizes(std::int64_t num_experts, int num_ranks, std::int64_t num_physical) {
  FUSEDMOE_CHECK(num_experts >= 1 && num_experts <= kMaxPhysical, "num_experts",
                 core::to_string(num_experts), core::format("in [1, {}]", kMaxPhysical));
  FUSEDMOE_CHECK(num_ranks >= 1, "num_ranks", core::to_string(num_ranks), "at least 1");
  FUSEDMOE_CHECK(num_physical >= num_experts && num_physical <= kMaxPhysical, "physical_to_logical",
                 core::format("{} experts", num_physical),
                 core::format("{} to {}", num_experts, kMaxPhysical));
}

/// A list of numbers of a JSON object. Throws Error naming it.
std::vector<std::int32_t> numbers(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) {
    throw Error::invalid(core::format("placement.{}", name),
                         core::format("placement.{} is missing", name));
  }
  std::vector<std::int32_t> list;
  const bool array = found->is_array();
  if (array) {
    for (const nlohmann::json& each : *found) {
      const bool fits = each.is_number_integer() && each >= 0 && each <= kMaxPhysical;
      FUSEDMOE_CHECK(fits, core::format("placement.{}", name), each.dump(),
                     core::format("numbers in [0, {}]", kMaxPhysical));
      list.push_back(each.get<std::int32_t>());
    }
  }
  FUSEDMOE_CHECK(array, core::format("placement.{}", name), found->type_name(), "a list");
  return list;
}

std::int64_t count(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  FUSEDMOE_CHECK(
      found != object.end() && found->is_number_integer() && *found >= 1 && *found <= kMaxPhysical,
      core::format("placement.{}", name), found == object.end() ? "missing" : found->dump(),
      core::format("a number in [1, {}]", kMaxPhysical));
  return found->get<std::int64_t>();
}

}  // namespace

ExpertPlacement::ExpertPlacement(std::int64_t num_experts, int num_ranks,
                                 std::vector<std::int32_t> physical_to_logical,
                                 std::vector<std::int32_t> rank_of)
    : num_experts_(num_experts),
      num_ranks_(num_ranks),
      physical_to_logical_(std::move(physical_to_logical)),
      rank_of_(std::move(rank_of)) {
  check_sizes(num_experts, num_ranks, num_physical());
  FUSEDMOE_CHECK(rank_of_.size() == physical_to_logical_.size(), "rank_of",
                 core::format("{} ranks", rank_of_.size()),
                 core::format("{}, one for each physical expert", num_physical()));
  std::vector<bool> held(static_cast<std::size_t>(num_experts));
  for (std::size_t p = 0; p < rank_of_.size(); ++p) {
    const std::int32_t logical = physical_to_logical_[p], rank = rank_of_[p];
    FUSEDMOE_CHECK(logical >= 0 && logical < num_experts, "physical_to_logical",
                   core::format("{} at [{}]", logical, p), core::format("in [0, {})", num_experts));
    FUSEDMOE_CHECK(rank >= 0 && rank < num_ranks, "rank_of", core::format("{} at [{}]", rank, p),
                   core::format("in [0, {})", num_ranks));
    held[logical] = true;
  }
  const auto missing = std::find(held.begin(), held.end(), false);
  if (missing != held.end()) {
    throw Error::invalid(
        "physical_to_logical",
        core::format("physical_to_logical does not hold expert {}", missing - held.begin()));
  }
}

ExpertPlacement ExpertPlacement::linear(std::int64_t num_experts, int num_ranks,
                                        std::int64_t redundant) {
  FUSEDMOE_CHECK(redundant >= 0, "redundant", core::to_string(redundant), "not negative");
  check_sizes(num_experts, num_ranks, num_experts + redundant);
  std::vector<std::int32_t> logical = identity(num_experts + redundant), ranks(logical.size());
  for (std::int32_t& each : logical) each %= static_cast<std::int32_t>(num_experts);
  const auto total = static_cast<std::int64_t>(logical.size());
  const std::int64_t base = total / num_ranks, more = total % num_ranks;
  for (std::int64_t rank = 0, p = 0; rank < num_ranks; ++rank) {
    for (std::int64_t i = 0; i < base + (rank < more ? 1 : 0); ++i) {
      ranks[p++] = static_cast<std::int32_t>(rank);
    }
  }
  return {num_experts, num_ranks, std::move(logical), std::move(ranks)};
}

ExpertPlacement ExpertPlacement::round_robin(std::int64_t num_experts, int num_ranks) {
  check_sizes(num_experts, num_ranks, num_experts);
  std::vector<std::int32_t> ranks = identity(num_experts);
  for (std::int32_t& each : ranks) each %= num_ranks;
  return {num_experts, num_ranks, identity(num_experts), std::move(ranks)};
}

std::string ExpertPlacement::json() const {
  return nlohmann::ordered_json{{"num_experts", num_experts_},
                                {"num_ranks", num_ranks_},
                                {"physical_to_logical", physical_to_logical_},
                                {"rank_of", rank_of_}}
      .dump();
}

ExpertPlacement ExpertPlacement::parse(std::string_view json) {
  const nlohmann::json object = nlohmann::json::parse(json, nullptr, false);
  FUSEDMOE_CHECK(object.is_object(), "placement", "no JSON object", "a JSON object");
  for (const auto& [name, value] : object.items()) {
    const bool known = name == "num_experts" || name == "num_ranks" ||
                       name == "physical_to_logical" || name == "rank_of";
    if (!known) {
      throw Error::invalid(core::format("placement.{}", name),
                           core::format("placement.{} is no member of a placement", name));
    }
  }
  return {count(object, "num_experts"), static_cast<int>(count(object, "num_ranks")),
          numbers(object, "physical_to_logical"), numbers(object, "rank_of")};
}

std::vector<std::int32_t> ExpertPlacement::local_experts(int rank) const {
  std::vector<std::int32_t> experts;
  for (std::size_t p = 0; p < rank_of_.size(); ++p) {
    if (rank_of_[p] == rank) experts.push_back(physical_to_logical_[p]);
  }
  return experts;
}

Tensor ExpertPlacement::expert_map(int rank) const {
  Tensor map = Tensor::empty({num_experts_}, DType::kI32);
  const Table table = this->table();
  for (std::int64_t e = 0; e < num_experts_; ++e) {
    const std::int32_t first = table.physical[table.offsets[e]];
    map.as<std::int32_t>()[e] = rank_of_[first] == rank ? table.local[first] : -1;
  }
  return map;
}

std::vector<ExpertPlacement::Replica> ExpertPlacement::replicas(std::int64_t expert) const {
  FUSEDMOE_CHECK(expert >= 0 && expert < num_experts_, "expert", core::to_string(expert),
                 core::format("in [0, {})", num_experts_));
  const Table table = this->table();
  std::vector<Replica> replicas;
  for (std::int32_t i = table.offsets[expert]; i < table.offsets[expert + 1]; ++i) {
    const std::int32_t p = table.physical[i];
    replicas.push_back({rank_of_[p], table.local[p]});
  }
  return replicas;
}

ExpertPlacement::Table ExpertPlacement::table() const {
  Table table;
  table.physical.resize(rank_of_.size());
  table.local.resize(rank_of_.size());
  table.offsets.assign(static_cast<std::size_t>(num_experts_) + 1, 0);
  for (const std::int32_t logical : physical_to_logical_) ++table.offsets[logical + 1];
  std::partial_sum(table.offsets.begin(), table.offsets.end(), table.offsets.begin());
  std::vector<std::int32_t> next = table.offsets, locals(static_cast<std::size_t>(num_ranks_));
  for (std::size_t p = 0; p < rank_of_.size(); ++p) {
    table.physical[next[physical_to_logical_[p]]++] = static_cast<std::int32_t>(p);
    table.local[p] = locals[rank_of_[p]]++;
  }
  return table;
}

}  // namespace fusedmoe
