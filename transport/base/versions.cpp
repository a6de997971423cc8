#include "transport/base/versions.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry {
namespace {

std::string described(const Speaker& speaker) {
  return fmt::format("{} ({}) speaks {}", speaker.name,
                     speaker.release.empty() ? "of an older kvferry" : fmt::format("kvferry {}", speaker.release),
                     to_text(speaker.versions));
}

}  // namespace

Result<std::uint32_t> common_version(std::string_view protocol, const Speaker& ours, const Speaker& theirs) {
  const std::uint32_t newest = std::min(ours.versions.newest, theirs.versions.newest);
  if (ours.versions.has(newest) && theirs.versions.has(newest)) return newest;
  return Error{ErrorCode::kRefused,
               fmt::format("no version of the {} in common: {}, {}; run kvferry releases that share one", protocol,
                           described(ours), described(theirs))};
}

std::string_view version() { return KVFERRY_VERSION; }

std::string to_text(const VersionRange& versions) {
  return versions.oldest == versions.newest ? fmt::format("version {}", versions.oldest)
                                            : fmt::format("versions {} to {}", versions.oldest, versions.newest);
}

}  // namespace kvferry
