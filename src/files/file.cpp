#include "files/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "core/check.h"

namespace fusedmoe::files {
namespace {

[[noreturn]] void fail_system(const std::filesystem::path& path, const char* action) {
  throw Error(path.string(), core::format("{} failed: {}", action, std::strerror(errno)),
              "a file that can be read or written");
}

class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags) : value_(::open(path.c_str(), flags)) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const { return value_; }

 private:
  int value_;
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a named pipe must fail below, not wait for a writer.
  const Descriptor descriptor(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor.value() < 0) fail_system(path, "opening");
  struct stat status {};
  if (::fstat(descriptor.value(), &status) != 0) fail_system(path, "reading the size");
  FUSEDMOE_CHECK(S_ISREG(status.st_mode), path.string(), "not a regular file", "a regular file");
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  void* mapping = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor.value(), 0);
  if (mapping == MAP_FAILED) fail_system(path, "mapping");
  data_ = mapping;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(data_, size_);
}

std::string read_text(const std::filesystem::path& path, std::size_t max_bytes) {
  const MappedFile file(path);
  FUSEDMOE_CHECK(file.size() <= max_bytes, path.string(), core::format("{} bytes", file.size()),
                 core::format("at most {} bytes", max_bytes));
  return std::string(static_cast<const char*>(file.data()), file.size());
}

FileWriter::FileWriter(std::filesystem::path path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail_system(path_, "creating");
}

FileWriter::~FileWriter() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(path_.c_str());
}

void FileWriter::write(const void* data, std::size_t size) {
  write_all(data, size, [&](const char* next, std::size_t left, std::size_t) {
    return ::write(descriptor_, next, left);
  });
}

void FileWriter::write_at(std::int64_t offset, const void* data, std::size_t size) {
  write_all(data, size, [&](const char* next, std::size_t left, std::size_t done) {
    return ::pwrite(descriptor_, next, left, offset + static_cast<off_t>(done));
  });
}

template <typename Write>
void FileWriter::write_all(const void* data, std::size_t size, const Write& write) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t written = write(static_cast<const char*>(data) + done, size - done, done);
    if (written < 0) {
      if (errno == EINTR) continue;
      fail_system(path_, "writing");
    }
    done += static_cast<std::size_t>(written);
  }
}

void FileWriter::finish() {
  if (::fsync(descriptor_) != 0) fail_system(path_, "flushing");
  const int descriptor = descriptor_;
  descriptor_ = -1;
  if (::close(descriptor) != 0) {
    ::unlink(path_.c_str());
    fail_system(path_, "closing");
  }
}

std::filesystem::path temporary_name(const std::filesystem::path& path) {
  static std::atomic<unsigned> counter{0};
  return path.parent_path() /
         core::format(".{}.{}-{}.tmp", path.filename().string(), ::getpid(), counter++);
}

void rename_file(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::error_code failure;
  std::filesystem::rename(from, to, failure);
  if (failure) {
    std::error_code ignored;
    std::filesystem::remove(from, ignored);
    throw Error(to.string(), "renaming failed: " + failure.message(), "a path for a file");
  }
  sync_directory(to.parent_path());
}

void sync_directory(const std::filesystem::path& directory) {
  const Descriptor descriptor(directory.empty() ? "." : directory, O_RDONLY | O_CLOEXEC);
  if (descriptor.value() >= 0) ::fsync(descriptor.value());
}

}  // namespace fusedmoe::files
