// Random layers on random ranks: the output is that of one rank, or all ranks refuse with the same
// Error. ranks_fuzzer [--runs N] [--seconds S] [--seed S] [--verbose], as run_fuzzer. Ranks are
// threads, or processes that share memory.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "../ranks/processes.h"
#include "../ranks/rank_layers.h"
#include "fusedmoe/quant.h"
#include "random_runs.h"

namespace fusedmoe::testing {
namespace {

/// How the rows of ranks get to each other.
enum class Medium { kLent, kMessages, kSequences, kProcesses };
constexpr const char* kMediumNames[] = {"lent", "messages", "sequences", "processes"};

struct RankProblem {
  RankCase how;
  LayerSpec spec;
  DType dtype = DType::kBF16;
  Medium medium = Medium::kLent;
  std::optional<DType> combine_dtype;
  bool sliced = false;  // each rank is given only its part of the weights
  bool routed = false;  // ids are given, some of them -1
  bool hooks = false;
  bool moves = false;  // experts, before each step
  int left = 0;        // ranks that at last go on without the others
  std::int64_t max_tokens = 0;
  std::vector<std::vector<std::int64_t>> tokens;  // of each step: for each group with own tokens
};

template <typename T, std::size_t n>
T one_of(Random& random, const std::array<T, n>& values) {
  return values[static_cast<std::size_t>(random.below(n))];
}

bool one_in(Random& random, std::int64_t n) {
  return random.below(n) == 0;
}

Deployment random_deployment(Random& random) {
  Deployment result;
  const int size = 1 + static_cast<int>(random.below(5));
  result.expert_parallel = !one_in(random, 4);
  if (one_in(random, 5)) {
    result.tp_size = size;
  } else if (one_in(random, 4)) {
    result.tp_size = 2;
    result.dp_size = 1 + static_cast<int>(random.below(2));
    result.sequence_parallel = one_in(random, 2);
  } else {
    result.dp_size = size;
  }
  return result;
}

/// Any physical experts on any ranks, each logical one once at least.
ExpertPlacement random_placement(Random& random, std::int64_t num_experts, int num_ranks) {
  switch (random.below(3)) {
    case 0:
      return ExpertPlacement::round_robin(num_experts, num_ranks);
    case 1:
      return ExpertPlacement::linear(num_experts, num_ranks, random.below(2 * num_experts));
    default:
      break;
  }
  std::vector<std::int32_t> logical, ranks;
  const std::int64_t physical = num_experts + random.below(num_experts + 1);
  for (std::int64_t p = 0; p < physical; ++p) {
    logical.push_back(static_cast<std::int32_t>(p % num_experts));
    ranks.push_back(static_cast<std::int32_t>(random.below(num_ranks)));
  }
  return {num_experts, num_ranks, logical, ranks};
}

Case random_experts(Random& random) {
  constexpr std::array kActivations{Activation::kSilu, Activation::kGeluTanh,
                                    Activation::kSwigluOai, Activation::kRelu2NoMul};
  const auto& schemes = named_schemes();
  Case spec;
  spec.num_experts = 1 + random.below(9);
  spec.topk = 1 + random.below(std::min<std::int64_t>(spec.num_experts, 4));
  spec.hidden = 64 * (1 + random.below(4));
  spec.intermediate = 64 * (1 + random.below(4));
  if (one_in(random, 2)) {
    const auto scheme = random.below(static_cast<std::int64_t>(schemes.size()));
    spec.scheme = schemes[static_cast<std::size_t>(scheme)].scheme;
  }
  spec.activation = one_of(random, kActivations);
  spec.bias = one_in(random, 3);
  spec.weight_on_input = one_in(random, 8);
  if (spec.weight_on_input) spec.topk = 1;
  spec.seed = random.bits();
  return spec;
}

RankProblem random_problem(Random& random) {
  RankProblem problem;
  const Deployment deployment = random_deployment(random);
  const int size = deployment.tp_size * deployment.dp_size;
  problem.spec.experts = random_experts(random);
  problem.spec.shared_experts = one_in(random, 5);
  if (one_in(random, 6)) problem.spec.zero_experts = 1 + random.below(3);
  problem.dtype = one_of(random, std::array{DType::kF32, DType::kBF16, DType::kF16});
  problem.medium = static_cast<Medium>(random.below(4));
  RankCase& how = problem.how;
  how.size = size;
  how.deployment = deployment;
  how.experts = one_in(random, 6) ? "reference" : "cpu";
  how.transport = one_in(random, 2) ? "all2all" : "allgather_reducescatter";
  if (deployment.dp_size == 1 && !deployment.sequence_parallel) how.transport = "no_ep";
  how.lend = problem.medium == Medium::kLent;
  how.cut = problem.medium == Medium::kSequences;
  if (deployment.expert_parallel && one_in(random, 2)) {
    how.placement = random_placement(random, problem.spec.experts.num_experts, size);
  }
  if (one_in(random, 3)) how.replica_choice = ReplicaChoice::kNearest;
  if (!one_in(random, 3)) {
    how.combine = one_in(random, 2) ? CombineMode::kPerSlot : CombineMode::kPerRank;
  }
  const std::optional<QuantKey>& key = problem.spec.experts.scheme.activations;
  if (one_in(random, 3)) how.dispatch_dtype = problem.dtype;
  if (key && one_in(random, 3)) how.dispatch_dtype = key->value;
  how.batch_invariant = one_in(random, 4);
  how.fixed_sizes = one_in(random, 4);
  how.monolithic = how.transport == "allgather_reducescatter" && one_in(random, 8);
  problem.hooks = one_in(random, 8);
  if (one_in(random, 4)) problem.combine_dtype = one_in(random, 2) ? DType::kF32 : problem.dtype;
  problem.sliced = !deployment.expert_parallel || (!how.placement && one_in(random, 2));
  problem.routed = !how.monolithic && one_in(random, 2);
  problem.moves = how.experts == "cpu" && deployment.expert_parallel && one_in(random, 3);
  if (problem.moves) {  // ranks with the same tokens stay together
    const bool groups = deployment.dp_size > 1;
    const int unit = groups ? deployment.tp_size : 1;
    problem.left = unit * static_cast<int>(1 + random.below(size / unit));
  }
  problem.max_tokens = 1 + random.below(12);
  for (std::int64_t step = 0; step < 1 + random.below(3); ++step) {
    std::vector<std::int64_t>& tokens = problem.tokens.emplace_back();
    for (int rank = 0; rank < size; ++rank) {
      tokens.push_back(one_in(random, 4) ? 0 : random.below(problem.max_tokens + 1));
    }
  }
  return problem;
}

std::string describe(const RankProblem& problem) {
  const Case& spec = problem.spec.experts;
  const RankCase& how = problem.how;
  std::string text = name(spec.scheme) + " " + std::string(name(problem.dtype));
  const auto add = [&](const char* key, auto value) {
    text += std::string(" ") + key + "=" + std::to_string(value);
  };
  text += std::string(" ") + kMediumNames[static_cast<int>(problem.medium)] + " " + how.experts +
          "+" + how.transport;
  add("tp", how.deployment->tp_size);
  add("dp", how.deployment->dp_size);
  add("ep", how.deployment->expert_parallel);
  add("sequence", how.deployment->sequence_parallel);
  add("experts", spec.num_experts);
  add("topk", spec.topk);
  add("hidden", spec.hidden);
  add("intermediate", spec.intermediate);
  text += " " + std::string(name(spec.activation));
  add("bias", spec.bias);
  add("weight_on_input", spec.weight_on_input);
  add("zero_experts", problem.spec.zero_experts);
  add("shared", problem.spec.shared_experts);
  if (how.placement) add("physical", how.placement->rank_of().size());
  if (how.combine) add("combine", static_cast<int>(*how.combine));
  if (how.dispatch_dtype) text += " dispatch_dtype=" + std::string(name(*how.dispatch_dtype));
  if (problem.combine_dtype) text += " combine_dtype=" + std::string(name(*problem.combine_dtype));
  add("invariant", how.batch_invariant);
  add("fixed", how.fixed_sizes);
  add("monolithic", how.monolithic);
  add("hooks", problem.hooks);
  add("sliced", problem.sliced);
  add("routed", problem.routed);
  add("moves", problem.moves);
  add("left", problem.left);
  return text;
}

/// What a rank gives to a step.
struct Step {
  Tensor x, ids, factors;
};

Step step_of(const RankProblem& problem, std::size_t number, int rank) {
  const Deployment& deployment = *problem.how.deployment;
  const int group = deployment.sequence_parallel ? rank : rank / deployment.tp_size;
  Case tokens = problem.spec.experts;
  tokens.scheme = schemes::unquantized(DType::kF32);
  tokens.num_tokens = problem.tokens[number][static_cast<std::size_t>(group)];
  tokens.negative_ids = true;
  tokens.seed += 100 * number + static_cast<std::size_t>(group) + 1;
  const std::int64_t hidden = std::exchange(tokens.hidden, 16);
  tokens.intermediate = 16;
  const Problem made = make_problem(tokens);
  return {random_tensor(problem.dtype, {tokens.num_tokens, hidden}, 1, tokens.seed), made.topk_ids,
          made.topk_weights};
}

Tensor forward(const RankProblem& problem, const MoeLayer& layer, const Step& step,
               std::int64_t most) {
  const Routing routing{step.ids, step.factors};
  return forward_exactly(problem.how, layer, step.x, most, problem.routed ? &routing : nullptr);
}

/// Whether one rank's bits are promised.
bool promises_bits(const RankProblem& problem) {
  const RankCase& how = problem.how;
  const bool per_slot = how.batch_invariant || how.combine == CombineMode::kPerSlot;
  // On AMX the number of an expert's rows decides which kernel computes them, and the kernels round
  // differently. Batch invariance asks for one kernel.
  const bool by_rows = cpu_isa() == "amx" && !how.batch_invariant;
  const std::optional<QuantKey>& key = problem.spec.experts.scheme.activations;
  // Of f16 rows quantized twice some scales may differ (docs/expert-parallel.md).
  const bool twice = problem.dtype == DType::kF16 && key && how.dispatch_dtype;
  return per_slot && !by_rows && how.experts == "cpu" && how.transport != "no_ep" &&
         !problem.hooks && how.deployment->expert_parallel && !twice &&
         !batch_dependent(problem.spec.experts.scheme);
}

/// Relative to an element or to a typical one. Each rank rounds its sums; and where it reads slices
/// of activations, or those of other tokens, their scales are others.
double tolerance(const RankProblem& problem) {
  const QuantScheme& scheme = problem.spec.experts.scheme;
  const double rounding = problem.dtype == DType::kF32 ? 2e-4 : 6e-2;
  const bool other_codes =
      problem.sliced || batch_dependent(scheme) || problem.hooks || problem.how.monolithic;
  if (!scheme.activations || !other_codes) return rounding;
  return scheme.activations->value == DType::kE2M1 ? 1.5 : 0.3;
}

/// The same places for the same experts in another order, which all ranks draw alike.
ExpertPlacement shuffled(const ExpertPlacement& placement, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::int32_t> experts = placement.physical_to_logical();
  for (std::size_t i = experts.size(); i > 1; --i) {
    std::swap(experts[i - 1],
              experts[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  }
  return {placement.num_experts(), placement.num_ranks(), experts, placement.rank_of()};
}

/// Binds the layer to the ranks that are left, which have any placement.
void leave_some_out(const RankProblem& problem, const LayerWeights& weights,
                    const std::shared_ptr<Communicator>& part, MoeLayer& layer) {
  const std::int64_t num_experts = problem.spec.experts.num_experts;
  const auto placement = problem.spec.experts.seed % 2 == 0
                             ? ExpertPlacement::linear(num_experts, problem.left)
                             : ExpertPlacement::round_robin(num_experts, problem.left);
  try {
    layer.rebind(part, placement, [&](std::int64_t expert) {
      ExpertWeights one = weights.experts;
      one.experts = {weights.experts.experts[static_cast<std::size_t>(expert)]};
      return one;
    });
  } catch (const Error& error) {
    throw Failure{std::string("rebind: ") + error.what()};
  }
}

/// What one rank does: all steps, each compared with those of a layer on one rank. Returns the text
/// of the Error that it throws, empty for none.
std::string run_rank(const RankProblem& problem, const LayerWeights& weights,
                     const std::shared_ptr<Communicator>& communicator) {
  const RankCase& how = problem.how;
  LayerOptions options = rank_options(how, problem.dtype, problem.max_tokens, communicator);
  options.ranks.combine_dtype = problem.combine_dtype;
  options.hooks = problem.hooks;
  LayerOptions one = one_rank_options(how, problem.dtype);
  const int rank = communicator->rank();
  try {
    MoeLayer layer(problem.sliced ? local_weights(weights, options.parallel) : weights, options);
    const MoeLayer alone(weights, one);
    const auto compare_step = [&](std::size_t number, bool bits) {
      const Step step = step_of(problem, number, rank);
      const Tensor actual = forward(problem, layer, step, problem.max_tokens);
      const Tensor expected = forward(problem, alone, step, 0);
      const std::string what = "rank " + std::to_string(rank) + ", step " + std::to_string(number);
      if (!bits) {
        expect_close(actual, expected, tolerance(problem), what);
      } else if (!bitwise_equal(actual, expected)) {
        throw Failure{what + ": not the bits of one rank"};
      }
    };
    for (std::size_t number = 0; number < problem.tokens.size(); ++number) {
      if (problem.moves && layer.placement()) {
        layer.start_move(shuffled(*layer.placement(), problem.spec.experts.seed + number));
        layer.commit_move();
      }
      compare_step(number, promises_bits(problem));
    }
    if (problem.moves && layer.placement()) {
      const auto part = communicator->split(rank < problem.left ? 1 : 0);
      if (rank >= problem.left) return {};
      leave_some_out(problem, weights, part, layer);
      // Ranks of one group that are left only add sums.
      const bool sends = layer.selection().prepare_finalize->name() == how.transport;
      compare_step(0, promises_bits(problem) && (sends || problem.left == 1));
    }
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// A Failure begins with '!'.
std::vector<std::string> run_processes(const RankProblem& problem, const LayerWeights& weights) {
  const int size = problem.how.size;
  return texts_of_processes(size, [&](int rank, const std::shared_ptr<ControlPlane>& control) {
    try {
      const auto communicator = make_communicator(rank, size, control, {kPatient});
      std::string found = run_rank(problem, weights, communicator);
      communicator->barrier();
      return found;
    } catch (const Failure& failure) {
      return "!" + failure.text;
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  });
}

std::vector<std::string> run_threads(const RankProblem& problem, const LayerWeights& weights) {
  const RankCase& how = problem.how;
  const auto communicators = make_communicators(how.size, how.lend, {kPatient}, how.cut);
  std::vector<std::string> results(communicators.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        results[rank] = run_rank(problem, weights, communicators[rank]);
        // Who is done early must not take the others' way.
        if (results[rank].empty()) communicators[rank]->barrier();
      } catch (const Failure& failure) {
        results[rank] = "!" + failure.text;
        communicators[rank]->abort("a wrong result");
      } catch (const std::exception& error) {
        results[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

struct Statistics {
  std::int64_t refused = 0;
  std::map<std::string, std::int64_t> compared;  // by medium
  std::int64_t bits = 0;
};

void run(std::uint64_t seed, Statistics& statistics, std::string& what) {
  Random random(seed);
  RankProblem problem = random_problem(random);
#ifdef FUSEDMOE_FUZZ_THREADS_ALONE
  if (problem.medium == Medium::kProcesses) problem.medium = Medium::kMessages;
#endif
  what = describe(problem);
  LayerWeights weights;
  try {
    weights = make_layer_weights(problem.spec);
  } catch (const Error&) {
    ++statistics.refused;
    return;
  }
  const bool processes = problem.medium == Medium::kProcesses;
  const std::vector<std::string> results =
      processes ? run_processes(problem, weights) : run_threads(problem, weights);
  for (const std::string& result : results) {
    if (result.starts_with('!')) throw Failure{result.substr(1)};
  }
  for (const std::string& result : results) {
    const bool late = result.find("did not arrive") != std::string::npos;
    if (result != results.front() || late) {
      throw Failure{"rank 0: \"" + results.front() + "\", but another: \"" + result + "\""};
    }
  }
  if (!results.front().empty()) {
    ++statistics.refused;
    if (std::getenv("FUSEDMOE_SHOW_REFUSALS")) std::puts(results.front().c_str());
    return;
  }
  ++statistics.compared[kMediumNames[static_cast<int>(problem.medium)]];
  statistics.bits += promises_bits(problem);
}

std::string summary(const Statistics& statistics) {
  std::string text;
  for (const auto& [medium, count] : statistics.compared) {
    text += std::to_string(count) + " " + medium + ", ";
  }
  return text + std::to_string(statistics.bits) + " of them bit by bit, " +
         std::to_string(statistics.refused) + " problems refused";
}

}  // namespace
}  // namespace fusedmoe::testing

int main(int argc, char** argv) {
  fusedmoe::testing::Statistics statistics;
  return fusedmoe::testing::run_seeds(
      argc, argv,
      [&](std::uint64_t seed, std::string& what) {
        fusedmoe::testing::run(seed, statistics, what);
      },
      [&] { return fusedmoe::testing::summary(statistics); });
}
