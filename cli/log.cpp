#include "log.h"

#include <fmt/color.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace fusedmoe::cli {

namespace {

int rank_in_front = -1;

}  // namespace

void put_rank_in_front(int rank) {
  rank_in_front = rank;
}

Progress::Progress(std::string what)
    : what_(std::move(what)),
      start_(Clock::now()),
      last_(start_),
      terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (drawn_) std::fputs("\r\033[K", stderr);
}

void Progress::update(std::int64_t done, std::int64_t total) {
  const auto now = Clock::now();
  if (done >= total || rank_in_front > 0 || now - start_ < std::chrono::seconds(1)) return;
  const std::chrono::milliseconds pause(terminal_ ? 100 : 5000);
  if (now - last_ < pause) return;
  last_ = now;

  const double share = static_cast<double>(done) / static_cast<double>(total);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  // The first percent says little of the others: it waits for memory and files.
  const std::string left =
      share < 0.01 ? "" : fmt::format(", about {:.0f} s left", elapsed / share - elapsed);
  if (!terminal_) {
    log(Level::kInfo, fmt::format("{}: {:.0f} %{}", what_, 100 * share, left));
    return;
  }
  constexpr int kWidth = 40;
  const int filled = static_cast<int>(share * kWidth);
  fmt::print(stderr, "\r\033[K{} [{:#<{}}{:.<{}}] {:3.0f} %{}", what_, "", filled, "",
             kWidth - filled, 100 * share, left);
  std::fflush(stderr);
  drawn_ = true;
}

void log(Level level, const std::string& text) {
  struct Style {
    const char* name;
    fmt::terminal_color color;
  };
  constexpr std::array<Style, 3> kStyles{{{"info", fmt::terminal_color::green},
                                          {"warning", fmt::terminal_color::yellow},
                                          {"error", fmt::terminal_color::red}}};
  const Style style = kStyles[static_cast<std::size_t>(level)];
  const char* no_color = std::getenv("NO_COLOR");
  const bool plain = isatty(STDERR_FILENO) != 1 || (no_color && *no_color);
  if (rank_in_front >= 0) fmt::print(stderr, "rank {}: ", rank_in_front);
  fmt::print(stderr, plain ? fmt::text_style() : fmt::fg(style.color), "{}:", style.name);
  fmt::print(stderr, " {}\n", text);
}

}  // namespace fusedmoe::cli
