#include "launch/cli/doctor/security_checks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "controller/api/endpoint.h"
#include "launch/cli/doctor/key_probes.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/net/host_port.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::cli {
namespace {

namespace fs = std::filesystem;

std::string contents(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Returns whether the process runs the program kvferry, or has loaded kvferry's Python module. Returns false for
/// another user's process unless this program runs as root, because the kernel hides what such a process runs.
bool runs_kvferry(const fs::path& process) {
  std::error_code ignored;
  if (fs::read_symlink(process / "exe", ignored).filename() == "kvferry") return true;
  return contents(process / "maps").find("/kvferry/_core.") != std::string::npos;
}

/// Parses an address in /proc/PID/net/tcp or tcp6: "0100007F:390A", with 32 digits before the colon for IPv6. Each
/// 32-bit word is in the byte order of the host.
net::HostPort parse_address(const std::string& text) {
  const std::size_t colon = text.find(':');
  std::array<std::uint8_t, 16> bytes{};
  for (std::size_t i = 0; i < colon / 8; ++i) {
    const auto word = static_cast<std::uint32_t>(std::stoul(text.substr(8 * i, 8), nullptr, 16));
    std::memcpy(bytes.data() + 4 * i, &word, sizeof(word));
  }
  const auto port = static_cast<std::uint16_t>(std::stoul(text.substr(colon + 1), nullptr, 16));
  if (colon == 8) return {fmt::format("{}.{}.{}.{}", bytes[0], bytes[1], bytes[2], bytes[3]), port};
  if (std::ranges::all_of(bytes, [](std::uint8_t byte) { return byte == 0; })) return {"::", port};
  if (std::all_of(bytes.begin(), bytes.end() - 1, [](std::uint8_t byte) { return byte == 0; }) && bytes.back() == 1)
    return {"::1", port};
  std::string host;
  for (std::size_t i = 0; i < bytes.size(); i += 2)
    host += fmt::format("{}{:x}", i == 0 ? "" : ":", bytes[i] << 8 | bytes[i + 1]);
  return {host, port};
}

/// Returns the TCP addresses at which a process listens.
std::vector<net::HostPort> listening_addresses(const fs::path& process) {
  std::set<std::string> sockets;
  std::error_code ignored;
  // increment() does not throw if the process ends meanwhile.
  for (fs::directory_iterator fd(process / "fd", ignored); fd != fs::directory_iterator(); fd.increment(ignored))
    sockets.insert(fs::read_symlink(fd->path(), ignored).string());  // such as "socket:[INODE]"
  std::vector<net::HostPort> found;
  for (const char* table : {"net/tcp", "net/tcp6"}) {
    std::istringstream rows(contents(process / table));
    std::string row;
    std::getline(rows, row);  // skips the heading of the table
    while (std::getline(rows, row)) {
      std::istringstream fields(row);
      const std::vector<std::string> parts(std::istream_iterator<std::string>(fields), {});
      constexpr std::size_t kLocal = 1, kState = 3, kInode = 9;
      if (parts.size() > kInode && parts[kState] == "0A" && sockets.contains("socket:[" + parts[kInode] + "]"))
        found.push_back(parse_address(parts[kLocal]));
    }
  }
  return found;
}

/// Returns the key files that a process got as --cluster-key-file or in KVFERRY_CLUSTER_KEY_FILE.
std::set<std::string> key_files(const fs::path& process) {
  std::set<std::string> files;
  const auto add = [&](const fs::path& table, const std::string& name) {
    std::istringstream parts(contents(table));
    bool is_next = false;
    for (std::string part; std::getline(parts, part, '\0');) {
      if (is_next || part.starts_with(name + "=")) files.insert(is_next ? part : part.substr(name.size() + 1));
      is_next = part == name;
    }
  };
  add(process / "cmdline", "--cluster-key-file");
  add(process / "environ", "KVFERRY_CLUSTER_KEY_FILE");
  files.erase("");
  return files;
}

/// Returns a path by which this process opens a file that the other process knows as `file`. That one may have another
/// working directory, or run in a container.
fs::path path_from_here(const fs::path& process, const std::string& file) {
  std::error_code ignored;
  const fs::path self("/proc/self");
  const auto is_equal = [&](const char* link) {
    return fs::read_symlink(process / link, ignored) == fs::read_symlink(self / link, ignored);
  };
  const bool sees_the_same = is_equal("ns/mnt") && is_equal("root");
  if (fs::path(file).is_absolute()) return sees_the_same ? fs::path(file) : process / "root" / file.substr(1);
  return (sees_the_same ? fs::read_symlink(process / "cwd", ignored) : process / "cwd") / file;
}

/// Returns one sentence for each weakness of a process of this host.
std::vector<std::string> weaknesses_of(const fs::path& process) {
  const std::string who = "process " + process.filename().string();
  std::vector<std::string> found;
  for (const net::HostPort& address : listening_addresses(process)) {
    if (net::is_loopback(address.host) || asks_for_key(address)) continue;
    found.push_back(
        fmt::format("{} listens at {}, which other hosts can reach, and asked for no cluster key when it was tried",
                    who, net::to_text(address)));
  }
  for (const std::string& file : key_files(process)) {
    const auto key = net::read_cluster_key(path_from_here(process, file).string());
    if (!key) found.push_back(fmt::format("{}: {}", who, key.error().what));
  }
  return found;
}

}  // namespace

SecurityReport examine_security(const std::vector<int>& pids, const std::string& controller) {
  SecurityReport report;
  for (const auto& process : fs::directory_iterator("/proc")) {
    const std::string name = process.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (!pids.empty() && std::ranges::find(pids, std::stoi(name)) == pids.end()) continue;
    if (!runs_kvferry(process.path())) continue;
    ++report.num_processes;
    const std::vector<std::string> some = weaknesses_of(process.path());
    report.weaknesses.insert(report.weaknesses.end(), some.begin(), some.end());
  }
  const auto address = net::address_of_endpoint(controller);
  if (address && controller::is_beyond_loopback(controller) && !asks_for_key(*address))
    report.weaknesses.push_back(
        fmt::format("the controller {} does not ask for a cluster key, or can't be reached", controller));
  return report;
}

}  // namespace kvferry::cli
