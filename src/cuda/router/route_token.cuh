// The router's second half for one token: a row of logits -> top-k ids and weights. Semantics:
// fusedmoe/router.h; the same steps as src/moe/router.cpp.
//
// One warp per token. Its choice scores are ordered 32-bit keys in shared memory, number i in the
// care of lane i % 32, and choosing is k times the largest of the lanes' best: two warp reductions,
// and a new search by the lane that lost its best.
//
// Ids equal the CPU's because scores do: see scores.cuh. The weights of kSparsemixer are those of
// near_weights.cu.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/router/kernels.h"
#include "cuda/router/scores.cuh"
#include "cuda/rows/element.cuh"

namespace fusedmoe::cuda {

constexpr int kSlotsPerLane = kMaxRouterTopk / kWarpSize;

/// Copies a row to `values`; returns its largest element, NaNs apart, over all lanes.
template <typename Logit>
__device__ float copy_row(const Logit* row, int count, float* values, int lane) {
  constexpr int kInFlight = 8;
  float largest = -kInfinity;
  for (int begin = lane; begin < count; begin += kInFlight * kWarpSize) {
    float loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int e = begin + i * kWarpSize;
      loaded[i] = e < count ? to_f32(row[e]) : -kInfinity;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int e = begin + i * kWarpSize;
      if (e < count) values[e] = loaded[i];
      largest = fmaxf(largest, loaded[i]);
    }
  }
  return warp_max(largest);
}

/// Turns logits into keys in place. `to_score` gets what `keys` holds, as a float.
template <typename ToScore>
__device__ void make_keys(const RouteParams& p, std::uint32_t* keys, int lane, ToScore to_score) {
#pragma unroll 4
  for (int e = lane; e < p.num_experts; e += kWarpSize) {
    const float expert_score = to_score(__uint_as_float(keys[e]));
    keys[e] = sort_key(p.bias ? expert_score + p.bias[e] : expert_score);
  }
}

/// Fills keys (num_experts) from a row of logits.
template <typename Logit>
__device__ Softmax compute_keys(const RouteParams& p, const Logit* row, std::uint32_t* keys,
                                int lane) {
  auto* values = reinterpret_cast<float*>(keys);
  Softmax softmax{copy_row(row, p.num_experts, values, lane), 1};
  switch (p.scoring) {
    case ScoringFunc::kSoftmax: {
      double sum = 0;
#pragma unroll 4
      for (int e = lane; e < p.num_experts; e += kWarpSize) {
        const float exponential = exp_rounded(values[e] - softmax.largest);
        values[e] = exponential;
        sum += exponential;
      }
      softmax.sum = static_cast<float>(warp_sum(sum));
      make_keys(p, keys, lane,
                [&](float exponential) { return finite_or(exponential / softmax.sum, 0); });
      break;
    }
    case ScoringFunc::kSigmoid:
      make_keys(p, keys, lane,
                [&](float logit) { return score(ScoringFunc::kSigmoid, logit, softmax); });
      break;
    case ScoringFunc::kSqrtSoftplus:
      make_keys(p, keys, lane,
                [&](float logit) { return score(ScoringFunc::kSqrtSoftplus, logit, softmax); });
      break;
    default:
      make_keys(p, keys, lane,
                [&](float logit) { return score(ScoringFunc::kLogits, logit, softmax); });
  }
  return softmax;
}

/// A lane's best key and where it is.
struct Candidate {
  std::uint32_t key = kTaken;
  int index = INT_MAX;
};

__device__ inline Candidate best_of_lane(const std::uint32_t* keys, int count, int lane) {
  Candidate best;
#pragma unroll 4
  for (int i = lane; i < count; i += kWarpSize) {
    const std::uint32_t key = keys[i];
    if (key > best.key) best = {key, i};
  }
  return best;
}

/// Takes the largest key of all, of equal ones the first, and returns its index. `mine` is the
/// lane's best_of_lane.
__device__ inline int take_best(std::uint32_t* keys, int count, int lane, Candidate& mine) {
  const std::uint32_t largest = __reduce_max_sync(kAllLanes, mine.key);
  const int index = __reduce_min_sync(kAllLanes, mine.key == largest ? mine.index : INT_MAX);
  if (mine.index == index) {
    keys[index] = kTaken;
    mine = best_of_lane(keys, count, lane);
  }
  return index;
}

/// Fills group_keys (num_groups): a group's score is its largest choice score, or with a correction
/// bias the sum of the two largest. 32 / num_groups lanes share a group, at least one.
__device__ inline void score_groups(const RouteParams& p, const std::uint32_t* keys,
                                    std::uint32_t* group_keys, int lane) {
  const int group_size = p.num_experts / p.num_groups;
  int sharers = 1;
  while (2 * sharers * p.num_groups <= kWarpSize) sharers *= 2;
  for (int first = 0; first < p.num_groups; first += kWarpSize / sharers) {
    const int group = first + lane / sharers;
    std::uint32_t best = sort_key(-kInfinity), second = best;
    if (group < p.num_groups) {
      for (int i = lane % sharers; i < group_size; i += sharers) {
        const std::uint32_t key = keys[group * group_size + i];
        second = max(second, min(best, key));
        best = max(best, key);
      }
    }
    for (int offset = sharers / 2; offset > 0; offset /= 2) {
      const std::uint32_t other_best = __shfl_xor_sync(kAllLanes, best, offset);
      const std::uint32_t other_second = __shfl_xor_sync(kAllLanes, second, offset);
      second = max(max(second, other_second), min(best, other_best));
      best = max(best, other_best);
    }
    if (group < p.num_groups && lane % sharers == 0) {
      const bool use_two = p.bias && group_size > 1;
      group_keys[group] = use_two ? sort_key(score_of_key(best) + score_of_key(second)) : best;
    }
  }
}

