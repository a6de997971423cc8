#include "launch/bench/controller/controller_peers.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "launch/bench/harness/bench_venv.h"
#include "launch/bench/harness/byte_size.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kPeers[] = {"dynamo", "lmcache", "mooncake", "redis"};
constexpr TimeNs kPatience = 180 * kSecond;  // between two lines of a program
constexpr double kRunSeconds = 0.5;          // of each repetition, as in controller_local.cpp

/// A ratio or a figure that may not be there.
std::string text_of(const Json& figures, const std::string& name, double unit, int digits) {
  if (!figures.contains(name) || !figures[name].is_number()) return "-";
  return fmt::format("{:.{}f}", figures[name].get<double>() / unit, digits);
}

std::string ratio(const Json& own, const std::string& own_name, const Json& figures, const std::string& name) {
  if (!own.contains(own_name) || !figures.contains(name)) return "-";
  const double theirs = figures[name].get<double>();
  return theirs > 0 ? fmt::format("{:.1f}", own[own_name].get<double>() / theirs) : "-";
}

bool is_peer(const Json& peer) {
  return peer.is_object() && peer.contains("engine") && peer["engine"].is_string() && peer.contains("version") &&
         peer["version"].is_string() && peer.contains("figures") && peer["figures"].is_object() &&
         peer.contains("notes") && peer["notes"].is_string();
}

/// What one program tells until it is done. An error keeps what it told before.
Result<void> hear_peer(ChildProcess& child, Json& peers, const Say& say) {
  while (true) {
    const Result<Json> line = checked(child.link().receive(kPatience));
    if (!line) {
      if (line.error().code != ErrorCode::kPeerLost) return line.error();
      return Error{ErrorCode::kPeerLost, fmt::format("its program ended early: {}", child.last_words())};
    }
    if (line->contains("done")) return {};
    if (line->contains("step") && (*line)["step"].is_string()) {
      say((*line)["step"].get<std::string>());
    } else if (line->contains("peer") && is_peer((*line)["peer"])) {
      peers.push_back((*line)["peer"]);
    } else {
      return Error{ErrorCode::kCorrupt, fmt::format("its program told what nobody understands: {}", line->dump())};
    }
  }
}

Result<void> measure_peer(const std::string& peer, const Json& spec, const PeerProgram& program, Json& peers,
                          const Say& say) {
  const Result<Command> command = program(peer, say);
  if (!command) return command.error();
  Result<ChildProcess> child = ChildProcess::start(*command);
  if (!child) return std::move(child).error();
  // A program that ended at once is better told of by its last words.
  if (Result<void> sent = child->link().send(spec); !sent && sent.error().code != ErrorCode::kPeerLost) return sent;
  return hear_peer(*child, peers, say);
}

}  // namespace

Result<std::vector<std::string>> parse_controller_peers(const std::string& text) {
  std::vector<std::string> peers = text.empty() ? std::vector<std::string>{} : split_list(text);
  for (auto peer = peers.begin(); peer != peers.end(); ++peer) {
    if (std::find(std::begin(kPeers), std::end(kPeers), *peer) == std::end(kPeers) ||
        std::find(peers.begin(), peer, *peer) != peer) {
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("--peers is '{}'; allowed: one or more of {}, each once, with commas between", text,
                               fmt::join(kPeers, ", "))};
    }
  }
  return peers;
}

Result<Command> controller_peer_program(const std::string& peer, const Say& say) {
  if (Result<void> ok = ensure_installed("controller_" + peer, say); !ok) return std::move(ok).error();
  return script_command("controller_" + peer + ".py", {});
}

Result<PeersFigures> measure_controller_peers(const std::vector<std::string>& peers, std::uint64_t num_hashes,
                                              std::uint64_t repeat, const PeerProgram& program, const Say& say) {
  PeersFigures figures;
  const Json spec{{"hashes", num_hashes}, {"repeat", repeat}, {"seconds", kRunSeconds}};
  for (const std::string& peer : peers) {
    const Result<void> done = measure_peer(peer, spec, program, figures.peers, say);
    if (done) continue;
    if (done.error().code == ErrorCode::kCancelled) return done.error();
    figures.missing[peer] = done.error().what;
    say(fmt::format("warning: {} is left out: {}", peer, done.error().what));
  }
  return figures;
}

std::string controller_peers_table(const PeersFigures& figures, const Json& own) {
  if (figures.peers.empty()) return "";
  std::string text = fmt::format("\n{:<32} {:>10} {:>10} {:>9} {:>9} {:>10} {:>9}\n", "peer, 128 keys", "lookup/s",
                                 "kvferry /", "p50 us", "p99 us", "M events/s", "B/hash");
  for (const Json& peer : figures.peers) {
    const Json& theirs = peer["figures"];
    const std::string name =
        fmt::format("{} {}", peer["engine"].get<std::string>(), peer["version"].get<std::string>());
    const auto row = [&](const char* way, const std::string& rate, const std::string& own_rate, const std::string& time,
                         const std::string& prefix) {
      if (!theirs.contains(rate)) return;
      text +=
          fmt::format("{:<32} {:>10} {:>10} {:>9} {:>9} {:>10} {:>9}\n", name + way, text_of(theirs, rate, 1, 0),
                      ratio(own, own_rate, theirs, rate), text_of(theirs, time + "_us_p50", 1, 1),
                      text_of(theirs, time + "_us_p99", 1, 1), text_of(theirs, prefix + "event_hashes_per_s", 1e6, 2),
                      text_of(theirs, prefix + "bytes_per_hash", 1, 1));
    };
    row(", in process", "lookup_128_per_s", "lookup_128_per_s", "lookup_128", "");
    row(", remote", "remote_per_s_per_core", "remote_per_s_per_core", "remote", "remote_");
  }
  text +=
      "remote: look-ups per second of the server's core with 16 in flight, next to kvferry's over its Unix socket; "
      "p50 and p99 one at a time\n";
  for (const Json& peer : figures.peers) {
    const std::string notes = peer["notes"].get<std::string>();
    if (!notes.empty()) text += fmt::format("{}: {}\n", peer["engine"].get<std::string>(), notes);
  }
  return text;
}

}  // namespace kvferry::bench
