#include "files/output.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <optional>
#include <set>

#include "core/check.h"

namespace fusedmoe::files {
namespace {

namespace fs = std::filesystem;

/// What this process is writing. Whoever creates, moves or removes such a thing holds the mutex.
/// Never destroyed: threads may outlive static objects.
struct Writing {
  std::mutex mutex;
  std::set<fs::path> partials;

  static Writing& instance() {
    static auto& writing = *new Writing;
    return writing;
  }
};

constexpr std::size_t kHostDigits = 12, kNumberDigits = 16;
constexpr std::string_view kSuffix = ".tmp";

std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (::getrandom(&number, sizeof number, 0) != sizeof number) {
  }
  return number;
}

/// Digits that tell the running kernel from those of other hosts, and from its last start. Where it
/// does not say them, a number that is nobody else's: then no owner is known to be gone.
const std::string& host() {
  static const auto& digits = *new std::string([] {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string text;
    file >> text;
    std::erase(text, '-');
    if (text.empty()) text = core::format("{:016x}", random_number());
    text.resize(kHostDigits, '0');
    return text;
  }());
  return digits;
}

/// ".<name>." of hidden names, which fit into what a file system allows.
std::string prefix_of(const fs::path& name) {
  constexpr std::size_t kMost = 200;
  return core::format(".{}.", name.string().substr(0, kMost));
}

bool is_partial_name(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix) || !name.ends_with(kSuffix)) return false;
  if (name.size() != prefix.size() + kHostDigits + 1 + kNumberDigits + kSuffix.size()) return false;
  const std::string_view digits = name.substr(prefix.size(), kHostDigits + 1 + kNumberDigits);
  return digits[kHostDigits] == '-' && std::count_if(digits.begin(), digits.end(), [](char c) {
                                         return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
                                       }) == static_cast<std::ptrdiff_t>(digits.size() - 1);
}

fs::path folder_of(const fs::path& target) {
  return target.has_parent_path() ? target.parent_path() : fs::path(".");
}

/// The number of the open file that `path`, below /dev/fd or /proc/self/fd, names.
std::optional<int> open_file_of(const fs::path& path) {
  std::error_code problem;
  if (!fs::equivalent(folder_of(path), "/proc/self/fd", problem)) return std::nullopt;
  const std::string digits = path.filename().string();
  int number = -1;
  std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return number;
}

/// Where links lead, also where nothing is yet. The links to open files stay: what they say need
/// not be a path.
fs::path resolved(fs::path path) {
  constexpr int kMostLinks = 40;
  for (int i = 0; i < kMostLinks && fs::is_symlink(fs::symlink_status(path)); ++i) {
    if (open_file_of(path)) break;
    const fs::path link = fs::read_symlink(path);
    path = link.is_absolute() ? link : path.parent_path() / link;
  }
  return path;
}

/// The last component is a name: without a slash at the end, "." or "..".
fs::path named(const fs::path& path) {
  fs::path target = path.lexically_normal();
  if (!target.has_filename()) target = target.parent_path();
  const fs::path name = target.filename();
  return name == "." || name == ".." ? fs::canonical(target) : target;
}

/// Negative: there is nothing, or it cannot be opened.
int open_leftover(const fs::path& path) {
  constexpr int kFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | kFlags);
  // Over NFS only who may write gets the lock of a file.
  return folder >= 0 ? folder : ::open(path.c_str(), O_RDWR | kFlags);
}

bool is_at(int descriptor, const fs::path& path) {
  struct stat here {
  }, there{};
  return ::fstat(descriptor, &here) == 0 && ::lstat(path.c_str(), &there) == 0 &&
         here.st_ino == there.st_ino && here.st_dev == there.st_dev;
}

