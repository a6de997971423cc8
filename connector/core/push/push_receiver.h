// The decode side of pushes, a part of the scheduler core; it has no I/O. PushReceiver reserves slots for the chunks
// that a prefill node offers, and orders the workers to grant access to these slots. It orders the workers to revoke a
// grant when the prefill node settles the chunk (reports that it is complete, or will not be), at the deadline, or if a
// worker cannot grant access.
//
// Until every rank has revoked its grant, a reserved slot counts as being written: it is not reused, and only loads of
// StepPlan::ahead read it. Afterwards the chunk is ready, or is dropped. If a rank can't revoke its grant in time,
// another slot can be reserved for the chunk, and the first slot stays out of use until the rank has revoked its grant.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "connector/core/pool/provenance.h"
#include "connector/core/push/announced_pushes.h"
#include "connector/core/push/push_parts.h"
#include "transport/base/clock.h"

namespace kvferry {

class PushReceiver {
 public:
  /// `announced` gets the pushes that need no slots, because this node pulls their chunks.
  PushReceiver(PushParts parts, AnnouncedPushes& announced) : parts_(parts), announced_(announced) {}

  /// Reserves slots in the order of the offer, until all reservations together have half of the pool's slots, or three
  /// quarters of them with the slots whose writers did not leave them in time. `from` describes the offer in
  /// Slot::writer. `member` and `push`: as in SchedulerCore::push_offered(). Nothing is reserved for an offer with
  /// PushOffer::has_frames, but the same half of the pool limits its chunks.
  PushReply offered(const std::string& from, const PushOffer& offer, const std::string& member, std::uint64_t push,
                    TimeNs now);
  /// Revokes all grants of these chunks at once, because a worker could not grant access to the chunks' slots.
  void grant_failed(std::uint64_t id, std::span<const std::uint32_t> indices);
  /// Revokes the grants of the settled chunks. Ignores chunks that are not granted any more. A settlement whose id no
  /// slot reservation has is counted and ignored.
  void settled(const PushSettlement& settlement);
  /// Records that one rank has revoked its grants. Returns the chunks that became ready.
  std::vector<ChunkRef> revoked(const Revocation& answer);
  /// Shortens the deadlines of these chunks' reservations, because a request waits for the chunks. Chunks that
  /// are missing at the new deadline are pulled.
  void shorten_deadline(std::span<const ChunkMeta> chunks, TimeNs now);
  /// Makes the write of every reserved chunk fail, even if the prefill node settles the chunk as complete.
  void invalidate();
  void tick(TimeNs now);

  std::size_t num_reservations() const { return reservations_.size(); }
  std::size_t num_reserved_chunks() const { return reservation_of_.size(); }

 private:
  struct Chunk {
    ChunkKey key;
    ChunkRef slot;
    std::uint32_t num_tokens = 0;
    bool is_granted = false;  // true while the sender may write the chunk; false once the revocation has begun
    std::uint32_t ranks_left = 0;
  };
  struct Reservation {
    TimeNs deadline = 0;
    Givers givers;                          // the prefill node, as its offer names it, and its member
    std::map<std::uint32_t, Chunk> chunks;  // [index in the offer] chunks of which some rank has not revoked its grant
  };
  void revoke(std::uint64_t id, Reservation& reservation, std::span<const SettledChunk> chunks);
  bool erase_reservation_of(const ChunkKey& key, std::uint64_t id);

  PushParts parts_;
  AnnouncedPushes& announced_;
  std::map<std::uint64_t, Reservation> reservations_;           // [id of the slot reservation] state of the reservation
  std::unordered_map<ChunkKey, std::uint64_t> reservation_of_;  // [chunk] id of its slot reservation
  std::size_t num_used_ = 0;  // slots of all reservations, also those whose write was abandoned
};

}  // namespace kvferry
