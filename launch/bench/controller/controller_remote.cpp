#include <poll.h>

#include <random>

#include "controller/api/client.h"
#include "controller/client/client_link.h"
#include "controller/protocol/wire.h"
#include "launch/bench/controller/controller_nodes.h"
#include "launch/bench/controller/controller_steps.h"
#include "launch/bench/harness/pinned.h"

namespace kvferry::bench {
namespace {

using controller::ClientLink;
namespace wire = controller::wire;

constexpr int kRoundTrips = 3000;  // number of measured round trips in each repetition
constexpr int kWarmUps = 200;
constexpr std::size_t kInFlight = 16;
constexpr TimeNs kRateTime = kSecond;
constexpr std::size_t kQuestions = 4096;  // number of different lookups, which are sent in turn

void wait(int fd) {
  pollfd item{fd, POLLIN, 0};
  ::poll(&item, 1, kPatienceMs);
}

class RemoteBench {
 public:
  RemoteBench(const ControllerLoad& load, ControllerReport& report, const ControllerFarSide& far)
      : load_(load), report_(report), far_(far) {}

  void run() {
    measure_latency("ZeroMQ", "zmq", far_.zmq, far_.zmq_echo);
    measure_latency("a Unix socket", "stream", far_.stream, far_.stream_echo);
    measure_rate("ZeroMQ", "remote_zmq", far_.zmq);
    measure_rate("a Unix socket", "remote", far_.stream);
  }

 private:
  /// Measures lookups and round trips to an echo server alternately, so that changes in the machine's load affect both
  /// in the same way.
  void measure_latency(const std::string& over, const std::string& name, const std::string& endpoint,
                       const std::string& echo) {
    const std::unique_ptr<controller::Client> client = registered(endpoint, "asker_" + name);
    const std::unique_ptr<ClientLink> link = need(controller::make_link(echo));
    report_.begin("lookups over " + over);
    std::vector<Speed> remote, empty;
    for (std::uint64_t i = 0; i < load_.repeat; ++i) {
      empty.push_back(time_round_trips([&] { return echo_once(*link); }));
      remote.push_back(time_round_trips([&] { return lookup_once(*client); }));
    }
    client->leave();
    report_.speed_row(fmt::format("lookup of {} keys over {}, one at a time", kLookupKeys, over), median_speed(remote),
                      "remote_" + name);
    report_.begin("empty messages over " + over);
    report_.speed_row("empty round trip over " + over, median_speed(empty), "empty_" + name);
  }

  template <class RoundTrip>
  Speed time_round_trips(const RoundTrip& round_trip) {
    std::vector<double> times_us;
    for (int i = -kWarmUps; i < kRoundTrips; ++i) {
      const TimeNs took = round_trip();
      if (i >= 0) times_us.push_back(static_cast<double>(took) * 1e-3);
    }
    return speed_of(times_us);
  }

  TimeNs lookup_once(controller::Client& client) {
    const std::uint64_t prefix = random_() % load_.num_prefixes();
    fill_keys<ChunkKey>(prefix, random_() % (kPrefixKeys / kLookupKeys) * kLookupKeys, query_.keys);
    const TimeNs begun = clock_.now();
    const std::uint64_t token = need(client.lookup(query_));
    for (;;) {
      wait(client.fd());
      const TimeNs now = clock_.now();
      for (const controller::ClientEvent& event : client.process(now)) {
        const auto* reply = std::get_if<controller::LookupReply>(&event);
        if (reply == nullptr || reply->token != token) continue;
        const TimeNs took = clock_.now() - begun;
        if (!names_all_workers(reply->holders, prefix)) throw wrong_answer();
        return took;
      }
      if (now - begun > kPatienceMs * kMillisecond) throw no_answer();
    }
  }

  TimeNs echo_once(ClientLink& link) {
    const TimeNs begun = clock_.now();
    bool is_sent = link.send("an empty message");
    for (;;) {
      if (is_sent) wait(link.fd());
      const TimeNs now = clock_.now();
      link.process(now);
      if (link.receive()) return clock_.now() - begun;
      if (!is_sent) is_sent = link.send("an empty message");  // send() fails until the link is connected
      if (now - begun > kPatienceMs * kMillisecond) throw no_answer();
    }
  }

