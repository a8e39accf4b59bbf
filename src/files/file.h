// Files that are read: mappings and small texts.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include <time.h>

namespace fusedmoe::files {

/// An open file, closed with the object; negative: none.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const { return value_; }

 private:
  int value_;
};

/// A whole file, mapped read-only and private, and open for reading. Touching the mapping of a file
/// that was truncated since ends the process with SIGBUS; one rewritten in place shows new bytes.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const void* data() const { return data_; }
  std::size_t size() const { return size_; }

  /// Throws Error if the size or the time of the last change is no longer that of the opening. A
  /// file that another one has replaced under its name is unchanged.
  void check_unchanged() const;
  /// Reads `size` bytes from `offset` on without the mapping. Throws Error if there are fewer.
  void read(std::size_t offset, void* destination, std::size_t size) const;

 private:
  std::filesystem::path path_;
  Descriptor descriptor_;
  struct timespec changed_ {};
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Text of a small file; Error if it is longer than `max_bytes`.
std::string read_text(const std::filesystem::path& path, std::size_t max_bytes);

/// Throws the Error "cannot <action> <path>: <what errno says>".
[[noreturn]] void fail_system(const std::filesystem::path& path, const char* action);
/// The same of what the standard library threw.
[[noreturn]] void fail_system(const std::filesystem::path& path, const char* action,
                              const std::filesystem::filesystem_error& error);

/// Flushes a directory entry, so that a rename survives a crash. Best effort.
void sync_directory(const std::filesystem::path& directory);

}  // namespace fusedmoe::files
