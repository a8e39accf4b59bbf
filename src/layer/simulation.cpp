#include "fusedmoe/simulation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/check.h"
#include "files/file.h"
#include "layer/rank_transports.h"
#include "layer/row_choice.h"
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

Json json_of(const RowCosts& costs) {
  return {{"dispatch", json_of(costs.dispatch)},
          {"per_rank", json_of(costs.per_rank)},
          {"per_slot", json_of(costs.per_slot)}};
}

struct PathMember {
  RowPath path;
  RowCosts RankCosts::*costs;
};
constexpr std::array<PathMember, 3> kPaths{
    {{RowPath::kPeerMemory, &RankCosts::peer_memory},
     {RowPath::kAll2all, &RankCosts::all2all},
     {RowPath::kAllgather, &RankCosts::allgather_reducescatter}}};

/// An object in the file, by what it is called in errors.
struct Part {
  const Json* json;  // null: it is not there
  std::string name;

  Part of(const char* key) const {
    const bool is_there = json && json->is_object() && json->contains(key);
    return {is_there ? &json->at(key) : nullptr, name.empty() ? key : name + "." + key};
  }
  double number(const char* key) const {
    const Part found = of(key);
    const bool is_there = found.json && found.json->is_number();
    const double value = is_there ? found.json->get<double>() : 0;
    FUSEDMOE_CHECK(value > 0, found.name, is_there ? core::format("{}", value) : "missing",
                   "a number above 0");
    return value;
  }
  std::string source() const {
    const Part found = of("source");
    return found.json && found.json->is_string() ? found.json->get<std::string>() : "";
  }
  LinkCost link_cost() const {
    return {number("floor_us"), 1e3 * number("gigabytes_per_second"), source()};
  }
};

/// What one rank sends, gets and multiplies.
struct RankLoad {
  struct Rows {
    double of_tokens = 0, of_slots = 0;
  };
  Rows sent[2], received[2];  // inside the host, and to others
  double rows = 0;            // of its experts
  double hit = 0;             // experts that have any
};

/// Whether every rank's rows go to all others.
bool to_all(const SimulatedLayer& layer) {
  const RowPath path = layer.path_inside();
  return path == RowPath::kAllgather || (path == RowPath::kAll2all && layer.fixed_sizes);
}

/// So many rows from a rank to another, which is not the same.
void send_rows(const SimulatedLayer& layer, std::vector<RankLoad>& ranks, int from, int to,
               const RankLoad::Rows& rows) {
  const int per_host = layer.placement.num_ranks() / layer.num_hosts;
  const int other_host = from / per_host != to / per_host;
  for (RankLoad::Rows* sum : {&ranks[static_cast<std::size_t>(from)].sent[other_host],
                              &ranks[static_cast<std::size_t>(to)].received[other_host]}) {
    sum->of_tokens += rows.of_tokens;
    sum->of_slots += rows.of_slots;
  }
}

void send_to_all(const SimulatedLayer& layer, std::vector<RankLoad>& ranks) {
  const int num_ranks = layer.placement.num_ranks();
  for (int to = 0; to < num_ranks; ++to) {
    if (layer.placement.local_experts(to).empty()) continue;
    for (int from = 0; from < num_ranks; ++from) {
      if (from == to) continue;
      send_rows(layer, ranks, from, to, {static_cast<double>(layer.tokens_per_rank), 0});
    }
  }
}

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
    if (to_all(layer_)) send_to_all(layer_, ranks_);
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
      if (rank == origin) continue;
      const bool is_new = std::find(reached_.begin(), reached_.end(), rank) == reached_.end();
      if (is_new) reached_.push_back(rank);
      const bool takes_a_row = layer_.to_each_expert || (is_new && !to_all(layer_));
      send_rows(layer_, ranks_, origin, rank, {takes_a_row ? 1.0 : 0.0, 1});
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

