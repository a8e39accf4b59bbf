// What the experts of a batch had to do, as text and JSON; and routed ids in a file.
#pragma once

#include <cstdint>
#include <string>

#include "fusedmoe/tensor.h"
#include "tools/load_statistics.h"

namespace fusedmoe::cli {

/// The totals: a line of column names and a line of values.
std::string load_table(const LoadStatistics& load);

/// A bar per expert (the 32 busiest, if there are more than 64) and a line of totals.
std::string load_chart(const LoadStatistics& load);

/// A character per expert, 64 to the line, darker with more rows; and a legend.
std::string load_heat_map(const LoadStatistics& load);

/// A JSON object of all of it.
std::string load_json(const LoadStatistics& load);

/// Top-k ids (num_tokens, topk) i32 and weights f32 of a forward, recorded in a safetensors file.
struct RecordedRouting {
  Tensor topk_ids, topk_weights;
};
void record_routing(const std::string& path, const RecordedRouting& routing,
                    std::int64_t num_experts);
/// Throws Error for a file of another number of experts or choices, or with ids out of range.
RecordedRouting replay_routing(const std::string& path, std::int64_t num_experts,
                               std::int64_t topk);
/// What experts had to do by the ids of such a file. Throws Error for a file without them.
LoadStatistics recorded_load(const std::string& path);

}  // namespace fusedmoe::cli
