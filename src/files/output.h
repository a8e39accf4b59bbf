// Outputs: files and folders that appear at their names complete, or not at all.
//
// What is being written has a hidden name, ".<name>.<host>-<random number>.tmp", that is created
// exclusively, so that no other process, container or host writes there. <host> tells the running
// kernel, and the writer holds a lock on it: so a later run can tell whether its owner is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "files/file.h"

namespace fusedmoe::files {

/// Writes to an open file.
class FileWriter {
 public:
  /// `shown`: the name that errors say.
  FileWriter(int descriptor, std::filesystem::path shown);

  void write(const void* data, std::size_t size);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// At a position of the file, which grows as needed; does not move where write() goes on.
  void write_at(std::int64_t offset, const void* data, std::size_t size);
  /// Flushes to the disk, where it is one.
  void flush();

 private:
  template <typename Write>
  void write_all(const void* data, std::size_t size, const Write& write);

  Descriptor descriptor_;
  std::filesystem::path shown_;
};

/// What is being written, under its hidden name; removed unless it was moved to its own.
class Partial {
 public:
  enum class Kind { kFile, kFolder };
  /// In `folder`, for the output `shown`, whose name is `name`.
  Partial(Kind kind, const std::filesystem::path& folder, const std::filesystem::path& name,
          const std::filesystem::path& shown);
  ~Partial();
  Partial(const Partial&) = delete;
  Partial& operator=(const Partial&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_->value(); }
  /// Renames it.
  void move_to(const std::filesystem::path& target, const std::filesystem::path& shown);

 private:
  std::filesystem::path path_;
  std::unique_ptr<Descriptor> descriptor_;
};

/// A file that takes the place of what has its name in finish(). A symbolic link stays one, to the
/// new file; a device or a pipe is written to as it is, and so is an open file, as /dev/stdout.
class OutputFile {
 public:
  explicit OutputFile(const std::filesystem::path& path);

  void write(const void* data, std::size_t size) { writer_->write(data, size); }
  void write(std::string_view text) { writer_->write(text); }
  void finish();

 private:
  std::filesystem::path shown_, target_;
  std::unique_ptr<Partial> partial_;  ///< null: a device, a pipe or an open file
  std::unique_ptr<FileWriter> writer_;
};

/// A folder that is new, or empty as a mount point may be. A new one appears by one rename. An
/// empty one stays, and is written in: its files appear by a rename each.
class OutputFolder {
 public:
  explicit OutputFolder(const std::filesystem::path& path);

  /// A new file of the folder.
  std::unique_ptr<FileWriter> create(const std::string& name);
  /// Bytes that are free where it is written.
  std::uintmax_t free_bytes() const;
  /// Everything is written and flushed. `last`: the file that appears last, where each appears by
  /// itself.
  void commit(std::string_view last);

 private:
  void move_files(std::string_view last);

  std::filesystem::path shown_, target_;
  bool exists_;
  std::unique_ptr<Partial> partial_;
};

/// What a run that was killed has left where an output is to be written; or what another run is
/// writing there.
struct Leftover {
  enum class Owner { kRuns, kGone, kUnknown };
  std::filesystem::path path;
  Owner owner = Owner::kUnknown;  ///< unknown: of another host, or before this one's last start
};
std::vector<Leftover> find_leftovers(const std::filesystem::path& output);
/// False if its owner runs.
bool remove_leftover(const std::filesystem::path& path);

/// Removes all that this process is writing, and stops every thread that would go on writing: for a
/// process that a signal ends.
void abandon_outputs();

}  // namespace fusedmoe::files