/// On average, where all physical experts are equally likely.
std::vector<RankLoad> expected_loads(const SimulatedLayer& layer, std::int64_t topk) {
  const int num_ranks = layer.placement.num_ranks();
  const auto tokens = static_cast<double>(layer.tokens_per_rank), slots = static_cast<double>(topk);
  std::vector<RankLoad> ranks(static_cast<std::size_t>(num_ranks));
  for (int to = 0; to < num_ranks; ++to) {
    const auto here = static_cast<double>(layer.placement.local_experts(to).size());
    const double share = here / static_cast<double>(layer.placement.num_physical());
    RankLoad::Rows rows{0, tokens * slots * share};
    if (layer.to_each_expert) {
      rows.of_tokens = rows.of_slots;
    } else if (!to_all(layer)) {
      rows.of_tokens = tokens * (1 - std::pow(1 - share, slots));
    }
    for (int from = 0; from < num_ranks; ++from) {
      if (from != to) send_rows(layer, ranks, from, to, rows);
    }
    RankLoad& rank = ranks[static_cast<std::size_t>(to)];
    rank.rows = num_ranks * rows.of_slots;
    if (here > 0) rank.hit = here * (1 - std::pow(1 - 1 / here, rank.rows));
  }
  if (to_all(layer)) send_to_all(layer, ranks);
  return ranks;
}

/// Each part of the rank that takes longest. A link carries as much one way as the other: the
/// longer way counts.
SimulatedStep longest(const RankCosts& costs, const SimulatedLayer& layer,
                      const std::vector<RankLoad>& ranks) {
  const RowCosts& inside = costs.of(layer.path_inside());
  const auto bytes_of = [&](const RankLoad::Rows& rows, bool back) {
    const bool slots = back && layer.combine == CombineMode::kPerSlot;
    return (slots ? rows.of_slots : rows.of_tokens) *
           (back ? layer.returned_row_bytes : layer.sent_row_bytes);
  };
  SimulatedStep step;
  double rows = 0, most_rows = 0;
  for (const RankLoad& rank : ranks) {
    const auto most = [&](int hosts, bool back) {
      return std::max(bytes_of(rank.sent[hosts], back), bytes_of(rank.received[hosts], back));
    };
    const auto us = [&](const LinkCost& within, bool back) {
      return std::max(within.us(most(0, back)), costs.between_hosts.us(most(1, back)));
    };
    step.dispatch_us = std::max(step.dispatch_us, us(inside.dispatch, false));
    step.combine_us = std::max(step.combine_us, us(inside.combine(layer.combine), true));
    step.experts_us = std::max(step.experts_us, costs.experts.us(rank.hit * layer.expert_bytes,
                                                                 rank.rows * layer.row_flops));
    step.inside_bytes = std::max(step.inside_bytes, most(0, false));
    step.between_bytes = std::max(step.between_bytes, most(1, false));
    most_rows = std::max(most_rows, rank.rows);
    rows += rank.rows;
  }
  step.balance = rows > 0 ? most_rows * static_cast<double>(ranks.size()) / rows : 0;
  return step;
}

/// As a layer on GPUs chooses it, which knows no ids.
bool sends_quantized(const RankCosts& costs, const SimulatedLayer& layer, std::int64_t topk) {
  if (layer.quantized_row_bytes == 0 || layer.placement.num_ranks() == 1) return false;
  if (layer.quantizes) return true;
  return layer.path_inside() == RowPath::kPeerMemory &&
         layer::saved_by_quantizing(costs, layer, topk) >= 0;
}

SimulatedStep simulate(const RankCosts& costs, const SimulatedLayer& layer, std::int64_t topk,
                       const std::vector<RankLoad>& ranks) {
  if (!sends_quantized(costs, layer, topk)) return longest(costs, layer, ranks);
  SimulatedLayer quantized = layer;
  quantized.sent_row_bytes = layer.quantized_row_bytes;
  SimulatedStep step = longest(costs, quantized, ranks);
  step.quantize_us = layer::quantize_us(costs, layer);
  step.dispatch_us += step.quantize_us;
  return step;
}

void check(const SimulatedLayer& layer) {
  const int num_ranks = layer.placement.num_ranks();
  FUSEDMOE_CHECK(layer.num_hosts > 0 && num_ranks % layer.num_hosts == 0, "num_hosts",
                 core::to_string(layer.num_hosts),
                 core::format("a divisor of the {} ranks", num_ranks));
  constexpr std::int64_t kMostTokens = 1 << 24;  // of a rank: each is counted
  FUSEDMOE_CHECK(layer.tokens_per_rank > 0 && layer.tokens_per_rank <= kMostTokens,
                 "tokens_per_rank", core::to_string(layer.tokens_per_rank),
                 core::format("from 1 to {}", kMostTokens));
}

