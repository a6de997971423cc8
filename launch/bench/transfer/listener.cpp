#include <poll.h>

#include <map>
#include <vector>

#include "launch/bench/harness/bench_venv.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/figures_file.h"
#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/transfer/transfer_bench.h"
#include "launch/bench/transfer/worker.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;
constexpr std::size_t kWorkersMax = 16;
constexpr TimeNs kDay = 24 * 3600 * kSecond;

class Session {
 public:
  explicit Session(OwnedFd socket) : host_(net::local_address(socket.get()).host), driver_(std::move(socket)) {}

  /// Returns when the driver has closed the connection, or after the user's interrupt. Throws a Failure if the driver
  /// sent a wrong message, or if the connection failed.
  void run() {
    while (!is_interrupted()) {
      std::vector<pollfd> fds{{driver_.in_fd(), POLLIN, 0}};
      std::vector<std::size_t> numbers;
      bool has_lines = driver_.has_line();
      for (auto& [number, worker] : workers_) {
        fds.push_back({worker.link().in_fd(), POLLIN, 0});
        numbers.push_back(number);
        has_lines |= worker.link().has_line();
      }
      if (::poll(fds.data(), fds.size(), has_lines ? 0 : 100) <= 0 && !has_lines) continue;
      for (std::size_t i = 0; i < numbers.size(); ++i)
        if (fds[i + 1].revents != 0 || workers_.at(numbers[i]).link().has_line()) relay(numbers[i]);
      if (fds[0].revents == 0 && !driver_.has_line()) continue;
      const Result<Json> message = driver_.receive(kPatience);
      if (!message && message.error().code == ErrorCode::kPeerLost) return;
      obey(need(message));
    }
  }

 private:
  void answer(const Json& line) { need(driver_.send(line)); }

  void obey(const Json& message) {
    const Json what = message.value("do", Json());
    if (what == "hello") {
      answer(host_facts());
      is_known_ = message.value("version", Json()) == host_facts()["version"];
      return;
    }
    if (!is_known_)
      throw Failure(
          {ErrorCode::kCorrupt,
           "the client did not begin as kvferry bench transfer --connect of this listener's version does; install the "
           "same version on both hosts"});
    if (what == "install") return install(message.value("what", Json()));
    const auto number = message.find("worker");
    if (number == message.end() || !number->is_number_unsigned() || number->get<std::size_t>() >= kWorkersMax)
      throw Failure({ErrorCode::kCorrupt, fmt::format("the client named no measuring process from 0 to {}, which "
                                                      "every command but hello and install does",
                                                      kWorkersMax - 1)});
    if (what == "start_worker") return start(*number, message.value("spec", Json::object()));
    if (what == "stop_worker") {
      workers_.erase(*number);
      return answer({{"stopped", true}});
    }
    const auto worker = workers_.find(*number);
    if (worker == workers_.end())
      return answer(to_json(Error{
          ErrorCode::kInvalidArgument,
          "the listener got a command for its measuring process, but none runs: the benchmark has started none, or "
          "it has ended"}));
    if (!worker->second.link().send(message)) report_death(*number);
  }

  void install(const Json& what) {
    const Result<void> done =
        attempt([&] { ensure_installed(what.is_string() ? what.get<std::string>() : "", [](const auto&) {}); });
    answer(done ? Json::object() : to_json(done.error()));
  }

  void start(std::size_t number, const Json& message) {
    workers_.erase(number);
    const Result<WorkerSpec> started = attempt([&] {
      WorkerSpec spec = worker_spec(message);
      spec.host = host_;
      workers_.try_emplace(number, worker_command(spec));
      return spec;
    });
    if (!started) return answer(to_json(started.error()));
    // After a successful send, run() relays the worker's answer.
    if (!workers_.at(number).link().send(to_json(*started))) report_death(number);
  }

  void relay(std::size_t number) {
    const Result<Json> line = workers_.at(number).link().receive(kPatience);
    if (!line) return report_death(number);
    answer(*line);
  }

  void report_death(std::size_t number) {
    const std::string words = workers_.at(number).last_words();
    workers_.erase(number);
    answer(to_json(Error{
        ErrorCode::kPeerLost,
        fmt::format("the measuring process on the listener's side ended; the last line of its stderr: '{}'", words)}));
  }

  const std::string host_;
  LineLink driver_;
  std::map<std::size_t, ChildProcess> workers_;  // [number that the driver chose]
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
    fmt::print("kvferry bench transfer listening on {}; stop it with Ctrl-C\n",
               net::to_text({address.host, listening->address.port}));
  std::fflush(stdout);
  while (!is_interrupted()) {
    Result<OwnedFd> accepted = attempt([&] { return tcp_accept(*listening, Deadline(is_child ? kPatience : kDay)); });
    if (!accepted) {
      if (accepted.error().code == ErrorCode::kTimeout && !is_child) continue;
      break;
    }
    if (is_child) listening->socket = OwnedFd();
    Result<void> served = attempt([&] { Session(*std::move(accepted)).run(); });
    if (is_child) return served;
    fmt::print("{}\n", served ? "a benchmark has disconnected" : "disconnected a client: " + served.error().what);
    std::fflush(stdout);
  }
  return {};
}

}  // namespace kvferry::bench
