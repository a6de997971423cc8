#include "launch/bench/transfer/listener.h"

#include <poll.h>

#include <optional>

#include "launch/bench/harness/bench_venv.h"
#include "launch/bench/harness/host_facts.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/transfer/worker_command.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;
constexpr TimeNs kDay = 24 * 3600 * kSecond;

class Session {
 public:
  explicit Session(int fd) : host_(net::local_address(fd).host), driver_(fd, fd) {}

  /// Returns when the driver has closed, or an error if the driver sent a wrong message.
  Result<void> run() {
    while (!is_interrupted()) {
      pollfd fds[] = {{driver_.in_fd(), POLLIN, 0}, {worker_ ? worker_->link().in_fd() : -1, POLLIN, 0}};
      const bool has_lines = driver_.has_line() || (worker_ && worker_->link().has_line());
      if (::poll(fds, 2, has_lines ? 0 : 100) <= 0 && !has_lines) continue;
      if (worker_ && (fds[1].revents != 0 || worker_->link().has_line())) {
        if (Result<void> ok = relay(); !ok) return ok;
      }
      if (fds[0].revents == 0 && !driver_.has_line()) continue;
      Result<Json> message = driver_.receive(kPatience);
      if (!message) return message.error().code == ErrorCode::kPeerLost ? Result<void>() : std::move(message).error();
      if (Result<void> ok = obey(*message); !ok) return ok;
    }
    return {};
  }

 private:
  Result<void> obey(const Json& message) {
    const Json what = message.value("do", Json());
    if (what == "hello") {
      if (Result<void> ok = driver_.send(host_facts()); !ok) return ok;
      is_known_ = message.value("version", Json()) == host_facts()["version"];
      return {};
    }
    if (!is_known_) return Error{ErrorCode::kCorrupt, "its first message is not a Hello of this version of kvferry"};
    if (what == "install") return install(message.value("what", Json()));
    if (what == "start_worker") return start(message.value("spec", Json::object()));
    if (what == "stop_worker") {
      worker_.reset();
      return driver_.send(Json::object());
    }
    if (!worker_) return driver_.send(to_json(Error{ErrorCode::kInvalidArgument, "no worker is running"}));
    if (!worker_->link().send(message)) return report_death();
    return {};
  }

  Result<void> install(const Json& what) {
    const Result<void> done = ensure_installed(what.is_string() ? what.get<std::string>() : "", [](const auto&) {});
    return driver_.send(done ? Json::object() : to_json(done.error()));
  }

  Result<void> start(const Json& message) {
    worker_.reset();
    Result<WorkerSpec> spec = worker_spec(message);
    if (!spec) return driver_.send(to_json(spec.error()));
    spec->host = host_;
    Result<Command> command = worker_command(*spec);
    if (!command) return driver_.send(to_json(command.error()));
    Result<ChildProcess> started = ChildProcess::start(*command);
    if (!started) return driver_.send(to_json(started.error()));
    worker_.emplace(std::move(*started));
    if (!worker_->link().send(to_json(*spec))) return report_death();
    return {};  // run() relays the worker's answer
  }

  Result<void> relay() {
    Result<Json> line = worker_->link().receive(kPatience);
    if (!line) return report_death();
    return driver_.send(*line);
  }

  Result<void> report_death() {
    const std::string words = worker_->last_words();
    worker_.reset();
    return driver_.send(to_json(Error{ErrorCode::kPeerLost, fmt::format("the target's program ended: {}", words)}));
  }

  const std::string host_;
  LineLink driver_;
  std::optional<ChildProcess> worker_;
  bool is_known_ = false;
};

}  // namespace

Result<void> run_listener(const HostPort& address, bool is_child) {
  catch_interrupts();
  Result<net::TcpListener> listening = net::listen_tcp(address.host, address.port);
  if (!listening) return std::move(listening).error();
  if (is_child)
    fmt::print("{}\n", Json{{"port", listening->address.port}}.dump());
  else
    fmt::print("kvferry bench transfer listening on {}; ends with Ctrl-C\n",
               net::to_text({address.host, listening->address.port}));
  std::fflush(stdout);
  while (!is_interrupted()) {
    Result<OwnedFd> accepted = tcp_accept(*listening, Deadline(is_child ? kPatience : kDay));
    if (!accepted) {
      if (accepted.error().code == ErrorCode::kTimeout && !is_child) continue;
      break;
    }
    if (is_child) listening->socket = OwnedFd();
    Session session(accepted->release());
    Result<void> served = session.run();
    if (is_child) return served;
    fmt::print("{}\n", served ? "a driver has disconnected" : "disconnected a driver: " + served.error().what);
    std::fflush(stdout);
  }
  return {};
}

}  // namespace kvferry::bench
