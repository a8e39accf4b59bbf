// What is wrong with the tensors of one block, as a list that a person can read.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fusedmoe::checkpoint {

/// Problems that differ only in the expert's index become one line.
class Problems {
 public:
  void add(const std::string& name, const std::string& text);
  std::size_t count() const { return count_; }
  std::string list() const;

 private:
  struct Line {
    std::string head, tail, text;
    std::set<std::int64_t> experts;
  };

  std::vector<Line> lines_;
  std::map<std::array<std::string, 3>, std::size_t> index_;  ///< head, tail, text -> line
  std::size_t count_ = 0;
};

}  // namespace fusedmoe::checkpoint
