// Rows as messages from the host. Its data plane takes whole messages, of rows that were packed, or
// a stream of bytes, of rows where they lie.
#pragma once

#include "layer/rank_messages.h"

namespace fusedmoe::layer {

class HostMessages final : public RankMessages {
 public:
  HostMessages(const RankRules& rules, const StepSizes& sizes, void* memory);

 private:
  void send(const RowTensors& own, const ForwardArgs& args) override;
  void receive(Stream stream) override;
  void sum(const ForwardArgs& args) override;

  void exchange_unpacked(const RowTensors& rows, Stream stream) const;

  const bool unpacked_;
};

}  // namespace fusedmoe::layer
