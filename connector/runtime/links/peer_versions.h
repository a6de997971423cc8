// Which version of the node protocol to speak with which other node.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "connector/runtime/links/node_wire.h"
#include "transport/base/result.h"
#include "transport/base/versions.h"

namespace kvferry {

/// The first message to a node is in the oldest version that this node speaks. Each message names the versions of its
/// sender; after the first answer both use the newest version that they share. Pure. Threads: one.
class PeerVersions {
 public:
  explicit PeerVersions(VersionRange ours = kNodeWire) : ours_(ours) {}

  std::uint32_t spoken_with(const std::string& endpoint) const;
  /// Takes the versions from an answer. kRefused, with a sentence: the nodes share no version, or this answer is in a
  /// version that this node does not speak.
  Result<void> learn(const std::string& endpoint, const Envelope& envelope);
  void drop(const std::string& endpoint) { spoken_.erase(endpoint); }
  /// Whether a request can be read. kRefused: as above; the sentence is for the node that asks.
  Result<void> check(const std::string& who, const Envelope& envelope) const;

 private:
  Result<std::uint32_t> common(const std::string& who, const Envelope& envelope) const;

  VersionRange ours_;
  std::map<std::string, std::uint32_t> spoken_;
};

}  // namespace kvferry
