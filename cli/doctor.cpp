// fusedmoe doctor: what this build finds on this machine.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "commands.h"
#include "core/device_runtime.h"
#include "core/numa.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/version.h"
#include "layer/tuned_configs.h"
#include "moe/peer_memory.h"
#include "ranks.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

using Json = nlohmann::ordered_json;

/// One thing that was looked at: a line of text, or a member of the JSON object, where a number is
/// a number and its key names the unit.
struct Finding {
  std::string label, text;
  std::string key;  ///< empty: the label with _ for blanks
  Json value;       ///< null: the text; discarded: nothing in JSON
};

/// Value of the first line "<key> ... : <value>" of a file of /proc; "unknown" when there is none.
std::string proc_value(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    if (begin != std::string::npos) return line.substr(begin);
  }
  return "unknown";
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) ? line : "unknown";
}

/// Nodes among which the CPU experts divide weights.
Finding numa_nodes() {
  std::string text;
  Json nodes = Json::array();
  for (const core::NumaNode& node : core::usable_numa_nodes()) {
    if (node.cpus.empty()) continue;
    text +=
        fmt::format("{}node {} ({} CPUs)", text.empty() ? "" : ", ", node.number, node.cpus.size());
    nodes.push_back({{"number", node.number}, {"cpus", node.cpus.size()}});
  }
  return {"numa nodes", text.empty() ? "none known" : text, "", nodes};
}

Finding tuned_configurations() {
  const std::string path = tuned_configs_path().string(), label = "tuned configurations";
  if (path.empty()) return {label, "none", "", {{"count", 0}}};
  Json value{{"count", 0}, {"path", path}};
  try {
    // Not tuned_configs(), which is silent about a cached file that cannot be read.
    if (!std::filesystem::exists(path)) return {label, "none in " + path, "", value};
    const TunedConfigs configs = load_tuned_configs(path);
    const std::size_t count = configs.all().size();
    value["count"] = count;
    std::map<std::string, int> reported;
    for (const TunedConfig& config : configs.all()) {
      if (!config.measured_by.empty()) ++reported[config.measured_by];
    }
    std::string text = fmt::format("{} in {}", count, path);
    for (const auto& [who, number] : reported) {
      text += fmt::format(", {} measured by {}", number, who);
      value["measured_by"][who] = number;
    }
    return {label, text, "", value};
  } catch (const Error& error) {
    value["problem"] = error.what();
    return {label, error.what(), "", value};
  }
}

/// "MemTotal:  24689840 kB"
Finding memory(const std::string& label, const char* key) {
  const std::string text = proc_value("/proc/meminfo", key);
  std::string name = label + " bytes";
  std::replace(name.begin(), name.end(), ' ', '_');
  char* end = nullptr;
  const std::int64_t kilobytes = std::strtoll(text.c_str(), &end, 10);
  if (end == text.c_str()) return {label, text, name, Json(Json::value_t::discarded)};
  return {label, format_bytes(1024 * kilobytes), name, Json(1024 * kilobytes)};
}

Finding cuda_devices() {
  Json devices = Json::array();
  for (int index = 0; index < cuda_device_count(); ++index) {
    const Device device{DeviceKind::kCuda, index};
    devices.push_back(
        {{"index", index}, {"name", device_name(device)}, {"problem", device_problem(device)}});
  }
  const std::string summary = cuda_device_summary();
  return {"cuda", summary, "", {{"summary", summary}, {"devices", devices}}};
}

std::vector<Finding> findings() {
  std::vector<std::string> experts;
  for (const auto& descriptor : all_experts()) experts.emplace_back(descriptor->name());
  return {
      {"fusedmoe", FUSEDMOE_VERSION, "", {}},
      {"compiler", __VERSION__, "", {}},
      {"processor", proc_value("/proc/cpuinfo", "model name"), "", {}},
      {"instruction set", std::string(cpu_isa()), "", {}},
      {"instruction sets", fmt::format("{}", fmt::join(cpu_isas(), ", ")), "", cpu_isas()},
      {"threads", fmt::to_string(num_threads()), "", num_threads()},
      numa_nodes(),
      memory("memory", "MemTotal"),
      memory("memory available", "MemAvailable"),
      {"huge pages", first_line("/sys/kernel/mm/transparent_hugepage/enabled"), "", {}},
      cuda_devices(),
      {"experts", fmt::format("{}", fmt::join(experts, ", ")), "", experts},
      tuned_configurations(),
  };
}

