// Which rows go to which rank: core::Backend's functions of the same names on the device.
// Everything is numbered in the order of tokens and slots.
#pragma once

#include "moe/backend.h"

namespace fusedmoe::cuda {

inline constexpr int kMaxRanks = core::kMostRanksOnCuda;

void find_destinations(const core::TokenDestinations& destinations, Stream stream);
void limit_rows(const core::RowLimits& limits, Stream stream);
void pack_rows(const core::RowPacking& packing, Stream stream);
void number_parts(const TensorView& rows, std::int64_t stride, Stream stream);
/// Both wait for the counts.
void expand_slots(const core::SlotExpansion& expansion,
                  std::span<const std::int64_t> rows_of_source, std::span<std::int64_t> counts,
                  Stream stream);
void number_slots(const core::SlotNumbers& numbers, std::span<std::int64_t> counts, Stream stream);

}  // namespace fusedmoe::cuda
