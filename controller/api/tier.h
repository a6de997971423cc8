// Where in a node a chunk lies.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry::controller {

/// Fastest first. The numbers travel on the wire.
enum class Tier : std::uint8_t { kGpu = 0, kHost = 1, kDisk = 2, kRemote = 3 };
constexpr std::size_t kNumTiers = 4;

}  // namespace kvferry::controller
