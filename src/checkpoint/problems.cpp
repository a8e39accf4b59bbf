#include "checkpoint/problems.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>

#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

/// Stands for a number: no name that is safe to print has it.
constexpr char kNumber = '\0';

/// What stands where a name has numbers: one, or "{0-3}".
using Parts = std::vector<std::string>;

/// A name that breaks no line and does not fill the screen.
std::string printable(const std::string& name) {
  constexpr std::size_t kLongest = 200;
  const bool plain = name.size() <= kLongest && std::all_of(name.begin(), name.end(), [](char c) {
                       return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f;
                     });
  return plain ? name : files::quote(name);
}

/// Of digits alone, as an index is written.
std::optional<std::int64_t> number_of(const std::string& part) {
  constexpr std::size_t kMaxDigits = 9;
  const bool digits = !part.empty() && part.size() <= kMaxDigits &&
                      part.find_first_not_of("0123456789") == std::string::npos;
  if (!digits || (part.size() > 1 && part[0] == '0')) return std::nullopt;
  return std::stoll(part);
}

/// Lines that differ in the part `p` alone become one.
std::vector<Parts> merge(const std::vector<Parts>& lines, std::size_t p) {
  std::vector<Parts> merged;
  std::vector<std::set<std::int64_t>> numbers;
  std::map<Parts, std::size_t> index;
  for (Parts line : lines) {
    const std::int64_t number = std::stoll(line[p]);
    line[p].clear();
    const auto [found, is_new] = index.emplace(line, merged.size());
    if (is_new) {
      merged.push_back(line);
      numbers.emplace_back();
    }
    numbers[found->second].insert(number);
  }
  for (std::size_t i = 0; i < merged.size(); ++i) {
    merged[i][p] = number_ranges({numbers[i].begin(), numbers[i].end()});
  }
  return merged;
}

/// What stands in the names of one group, a line each.
std::vector<Parts> folded(const std::vector<std::vector<std::int64_t>>& numbers) {
  std::vector<Parts> lines;
  for (const std::vector<std::int64_t>& each : numbers) {
    Parts line;
    for (const std::int64_t number : each) line.push_back(core::to_string(number));
    lines.push_back(std::move(line));
  }
  for (std::size_t p = numbers.front().size(); p-- > 0;) lines = merge(lines, p);
  return lines;
}

std::string filled(std::string_view pattern, const Parts& parts) {
  std::string result;
  std::size_t next = 0;
  for (const char c : pattern) {
    if (c == kNumber) {
      result += parts[next++];
    } else {
      result += c;
    }
  }
  return result;
}

}  // namespace

std::string number_ranges(const std::vector<std::int64_t>& ascending) {
  if (ascending.size() == 1) return core::to_string(ascending.front());
  std::string result;
  for (std::size_t i = 0; i < ascending.size();) {
    const std::size_t first = i;
    while (++i < ascending.size() && ascending[i] == ascending[i - 1] + 1) continue;
    if (!result.empty()) result += ',';
    result += i - first == 1 ? core::to_string(ascending[first])
                             : core::format("{}-{}", ascending[first], ascending[i - 1]);
  }
  return core::format("{{{}}}", result);
}

void Problems::add(const std::string& name, const std::string& text) {
  if (++count_ > kMaxNames) return;
  const std::string shown = printable(name);
  std::string pattern;
  std::vector<std::int64_t> numbers;
  for (std::size_t begin = 0; begin <= shown.size();) {
    const std::size_t end = std::min(shown.find('.', begin), shown.size());
    const std::string part = shown.substr(begin, end - begin);
    const auto number = numbers.size() < kMaxNumbers ? number_of(part) : std::nullopt;
    if (number) {
      numbers.push_back(*number);
      pattern += kNumber;
    } else {
      pattern += part;
    }
    if (end < shown.size()) pattern += '.';
    begin = end + 1;
  }
  const auto [found, is_new] = index_.emplace(Key{pattern, text}, groups_.size());
  if (is_new) groups_.push_back({found->first, {}});
  groups_[found->second].second.push_back(std::move(numbers));
}

std::string Problems::list() const {
  std::vector<std::string> lines;
  for (const auto& [key, numbers] : groups_) {
    for (const Parts& parts : folded(numbers)) {
      const std::string name = filled(key.first, parts);
      lines.push_back(key.second.empty() ? name : name + ": " + key.second);
    }
  }
  const std::size_t names = count_ - std::min(count_, kMaxNames), most = kMaxLines - 1;
  const bool all = names == 0 && lines.size() <= most;
  const std::size_t shown = all ? lines.size() : std::min(lines.size(), most - 1);
  const std::size_t more = lines.size() - shown;
  std::string result, rest;
  for (std::size_t i = 0; i < shown; ++i) result += "\n  " + lines[i];
  if (more > 0) rest += core::format(" and {} more lines like these", more);
  if (names > 0) rest += core::format(" and {} more names", names);
  return rest.empty() ? result : result + "\n " + rest;
}

}  // namespace fusedmoe::checkpoint
