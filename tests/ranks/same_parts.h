// What tests of experts that move share, on CPUs and on GPUs.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "fusedmoe/comm.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "testing/compare.h"

namespace fusedmoe::testing {

inline void expect_same_parts(const PackedWeights& actual, const PackedWeights& expected) {
  const PackedParts a = actual.parts(), e = expected.parts();
  ASSERT_EQ(a.size(), e.size());
  for (const auto& [name, tensor] : e) {
    ASSERT_TRUE(a.contains(name)) << name;
    EXPECT_TRUE(bitwise_equal(to_device(a.at(name), {}), to_device(tensor, {}))) << name;
  }
  EXPECT_EQ(actual.info().a1_scale, expected.info().a1_scale);
  EXPECT_EQ(actual.info().a2_scale, expected.info().a2_scale);
}

/// The weights of an expert, as a checkpoint gives them.
inline ExpertSource source_of(const LayerWeights& weights) {
  return [&](std::int64_t expert) {
    ExpertWeights one = weights.experts;
    one.experts = {weights.experts.experts[static_cast<std::size_t>(expert)]};
    return one;
  };
}

/// A data plane that fails while experts travel.
class Breaking final : public DataPlane {
 public:
  explicit Breaking(std::shared_ptr<DataPlane> plane) : plane_(std::move(plane)) {}
  std::string_view name() const override { return plane_->name(); }
  Device device() const override { return plane_->device(); }
  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream stream,
                Waiting& waiting) override {
    if (waiting.what() == "moving experts") throw std::runtime_error("the cable is cut");
    plane_->exchange(sends, receives, stream, waiting);
  }
  void abort() noexcept override { plane_->abort(); }

 private:
  std::shared_ptr<DataPlane> plane_;
};

}  // namespace fusedmoe::testing
