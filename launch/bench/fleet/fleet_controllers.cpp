#include "launch/bench/fleet/fleet_controllers.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "launch/bench/harness/pinned.h"
#include "launch/bench/transfer/programs.h"
#include "transport/base/owned_fd.h"

namespace kvferry::bench {
namespace {

constexpr TimeNs kStartTime = 30 * kSecond;

sockaddr_in local_address(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

/// Each another one: the sockets are open until all ports are known.
std::vector<int> free_ports(std::size_t num_ports) {
  std::vector<OwnedFd> sockets;
  std::vector<int> ports;
  for (std::size_t i = 0; i < num_ports; ++i) {
    sockets.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = local_address(0);
    socklen_t size = sizeof(address);
    ::bind(sockets.back().get(), reinterpret_cast<sockaddr*>(&address), size);
    ::getsockname(sockets.back().get(), reinterpret_cast<sockaddr*>(&address), &size);
    ports.push_back(ntohs(address.sin_port));
  }
  return ports;
}

bool is_open(int port) {
  const OwnedFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = local_address(port);
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

std::string local(const char* scheme, int port) { return fmt::format("{}://127.0.0.1:{}", scheme, port); }

}  // namespace

Result<std::unique_ptr<FleetControllers>> FleetControllers::start(const FleetControllersOptions& options) {
  std::unique_ptr<FleetControllers> all(new FleetControllers);
  all->options_ = options;
  char folder[] = "/tmp/kvferry-fleetXXXXXX";
  if (::mkdtemp(folder) == nullptr) return Error{ErrorCode::kUnavailable, "no folder can be made in /tmp"};
  all->folder_ = folder;
  all->ports_ = free_ports(2 * options.num_replicas);
  for (std::size_t i = 0; i < options.num_replicas; ++i) {
    all->addresses_.push_back(local("tcp", all->ports_[2 * i]));
    all->endpoints_.push_back(options.over_streams ? local("stream", all->ports_[2 * i + 1]) : all->addresses_[i]);
  }
  if (options.num_replicas > 1) {
    if (Result<void> started = all->start_services(); !started) return std::move(started).error();
  }
  all->controllers_.resize(options.num_replicas);
  for (std::size_t i = 0; i < options.num_replicas; ++i) {
    if (Result<void> started = all->start_again(i); !started) return std::move(started).error();
    const int port = all->ports_[2 * i + (options.over_streams ? 1 : 0)];
    if (Result<void> up = all->listens(*all->controllers_[i], port); !up) return std::move(up).error();
  }
  return all;
}

FleetControllers::~FleetControllers() {
  for (auto* programs : {&controllers_, &services_}) {
    for (std::optional<ChildProcess>& program : *programs) {
      if (program) program->kill();
    }
  }
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

Result<void> FleetControllers::start_services() {
  const std::vector<int> ports = free_ports(3);
  etcd_ = local("http", ports[0]);
  redis_ = local("redis", ports[2]);
  const std::string peer = local("http", ports[1]);
  std::error_code ignored;
  std::filesystem::create_directory(folder_ + "/redis", ignored);
  const Command commands[] = {
      {{"etcd", "--data-dir", folder_ + "/etcd", "--listen-client-urls", etcd_, "--advertise-client-urls", etcd_,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer,
        "--log-level", "error"},
       {}},
      {{"redis-server", "--port", std::to_string(ports[2]), "--bind", "127.0.0.1", "--dir", folder_ + "/redis",
        "--appendonly", "yes", "--save", "", "--logfile", "/dev/null"},
       {}}};
  for (const Command& command : commands) {
    Result<ChildProcess> program = ChildProcess::start(command);
    if (!program) return std::move(program).error();
    services_.emplace_back(std::move(*program));
    const int port = &command == commands ? ports[0] : ports[2];
    if (Result<void> up = listens(*services_.back(), port); !up) {
      return std::move(up).error().with(
          fmt::format("{}, which replicas need (Debian packages etcd-server and redis-server)", command.words[0]));
    }
  }
  return {};
}

Result<void> FleetControllers::listens(ChildProcess& process, int port) const {
  const SteadyClock clock;
  for (const TimeNs end = clock.now() + kStartTime; clock.now() < end; ::usleep(5000)) {
    if (is_open(port)) return {};
    if (process.has_ended()) break;
  }
  return Error{ErrorCode::kUnavailable, fmt::format("nobody listens on port {}: {}", port, process.last_words())};
}

void FleetControllers::kill(std::size_t replica) {
  controllers_[replica]->kill();
  controllers_[replica].reset();
}

Result<void> FleetControllers::start_again(std::size_t replica) {
  std::vector<std::string> words = {"controller", "--bind", addresses_[replica], "--state",
                                    fmt::format("{}/state{}", folder_, replica)};
  if (options_.over_streams) words.insert(words.end(), {"--stream", endpoints_[replica]});
  if (!etcd_.empty())
    words.insert(words.end(), {"--etcd", etcd_, "--event-log", redis_, "--replica", fmt::format("r{}", replica)});
  Result<std::string> program = kvferry_program();
  if (!program) return std::move(program).error();
  // With the files that shells and systemd give a program, whatever this one may have: it has to help itself.
  words.insert(words.begin(), {"sh", "-c", "ulimit -Sn 1024; exec \"$@\"", "sh", std::move(*program)});
  const PinnedHere pinned(1);
  Result<ChildProcess> process = ChildProcess::start({std::move(words), {"KVFERRY_LOG=error"}});
  if (!process) return std::move(process).error();
  controllers_[replica].emplace(std::move(*process));
  return {};
}

double FleetControllers::cpu_s(std::size_t replica) const {
  if (!controllers_[replica]) return 0;
  clockid_t clock{};
  timespec time{};
  if (::clock_getcpuclockid(controllers_[replica]->pid(), &clock) != 0) return 0;
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double FleetControllers::rss_mib(std::size_t replica) const {
  if (!controllers_[replica]) return 0;
  std::ifstream status(fmt::format("/proc/{}/status", controllers_[replica]->pid()));
  for (std::string line; std::getline(status, line);) {
    unsigned long kib = 0;
    if (std::sscanf(line.c_str(), "VmRSS: %lu", &kib) == 1) return static_cast<double>(kib) / 1024;
  }
  return 0;
}

std::size_t FleetControllers::num_files(std::size_t replica) const {
  std::error_code ignored;
  if (!controllers_[replica]) return 0;
  std::size_t num_files = 0;
  for (const auto& file :
       std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", controllers_[replica]->pid()), ignored))
    num_files += file.path().empty() ? 0 : 1;
  return num_files;
}

}  // namespace kvferry::bench