void check(const SimulatedLayer& layer, const TensorView& topk_ids) {
  check(layer);
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

std::string_view name(RowPath path) {
  switch (path) {
    case RowPath::kPeerMemory:
      return "peer_memory";
    case RowPath::kAll2all:
      return "all2all";
    case RowPath::kAllgather:
      return "allgather_reducescatter";
  }
  return {};
}

const RowCosts& RankCosts::of(RowPath path) const {
  return this->*kPaths[static_cast<std::size_t>(path)].costs;
}

std::string RankCosts::json() const {
  Json file;
  for (const auto& [path, costs] : kPaths) file[std::string(name(path))] = json_of(this->*costs);
  file["between_hosts"] = json_of(between_hosts);
  file["beside_experts"] = json_of(beside_experts);
  file["quantize"] = json_of(quantize);
  file["experts"] = {{"gigabytes_per_second", 1e-3 * experts.bytes_per_us},
                     {"teraflops", 1e-6 * experts.flops_per_us},
                     {"source", experts.source}};
  return file.dump(2) + "\n";
}

RankCosts RankCosts::parse(std::string_view json) {
  const Json file = Json::parse(json, nullptr, false);
  FUSEDMOE_CHECK(file.is_object(), "costs", "another text", "a JSON object");
  const Part all{&file, ""};
  RankCosts costs = default_rank_costs();
  bool has_any = false;
  for (const auto& [path, member] : kPaths) {
    const Part part = all.of(std::string(name(path)).c_str());
    if (!part.json) continue;
    has_any = true;
    costs.*member = {part.of("dispatch").link_cost(), part.of("per_rank").link_cost(),
                     part.of("per_slot").link_cost()};
  }
  FUSEDMOE_CHECK(has_any, "costs", "without peer_memory, all2all and allgather_reducescatter",
                 "what bench --calibrate of this version writes");
  costs.between_hosts = all.of("between_hosts").link_cost();
  for (const auto& [key, cost] : {std::pair("beside_experts", &costs.beside_experts),
                                  std::pair("quantize", &costs.quantize)}) {
    if (const Part part = all.of(key); part.json) *cost = part.link_cost();
  }
  const Part experts = all.of("experts");
  costs.experts = {1e3 * experts.number("gigabytes_per_second"), 1e6 * experts.number("teraflops"),
                   experts.source()};
  return costs;
}

RankCosts default_rank_costs() {
  const char* const two = "measured: two H200, bench --ep 2, fixed sizes";
  const char* const slots = "assumed: as per_rank";
  return {.peer_memory = {{7.2, 303e3, two}, {7.2, 303e3, two}, {11.9, 297e3, two}},
          .all2all = {{17.8, 250e3, two}, {20.5, 242e3, two}, {20.5, 242e3, slots}},
          .allgather_reducescatter = {{18.2, 250e3, two}, {9.6, 233e3, two}, {9.6, 233e3, slots}},
          .between_hosts = {24, 42e3, "assumed: what explains DeepEP's table of H800"},
          .beside_experts = {45, 15e6, "measured: two H200, E4M3 rows"},
          .quantize = {7, 3e6, "measured: two and four H200, FP8 with block scales"},
          .experts = {3.95e6, 924e6, "measured: one H200, FP8 with block scales"}};
}

const RankCosts& rank_costs() {
  static const RankCosts costs = [] {
    const char* variable = "FUSEDMOE_RANK_COSTS";
    const char* path = std::getenv(variable);
    if (!path || !*path) return default_rank_costs();
    std::string context = variable;
    try {
      const std::string text = files::read_text(path, std::size_t{1} << 20);
      context += core::format(" {}", path);  // errors of reading name it
      return RankCosts::parse(text);
    } catch (const Error& error) {
      throw error.within(context);
    }
  }();
  return costs;
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
  SimulatedLayer layer = layer::simulated_rows(config, {}, preparation, std::move(placement));
  layer.expert_bytes = packed_bytes / static_cast<double>(config.num_local_experts);
  layer.row_flops = core::row_flops(config.activation, config.hidden, config.intermediate);
  return layer;
}

SimulatedStep simulate(const RankCosts& costs, const SimulatedLayer& layer,
                       const TensorView& topk_ids) {
  check(layer, topk_ids);
  return simulate(costs, layer, topk_ids.size(1), Simulation(layer, topk_ids).run());
}

SimulatedStep simulate(const RankCosts& costs, const SimulatedLayer& layer, std::int64_t topk) {
  check(layer);
  return simulate(costs, layer, topk, expected_loads(layer, topk));
}

}  // namespace fusedmoe