/// Hidden names of the output `name`, our own among them.
std::vector<fs::path> partials_in(const fs::path& folder, const fs::path& name) {
  std::vector<fs::path> found;
  std::error_code problem;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, problem)) {
    if (is_partial_name(entry.path().filename().string(), prefix_of(name))) {
      found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

Leftover::Owner owner_of(const fs::path& path, const std::string& prefix) {
  const Descriptor descriptor(open_leftover(path));
  if (descriptor.value() < 0) return Leftover::Owner::kUnknown;
  if (::flock(descriptor.value(), LOCK_EX | LOCK_NB) != 0) {
    return errno == EWOULDBLOCK ? Leftover::Owner::kRuns : Leftover::Owner::kUnknown;
  }
  const bool here = path.filename().string().substr(prefix.size(), kHostDigits) == host();
  return here ? Leftover::Owner::kGone : Leftover::Owner::kUnknown;
}

}  // namespace

FileWriter::FileWriter(int descriptor, fs::path shown)
    : descriptor_(descriptor), shown_(std::move(shown)) {
  if (descriptor < 0) fail_system(shown_, "write");
}

void FileWriter::write(const void* data, std::size_t size) {
  write_all(data, size, [&](const char* next, std::size_t left, std::size_t) {
    return ::write(descriptor_.value(), next, left);
  });
}

void FileWriter::write_at(std::int64_t offset, const void* data, std::size_t size) {
  write_all(data, size, [&](const char* next, std::size_t left, std::size_t done) {
    return ::pwrite(descriptor_.value(), next, left, offset + static_cast<off_t>(done));
  });
}

template <typename Write>
void FileWriter::write_all(const void* data, std::size_t size, const Write& write) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t written = write(static_cast<const char*>(data) + done, size - done, done);
    if (written < 0) {
      if (errno == EINTR) continue;
      fail_system(shown_, "write");
    }
    done += static_cast<std::size_t>(written);
  }
}

void FileWriter::flush() {
  const bool cannot = ::fsync(descriptor_.value()) != 0;
  if (cannot && errno != EINVAL && errno != EROFS) fail_system(shown_, "write");  // a pipe: EINVAL
}

Partial::Partial(Kind kind, const fs::path& folder, const fs::path& name, const fs::path& shown) {
  Writing& writing = Writing::instance();
  const std::lock_guard lock(writing.mutex);
  while (true) {
    const fs::path path =
        folder / core::format("{}{}-{:016x}{}", prefix_of(name), host(), random_number(), kSuffix);
    if (kind == Kind::kFolder && ::mkdir(path.c_str(), 0777) != 0) {
      if (errno == EEXIST) continue;
      fail_system(shown, "write");
    }
    const int flags = kind == Kind::kFolder ? O_RDONLY | O_DIRECTORY : O_WRONLY | O_CREAT | O_EXCL;
    auto descriptor = std::make_unique<Descriptor>(::open(path.c_str(), flags | O_CLOEXEC, 0666));
    // A run that looks for leftovers may have come before the lock: then another name.
    if (descriptor->value() < 0) {
      if (errno == EEXIST || (errno == ENOENT && kind == Kind::kFolder)) continue;
      fail_system(shown, "write");
    }
    const bool taken = ::flock(descriptor->value(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    const bool here = is_at(descriptor->value(), path);
    if (taken || !here) {
      std::error_code ignored;
      if (here) fs::remove(path, ignored);
      continue;
    }
    writing.partials.insert(path);
    path_ = path;
    descriptor_ = std::move(descriptor);
    return;
  }
}

Partial::~Partial() {
  Writing& writing = Writing::instance();
  const std::lock_guard lock(writing.mutex);
  if (writing.partials.erase(path_) == 0) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void Partial::move_to(const fs::path& target, const fs::path& shown) {
  Writing& writing = Writing::instance();
  const std::lock_guard lock(writing.mutex);
  if (::rename(path_.c_str(), target.c_str()) != 0) {
    const bool taken = errno == EEXIST || errno == ENOTEMPTY || errno == ENOTDIR;
    FUSEDMOE_CHECK_IO(
        !taken, shown.string(),
        core::format("cannot write {}: another run has made it meanwhile", shown.string()));
    fail_system(shown, "write");
  }
  writing.partials.erase(path_);
  sync_directory(folder_of(target));
}

OutputFile::OutputFile(const fs::path& path) try : shown_(path), target_(resolved(path)) {
  const fs::file_status status = fs::status(path);
  FUSEDMOE_CHECK_IO(!fs::is_directory(status), shown_.string(),
                    core::format("cannot write {}: it is a folder", shown_.string()));
  if (const std::optional<int> number = open_file_of(target_)) {
    // With the position of the open file, so that what others write there stays.
    writer_ = std::make_unique<FileWriter>(::fcntl(*number, F_DUPFD_CLOEXEC, 0), shown_);
    return;
  }
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    writer_ = std::make_unique<FileWriter>(::open(path.c_str(), O_WRONLY | O_CLOEXEC), shown_);
    return;
  }
  partial_ = std::make_unique<Partial>(Partial::Kind::kFile, folder_of(target_), target_.filename(),
                                       shown_);
  // Of its own: the lock is held until the file has its name.
  writer_ =
      std::make_unique<FileWriter>(::fcntl(partial_->descriptor(), F_DUPFD_CLOEXEC, 0), shown_);
} catch (const fs::filesystem_error& error) {
  fail_system(path, "write", error);
}

void OutputFile::finish() {
  writer_->flush();
  writer_.reset();
  if (partial_) partial_->move_to(target_, shown_);
}

OutputFolder::OutputFolder(const fs::path& path) try
    : shown_(path), target_(named(resolved(named(path)))), exists_(fs::exists(target_)) {
  const auto name = target_.filename();
  const fs::path folder = exists_ ? target_ : folder_of(target_);
  bool free = true;
  if (exists_) {
    free = fs::is_directory(target_);
    for (const auto& entry : free ? fs::directory_iterator(target_) : fs::directory_iterator()) {
      const std::string found = entry.path().filename().string();
      // What every new file system of a kind has.
      free = free && (found == "lost+found" || is_partial_name(found, prefix_of(name)));
    }
  }
  FUSEDMOE_CHECK_IO(
      free, shown_.string(),
      core::format("cannot write to {}: it exists and is no empty directory", shown_.string()));
  fs::create_directories(folder);
  partial_ = std::make_unique<Partial>(Partial::Kind::kFolder, folder, name, shown_);
  if (!exists_) return;
  for (const fs::path& other : partials_in(target_, name)) {
    const bool busy =
        other != partial_->path() && owner_of(other, prefix_of(name)) == Leftover::Owner::kRuns;
    FUSEDMOE_CHECK_IO(
        !busy, shown_.string(),
        core::format("cannot write to {}: another run is writing there", shown_.string()));
  }
} catch (const fs::filesystem_error& error) {
  fail_system(path, "write", error);
}

std::unique_ptr<FileWriter> OutputFolder::create(const std::string& name) {
  const std::lock_guard lock(Writing::instance().mutex);
  const fs::path path = partial_->path() / name;
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  return std::make_unique<FileWriter>(::open(path.c_str(), kFlags, 0666), shown_ / name);
}

std::uintmax_t OutputFolder::free_bytes() const {
  return fs::space(partial_->path()).available;
}

void OutputFolder::commit(std::string_view last) {
  if (exists_) {
    move_files(last);
  } else {
    partial_->move_to(target_, shown_);
  }
}

/// All or none, and never over a file of another run.
void OutputFolder::move_files(std::string_view last) {
  const std::lock_guard lock(Writing::instance().mutex);
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(partial_->path())) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  std::stable_partition(names.begin(), names.end(), [&](const auto& name) { return name != last; });
  for (auto name = names.begin(); name != names.end(); ++name) {
    const fs::path from = partial_->path() / *name, to = target_ / *name;
    // Not every file system can rename where nothing is; a link fails there too.
    int problem = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE);
    if (problem != 0 && errno == EINVAL) {
      problem = ::link(from.c_str(), to.c_str());
      if (problem == 0) ::unlink(from.c_str());
    }
    if (problem == 0) continue;
    const int code = errno;
    while (name != names.begin()) {
      --name;
      ::rename((target_ / *name).c_str(), (partial_->path() / *name).c_str());
    }
    errno = code;
    fail_system(shown_, "write");
  }
  sync_directory(target_);
}

