// The decode side of pushes: lends slots to a prefill node that offers chunks (the receiver's credit), and takes them
// back whatever comes: when the other node settles, when its time is up, when a worker can't lend. Pure: the scheduler
// core owns one, tells it what happens, and carries its actions on.
//
// A slot's way: lent -> its workers are told to take it back -> every rank has -> ready, or free again. Until then it
// counts as being written, so nobody reads it and nobody else fills it.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "connector/core/chunk_pool.h"
#include "connector/core/push/push_wire.h"
#include "transport/base/clock.h"

namespace kvferry {

// ---- actions, to all workers ----
struct GrantSlots {
  GrantOrder order;
};
struct RevokeSlots {
  Revocation revocation;
};

struct PushReceiverConfig {
  std::string fingerprint;
  std::uint32_t chunk_tokens = 256;
  std::uint32_t num_ranks = 1;
  TimeNs ttl = 60 * kSecond;       // a reservation ends then, settled or not
  TimeNs arrived_ttl = 1 * kSecond;  // once the request itself has come: what is not there by then is pulled
  std::uint64_t first_ticket = 1;  // another one at each start: loans of a past life are strangers
};

class PushReceiver {
 public:
  using Actions = std::vector<std::variant<GrantSlots, RevokeSlots>>;

  PushReceiver(PushReceiverConfig config, ChunkPool& pool)
      : config_(std::move(config)), pool_(pool), next_ticket_(config_.first_ticket) {}

  /// Lends what the pool has room for, in order, up to half of its slots over all loans. `from` is for messages.
  PushReply offered(const std::string& from, const PushOffer& offer, TimeNs now);
  /// Workers could not lend these: they are taken back at once.
  void grant_failed(std::uint64_t ticket, std::span<const std::uint32_t> indices);
  /// Unknown tickets, chunks that were not lent and doubled words are ignored.
  void settled(const PushSettlement& settlement);
  /// One rank has taken slots back. Returns the chunks that are whole and verified now.
  std::vector<ChunkRef> revoked(const Revocation& answer);
  /// A request that waits for these chunks has come.
  void shorten_deadline(std::span<const ChunkKey> keys, TimeNs now);
  /// Nothing that is lent now will be believed, however it is settled.
  void invalidate();
  void tick(TimeNs now);
  Actions take_actions() { return std::exchange(actions_, {}); }

  std::size_t num_reservations() const { return reservations_.size(); }
  std::size_t num_granted_chunks() const { return by_key_.size(); }
  std::uint64_t num_received() const { return num_received_; }

 private:
  struct Chunk {
    ChunkKey key;
    ChunkRef slot;
    std::uint32_t num_tokens = 0;
    bool is_granted = false;  // else it is being taken back
    std::uint32_t ranks_left = 0;
  };
  struct Reservation {
    TimeNs deadline = 0;
    std::map<std::uint32_t, Chunk> chunks;  // by index; gone when taken back
  };
  void revoke(std::uint64_t ticket, Reservation& reservation, std::span<const SettledChunk> chunks);

  PushReceiverConfig config_;
  ChunkPool& pool_;
  std::map<std::uint64_t, Reservation> reservations_;
  std::unordered_map<ChunkKey, std::uint64_t> by_key_;  // of all chunks of all loans: the reservation
  std::uint64_t next_ticket_;
  std::uint64_t num_received_ = 0;
  Actions actions_;
};

}  // namespace kvferry
