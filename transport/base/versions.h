// Compatibility of kvferry releases: each side of a protocol that has several versions reports which versions it
// speaks, and both use the newest that they have in common.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "transport/base/result.h"

namespace kvferry {

struct VersionRange {
  std::uint32_t oldest = 0, newest = 0;
  bool has(std::uint32_t version) const { return oldest <= version && version <= newest; }
  bool operator==(const VersionRange&) const = default;
};

/// One side of a protocol: the versions that it speaks, and its name in a refusal.
struct Speaker {
  std::string_view name;     // name of the side in a refusal, e.g. "this controller"
  std::string_view release;  // kvferry version of this side; empty: unknown
  VersionRange versions;
};

/// Returns the newest version that both speak. Errors: kRefused if there is none, with both sides' versions and
/// releases.
Result<std::uint32_t> common_version(std::string_view protocol, const Speaker& ours, const Speaker& theirs);

/// Returns the version of this build of kvferry.
std::string_view version();

/// Returns "version 2" or "versions 2 to 4".
std::string to_text(const VersionRange& versions);

}  // namespace kvferry
