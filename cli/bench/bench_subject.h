// What bench and tune measure: models by name, or a shape.
#pragma once

#include <string>
#include <vector>

#include "command_line.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::cli {

struct BenchSubject {
  std::string name;
  ModelConfig model;
};

/// The options --model and --shape, of which a command needs one.
class BenchSubjects {
 public:
  /// Returns the group, of which one must be given.
  Command add_to(Command& command);
  /// Throws Error for a shape that is none.
  std::vector<BenchSubject> get() const;

 private:
  std::vector<std::string> models_;
  std::string shape_;
};

}  // namespace fusedmoe::cli
