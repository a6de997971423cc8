#include "launch/bench/fleet/fleet_controllers.h"

#include <unistd.h>

#include <filesystem>

#include "launch/bench/harness/pinned.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::bench {
namespace {

constexpr TimeNs kStartTime = 30 * kSecond;

constexpr const char* kHost = "127.0.0.1";

/// The sockets stay open until all ports are known, so that the ports differ.
Result<std::vector<std::uint16_t>> free_ports(std::size_t num_ports) {
  std::vector<net::TcpListener> listeners;
  std::vector<std::uint16_t> ports;
  for (std::size_t i = 0; i < num_ports; ++i) {
    Result<net::TcpListener> listener = net::listen_tcp(kHost, 0);
    if (!listener) return std::move(listener).error();
    ports.push_back(listener->address.port);
    listeners.push_back(std::move(*listener));
  }
  return ports;
}

bool is_open(std::uint16_t port) { return static_cast<bool>(net::connect_tcp({kHost, port})); }

std::string local(const char* scheme, std::uint16_t port) { return fmt::format("{}://{}:{}", scheme, kHost, port); }

}  // namespace

Result<std::unique_ptr<FleetControllers>> FleetControllers::start(const FleetControllersOptions& options) {
  Result<TemporaryFolder> folder = TemporaryFolder::make();
  if (!folder) return std::move(folder).error();
  std::unique_ptr<FleetControllers> all(new FleetControllers(std::move(*folder)));
  all->options_ = options;
  Result<std::vector<std::uint16_t>> ports = free_ports(2 * options.num_replicas);
  if (!ports) return std::move(ports).error();
  all->ports_ = std::move(*ports);
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
    const std::uint16_t port = all->ports_[2 * i + (options.over_streams ? 1 : 0)];
    if (Result<void> up = all->wait_listening(*all->controllers_[i], port); !up) return std::move(up).error();
  }
  return all;
}

FleetControllers::~FleetControllers() {
  for (auto* programs : {&controllers_, &services_}) {
    for (std::optional<ChildProcess>& program : *programs) {
      if (program) program->kill();
    }
  }
}

Result<void> FleetControllers::start_services() {
  const Result<std::vector<std::uint16_t>> ports = free_ports(3);
  if (!ports) return ports.error();
  const std::uint16_t etcd_port = (*ports)[0], redis_port = (*ports)[2];
  etcd_ = local("http", etcd_port);
  redis_ = local("redis", redis_port);
  const std::string peer = local("http", (*ports)[1]);
  std::error_code ignored;
  std::filesystem::create_directory(folder_.path() + "/redis", ignored);
  const Command commands[] = {
      {{"etcd", "--data-dir", folder_.path() + "/etcd", "--listen-client-urls", etcd_, "--advertise-client-urls", etcd_,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer,
        "--log-level", "error"},
       {}},
      {{"redis-server", "--port", std::to_string(redis_port), "--bind", "127.0.0.1", "--dir", folder_.path() + "/redis",
        "--appendonly", "yes", "--save", "", "--logfile", "/dev/null"},
       {}}};
  for (const Command& command : commands) {
    Result<ChildProcess> program = ChildProcess::start(command);
    if (!program) return std::move(program).error();
    services_.emplace_back(std::move(*program));
    const std::uint16_t port = &command == commands ? etcd_port : redis_port;
    if (Result<void> up = wait_listening(*services_.back(), port); !up) {
      return std::move(up).error().with(
          fmt::format("{}, which replicas need (Debian packages etcd-server and redis-server)", command.words[0]));
    }
  }
  return {};
}

Result<void> FleetControllers::wait_listening(ChildProcess& process, std::uint16_t port) const {
  const SteadyClock clock;
  for (const TimeNs end = clock.now() + kStartTime; clock.now() < end; ::usleep(5000)) {
    if (is_open(port)) return {};
    if (process.has_ended()) break;
  }
  return Error{ErrorCode::kUnavailable, fmt::format("no server listens on port {}: {}", port, process.last_words())};
}

void FleetControllers::kill(std::size_t replica) {
  controllers_[replica]->kill();
  controllers_[replica].reset();
}

Result<void> FleetControllers::start_again(std::size_t replica) {
  std::vector<std::string> words = {"controller", "--bind", addresses_[replica], "--state",
                                    fmt::format("{}/state{}", folder_.path(), replica)};
  if (options_.over_streams) words.insert(words.end(), {"--stream", endpoints_[replica]});
  if (!etcd_.empty())
    words.insert(words.end(), {"--etcd", etcd_, "--event-log", redis_, "--replica", fmt::format("r{}", replica)});
  Result<std::string> program = kvferry_program();
  if (!program) return std::move(program).error();
  // The controller starts with the file limit that shells and systemd give, so that it has to raise the limit itself.
  words.insert(words.begin(), {"sh", "-c", "ulimit -Sn 1024; exec \"$@\"", "sh", std::move(*program)});
  const PinnedHere pinned(1);
  Result<ChildProcess> process = ChildProcess::start({std::move(words), {"KVFERRY_LOG=error"}});
  if (!process) return std::move(process).error();
  controllers_[replica].emplace(std::move(*process));
  return {};
}

double FleetControllers::cpu_s(std::size_t replica) const {
  return controllers_[replica] ? cpu_seconds(controllers_[replica]->pid()) : 0;
}

double FleetControllers::rss_mib(std::size_t replica) const {
  return controllers_[replica] ? resident_bytes(controllers_[replica]->pid()) / (1 << 20) : 0;
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
