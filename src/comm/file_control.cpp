// The control plane in a folder: a text is a file, which appears at once with all it holds, because
// it is written under another name and renamed.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
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
    std::error_code problem;
    std::filesystem::create_directories(folder_, problem);
    FUSEDMOE_CHECK_IO(!problem, folder_.string(),
                      core::format("cannot create {}: {}", folder_.string(), problem.message()));
  }

  void post(const std::string& name, std::string_view text) override {
    const std::filesystem::path path = path_of(name);
    const std::string own =
        core::format("{}.{}.{}", path.string(), getpid(), static_cast<const void*>(this));
    {
      std::ofstream file(own, std::ios::binary);
      file.write(text.data(), static_cast<std::streamsize>(text.size()));
      file.close();
      FUSEDMOE_CHECK_IO(file, own, core::format("cannot write {}", own));
    }
    // link() fails where the name is taken: the first text stays.
    const int linked = ::link(own.c_str(), path.c_str());
    const int code = errno;
    ::unlink(own.c_str());
    FUSEDMOE_CHECK_IO(linked == 0 || code == EEXIST, path.string(),
                      core::format("cannot create {}: {}", path.string(), std::strerror(code)));
  }

  std::optional<std::string> read(const std::string& name,
                                  std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (true) {
      if (std::ifstream file(path_of(name), std::ios::binary); file) {
        std::ostringstream text;
        text << file.rdbuf();
        return text.str();
      }
      if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

 private:
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
