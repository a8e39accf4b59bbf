// What is wrong with the tensors of a checkpoint, as a list that a person can read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fusedmoe::checkpoint {

/// "5", "{0-3,7}": numbers of a part of a name that are listed together.
std::string number_ranges(const std::vector<std::int64_t>& ascending);

/// Problems of tensors whose names differ in numbers alone become one line:
/// "layers.3.experts.{0-255}.down_proj.weight: missing".
class Problems {
 public:
  /// `text` may be empty: the name says it all.
  void add(const std::string& name, const std::string& text = {});
  std::size_t count() const { return count_; }
  /// Each on a line of its own behind the sentence that introduces them. What would make more than
  /// kMaxLines, that sentence among them, is counted in the last one, as are names behind the first
  /// kMaxNames.
  std::string list() const;

  static constexpr std::size_t kMaxLines = 15;
  /// Names and numbers of each that are folded: a file may hold any number of both. The names of a
  /// layer of a published model are a few thousands.
  static constexpr std::size_t kMaxNames = 16384, kMaxNumbers = 6;

 private:
  using Key = std::pair<std::string, std::string>;  ///< name with kNumber for numbers, text
  /// Those of each tensor, in the order in which they stand in its name.
  using Numbers = std::vector<std::vector<std::int64_t>>;

  std::vector<std::pair<Key, Numbers>> groups_;
  std::map<Key, std::size_t> index_;  ///< position in groups_
  std::size_t count_ = 0;
};

}  // namespace fusedmoe::checkpoint
