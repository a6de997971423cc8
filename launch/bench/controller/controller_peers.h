// Other projects' directories under the load of `kvferry bench controller`, by Python programs of launch/bench/peers.
//
// A program gets {"hashes", "repeat", "seconds"} as a line of JSON and tells {"step": what it is at}, {"peer":
// figures},
// {"error": why not}, and {"done": true} at its end. Rates are those of the server's core where there is a server.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "launch/bench/harness/child_process.h"

namespace kvferry::bench {

struct PeersFigures {
  nlohmann::json peers = nlohmann::json::array();     // {"engine", "version", "figures", "notes"} each
  nlohmann::json missing = nlohmann::json::object();  // peer: why
};

using Say = std::function<void(const std::string&)>;
/// How to start a peer's program, once what it needs is there; an error leaves the peer out.
using PeerProgram = std::function<Result<Command>(const std::string& peer, const Say& say)>;

/// Names with commas between them; none for an empty text. kInvalidArgument.
Result<std::vector<std::string>> parse_controller_peers(const std::string& text);

/// Installs from PyPI where needed.
Result<Command> controller_peer_program(const std::string& peer, const Say& say);

/// One after the other. A peer that can't be installed, started or measured is one warning. kCancelled alone is an
/// error.
Result<PeersFigures> measure_controller_peers(const std::vector<std::string>& peers, std::uint64_t num_hashes,
                                              std::uint64_t repeat, const PeerProgram& program, const Say& say);

/// `own` are kvferry's figures of the same run, "" where there is nothing to tell.
std::string controller_peers_table(const PeersFigures& figures, const nlohmann::json& own);

}  // namespace kvferry::bench