std::string nccl_text() {
  const NcclInfo info = nccl_info();
  const auto version = [](int number) {
    return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
  };
  if (!info.problem.empty()) return info.problem;
  return fmt::format("{} in {}, compiled for {}", version(info.found), info.path,
                     version(info.compiled));
}

std::string launch_text() {
  const std::optional<Launch> launch = launch_from_environment();
  if (!launch) return "none";
  return fmt::format("{}: rank {} of {}, {} on this host, rank 0 at {}:{}", launch->launcher,
                     launch->rank, launch->size, launch->local_rank,
                     launch->address.empty() ? "unknown" : launch->address, launch->port);
}

/// For each GPU those whose memory it can read.
std::string peer_text() {
  const int count = cuda_device_count();
  if (count < 2) return fmt::format("{} GPUs", count);
  const core::DeviceRuntime& runtime = core::cuda_runtime();
  const auto id_of = [&](int index) { return runtime.physical_id({DeviceKind::kCuda, index}); };
  std::string text;
  for (int a = 0; a < count; ++a) {
    std::string peers;
    for (int b = 0; b < count; ++b) {
      if (a != b && runtime.can_access(id_of(a), id_of(b))) peers += fmt::format(" {}", b);
    }
    text +=
        fmt::format("{}{} reads{}", text.empty() ? "" : "; ", a, peers.empty() ? " nobody" : peers);
  }
  return text;
}

constexpr std::chrono::seconds kTestTimeout{10};
constexpr std::chrono::seconds kPairTimeout{2};  // eight GPUs are 28 pairs

/// Says what was done and how long `run` took, or what it threw.
Finding self_test(const std::string& label, const std::string& done,
                  const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    run();
  } catch (const std::exception& error) {
    return {label, error.what(), "", {{"passed", false}, {"problem", error.what()}}};
  }
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  return {label,
          fmt::format("{} in {:.2f} s", done, time.count()),
          "",
          {{"passed", true}, {"seconds", time.count()}}};
}

std::string exchanged(int num_ranks) {
  return fmt::format("{} ranks exchanged numbers", num_ranks);
}

void check_number(int rank, int peer, std::int32_t number) {
  if (number == peer) return;
  throw Error::communication(fmt::format("rank {} got {} from rank {}", rank, number, peer));
}

/// Each rank sends its number to all others.
void exchange_numbers(const std::shared_ptr<Communicator>& communicator) {
  const int size = communicator->size(), rank = communicator->rank();
  const Device where = communicator->device();
  std::vector<std::int32_t> numbers(size, rank);
  const Tensor out = to_device(borrow(numbers.data(), DType::kI32, {size}), where);
  const Tensor in = Tensor::zeros({size}, DType::kI32, where);
  std::vector<Message> sends, receives;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    sends.push_back({peer, out.as<std::int32_t>() + peer, 4});
    receives.push_back({peer, in.as<std::int32_t>() + peer, 4});
  }
  for (int round = 0; round < 100; ++round) {
    communicator->exchange(sends, receives, Stream{where}, "self test");
  }
  synchronize(Stream{where});
  communicator->check();
  const Tensor result = to_device(in, {});
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) check_number(rank, peer, result.as<std::int32_t>()[peer]);
  }
}

/// Each rank reads the numbers of all where they have written them.
void read_numbers(const std::shared_ptr<Communicator>& communicator) {
  if (!communicator->share_memory()) {
    throw Error::communication(
        "processes cannot map each other's memory here, so their rows go in messages");
  }
  const int rank = communicator->rank();
  auto* mine = static_cast<std::int32_t*>(communicator->take_shared(sizeof(std::int32_t)));
  *mine = rank;
  for (int round = 0; round < 100; ++round) {
    const auto read = [&](std::span<const void* const> lent) {
      for (int peer = 0; peer < communicator->size(); ++peer) {
        check_number(rank, peer, *static_cast<const std::int32_t*>(lent[peer]));
      }
    };
    communicator->lend("a number", mine, read, "self test");
  }
  communicator->give_back_shared(mine);
}