std::vector<Leftover> find_leftovers(const fs::path& output) try {
  const fs::path target = named(resolved(named(output)));
  const fs::path name = target.filename();
  std::vector<Leftover> result;
  for (const fs::path& folder : {folder_of(target), target}) {
    for (const fs::path& path : partials_in(folder, name)) {
      result.push_back({path, owner_of(path, prefix_of(name))});
    }
  }
  return result;
} catch (const fs::filesystem_error& error) {
  fail_system(output, "write", error);
}

bool remove_leftover(const fs::path& path) {
  const Descriptor descriptor(open_leftover(path));
  if (descriptor.value() < 0 && errno == ENOENT) return true;
  // Where there are no locks, the caller knows better.
  const bool runs = ::flock(descriptor.value(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (runs || (descriptor.value() >= 0 && !is_at(descriptor.value(), path))) return false;
  std::error_code problem;
  fs::remove_all(path, problem);
  FUSEDMOE_CHECK_IO(!problem, path.string(),
                    core::format("cannot remove {}: {}", path.string(), problem.message()));
  return true;
}

void abandon_outputs() {
  Writing& writing = Writing::instance();
  // Never unlocked: who would write on waits here until the process has ended.
  writing.mutex.lock();
  for (const fs::path& partial : writing.partials) {
    std::error_code ignored;
    fs::remove_all(partial, ignored);
  }
}

}  // namespace fusedmoe::files
