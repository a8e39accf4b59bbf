#include "fusedmoe/simulation.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/check.h"
#include "layer/prepared_rows.h"
#include "layer/rank_transports.h"
#include "moe/replica.h"
#include "moe/row_flops.h"

namespace fusedmoe {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const LinkCost& cost) {
  return {{"floor_us", cost.floor_us},
          {"gigabytes_per_second", 1e-3 * cost.bytes_per_us},
          {"source", cost.source}};
}

/// A positive number of a part of the file.
double number(const Json& file, const char* part, const char* key) {
  const auto found = file.find(part);
  const bool is_there = found != file.end() && found->contains(key) && found->at(key).is_number();
  const double value = is_there ? found->at(key).get<double>() : 0;
  FUSEDMOE_CHECK(value > 0, core::format("{}.{}", part, key),
                 is_there ? core::format("{}", value) : "missing", "a number above 0");
  return value;
}

std::string source(const Json& file, const char* part) {
  const Json& object = file.at(part);
  const auto found = object.find("source");
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

LinkCost link_cost(const Json& file, const char* part) {
  return {number(file, part, "floor_us"), 1e3 * number(file, part, "gigabytes_per_second"),
          source(file, part)};
}

/// What one rank sends, gets and multiplies.
struct RankLoad {
  double sent[2] = {}, received[2] = {};  // rows: inside the host, and to others
  double rows = 0;                        // of its experts
  double hit = 0;                         // experts that have any
};

class Simulation {
 public:
  Simulation(const SimulatedLayer& layer, const TensorView& topk_ids)
      : layer_(layer),
        ids_(topk_ids),
        table_(layer.placement.table()),
        replicas_(destinations()),
        ranks_(static_cast<std::size_t>(layer.placement.num_ranks())),
        is_hit_(static_cast<std::size_t>(layer.placement.num_physical())) {}

  std::vector<RankLoad> run() {
    const std::int64_t recorded = ids_.size(0);
    std::int64_t token = 0;
    for (int rank = 0; rank < layer_.placement.num_ranks(); ++rank) {
      for (std::int64_t i = 0; i < layer_.tokens_per_rank; ++i, ++token) {
        route(rank, i, ids_.as<const std::int32_t>() + token % recorded * ids_.size(1));
      }
    }
    for (std::size_t p = 0; p < is_hit_.size(); ++p) {
      ranks_[static_cast<std::size_t>(layer_.placement.rank_of()[p])].hit += is_hit_[p];
    }
    return std::move(ranks_);
  }

 private:
  core::TokenDestinations destinations() const {
    const auto view = [](const std::vector<std::int32_t>& values) {
      return TensorView(const_cast<std::int32_t*>(values.data()), DType::kI32,
                        {static_cast<std::int64_t>(values.size())});
    };
    core::TokenDestinations result;
    result.replica_offsets = view(table_.offsets);
    result.replicas = view(table_.physical);
    result.physical_ranks = view(layer_.placement.rank_of());
    return result;
  }

  void route(int origin, std::int64_t token, const std::int32_t* ids) {
    reached_.clear();
    for (std::int64_t slot = 0; slot < ids_.size(1); ++slot) {
      if (ids[slot] < 0) continue;
      const std::int32_t physical = replicas_.choose(ids[slot], token);
      const std::int32_t rank = layer_.placement.rank_of()[static_cast<std::size_t>(physical)];
      is_hit_[static_cast<std::size_t>(physical)] = true;
      ranks_[static_cast<std::size_t>(rank)].rows += 1;
      const bool is_new = std::find(reached_.begin(), reached_.end(), rank) == reached_.end();
      if (rank == origin || (!is_new && !layer_.to_each_expert)) continue;
      reached_.push_back(rank);
      const int per_host = layer_.placement.num_ranks() / layer_.num_hosts;
      const int other_host = rank / per_host != origin / per_host;
      ranks_[static_cast<std::size_t>(origin)].sent[other_host] += 1;
      ranks_[static_cast<std::size_t>(rank)].received[other_host] += 1;
    }
  }

  const SimulatedLayer& layer_;
  const TensorView& ids_;
  const ExpertPlacement::Table table_;
  const core::ReplicaTable replicas_;
  std::vector<RankLoad> ranks_;
  std::vector<bool> is_hit_;
  std::vector<std::int32_t> reached_;
};

void check(const SimulatedLayer& layer, const TensorView& topk_ids) {
  const int num_ranks = layer.placement.num_ranks();
  FUSEDMOE_CHECK(layer.num_hosts > 0 && num_ranks % layer.num_hosts == 0, "num_hosts",
                 core::to_string(layer.num_hosts),
                 core::format("a divisor of the {} ranks", num_ranks));
  constexpr std::int64_t kMostTokens = 1 << 24;  // of a rank: each is counted
  FUSEDMOE_CHECK(layer.tokens_per_rank > 0 && layer.tokens_per_rank <= kMostTokens,
                 "tokens_per_rank", core::to_string(layer.tokens_per_rank),
                 core::format("from 1 to {}", kMostTokens));
  core::check_tensor(topk_ids, "topk_ids", DType::kI32, {-1, -1});
  core::check_device(topk_ids, "topk_ids", {});
  FUSEDMOE_CHECK(topk_ids.size(0) > 0, "topk_ids", "no tokens", "at least one");
  const std::int64_t num_experts = layer.placement.num_experts();
  for (std::int64_t i = 0; i < topk_ids.numel(); ++i) {
    const std::int32_t id = topk_ids.as<const std::int32_t>()[i];
    FUSEDMOE_CHECK(id >= -1 && id < num_experts, "topk_ids",
                   core::format("{} at [{}, {}]", id, i / topk_ids.size(1), i % topk_ids.size(1)),
                   core::format("-1 or in [0, {})", num_experts));
  }
}

}  // namespace

