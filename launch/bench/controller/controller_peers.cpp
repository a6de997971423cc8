#include "launch/bench/controller/controller_peers.h"

#include "launch/bench/harness/bench_venv.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/figures_file.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;

constexpr double kRunSeconds = 0.5;  // total time of the lookups in one repetition, as in controller_local.cpp

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

void measure_peer(const std::string& peer, const Json& spec, const PeerProgram& program, Json& peers, const Say& say) {
  run_peer_program(need(program(peer, say)), spec, say, [&](const Json& line) {
    if (!line.contains("peer") || !is_peer(line["peer"]))
      throw Failure(
          {ErrorCode::kCorrupt,
           fmt::format("the program that measures {} wrote a line that is neither a step, figures nor an error: {}",
                       peer, line.dump())});
    peers.push_back(line["peer"]);
  });
}

}  // namespace

Result<Command> controller_peer_program(const std::string& peer, const Say& say) {
  return attempt([&] {
    ensure_installed("controller_" + peer, say);
    return script_command("controller_" + peer + ".py", {});
  });
}

Result<PeersFigures> measure_controller_peers(const std::vector<std::string>& peers, std::uint64_t num_hashes,
                                              std::uint64_t repeat, const PeerProgram& program, const Say& say) {
  PeersFigures figures;
  const Json spec{{"hashes", num_hashes}, {"repeat", repeat}, {"seconds", kRunSeconds}};
  return attempt([&] {
    for (const std::string& peer : peers)
      try_part(peer, figures.missing, say, [&] { measure_peer(peer, spec, program, figures.peers, say); });
    return figures;
  });
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
      text += fmt::format("{:<32} {:>10} {:>10} {:>9} {:>9} {:>10} {:>9}\n", name + way, number_text(theirs, rate, 0),
                          ratio(own, own_rate, theirs, rate), number_text(theirs, time + "_us_p50", 1),
                          number_text(theirs, time + "_us_p99", 1),
                          number_text(theirs, prefix + "event_hashes_per_s", 2, 1e6),
                          number_text(theirs, prefix + "bytes_per_hash", 1));
    };
    row(", in process", "lookup_128_per_s", "lookup_128_per_s", "lookup_128", "");
    row(", remote", "remote_per_s_per_core", "remote_per_s_per_core", "remote", "remote_");
  }
  text +=
      "remote: lookups per second of the server's processor time, with 16 lookups in flight; kvferry's are measured "
      "over "
      "its Unix socket; p50 and p99 are measured with one lookup at a time\n";
  for (const Json& peer : figures.peers) {
    const std::string notes = peer["notes"].get<std::string>();
    if (!notes.empty()) text += fmt::format("{}: {}\n", peer["engine"].get<std::string>(), notes);
  }
  return text;
}

}  // namespace kvferry::bench