Finding threads_test(const std::string& label, int num_ranks, const std::string& device) {
  return self_test(label, exchanged(num_ranks),
                   [&] { run_local_ranks(num_ranks, device, exchange_numbers, kTestTimeout); });
}

/// Two threads that talk as processes without MPI do.
Finding tcp_test() {
  const auto join = [&](const std::shared_ptr<Communicator>& thread) {
    const int rank = thread->rank(), size = thread->size();
    const auto gather = [&](const std::string& text) { return thread->gather(text, "tcp"); };
    const auto control = make_control_plane(rank, size, gather, kTestTimeout);
    exchange_numbers(make_communicator(rank, size, control, {kTestTimeout}));
  };
  return self_test("tcp", exchanged(2), [&] { run_local_ranks(2, "cpu", join, kTestTimeout); });
}

/// How fast each rank reads each other, by (reader, owner). Pairs that were not timed are missing.
using PeerLinks = std::map<std::pair<int, int>, PeerLink>;

/// How each rank reads the memory of the others.
Finding peer_links(const PeerLinks& links) {
  std::string text;
  Json all = Json::array();
  for (const auto& [ranks, link] : links) {
    const auto [reader, owner] = ranks;
    if (reader == owner) continue;
    text += fmt::format("{}rank {} reads rank {} at {:.1f} GB/s, a word in {:.2f} us",
                        text.empty() ? "" : "; ", reader, owner, link.bytes_per_second / 1e9,
                        link.word_us);
    all.push_back({{"reader", reader},
                   {"owner", owner},
                   {"bytes_per_second", link.bytes_per_second},
                   {"word_us", link.word_us}});
  }
  return {"peer links", text.empty() ? "not timed" : text, "", all};
}

/// These ranks, on GPUs in turns, map each other's memory, and time it.
Finding map_ranks(const std::string& label, const std::vector<int>& ranks, int gpus,
                  std::chrono::seconds timeout, PeerLinks& links) {
  const auto size = static_cast<int>(ranks.size());
  std::vector<std::vector<PeerLink>> timed(ranks.size());
  const auto map = [&](const std::shared_ptr<Communicator>& thread) {
    const int rank = thread->rank();
    const auto gather = [&](const std::string& text) { return thread->gather(text, "joining"); };
    const Device device{DeviceKind::kCuda, ranks[rank] % gpus};
    Communicator mapping(rank, size, make_control_plane(rank, size, gather, timeout), nullptr,
                         {timeout, device, true, true});
    const std::string problem = mapping.map_peers(std::size_t{1} << 20);
    if (!problem.empty()) throw Error::communication(problem);
    timed[rank] = mapping.peers()->links();
    mapping.barrier();
  };
  Finding test = self_test(label, fmt::format("{} ranks read each other's marks", size),
                           [&] { run_local_ranks(size, "cpu", map, timeout); });
  for (int reader = 0; reader < size; ++reader) {
    for (std::size_t owner = 0; owner < timed[reader].size(); ++owner) {
      links[{ranks[reader], ranks[owner]}] = timed[reader][owner];
    }
  }
  return test;
}

/// The GPUs map each other's memory, or two ranks share the one that there is. Where all together
/// fail, each pair is tried by itself.
std::vector<Finding> peer_memory_tests(int gpus) {
  std::vector<int> all(std::max(gpus, 2));
  std::iota(all.begin(), all.end(), 0);
  PeerLinks links;
  std::vector<Finding> findings{map_ranks("peer memory", all, gpus, kTestTimeout, links)};
  if (!findings[0].value.at("passed").get<bool>() && gpus > 2) {
    for (int a = 0; a < gpus; ++a) {
      for (int b = a + 1; b < gpus; ++b) {
        const std::string label = fmt::format("peer memory {} and {}", a, b);
        findings.push_back(map_ranks(label, {a, b}, gpus, kPairTimeout, links));
        findings.back().key = fmt::format("peer_memory_{}_{}", a, b);
      }
    }
  }
  findings.push_back(peer_links(links));
  return findings;
}

