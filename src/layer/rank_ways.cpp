// Which of the ways that rows travel a step takes: a step itself does not know them.
#include "layer/device_messages.h"
#include "layer/host_messages.h"
#include "layer/rows_in_place.h"

namespace fusedmoe::layer {

std::unique_ptr<RankStep> RankStep::make(const RankRules& rules, const StepSizes& sizes,
                                         void* memory) {
  switch (rules.way) {
    case RowWay::kInPlace:
      return std::make_unique<RowsInPlace>(rules, sizes, memory);
    case RowWay::kHostMessages:
      return std::make_unique<HostMessages>(rules, sizes, memory);
    case RowWay::kDeviceMessages:
      return std::make_unique<DeviceMessages>(rules, sizes, memory);
  }
  return nullptr;
}

}  // namespace fusedmoe::layer
