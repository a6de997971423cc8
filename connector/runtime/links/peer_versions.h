// Which version of the node protocol to speak with which other node.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "connector/runtime/links/node_wire.h"
#include "transport/base/result.h"
#include "transport/base/versions.h"

namespace kvferry {

/// A node is first spoken to in the oldest version that this side speaks, and tells what it speaks with each message;
/// from then on it is the newest that both have. Pure. Threads: one.
class PeerVersions {
 public:
  explicit PeerVersions(VersionRange ours = kNodeWire) : ours_(ours) {}

  std::uint32_t spoken_with(const std::string& endpoint) const;
  /// From what came from there. kRefused: nothing in common, or it is in another version than ours; in a sentence.
  Result<void> learn(const std::string& endpoint, const Envelope& envelope);
  void forget(const std::string& endpoint) { spoken_.erase(endpoint); }
  /// Whether a request of whoever can be read. kRefused: as above; the sentence is its answer.
  Result<void> check(const std::string& who, const Envelope& envelope) const;

 private:
  Result<std::uint32_t> common(const std::string& who, const Envelope& envelope) const;

  VersionRange ours_;
  std::map<std::string, std::uint32_t> spoken_;
};

}  // namespace kvferry
