// The control plane in a folder: a text is a file, which appears at once with all it holds, because
// it is written under a name of its own and linked. Only its owner can read it. Tokens are among
// the texts, so nobody else may write in the folder.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "core/check.h"
#include "fusedmoe/comm.h"

namespace fusedmoe {
namespace comm {
namespace {

class FileControl final : public ControlPlane {
 public:
  explicit FileControl(std::filesystem::path folder) : folder_(std::move(folder)) {
    if (!folder_.has_filename()) folder_ = folder_.parent_path();  // behind a slash
    std::error_code ignored;                                       // then mkdir() says why not
    std::filesystem::create_directories(folder_.parent_path(), ignored);
    const bool exists = ::mkdir(folder_.c_str(), S_IRWXU) == 0 || errno == EEXIST;
    FUSEDMOE_CHECK_IO(exists, folder_.string(), problem("create", folder_));
    struct stat found {};
    const bool read = ::stat(folder_.c_str(), &found) == 0;
    FUSEDMOE_CHECK_IO(read, folder_.string(), problem("read", folder_));
    FUSEDMOE_CHECK_IO(S_ISDIR(found.st_mode), folder_.string(),
                      core::format("cannot create {}: there is a file", folder_.string()));
    FUSEDMOE_CHECK_IO(
        found.st_uid == ::geteuid(), folder_.string(),
        core::format("ranks cannot meet in {}: it belongs to user {}, this is user {}",
                     folder_.string(), found.st_uid, ::geteuid()));
    FUSEDMOE_CHECK_IO((found.st_mode & (S_IWGRP | S_IWOTH)) == 0, folder_.string(),
                      core::format("ranks cannot meet in {}: other users can write there, until "
                                   "chmod go-w",
                                   folder_.string()));
  }

  void post(const std::string& name, std::string_view text) override {
    const std::filesystem::path path = path_of(name);
    std::string own = path.string() + ".XXXXXX";
    const int file = ::mkostemp(own.data(), O_CLOEXEC);
    FUSEDMOE_CHECK_IO(file >= 0, own, problem("create", path));
    const bool written = write_all(file, text);
    const std::string why = problem("write", path);
    // link() fails where the name is taken: the first text stays.
    const bool linked = written && (::link(own.c_str(), path.c_str()) == 0 || errno == EEXIST);
    const std::string why_not = written ? problem("create", path) : why;
    ::unlink(own.c_str());
    FUSEDMOE_CHECK_IO(linked, path.string(), why_not);
  }

  void forget(const std::string& name) override { ::unlink(path_of(name).c_str()); }

  std::optional<std::string> read(const std::string& name,
                                  std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (true) {
      const std::filesystem::path path = path_of(name);
      if (std::ifstream file(path, std::ios::binary); file) {
        std::ostringstream text;
        text << file.rdbuf();
        return text.str();
      }
      FUSEDMOE_CHECK_IO(errno == ENOENT, path.string(), problem("read", path));
      if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

 private:
  static std::string problem(const char* act, const std::filesystem::path& path) {
    return core::format("cannot {} {}: {}", act, path.string(), std::strerror(errno));
  }
  /// Closes it, too.
  static bool write_all(int file, std::string_view text) {
    bool good = true;
    while (good && !text.empty()) {
      const ssize_t bytes = ::write(file, text.data(), text.size());
      good = bytes > 0 || (bytes < 0 && errno == EINTR);
      if (bytes > 0) text.remove_prefix(static_cast<std::size_t>(bytes));
    }
    const int code = errno;
    const bool closed = ::close(file) == 0;
    if (!good) errno = code;
    return good && closed;
  }
  std::filesystem::path path_of(std::string name) const {
    for (char& c : name) c = c == '/' ? '_' : c;
    return folder_ / name;
  }

  std::filesystem::path folder_;
};

}  // namespace
}  // namespace comm

std::shared_ptr<ControlPlane> make_file_control_plane(const std::string& folder) {
  return std::make_shared<comm::FileControl>(folder);
}

}  // namespace fusedmoe
