// The key that only the members of a deployment have. `kvferry keygen` writes one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "transport/base/result.h"

namespace kvferry::net {

/// The key is used only to derive a key for each purpose, so that no derived key reveals anything about another one.
class ClusterKey {
 public:
  static constexpr std::size_t kBytesMin = 32, kBytesMax = 65536;
  using Derived = std::array<std::uint8_t, 32>;

  explicit ClusterKey(std::string bytes) : bytes_(std::move(bytes)) {}

  /// Returns HMAC-SHA256 of `purpose` under the key.
  Derived derived(std::string_view purpose) const;

 private:
  std::string bytes_;
};

/// Returns the key, which is the whole content of the file, or nullopt if the name `file` is empty, which means that no
/// key is configured. kInvalidArgument: the file can't be read, has a mode other than 0600 and 0400, or is too short or
/// too long.
Result<std::optional<ClusterKey>> read_cluster_key(const std::string& file);

}  // namespace kvferry::net
