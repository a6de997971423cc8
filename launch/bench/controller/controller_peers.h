// Other projects' directories, here called peers, under the load of `kvferry bench controller`. Each peer is measured
// by a program of launch/bench/peers.
//
// The program reads {"hashes", "repeat", "seconds"} as a line of JSON. It writes lines: {"step": text} for the
// progress, {"peer": figures}, and {"done": true} at its end, or {"error": reason} if it fails. Figures whose names end
// in per_s_per_core are per second of the processor time of the peer's server.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "launch/bench/harness/programs.h"

namespace kvferry::bench {

struct PeersFigures {
  nlohmann::json peers = nlohmann::json::array();     // array of {"engine", "version", "figures", "notes"}
  nlohmann::json missing = nlohmann::json::object();  // the reason for each peer without figures
};

constexpr std::string_view kControllerPeers[] = {"dynamo", "lmcache", "mooncake", "redis"};

/// Installs what a peer's program needs, and returns the command that runs this program. If a PeerProgram returns an
/// error other than kCancelled, the peer is left out.
using PeerProgram = std::function<Result<Command>(const std::string& peer, const Say& say)>;

/// The PeerProgram that installs the peer's packages from PyPI.
Result<Command> controller_peer_program(const std::string& peer, const Say& say);

/// Measures the peers one after the other. If a peer can't be installed, started or measured, `say` is called with a
/// warning. The only error is kCancelled.
Result<PeersFigures> measure_controller_peers(const std::vector<std::string>& peers, std::uint64_t num_hashes,
                                              std::uint64_t repeat, const PeerProgram& program, const Say& say);

/// Returns a table of the peers' figures and of kvferry's rates divided by the peers' rates, or an empty text if no
/// peer has figures. `own` has kvferry's figures of the same run.
std::string controller_peers_table(const PeersFigures& figures, const nlohmann::json& own);

}  // namespace kvferry::bench
