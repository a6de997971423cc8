// SlotGrants is the part of the service loop for the receiving side of pushes. It grants other nodes access to slots of
// this rank's pool, and revokes the grants, after which other nodes can't write the slots any more.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "connector/core/push_wire.h"
#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/worker/worker_parts.h"

namespace kvferry {

/// Grants and revokes access to the slots of one rank. All methods run on the service thread.
class SlotGrants {
 public:
  SlotGrants(const WorkerParts& parts, const SendOutcome& send) : parts_(parts), send_(send) {}

  void grant(const GrantOrder& order);
  void revoke(const Revocation& order);
  /// Called for each chunk of take_landed() that belongs to no pull. Records the outcome of the chunk's revocation,
  /// unless the chunk is in a frame only: the store then returns it once more. Returns false if no revocation has given
  /// this chunk to the store.
  bool landed(const ChunkStore::Landed& chunk);
  /// Retries revocations that wait for the end of a peer's copy, and sends the outcomes. Returns true if an outcome was
  /// sent.
  bool progress();
  /// Returns true if a revocation waits for the end of a peer's copy, or for landed() with a chunk that was given to
  /// the store. In both cases the caller must soon call progress() again.
  bool is_waiting() const { return !revoking_.empty() || !landing_.empty(); }

 private:
  struct GrantedSlot {
    ChunkRef chunk;
    std::optional<GrantId> grant;  // the transport's grant; empty: there is none, or it was revoked
    bool has_begun = false;        // true if the core has begun a write of the slot; false: the order was refused
    bool has_place = false;        // true if the store has given the chunk a place: ChunkStore::landed() must follow
    std::optional<RevokedChunk> revoking;  // the revoked chunk that was passed to revoke(); empty: not revoked yet
  };
  /// A pair: the id of the slot reservation (PushReply::reservation), and the chunk's index in the offer.
  using Key = std::pair<std::uint64_t, std::uint32_t>;

  std::string grant(const GrantedChunk& wanted, const GrantTerms& terms, GrantedSlot& slot);
  Result<std::string> grant_place(const GrantedChunk& wanted, const GrantTerms& terms, GrantedSlot& slot);
  void take_back(const Key& key, GrantedSlot& slot);
  void end(const Key& key, bool ok);

  const WorkerParts& parts_;
  const SendOutcome& send_;
  std::map<Key, GrantedSlot> slots_;
  std::set<Key> revoking_;  // slots whose revocation waits for the end of a peer's copy
  std::map<ChunkRef, Key> landing_;
  std::map<std::uint64_t, Revoked> outcomes_;  // keyed by the id of the slot reservation
  std::uint64_t num_not_granted_ = 0;          // number of slots not granted because of an error
};

}  // namespace kvferry
