// The decode side of pushes between nodes that both have frames of GPU memory; it has no I/O. A grant of GPU memory
// could not be revoked, so no other node writes into this node's frames. Instead the prefill node announces each chunk
// when the chunk is complete, and this node pulls it at once: from frame to frame if a measured path leads there.
//
// AnnouncedPushes knows which chunks were offered and announced. SchedulerCore leases and pulls them
// (scheduler_announced.cpp). A chunk is in one of these places of its push:
//
//   expect() -> expected -> settled() -> complete -> the core sends a lease request -> asked -> the core starts the
//   pull
//
// Before settled(), the prefill node may announce layers of an expected chunk: the chunk is then growing. The core
// leases it, and pulls its layers as they are announced; the settlement has the checksums and ends the growth.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "connector/core/chunk_meta.h"
#include "connector/core/push_wire.h"
#include "transport/base/clock.h"

namespace kvferry {

class AnnouncedPushes {
 public:
  /// An expected chunk of which layers were announced.
  struct Growing {
    enum class State : std::uint8_t {
      kTold,    // no lease request names the chunk yet
      kAsked,   // the lease request in progress names it
      kPulled,  // it is item `item` of the pull `pull`
      kRefused  // it was not leased, and is pulled once it is settled
    };
    State state = State::kTold;
    std::uint32_t done = 0, of = 1;  // as in PushProgress
    std::uint64_t pull = 0;
    std::uint32_t item = 0;
    std::optional<SettledChunk> settled = {};  // set if the settlement came in state kAsked
  };
  struct Push {
    std::string endpoint;                           // the prefill node, as its offer names it
    std::string member;                             // name of the member whose key the offer's sender used; empty: none
    std::uint64_t push = 0;                         // the prefill node's number of the push
    TimeNs deadline = 0;                            // time at which the push expires
    std::map<std::uint32_t, ChunkMeta> expected{};  // [index in the offer] chunks that may still be announced
    std::vector<ChunkMeta> complete{};              // announced chunks that no lease request names yet
    std::vector<ChunkMeta> asked{};                 // chunks of the lease request in progress; empty: there is none
    std::map<std::uint32_t, Growing> growing{};     // [index in the offer] those of `expected` that are growing
    std::vector<std::uint32_t> asked_growing{};  // the last chunks of `asked` are growing; their indices in the offer
    std::uint64_t fetch = 0;                     // RequestLease::fetch of the lease request in progress
    TimeNs try_deadline = 0;                     // time at which that request counts as lost

    std::size_t num_chunks() const { return expected.size() + complete.size() + asked.size(); }
  };
  using Pushes = std::map<std::uint64_t, Push>;
  /// Limit on the endpoints of all pushes. Offers name their endpoint themselves, and this node connects to it.
  static constexpr std::size_t kEndpointsMax = 128;

  /// Returns false if a push from this endpoint would exceed kEndpointsMax.
  bool has_room_for(const std::string& endpoint) const {
    std::set<std::string_view> endpoints{endpoint};
    for (const auto& [id, push] : pushes_) endpoints.insert(push.endpoint);
    return endpoints.size() <= kEndpointsMax;
  }
  /// `id` is the number that settlements of the push must name.
  void expect(std::uint64_t id, Push push) { pushes_.emplace(id, std::move(push)); }
  /// Returns the push whose messages name this id, nullptr if there is none.
  Push* find(std::uint64_t id) {
    const auto found = pushes_.find(id);
    return found == pushes_.end() ? nullptr : &found->second;
  }
  /// Returns the push whose lease request this is, nullptr if no push waits for it.
  Push* waiting_for(std::uint64_t fetch) {
    const auto is_it = [&](const auto& entry) { return !entry.second.asked.empty() && entry.second.fetch == fetch; };
    const auto found = std::find_if(pushes_.begin(), pushes_.end(), is_it);
    return found == pushes_.end() ? nullptr : &found->second;
  }
  /// Removes the pushes that have no chunk left, and those whose deadline has passed. A lease that is answered after
  /// that is released, and pulls in progress go on.
  void erase_ended(TimeNs now) {
    std::erase_if(pushes_,
                  [&](const auto& entry) { return entry.second.num_chunks() == 0 || entry.second.deadline <= now; });
  }
  void clear() { pushes_.clear(); }

  Pushes& pushes() { return pushes_; }
  std::size_t size() const { return pushes_.size(); }
  /// Returns the number of chunks of all pushes that are not being pulled yet.
  std::size_t num_chunks() const {
    std::size_t sum = 0;
    for (const auto& [id, push] : pushes_) sum += push.num_chunks();
    return sum;
  }

 private:
  Pushes pushes_;  // [id]
};

}  // namespace kvferry
