#include "command_info.h"

#include <algorithm>
#include <numeric>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/selection.h"

namespace fusedmoe::cli {
namespace {

std::vector<std::string> scheme_names() {
  std::vector<std::string> names;
  for (const NamedScheme& scheme : named_schemes()) names.push_back(scheme.name);
  return names;
}

std::vector<std::string> experts_names() {
  std::vector<std::string> names;
  for (const auto& experts : all_experts()) names.emplace_back(experts->name());
  return names;
}

/// Those that are computed.
std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const Family& family : Family::all()) {
    if (family.refused().empty()) names.emplace_back(family.name());
  }
  return names;
}

/// Insertions, deletions, replacements and swaps of neighbours that make `a` of `b`.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), 0);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before = last;
    std::swap(last, row);
  }
  return last[b.size()];
}

template <typename List>
auto find_named(const List& list, std::string_view name) {
  const auto found =
      std::find_if(list.begin(), list.end(), [&](const auto& entry) { return entry.name == name; });
  return found == list.end() ? nullptr : &*found;
}

}  // namespace

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> table{
      {"PATH", "a file or a folder", true},
      {"SCHEME",
       "number format of weights and activations: bf16, fp8_block, mxfp4, nvfp4, int4_g128, ...; a "
       "wrong name lists all; with a rule for the scales of activations as in mxfp4:even",
       false, scheme_names},
      {"MODEL", "a published model by name, of which only the shapes are used: gpt-oss-20b, ...",
       false, model_preset_names},
      {"EXPERTS",
       "an implementation: cpu, sm90 (Hopper GPUs), sm89 (FP8 on GPUs of 8.9 and 12.x), sm80 "
       "(GPUs since Ampere) or reference (slow, the specification); behind a + also how rows reach "
       "it: cpu+no_ep, cpu+batched, "
       "cpu+all2all, cpu+allgather_reducescatter",
       false, experts_names},
      {"FAMILY",
       "how a model's tensors are named: a name that `fusedmoe families` lists, or a JSON file "
       "with a description",
       true, family_names},
      {"DEVICE", "cpu, cuda or cuda:N", false,
       [] {
         return std::vector<std::string>{"cpu", "cuda"};
       }},
      {"DTYPE", "f32, bf16, f16, e4m3, i8 or e2m1", false,
       [] { return std::vector<std::string>{"f32", "bf16", "f16", "e4m3", "i8", "e2m1"}; }},
      {"SHAPE", "HIDDENxINTERMEDIATExEXPERTSxTOPK, as 2880x2880x32x4"},
      {"CAPABILITY", "of a GPU, as 9.0"},
      {"NAME", ""},
      {"SECONDS", ""},
      {"MIB", "so many MiB of 1,048,576 bytes"},
      {"N", ""},
  };
  return table;
}

const Kind* find_kind(std::string_view name) {
  return find_named(kinds(), name);
}

std::string OptionInfo::value() const {
  if (choices.empty()) return kind;
  std::string text;
  for (const std::string& choice : choices) text += (text.empty() ? "" : "|") + choice;
  return text.size() <= 40 ? text : kind;
}

std::vector<std::string> OptionInfo::words() const {
  const Kind* known = find_kind(kind);
  return !choices.empty() || !known || !known->words ? choices : known->words();
}

const OptionInfo* CommandInfo::find(std::string_view name) const {
  return find_named(options, name);
}

const CommandInfo* ProgramInfo::find(std::string_view command) const {
  return find_named(commands, command);
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string* best = nullptr;
  std::size_t least = std::max<std::size_t>(1, word.size() / 3) + 1;  // further ones are no slips
  for (const std::string& candidate : candidates) {
    // A longer word for the same: --output where there is --out.
    const bool begins = candidate.size() > 3 && word.starts_with(candidate);
    const std::size_t far = begins ? 1 : distance(word, candidate);
    if (far < least) {
      least = far;
      best = &candidate;
    }
  }
  if (best) return "; did you mean " + *best + "?";
  std::string longer;  // names that the word is the beginning of: fp8_block, ... of fp8
  for (const std::string& candidate : candidates) {
    if (word.size() > 1 && candidate.starts_with(word)) {
      longer += (longer.empty() ? "" : ", ") + candidate;
    }
  }
  return longer.empty() ? "" : "; did you mean one of " + longer + "?";
}

std::string with_commas(std::string number) {
  const std::size_t first = number.starts_with("-") ? 1 : 0;
  for (std::size_t at = number.size(); at > first + 3;) number.insert(at -= 3, ",");
  return number;
}

}  // namespace fusedmoe::cli