/// Calls test(communicator) in this process and in a child of it, which meet in a folder.
void run_two_processes(const RankFunction& test) {
  std::error_code missing;
  const std::filesystem::path parent = std::filesystem::temp_directory_path(missing);
  if (missing) throw Error::communication("no folder for temporary files: see TMPDIR");
  std::string folder = (parent / "fusedmoe-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) {
    throw Error::communication(
        fmt::format("cannot make the folder {}: {}", folder, std::strerror(errno)));
  }
  const auto run_process = [&](int rank) {
    run_rank(make_communicator(rank, 2, make_file_control_plane(folder), {kTestTimeout}), test);
  };
  const pid_t child = fork();
  if (child == 0) {
    try {
      run_process(1);
    } catch (...) {  // rank 0 has been told
    }
    _exit(0);
  }
  std::exception_ptr failure;
  try {
    if (child < 0) {
      throw Error::communication(fmt::format("cannot fork: {}", std::strerror(errno)));
    }
    run_process(0);
  } catch (...) {
    failure = std::current_exception();
  }
  if (child > 0) waitpid(child, nullptr, 0);
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  if (failure) std::rethrow_exception(failure);
}

std::vector<Finding> comm_findings() {
  // First: a process should not fork once it has threads, or CUDA.
  const Finding files = self_test("file rendezvous", "2 processes exchanged numbers",
                                  [] { run_two_processes(exchange_numbers); });
  const Finding shared = self_test("shared memory", "2 processes read each other's memory",
                                   [] { run_two_processes(read_numbers); });
  const int gpus = cuda_device_count();
  std::vector<Finding> findings{
      {"launcher", launch_text(), "", {}},
      {"nccl", nccl_text(), "", {}},
      {"nccl windows",
       "not used: rows travel by NCCL's own calls, nothing calls its device code",
       "",
       {}},
      {"mpi", mpi_summary(), "", {}},
      {"peer access", peer_text(), "", {}},
      threads_test("threads", 4, "cpu"),
      tcp_test(),
      files,
      shared,
  };
  if (launched()) {
    const int size = launched()->size;
    findings.push_back(self_test("launched ranks", exchanged(size), [&] {
      run_on_ranks(size, gpus > 0 ? "cuda" : "cpu", exchange_numbers, kTestTimeout);
    }));
  }
  if (gpus > 0) findings.push_back(threads_test("threads on cuda:0", 2, "cuda:0"));
  if (gpus > 0 && !launched()) {
    for (const Finding& each : peer_memory_tests(gpus)) findings.push_back(each);
  }
  if (gpus > 1 && !launched()) findings.push_back(threads_test("nccl self test", gpus, "cuda"));
  return findings;
}

void run(bool json, bool comm) {
  Json object;
  for (const Finding& finding : comm ? comm_findings() : findings()) {
    if (comm && launched() && launched()->rank > 0) continue;  // rank 0 says it
    if (json) {
      if (finding.value.is_discarded()) continue;
      std::string key = finding.key.empty() ? finding.label : finding.key;
      std::replace(key.begin(), key.end(), ' ', '_');
      object[key] = finding.value.is_null() ? Json(finding.text) : finding.value;
    } else {
      fmt::print("{:<22}{}\n", finding.label, finding.text);
    }
  }
  if (json && !object.empty()) fmt::print("{}\n", object.dump());
}

}  // namespace

void add_doctor(Program& program) {
  auto json = std::make_shared<bool>(false), comm = std::make_shared<bool>(false);
  Command command = program.add_command(
      "doctor", "Show what this build finds here: instruction set, threads, memory, devices");
  command.add_flag("--json", *json,
                   "Print one JSON object instead of text; units are in the names");
  command.add_flag("--comm", *comm,
                   "Show how ranks can talk instead, and try each way for a moment");
  command.example("fusedmoe doctor --json");
  command.runs([json, comm] { run(*json, *comm); });
}

}  // namespace fusedmoe::cli