/// Takes away the experts of all but the topk_group best groups.
__device__ inline void drop_groups(const RouteParams& p, std::uint32_t* keys,
                                   std::uint32_t* group_keys, int lane) {
  __syncwarp();
  score_groups(p, keys, group_keys, lane);
  __syncwarp();
  Candidate mine = best_of_lane(group_keys, p.num_groups, lane);
  for (int i = 0; i < p.topk_group; ++i) take_best(group_keys, p.num_groups, lane, mine);
  __syncwarp();
  const int group_size = p.num_experts / p.num_groups;
  for (int e = lane; e < p.num_experts; e += kWarpSize) {
    if (group_keys[e / group_size] != kTaken) keys[e] = kTaken;
  }
  __syncwarp();
}

/// Sum over the slots in their order, as the CPU adds them. Slot j is in lane j % 32.
__device__ inline double sum_of_slots(const float (&values)[kSlotsPerLane], int topk) {
  double sum = 0;
#pragma unroll
  for (int part = 0; part < kSlotsPerLane; ++part) {
    const int end = min(topk - part * kWarpSize, kWarpSize);
    for (int j = 0; j < end; ++j) sum += __shfl_sync(kAllLanes, values[part], j);
  }
  return sum;
}

/// From the scores of the chosen experts to their weights. Slots that are none hold -infinity.
__device__ inline void compute_weights(const RouteParams& p, float (&weights)[kSlotsPerLane]) {
  if (p.scoring == ScoringFunc::kTopkSoftmax) {
    float largest = -kInfinity;
    for (float weight : weights) largest = fmaxf(largest, weight);
    largest = warp_max(largest);
    // Where nothing is finite, exp(-infinity - 0) makes all weights 0.
    const float shift = largest == -kInfinity ? 0.0f : largest;
    for (float& weight : weights) weight = exp_rounded(weight - shift);
    const auto sum = static_cast<float>(sum_of_slots(weights, p.topk));
    for (float& weight : weights) weight = sum > 0 ? weight / sum : 0.0f;
  } else if (p.scoring == ScoringFunc::kTopkSigmoid) {
    for (float& weight : weights) weight = sigmoid(weight);
  } else if (p.scoring == ScoringFunc::kLogits) {
    for (float& weight : weights) weight = weight == -kInfinity ? 0.0f : weight;
  }
  if (p.renormalize) {
    const auto divisor = static_cast<float>(sum_of_slots(weights, p.topk) + p.renormalize_epsilon);
    for (float& weight : weights) weight /= divisor;
  }
  if (p.scaling_factor != 1) {
    for (float& weight : weights) weight *= p.scaling_factor;
  }
}

/// Routes one token with one warp: its row of logits -> ids and weights (topk). Whatever memory
/// they are in. keys: (num_experts + num_groups) in shared memory. `counts` (num_experts) of the
/// block may be null.
template <typename Logit>
__device__ void route_token(const RouteParams& p, const Logit* row, std::int32_t* out_ids,
                            float* out_weights, std::uint32_t* keys, std::int32_t* counts) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const Softmax softmax = compute_keys(p, row, keys, lane);
  if (p.num_groups > 0) drop_groups(p, keys, keys + p.num_experts, lane);

  int ids[kSlotsPerLane] = {};
  Candidate mine = best_of_lane(keys, p.num_experts, lane);
#pragma unroll
  for (int part = 0; part < kSlotsPerLane; ++part) {
    const int end = min(p.topk - part * kWarpSize, kWarpSize);
    for (int j = 0; j < end; ++j) {
      const int id = take_best(keys, p.num_experts, lane, mine);
      if (lane == j) ids[part] = id;
    }
  }

  float weights[kSlotsPerLane];
#pragma unroll
  for (int part = 0; part < kSlotsPerLane; ++part) {
    const bool used = part * kWarpSize + lane < p.topk;
    weights[part] = used ? score(p.scoring, to_f32(row[ids[part]]), softmax) : -kInfinity;
  }
  compute_weights(p, weights);
#pragma unroll
  for (int part = 0; part < kSlotsPerLane; ++part) {
    const int slot = part * kWarpSize + lane;
    if (slot >= p.topk) continue;
    out_ids[slot] = ids[part];
    out_weights[slot] = weights[part];
    if (counts) atomicAdd(counts + ids[part], 1);
  }
}

}  // namespace fusedmoe::cuda
