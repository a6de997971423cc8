// Storage tiers of a chunk within a node.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry::controller {

/// The tiers are ordered from fast to slow. Their numbers are part of the protocol.
enum class Tier : std::uint8_t { kGpu = 0, kHost = 1, kDisk = 2, kRemote = 3 };
constexpr std::size_t kNumTiers = 4;

}  // namespace kvferry::controller
