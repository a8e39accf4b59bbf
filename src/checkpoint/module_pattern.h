// A pattern for names of modules, as quantization configs write them.
#pragma once

#include <array>
#include <regex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace fusedmoe::checkpoint {

class ModulePattern {
 public:
  enum class Kind {
    kMatch,   ///< regular expression for the beginning of the name
    kSearch,  ///< regular expression for any part of it
    kGlob,    ///< * and ? for any characters and any one; also means what lies below the module
  };

  /// Throws Error naming `label` for a pattern that is none, or that may take very long.
  ModulePattern(Kind kind, const std::string& text, const std::string& label);

  /// Answers of one pattern. Names that differ only in digits that the pattern cannot tell apart
  /// have one answer, so the experts of a layer take few searches.
  using Memo = std::unordered_map<std::string, bool>;
  bool matches(const std::string& module, Memo& memo) const;

  /// Of a pattern that fits another name of the same module: whether it was written for such names,
  /// and does not fit by chance as "^(?!.*experts)" does. It says how the name begins, or has a
  /// text that this name has not.
  bool tells_from(const std::string& name) const;

 private:
  bool search(const std::string& module) const;

  Kind kind_;
  std::string glob_;
  std::regex regex_;
  bool says_beginning_;            ///< begins with a text, not with what stands for many
  std::string required_;           ///< occurs in every name that matches
  std::array<char, 10> digits_{};  ///< for each digit the one that stands for it
};

/// The name that a regular expression for the beginning of a name stands for, if it stands for that
/// one alone: "^a\.b$".
std::string exact_name(std::string_view regex);

}  // namespace fusedmoe::checkpoint
