// The interface between a backend and the contract suite, and helper functions for all transport tests.
#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace kvferry {

struct RemoteGrant {
  GrantId id;
  std::string exported;
};

/// A peer, usually in another process: a transport with one region, whose memory is visible to the test too.
class Remote {
 public:
  virtual ~Remote() = default;
  virtual std::string address() const = 0;
  virtual std::string region() const = 0;
  virtual std::span<std::byte> memory() = 0;
  /// Waits until the remote process has polled this many notifications (in all calls together), or until a time limit.
  virtual std::vector<Notification> wait_notifications(std::size_t num_notifications) = 0;
  /// The remote acts as the owner of its region: grants a part of it, revokes the grant, unregisters the region.
  virtual RemoteGrant grant(std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) = 0;
  RemoteGrant grant(std::uint64_t offset, std::uint64_t bytes) { return grant(offset, bytes, GrantTerms{}); }
  virtual ErrorCode revoke(GrantId grant) = 0;
  virtual ErrorCode unregister() = 0;
  /// Returns Transport::num_refused() of the remote.
  virtual std::uint64_t num_refused() = 0;
  virtual void shut_down() = 0;
  virtual void kill() = 0;
  /// Stops the remote (SIGSTOP): transfers with it make no progress until go_on().
  virtual void stop() = 0;
  virtual void go_on() = 0;
};

inline ErrorCode code_of(const Result<void>& result) { return result ? ErrorCode::kOk : result.error().code; }

/// A backend. Each test constructs one. name() is a part of the names of tests.
class Fixture {
 public:
  virtual ~Fixture() = default;
  virtual std::unique_ptr<Transport> make_transport(std::uint32_t transfers_max) = 0;
  virtual std::unique_ptr<Remote> make_remote(std::uint64_t bytes) = 0;
  /// Returns whether a stopped remote process stops transfers with it.
  virtual bool needs_running_remote() const { return true; }
  /// Returns whether peers can't use a descriptor after unregister_region().
  virtual bool enforces_unregister() const { return true; }
  virtual bool has_grants() const { return true; }
  /// Returns whether a stopped peer that owes an answer is lost after a while.
  virtual bool notices_silence() const { return true; }
};

constexpr auto kPatience = std::chrono::seconds(30);  // limit on each wait; a longer wait fails the test

inline bool is_readable(int fd, std::chrono::milliseconds timeout = {}) {
  pollfd waiting{fd, POLLIN, 0};
  return ::poll(&waiting, 1, static_cast<int>(timeout.count())) == 1;
}

/// Calls `take` until `wanted` results are there, or until kPatience has passed. The caller checks the number.
template <class Take>
auto wait_for(Transport& transport, std::size_t wanted, Take take) {
  decltype(take()) all;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (all.size() < wanted && std::chrono::steady_clock::now() < deadline) {
    is_readable(transport.event_fd(), std::chrono::milliseconds(20));
    for (auto& one : take()) all.push_back(std::move(one));
  }
  return all;
}
inline std::vector<Completion> wait_completions(Transport& transport, std::size_t wanted) {
  return wait_for(transport, wanted, [&] { return transport.poll(); });
}
inline std::vector<Notification> wait_notifications(Transport& transport, std::size_t wanted) {
  return wait_for(transport, wanted, [&] { return transport.poll_notifications(); });
}

/// Returns when every earlier transfer has been posted as far as possible. The progress thread answers the second
/// registration only after a round that has read everything that was submitted before the first.
inline void wait_until_posted(Transport& transport) {
  std::byte memory[64];
  for (int round = 0; round < 2; ++round) {
    const Result<RegionId> region = transport.register_region(memory, sizeof(memory));
    if (region) static_cast<void>(transport.unregister_region(*region));
  }
}

inline void fill(std::span<std::byte> memory, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
}

/// Returns ranges of 0 to bytes_max bytes, in random order on both sides, unaligned, with gaps, without overlaps.
inline std::vector<CopyRange> random_ranges(std::uint64_t seed, std::size_t num_ranges, std::uint64_t bytes_max) {
  std::mt19937_64 random(seed);
  std::vector<CopyRange> ranges(num_ranges);
  for (CopyRange& range : ranges) range.bytes = random() % (bytes_max + 1);
  std::vector<std::size_t> order(num_ranges);
  std::iota(order.begin(), order.end(), 0);
  const auto lay_out = [&](auto member) {
    std::shuffle(order.begin(), order.end(), random);
    std::uint64_t offset = 0;
    for (const std::size_t index : order) {
      offset += random() % 3;
      ranges[index].*member = offset;
      offset += ranges[index].bytes;
    }
  };
  lay_out(&CopyRange::local_offset);
  lay_out(&CopyRange::remote_offset);
  return ranges;
}

}  // namespace kvferry