  /// Measures lookups per second of the server's processor time, which does not include the time in which the server
  /// waits for the client.
  void measure_rate(const std::string& over, const std::string& name, const std::string& endpoint) {
    const std::unique_ptr<ClientLink> link = need(controller::make_link(endpoint));
    report_.begin(fmt::format("{} lookups in flight over {}", kInFlight, over));
    say_hello(*link, name);
    std::vector<std::string> questions(kQuestions);
    for (std::size_t i = 0; i < kQuestions; ++i) {
      wire::Lookup lookup{.incarnation = 1, .token = i, .keys = {std::vector<ChunkKey>(kLookupKeys)}};
      fill_keys<ChunkKey>(prefix_of(i), i % (kPrefixKeys / kLookupKeys) * kLookupKeys, lookup.keys.keys);
      questions[i] = encode(lookup);
    }
    std::vector<double> per_core, per_s;
    for (std::uint64_t i = 0; i < load_.repeat; ++i) {
      const double cpu_s = far_.cpu_s();
      const TimeNs begun = clock_.now();
      const auto num_answers = static_cast<double>(ask_for(kRateTime, *link, questions));
      per_core.push_back(num_answers / (far_.cpu_s() - cpu_s));
      per_s.push_back(num_answers * 1e9 / static_cast<double>(clock_.now() - begun));
    }
    report_.row(fmt::format("{} lookups of {} keys in flight over {}", kInFlight, kLookupKeys, over),
                fmt::format("{:>9.0f} /s per server core   {:>9.0f} /s", median(per_core), median(per_s)));
    report_.figure(name + "_per_s_per_core", median(per_core));
    report_.figure(name + "_per_s", median(per_s));
  }

  std::uint64_t prefix_of(std::uint64_t question) const { return scramble(question) % load_.num_prefixes(); }

  void say_hello(ClientLink& link, const std::string& name) {
    const std::string hello = encode(wire::Hello{.node = node_info(name)});
    const TimeNs deadline = clock_.now() + kPatienceMs * kMillisecond;
    for (bool is_sent = false; clock_.now() < deadline;) {
      link.process(clock_.now());
      if (!is_sent) is_sent = link.send(hello);
      if (const auto bytes = link.receive()) {
        const Result<wire::FromController> message = wire::parse<wire::FromController>(*bytes);
        if (message && std::holds_alternative<wire::Registered>(*message)) return;
      }
      pollfd item{link.fd(), POLLIN, 0};
      ::poll(&item, 1, 10);
    }
    throw no_answer();
  }

  std::uint64_t ask_for(TimeNs duration, ClientLink& link, const std::vector<std::string>& questions) {
    std::uint64_t num_asked = 0, num_answered = 0;
    const TimeNs begun = clock_.now();
    TimeNs now = begun;
    const auto ask = [&] { return link.send(questions[num_asked++ % questions.size()]); };
    link.set_corked(true);
    for (std::size_t i = 0; i < kInFlight; ++i) {
      if (!ask()) throw no_answer();
    }
    link.set_corked(false);
    while (num_answered < num_asked) {
      wait(link.fd());
      now = clock_.now();
      link.process(now);
      link.set_corked(true);  // delays the new lookups, one for each answer, so that one write sends all of them
      while (const auto bytes = link.receive()) {
        if (num_answered++ % 64 == 0 && !is_right(*bytes)) throw wrong_answer();
        if (now - begun < duration && !ask()) throw no_answer();
      }
      link.set_corked(false);
      if (now - begun > duration + kPatienceMs * kMillisecond) throw no_answer();
    }
    return num_answered;
  }
  bool is_right(std::string_view bytes) const {
    const Result<wire::FromController> message = wire::parse<wire::FromController>(bytes);
    const auto* reply = message ? std::get_if<wire::LookupReply>(&*message) : nullptr;
    return reply != nullptr && names_all_workers(reply->holders, prefix_of(reply->token));
  }

  const ControllerLoad& load_;
  ControllerReport& report_;
  const ControllerFarSide& far_;
  SteadyClock clock_;
  std::mt19937_64 random_{1};
  controller::LookupQuery query_{.keys = std::vector<ChunkKey>(kLookupKeys), .tail_groups = {}, .exact_tails = {}};
};

}  // namespace

void measure_remote(const ControllerLoad& load, ControllerReport& report) {
  report.group("remote");
  report.begin("publishing all chunks to a controller process");
  ControllerFarSide far(load);
  far.wait_filled();
  report.row("controller process filled", "");
  const PinnedHere pinned(0);
  RemoteBench(load, report, far).run();
  measure_visible(far, report);
}

}  // namespace kvferry::bench
