// Files: read-only mappings, and writers that leave nothing half done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

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

/// Creates a new file; unless finish() is reached it is removed again.
class FileWriter {
 public:
  /// `shown`: the name that errors say, where `path` is a temporary one.
  explicit FileWriter(std::filesystem::path path, std::filesystem::path shown = {});
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, std::size_t size);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// At a position of the file, which grows as needed; does not move where write() goes on.
  void write_at(std::int64_t offset, const void* data, std::size_t size);
  /// Flushes to the disk and closes.
  void finish();

 private:
  template <typename Write>
  void write_all(const void* data, std::size_t size, const Write& write);

  std::filesystem::path path_, shown_;
  int descriptor_ = -1;
};

/// A name beside `path` that nobody else uses.
std::filesystem::path temporary_name(const std::filesystem::path& path);

/// Gives a finished file its name, in the place of what has it; removes it where that fails.
void rename_file(const std::filesystem::path& from, const std::filesystem::path& to);

/// Flushes a directory entry, so that a rename survives a crash. Best effort.
void sync_directory(const std::filesystem::path& directory);

}  // namespace fusedmoe::files
