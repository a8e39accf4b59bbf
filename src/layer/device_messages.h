// Rows as messages from a device. Rows for other ranks are packed; this rank's own go straight to
// where its experts read them, and are added up where its experts have left them. Rows that go to
// all ranks are sent from where they are, if this rank has as many tokens as it sends rows.
#pragma once

#include "layer/rank_messages.h"

namespace fusedmoe::layer {

class DeviceMessages final : public RankMessages {
 public:
  DeviceMessages(const RankRules& rules, const StepSizes& sizes, void* memory);

 private:
  void send(const RowTensors& own, const ForwardArgs& args) override;
  void receive(Stream stream) override;
  void give_back(const ForwardArgs& args) override;
  void sum(const ForwardArgs& args) override;
  bool finds_destinations() const override;
  std::int64_t local_slots(const ForwardArgs& args) const override;

  void count_slots(Stream stream);
  bool gathers() const;
  bool fills_all() const { return sizes_.num_tokens == rows_for_all(); }
  void gather_rows(Stream stream) const;
  bool sums_into_output(const ForwardArgs& args) const;
  TensorView number_all(Stream stream) const;

  TensorView numbers_;      // (num_tokens, topk) i32, of slots that are counted; or undefined
  RowTensors in_place_;     // rows for all, sent from where they are; or undefined
  bool scattered_ = false;  // the data plane makes the sums over ranks
};

}  // namespace fusedmoe::layer
