#include "files/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstring>

#include "core/check.h"

namespace fusedmoe::files {

void fail_system(const std::filesystem::path& path, const char* action) {
  std::string reason = std::strerror(errno);
  if (!reason.empty()) reason[0] = static_cast<char>(std::tolower(reason[0]));
  throw Error::io(path.string(), core::format("cannot {} {}: {}", action, path.string(), reason));
}

void fail_system(const std::filesystem::path& path, const char* action,
                 const std::filesystem::filesystem_error& error) {
  errno = error.code().value();
  fail_system(path, action);
}

namespace {

struct stat status_of(int descriptor, const std::filesystem::path& path) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) fail_system(path, "read the size of");
  return status;
}

}  // namespace

Descriptor::~Descriptor() {
  if (value_ >= 0) ::close(value_);
}

MappedFile::MappedFile(const std::filesystem::path& path)
    : path_(path),
      // O_NONBLOCK: opening a named pipe must fail below, not wait for a writer.
      descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (descriptor_.value() < 0) fail_system(path, "open");
  const struct stat status = status_of(descriptor_.value(), path);
  FUSEDMOE_CHECK_IO(S_ISREG(status.st_mode), path.string(),
                    core::format("cannot read {}: not a regular file", path.string()));
  changed_ = status.st_mtim;
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  void* mapping = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor_.value(), 0);
  if (mapping == MAP_FAILED) fail_system(path, "map");
  data_ = mapping;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(data_, size_);
}

void MappedFile::check_unchanged() const {
  const struct stat status = status_of(descriptor_.value(), path_);
  FUSEDMOE_CHECK_IO(static_cast<std::size_t>(status.st_size) == size_, path_.string(),
                    core::format("{} had {} bytes when it was opened and has {} now",
                                 path_.string(), size_, static_cast<std::int64_t>(status.st_size)));
  FUSEDMOE_CHECK_IO(
      status.st_mtim.tv_sec == changed_.tv_sec && status.st_mtim.tv_nsec == changed_.tv_nsec,
      path_.string(), core::format("{} was written to after it was opened", path_.string()));
}

void MappedFile::read(std::size_t offset, void* destination, std::size_t size) const {
  for (std::size_t done = 0; done < size;) {
    const ssize_t count = ::pread(descriptor_.value(), static_cast<char*>(destination) + done,
                                  size - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_system(path_, "read");
    FUSEDMOE_CHECK_IO(count > 0, path_.string(),
                      core::format("{} ends at byte {}, before the {} bytes it was opened with",
                                   path_.string(), offset + done, size_));
    done += static_cast<std::size_t>(count);
  }
}

std::string read_text(const std::filesystem::path& path, std::size_t max_bytes) {
  const MappedFile file(path);
  FUSEDMOE_CHECK_IO(file.size() <= max_bytes, path.string(),
                    core::format("cannot read {}: it has {} bytes, more than the {} allowed",
                                 path.string(), file.size(), max_bytes));
  return std::string(static_cast<const char*>(file.data()), file.size());
}

void sync_directory(const std::filesystem::path& directory) {
  const char* path = directory.empty() ? "." : directory.c_str();
  const Descriptor descriptor(::open(path, O_RDONLY | O_CLOEXEC));
  if (descriptor.value() >= 0) ::fsync(descriptor.value());
}

}  // namespace fusedmoe::files
