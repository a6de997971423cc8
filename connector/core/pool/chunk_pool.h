// The slot table of a chunk pool: the chunk in each slot, the slot's pins, and the order of eviction. The table has
// only metadata. The bytes are in the workers' pools: each rank stores its share of a chunk in the slot with the same
// number. The class has no I/O and no clock: the caller passes the time.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "connector/core/chunk_meta.h"
#include "connector/core/plan.h"
#include "connector/core/pool/provenance.h"
#include "connector/core/pool/tenant_slots.h"
#include "connector/core/pool_changes.h"
#include "transport/base/chunk_key.h"
#include "transport/base/clock.h"

namespace kvferry {

using PinId = StrongId<struct PinIdTag, std::uint64_t>;  // id of a pin; 0 stands for no pin

class ChunkPool {
 public:
  ChunkPool(std::uint32_t num_slots, std::uint32_t num_ranks);

  /// kRetired: the slot's key was removed, but the slot is still pinned or written. The slot becomes free when its last
  /// pin and its last write have ended.
  enum class State : std::uint8_t { kFree, kWriting, kReady, kRetired };
  struct Slot {
    State state = State::kFree;
    ChunkRef ref;
    ChunkMeta meta;
    std::vector<std::uint64_t> checksums;  // [rank] checksum of the rank's bytes; valid once the state was kReady
    std::vector<bool> written;             // [rank] true if the rank has reported the end of its write
    std::uint32_t ranks_done = 0;
    /// [rank] true if the rank has the chunk, verified, in a frame of GPU memory, and is copying it to the slot. The
    /// chunk can be loaded, other nodes can read it from frames only, and the slot is not reused.
    std::vector<bool> in_frame;
    std::uint32_t ranks_in_frames = 0;  // number of ranks for which `in_frame` is true
    bool write_failed = false;
    bool is_named = false;  // true if name() has returned true for the chunk
    std::uint32_t pins = 0;
    std::string writer;  // what writes the slot, such as a request's save; empty unless the state is kWriting
    Givers givers;       // nodes that the KV, or the KV from which it was computed, has passed through
    TenantSlots::Tenant* tenant = nullptr;  // tenant of the chunk; nullptr in state kFree
    TenantSlots::Lru::iterator lru;         // place in Tenant::ready; valid only in state kReady

    /// True if other nodes can read the chunk; `in_frames` is true for a node that reads it from frames.
    bool is_readable(bool in_frames) const { return state == State::kReady && (in_frames || ranks_in_frames == 0); }
    /// True if all bytes of the chunk are in the slot, where every node can read them.
    bool is_complete() const { return is_readable(false); }
    bool is_in_frame(std::uint32_t rank) const { return rank < in_frame.size() && in_frame[rank]; }
  };

  /// Returns the slot that contains the chunk `key` or into which the chunk is being written, nullptr if there is none.
  const Slot* find(const ChunkKey& key) const;
  const Slot& slot(std::uint32_t index) const { return slots_[index]; }
  /// Returns the newest ready tails of a group, newest first.
  std::vector<const Slot*> tails(const ChunkKey& group) const;

  /// Reserves a slot for writing the chunk `meta`, which must not be in the pool. If no slot is free, evicts the chunk
  /// that TenantSlots::victim() chooses among those without pins that are not being copied from a frame, and reserves
  /// its slot. Returns nullopt if victim() finds none.
  std::optional<ChunkRef> reserve(const ChunkMeta& meta, const std::string& writer, Givers givers = {});
  /// Records that a rank has ended the write of its share of the chunk. Once all ranks have reported, the slot becomes
  /// ready; if any rank failed, or fail_write() was called, it becomes free, or kRetired while it is in use. Returns
  /// true if the slot became ready. `in_frame` is true if the rank has the chunk in a frame; slot_written() then
  /// follows.
  bool rank_written(ChunkRef chunk, std::uint32_t rank, bool ok, std::uint64_t checksum, bool in_frame = false);
  /// Records that a rank's copy of the chunk from a frame to the slot has ended. If it failed, the chunk is dropped.
  /// Returns true if the chunk is ready and, with this copy, is in every rank's slot.
  bool slot_written(ChunkRef chunk, std::uint32_t rank, bool ok);
  /// Adds `givers` to Slot::givers of a chunk that is being written.
  void add_givers(ChunkRef chunk, const Givers& givers);
  /// Replaces the windows of the chunk, which must be in state kWriting, by those in `meta`.
  void set_windows(ChunkRef chunk, const ChunkMeta& meta);
  /// Marks the write in progress as failed, whatever the ranks report later.
  void fail_write(ChunkRef chunk);
  /// Marks the write in progress as failed, and lets another slot be reserved for the chunk's key. The slot of `chunk`
  /// stays in use until all ranks have reported, because a peer may still write into it.
  void abandon_write(ChunkRef chunk);
  /// Evicts a ready chunk, so that no lookup finds the chunk. The slot becomes free when its last pin and its last
  /// write have ended. Does nothing if the chunk is not ready or not in the pool.
  void invalidate(ChunkRef chunk);