std::string RankCosts::json() const {
  return Json{{"dispatch", json_of(dispatch)},
              {"combine", json_of(combine)},
              {"between_hosts", json_of(between_hosts)},
              {"experts",
               {{"gigabytes_per_second", 1e-3 * experts.bytes_per_us},
                {"teraflops", 1e-6 * experts.flops_per_us},
                {"source", experts.source}}}}
             .dump(2) +
         "\n";
}

RankCosts RankCosts::parse(std::string_view json) {
  const Json file = Json::parse(json, nullptr, false);
  FUSEDMOE_CHECK(file.is_object(), "costs", "another text", "a JSON object");
  RankCosts costs;
  costs.dispatch = link_cost(file, "dispatch");
  costs.combine = link_cost(file, "combine");
  costs.between_hosts = link_cost(file, "between_hosts");
  costs.experts = {1e3 * number(file, "experts", "gigabytes_per_second"),
                   1e6 * number(file, "experts", "teraflops"), source(file, "experts")};
  return costs;
}

RankCosts default_rank_costs() {
  const char* const two = "measured: two H200, bench --ep 2 over NCCL";
  return {.dispatch = {12.8, 249e3, two},
          .combine = {13.8, 237e3, two},
          .between_hosts = {24, 42e3, "assumed: what explains DeepEP's table of H800"},
          .experts = {3.95e6, 924e6, "measured: one H200, FP8 with block scales"}};
}

SimulatedLayer simulated_layer(const Selection& selection, ExpertPlacement placement) {
  const MoeConfig& config = selection.config;
  const double packed_bytes = static_cast<double>(selection.packed_bytes());
  FUSEDMOE_CHECK(placement.num_experts() == config.num_experts, "placement",
                 core::format("of {} experts", placement.num_experts()),
                 core::format("of {}", config.num_experts));
  if (const Support travels = layer::supports_dispatch_dtype(config); !travels) {
    throw Error::unsupported(travels.reason, "dispatch_dtype", travels.text);
  }
  const Preparation preparation = make_preparation(*selection.experts, config.scheme, false);
  SimulatedLayer layer;
  layer.placement = std::move(placement);
  layer.sent_row_bytes = static_cast<double>(layer::sent_row_bytes(config, preparation));
  layer.returned_row_bytes = static_cast<double>(bytes(config.dtype, config.hidden));
  layer.expert_bytes = packed_bytes / static_cast<double>(config.num_local_experts);
  layer.row_flops = core::row_flops(config.activation, config.hidden, config.intermediate);
  return layer;
}

SimulatedStep simulate(const RankCosts& costs, const SimulatedLayer& layer,
                       const TensorView& topk_ids) {
  check(layer, topk_ids);
  const std::vector<RankLoad> ranks = Simulation(layer, topk_ids).run();
  SimulatedStep step;
  double rows = 0, most_rows = 0;
  for (const RankLoad& rank : ranks) {
    // A link carries as much one way as the other: the longer way counts.
    const double inside = std::max(rank.sent[0], rank.received[0]);
    const double between = std::max(rank.sent[1], rank.received[1]);
    const auto us = [&](const LinkCost& within, double row_bytes) {
      return std::max(within.us(inside * row_bytes), costs.between_hosts.us(between * row_bytes));
    };
    step.dispatch_us = std::max(step.dispatch_us, us(costs.dispatch, layer.sent_row_bytes));
    step.combine_us = std::max(step.combine_us, us(costs.combine, layer.returned_row_bytes));
    step.experts_us = std::max(step.experts_us, costs.experts.us(rank.hit * layer.expert_bytes,
                                                                 rank.rows * layer.row_flops));
    step.inside_bytes = std::max(step.inside_bytes, inside * layer.sent_row_bytes);
    step.between_bytes = std::max(step.between_bytes, between * layer.sent_row_bytes);
    most_rows = std::max(most_rows, rank.rows);
    rows += rank.rows;
  }
  step.balance = rows > 0 ? most_rows * static_cast<double>(ranks.size()) / rows : 0;
  return step;
}

}  // namespace fusedmoe
