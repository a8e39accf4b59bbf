// Parts of a checkpoint under the names, and in the forms of storage, in which others publish them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fusedmoe/quant.h"
#include "linear_parts.h"

namespace fusedmoe::testing {

inline void replace(std::string& text, const std::string& from, const std::string& to) {
  if (const std::size_t at = text.find(from); at != text.npos) text.replace(at, from.size(), to);
}

/// Every tensor under another name; an empty one leaves it out.
inline void rename(Parts& parts, const std::function<std::string(const std::string&)>& other) {
  std::map<std::string, Tensor, std::less<>> renamed;
  for (const auto& [name, tensor] : parts.tensors) {
    if (const std::string text = other(name); !text.empty()) renamed[text] = tensor;
  }
  parts.tensors = renamed;
}

/// Whether both have the same weights, biases and input scales.
inline void expect_same(const ExpertWeights& actual, const ExpertWeights& wanted) {
  EXPECT_EQ(name(actual.scheme), name(wanted.scheme));
  ASSERT_EQ(actual.num_experts(), wanted.num_experts());
  const auto same = [&](const WeightMatrix& a, const WeightMatrix& b, std::int64_t in) {
    ASSERT_EQ(a.values.defined(), b.values.defined());
    if (!a.values) return;
    const QuantKey& key = wanted.scheme.weights;
    EXPECT_TRUE(bitwise_equal(dequantize_weights(a, key, in), dequantize_weights(b, key, in)));
    ASSERT_EQ(a.bias.defined(), b.bias.defined());
    for (std::int64_t i = 0; a.bias && i < a.bias.numel(); ++i) {
      EXPECT_EQ(load_f32(a.bias.data(), a.bias.dtype(), i * a.bias.stride(0)),
                load_f32(b.bias.data(), b.bias.dtype(), i * b.bias.stride(0)));
    }
    ASSERT_EQ(a.input_scale.defined(), b.input_scale.defined());
    if (a.input_scale) {
      EXPECT_EQ(*a.input_scale.as<const float>(), *b.input_scale.as<const float>());
    }
  };
  for (std::size_t e = 0; e < wanted.experts.size(); ++e) {
    same(actual.experts[e].gate, wanted.experts[e].gate, wanted.hidden);
    same(actual.experts[e].up, wanted.experts[e].up, wanted.hidden);
    same(actual.experts[e].down, wanted.experts[e].down, wanted.intermediate);
  }
}

/// (E, rows, columns) of the matrices of each expert, one below the other; transposed (E, columns,
/// rows). Numbers: (E), or (E, 2) in pairs.
inline Tensor stacked(const std::vector<std::vector<Tensor>>& experts, bool transposed,
                      bool pairs) {
  const Tensor& one = experts[0][0];
  const auto count = static_cast<std::int64_t>(experts.size());
  const std::int64_t width = bytes(one.dtype(), 1);
  if (one.numel() == 1 && one.rank() < 2) {
    const std::int64_t each = pairs ? static_cast<std::int64_t>(experts[0].size()) : 1;
    Tensor result =
        each == 2 ? Tensor::empty({count, 2}, one.dtype()) : Tensor::empty({count}, one.dtype());
    for (std::int64_t e = 0; e < count; ++e) {
      for (std::int64_t i = 0; i < each; ++i) {
        std::memcpy(result.as<char>() + (e * each + i) * width,
                    experts[static_cast<std::size_t>(e)][static_cast<std::size_t>(i)].data(),
                    static_cast<std::size_t>(width));
      }
    }
    return result;
  }
  std::int64_t rows = 0;
  for (const Tensor& part : experts[0]) rows += part.size(0);
  const std::int64_t columns = one.size(1);
  Tensor result = Tensor::empty(
      transposed ? Shape{count, columns, rows} : Shape{count, rows, columns}, one.dtype());
  char* out = result.as<char>();
  for (std::int64_t e = 0; e < count; ++e) {
    std::int64_t row = 0;
    for (const Tensor& part : experts[static_cast<std::size_t>(e)]) {
      for (std::int64_t r = 0; r < part.size(0); ++r, ++row) {
        for (std::int64_t c = 0; c < columns; ++c) {
          const std::int64_t at =
              transposed ? (e * columns + c) * rows + row : (e * rows + row) * columns + c;
          std::memcpy(out + at * width, part.as<char>() + (r * columns + c) * width,
                      static_cast<std::size_t>(width));
        }
      }
    }
  }
  return result;
}

inline Parts gpt_oss() {
  Parts parts("mxfp4_w4a16", CheckpointLayout::kGptOss, "gpt_oss");
  const auto path = TinyCheckpoints::instance().source("gpt_oss");
  parts.tensors = testing::tensors_of(path);
  parts.config = testing::read_json(path / "config.json");
  return parts;
}

}  // namespace fusedmoe::testing
