// Other projects' directories, here called peers, under the load of `kvferry bench controller`. A program of
// launch/bench/peers measures each.
//
// A program reads {"hashes", "repeat", "seconds"} as a line of JSON. It writes lines: {"step": text} for the progress,
// {"peer": figures} or {"error": reason}, and {"done": true} at its end. Figures named per_s_per_core are per second of
// the processor time of the peer's server.
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
  nlohmann::json missing = nlohmann::json::object();  // reason by peer, for each peer without figures
};

constexpr std::string_view kControllerPeers[] = {"dynamo", "lmcache", "mooncake", "redis"};

/// Returns the command of a peer's program after installing what the program needs; an error leaves the peer out.
using PeerProgram = std::function<Result<Command>(const std::string& peer, const Say& say)>;

/// The PeerProgram that installs from PyPI.
Result<Command> controller_peer_program(const std::string& peer, const Say& say);

/// Measures the peers one after the other. A peer that can't be installed, started or measured only causes a warning.
/// Errors: kCancelled only.
Result<PeersFigures> measure_controller_peers(const std::vector<std::string>& peers, std::uint64_t num_hashes,
                                              std::uint64_t repeat, const PeerProgram& program, const Say& say);

/// Returns a table of the peers' figures and of kvferry's rates divided by theirs; "" if no peer has figures.
/// `own`: kvferry's figures of the same run.
std::string controller_peers_table(const PeersFigures& figures, const nlohmann::json& own);

}  // namespace kvferry::bench
