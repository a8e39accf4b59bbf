#include "checkpoint/module_pattern.h"

#include <algorithm>
#include <cctype>

#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_alphanumeric(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0;
}

// A search over a pattern may take time that grows with a power of its repetitions, and without
// bound where one repeats another.
bool is_harmless(std::string_view pattern) {
  constexpr std::size_t kMaxLength = 1024, kMaxRepetitions = 5;
  std::size_t repetitions = 0;
  char before = 0;  // what a repetition would repeat, as far as it is a special character
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      ++i;
      before = 0;
      continue;
    }
    if (c == '*' || c == '+' || c == '{') {
      ++repetitions;
      if (std::string_view(")*+?}").find(before) != std::string_view::npos) return false;
    }
    if (c == '[') i = std::min(pattern.find(']', i + 2), pattern.size());
    before = c;
  }
  return pattern.size() <= kMaxLength && repetitions <= kMaxRepetitions;
}

/// Goes back to the last * only, so it takes at most the product of the lengths.
bool matches_glob(std::string_view text, std::string_view glob) {
  std::size_t at = 0, in_glob = 0, star = glob.npos, after_star = 0;
  while (at < text.size()) {
    if (in_glob < glob.size() && glob[in_glob] == '*') {
      star = in_glob++;
      after_star = at;
    } else if (in_glob < glob.size() && (glob[in_glob] == '?' || glob[in_glob] == text[at])) {
      ++at;
      ++in_glob;
    } else if (star != glob.npos) {
      in_glob = star + 1;
      at = ++after_star;
    } else {
      return false;
    }
  }
  return glob.find_first_not_of('*', in_glob) == glob.npos;
}

std::string longest_text(std::string_view glob) {
  std::string_view best;
  while (!glob.empty()) {
    const std::size_t end = std::min(glob.find_first_of("*?"), glob.size());
    if (end > best.size()) best = glob.substr(0, end);
    glob.remove_prefix(std::min(end + 1, glob.size()));
  }
  return std::string(best);
}

/// The longest text that every match contains, without what groups and classes add.
std::string required_text(std::string_view regex) {
  std::string best, run;
  const auto end_run = [&] {
    if (run.size() > best.size()) best = run;
    run.clear();
  };
  int depth = 0;
  for (std::size_t i = 0; i < regex.size(); ++i) {
    const char c = regex[i];
    if (c == '|' && depth == 0) return {};
    if (c == '\\') {
      const char escaped = ++i < regex.size() ? regex[i] : '\\';
      if (depth == 0 && !is_alphanumeric(escaped)) {
        run += escaped;
      } else {
        end_run();
      }
    } else if (c == '[') {
      end_run();
      i = std::min(regex.find(']', i + 2), regex.size());
    } else if (c == '(' || c == ')') {
      end_run();
      depth += c == '(' ? 1 : -1;
    } else if (c == '*' || c == '?' || c == '{') {
      if (!run.empty()) run.pop_back();
      end_run();
      if (c == '{') i = std::min(regex.find('}', i), regex.size());
    } else if (c == '.' || c == '^' || c == '$' || c == '+') {
      end_run();
    } else if (depth == 0) {
      run += c;
    }
  }
  end_run();
  return best;
}

bool says_beginning(ModulePattern::Kind kind, std::string_view text) {
  const bool caret = text.starts_with('^');
  if (caret) text.remove_prefix(1);
  const bool anchored = caret || kind != ModulePattern::Kind::kSearch;
  return anchored && !text.empty() && (is_alphanumeric(text.front()) || text.front() == '_');
}

/// A digit that is not in the pattern stands for all of those, unless a range or a number of a
/// character, a group or a repetition may tell them apart.
std::array<char, 10> same_digits(std::string_view regex) {
  std::array<char, 10> digits{'0', '1', '2', '3', '4', '5', '6', '7', '8', '9'};
  for (std::size_t i = 0; i < regex.size(); ++i) {
    const bool before = i > 0 && is_digit(regex[i - 1]);
    const bool after = i + 1 < regex.size() && is_digit(regex[i + 1]);
    const bool range = regex[i] == '-' && (before || after);
    const bool number = regex[i] == '\\' && i + 1 < regex.size() &&
                        (after || regex[i + 1] == 'x' || regex[i + 1] == 'u');
    if (range || number) return digits;
  }
  char other = 0;
  for (char& digit : digits) {
    if (regex.find(digit) != std::string_view::npos) continue;
    if (!other) other = digit;
    digit = other;
  }
  return digits;
}

std::regex compile(const std::string& text, const std::string& label) {
  FUSEDMOE_CHECK_SUPPORTED(is_harmless(text), kQuantScheme, label, files::quote(text),
                           "a pattern of at most five repetitions, none of them of a group or of a "
                           "repetition");
  try {
    return std::regex(text);
  } catch (const std::regex_error&) {
    throw Error::unsupported(
        Reason::kQuantScheme, label,
        core::format("{} has the pattern {}, which is no regular expression, or has what Python's "
                     "alone have: lookbehind, flags or named groups",
                     label, files::quote(text)));
  }
}

}  // namespace

ModulePattern::ModulePattern(Kind kind, const std::string& text, const std::string& label)
    : kind_(kind),
      says_beginning_(says_beginning(kind, text)),
      required_(kind == Kind::kGlob ? longest_text(text) : required_text(text)),
      digits_(same_digits(text)) {
  if (kind == Kind::kGlob) {
    glob_ = text;
  } else {
    regex_ = compile(text, label);
  }
}

bool ModulePattern::search(const std::string& module) const {
  switch (kind_) {
    case Kind::kMatch:
      return std::regex_search(module, regex_, std::regex_constants::match_continuous);
    case Kind::kSearch:
      return std::regex_search(module, regex_);
    case Kind::kGlob:
      break;
  }
  for (std::string_view name = module;; name = name.substr(0, name.rfind('.'))) {
    if (matches_glob(name, glob_)) return true;
    if (name.find('.') == std::string_view::npos) return false;
  }
}

bool ModulePattern::matches(const std::string& module, Memo& memo) const {
  if (module.find(required_) == std::string::npos) return false;
  std::string key = module;
  for (char& c : key) {
    if (is_digit(c)) c = digits_[static_cast<std::size_t>(c - '0')];
  }
  const auto [answer, is_new] = memo.try_emplace(std::move(key), false);
  if (is_new) answer->second = search(answer->first);
  return answer->second;
}

bool ModulePattern::tells_from(const std::string& name) const {
  return says_beginning_ || name.find(required_) == std::string::npos;
}

std::string exact_name(std::string_view regex) {
  if (!regex.ends_with('$')) return {};
  regex.remove_suffix(1);
  if (regex.starts_with('^')) regex.remove_prefix(1);
  std::string name;
  for (std::size_t i = 0; i < regex.size(); ++i) {
    if (regex[i] == '\\' && i + 1 < regex.size() && regex[i + 1] == '.') {
      name += regex[++i];
    } else if (is_alphanumeric(regex[i]) || regex[i] == '_') {
      name += regex[i];
    } else {
      return {};
    }
  }
  return name;
}

}  // namespace fusedmoe::checkpoint
