#include "connector/runtime/links/peer_versions.h"

namespace kvferry {

std::uint32_t PeerVersions::spoken_with(const std::string& endpoint) const {
  const auto known = spoken_.find(endpoint);
  return known == spoken_.end() ? ours_.oldest : known->second;
}

Result<void> PeerVersions::learn(const std::string& endpoint, const Envelope& envelope) {
  const Result<std::uint32_t> version = common("the node at " + endpoint, envelope);
  if (!version) return version.error();
  spoken_[endpoint] = *version;
  if (ours_.has(envelope.version)) return {};
  return Error{ErrorCode::kRefused,
               fmt::format("the answer is in node protocol version {}; the next request will be in version {}",
                           envelope.version, *version)};
}

Result<void> PeerVersions::check(const std::string& who, const Envelope& envelope) const {
  const Result<std::uint32_t> version = common(who, envelope);
  if (!version) return version.error();
  if (ours_.has(envelope.version)) return {};
  return Error{ErrorCode::kRefused, fmt::format("this node does not speak node protocol version {}; ask in version {}",
                                                envelope.version, *version)};
}

Result<std::uint32_t> PeerVersions::common(const std::string& who, const Envelope& envelope) const {
  const VersionRange theirs = envelope.newest == 0 ? VersionRange{envelope.version, envelope.version}
                                                   : VersionRange{envelope.oldest, envelope.newest};
  return common_version("node protocol", {"this node", version(), ours_}, {who, envelope.release, theirs});
}

}  // namespace kvferry