  /// Marks the chunks as just used, the first one as the most recent, so that a prefix is evicted from its end.
  void touch(std::span<const ChunkRef> chunks);
  /// Makes this chunk the next one of its tenant to evict, because a newer chunk contains its tokens.
  void demote(ChunkRef chunk);

  /// Pins the chunks until unpin() or the deadline. `owner` says what the pin is for.
  PinId pin(std::vector<ChunkRef> chunks, std::string owner, TimeNs now, TimeNs deadline);
  /// Returns false if the pin has expired or is unknown.
  bool unpin(PinId id);
  bool pinned(PinId id) const { return pins_.contains(id.value); }
  /// Ends the pins whose deadline has passed. Returns their owners.
  std::vector<std::string> expire_pins(TimeNs now);
  /// Marks the tenants that have not used a chunk for `idle_after` as idle: an idle tenant has no share of the pool.
  void find_idle_tenants(TimeNs now, TimeNs idle_after) { tenants_.advance(now, idle_after); }

  /// Returns the keys of the chunks evicted since the last call, but not of chunks that some rank had only in a frame.
  /// The caller reports these keys to the controller.
  std::vector<ChunkKey> take_evicted() { return std::exchange(evicted_, {}); }
  /// Begins to record which chunks the pool gets and loses, for take_changes().
  void track_changes() { changed_.emplace(); }
  /// Returns the state of each chunk that became ready, was evicted or failed to be written since the last call. If
  /// some of these changes were dropped, returns the states of all chunks.
  PoolChanges take_changes();
  /// Returns true at the first call for a chunk, if changes are tracked. The caller then reports the chunk's tokens.
  bool name(ChunkRef chunk);
  /// Returns all ready slots, tenant by tenant; those of one tenant in the order of eviction.
  std::vector<const Slot*> ready() const;

  std::uint32_t num_slots() const { return static_cast<std::uint32_t>(slots_.size()); }
  std::uint32_t num_pinned() const { return pinned_; }
  std::uint32_t num_ready() const { return ready_; }
  std::size_t num_pins() const { return pins_.size(); }
  struct Pin {
    std::vector<ChunkRef> chunks;
    std::string owner;
    TimeNs deadline = 0;
  };
  /// Returns all pins, keyed by PinId::value.
  const std::map<std::uint64_t, Pin>& pins() const { return pins_; }
  std::uint32_t num_writing() const { return writing_; }
  const TenantSlots& tenants() const { return tenants_; }
  /// Returns how many chunks were evicted to make room for a chunk of another tenant.
  std::uint64_t num_evicted_for_tenants() const { return evicted_for_tenants_; }

 private:
  static bool is_used(const Slot& slot) { return slot.pins > 0 || slot.ranks_in_frames > 0; }
  Slot& checked(ChunkRef chunk);
  void evict(Slot& slot);
  void erase_key(const Slot& slot);
  void free_or_retire(Slot& slot);
  void note_change(const ChunkKey& key);

  std::uint32_t num_ranks_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  TenantSlots tenants_;
  std::uint64_t evicted_for_tenants_ = 0;
  std::uint32_t ready_ = 0;
  std::uint32_t writing_ = 0;
  std::uint32_t pinned_ = 0;
  std::unordered_map<ChunkKey, std::uint32_t> by_key_;
  /// [tail group] Slots of the group's newest tails, oldest first.
  std::unordered_map<ChunkKey, std::vector<std::uint32_t>> by_group_;
  std::map<std::uint64_t, Pin> pins_;
  std::uint64_t last_pin_ = 0;
  std::vector<ChunkKey> evicted_;
  std::optional<std::vector<ChunkKey>> changed_;  // keys for take_changes(); nullopt if changes are not tracked
  bool has_dropped_changes_ = false;              // true if changed_ became too long, and was cleared
};

}  // namespace kvferry
