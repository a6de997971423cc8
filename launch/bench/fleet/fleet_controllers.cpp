#include "launch/bench/fleet/fleet_controllers.h"

#include <unistd.h>

#include <filesystem>

#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/pinned.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::bench {
namespace {

constexpr TimeNs kStartTime = 30 * kSecond;

constexpr const char* kHost = "127.0.0.1";

/// Returns free ports. Their sockets stay open until all ports are known, so that the ports differ.
std::vector<std::uint16_t> free_ports(std::size_t num_ports) {
  std::vector<net::TcpListener> listeners;
  std::vector<std::uint16_t> ports;
  for (std::size_t i = 0; i < num_ports; ++i) {
    listeners.push_back(need(net::listen_tcp(kHost, 0)));
    ports.push_back(listeners.back().address.port);
  }
  return ports;
}

bool is_open(std::uint16_t port) { return static_cast<bool>(net::connect_tcp({kHost, port})); }

std::string local(const char* scheme, std::uint16_t port) { return fmt::format("{}://{}:{}", scheme, kHost, port); }

void wait_listening(ChildProcess& process, std::uint16_t port) {
  const SteadyClock clock;
  for (const TimeNs end = clock.now() + kStartTime; clock.now() < end; ::usleep(5000)) {
    if (is_open(port)) return;
    if (process.has_ended()) break;
  }
  throw Failure(
      {ErrorCode::kUnavailable,
       fmt::format("the server that the benchmark started for {}:{} {}; the last line of its stderr: '{}'", kHost, port,
                   process.has_ended() ? std::string("ended before it listened there")
                                       : fmt::format("did not listen there within {} s", kStartTime / kSecond),
                   process.last_words())});
}

}  // namespace

void FleetControllers::start() {
  ports_ = free_ports(2 * options_.num_replicas);
  for (std::size_t i = 0; i < options_.num_replicas; ++i) {
    addresses_.push_back(local("tcp", ports_[2 * i]));
    endpoints_.push_back(options_.over_streams ? local("stream", ports_[2 * i + 1]) : addresses_[i]);
  }
  if (options_.num_replicas > 1) start_services();
  controllers_.resize(options_.num_replicas);
  for (std::size_t i = 0; i < options_.num_replicas; ++i) {
    start_again(i);
    wait_listening(*controllers_[i], ports_[2 * i + (options_.over_streams ? 1 : 0)]);
  }
}

FleetControllers::~FleetControllers() {
  for (auto* programs : {&controllers_, &services_}) {
    for (const std::unique_ptr<ChildProcess>& program : *programs) {
      if (program) program->kill();
    }
  }
}

void FleetControllers::start_services() {
  const std::vector<std::uint16_t> ports = free_ports(3);
  const std::uint16_t etcd_port = ports[0], redis_port = ports[2];
  etcd_ = local("http", etcd_port);
  redis_ = local("redis", redis_port);
  const std::string peer = local("http", ports[1]);
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
    services_.push_back(std::make_unique<ChildProcess>(command));
    const std::uint16_t port = &command == commands ? etcd_port : redis_port;
    Result<void> up = attempt([&] { wait_listening(*services_.back(), port); });
    if (!up)
      throw Failure(std::move(up).error().with(fmt::format(
          "{}, which --replicas 3 needs (Debian packages etcd-server and redis-server)", command.words[0])));
  }
}

void FleetControllers::kill(std::size_t replica) {
  controllers_[replica]->kill();
  controllers_[replica].reset();
}

void FleetControllers::start_again(std::size_t replica) {
  std::vector<std::string> words = {"controller", "--bind", addresses_[replica], "--state",
                                    fmt::format("{}/state{}", folder_.path(), replica)};
  if (options_.over_streams) words.insert(words.end(), {"--stream", endpoints_[replica]});
  if (!etcd_.empty())
    words.insert(words.end(), {"--etcd", etcd_, "--event-log", redis_, "--replica", fmt::format("r{}", replica)});
  // 1024 open files are the default limit of shells and systemd, so the controller must raise its limit itself, as it
  // must in production.
  words.insert(words.begin(), {"sh", "-c", "ulimit -Sn 1024; exec \"$@\"", "sh", kvferry_program()});
  const PinnedHere pinned(1);
  controllers_[replica] =
      std::make_unique<ChildProcess>(Command{std::move(words), {"KVFERRY_LOG=error", "KVFERRY_CLUSTER_KEY_FILE="}});
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
