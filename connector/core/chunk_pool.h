// The slot table of a chunk pool: which chunk lies in which slot, who holds it, what may be evicted. Metadata only; the
// bytes lie in the workers, every rank's share in the same slot. Pure: time is handed in.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "connector/core/plan.h"
#include "transport/base/chunk_key.h"
#include "transport/base/clock.h"

namespace kvferry {

using PinId = StrongId<struct PinIdTag, std::uint64_t>;  // 0: none

struct ChunkMeta {
  ChunkKey key;
  std::uint32_t num_tokens = 0;
  bool is_tail = false;
  std::optional<ChunkKey> tail_group;
  std::uint32_t window_from = 0;  // layers with a sliding window have KV from this token of the chunk on
};

class ChunkPool {
 public:
  ChunkPool(std::uint32_t num_slots, std::uint32_t num_ranks);

  /// kRetired: its key is gone, but a hold still reads it; free when the last hold ends.
  enum class State : std::uint8_t { kFree, kWriting, kReady, kRetired };
  struct Slot {
    State state = State::kFree;
    ChunkRef ref;
    ChunkMeta meta;
    std::vector<std::uint64_t> checksums;  // [rank]; valid in kReady
    std::vector<bool> written;             // [rank]; who has reported this write
    std::uint32_t ranks_done = 0;
    bool write_failed = false;
    std::uint32_t pins = 0;
    std::string writer;                      // owner of the write, for messages; empty when idle
    std::list<std::uint32_t>::iterator lru;  // valid in kReady
  };

  /// The slot that holds or will hold `key`, or nullptr.
  const Slot* find(const ChunkKey& key) const;
  const Slot& slot(std::uint32_t index) const { return slots_[index]; }
  /// Tails of a group, newest first; some may still be written.
  std::vector<const Slot*> tails(const ChunkKey& group) const;

  /// Takes a slot for writing `meta`, which must not be in the pool: a free one, else the least recently used unpinned
  /// one, whose key then stands in take_evicted(). nullopt: every slot is pinned or being written.
  std::optional<ChunkRef> reserve(const ChunkMeta& meta, const std::string& writer);
  /// One rank's outcome of a write. Ready when all ranks wrote; freed when any failed. Returns true when it became
  /// ready.
  bool rank_written(ChunkRef chunk, std::uint32_t rank, bool ok, std::uint64_t checksum);
  /// Of a chunk that is being written: from which token on it has what windows attend to (ChunkMeta::window_from).
  void set_window_from(ChunkRef chunk, std::uint32_t window_from);
  /// The write under way can't be trusted: however it ends, it counts as failed.
  void fail_write(ChunkRef chunk);
  /// Frees a slot that nobody writes any more (a pull that was given up before it started).
  void abandon(ChunkRef chunk);
  /// Forgets a ready chunk's key, so that no look-up finds it; the slot is freed when its last pin goes.
  void invalidate(ChunkRef chunk);

  /// Marks as just used, in order, so that a chain's end is evicted before its start.
  void touch(std::span<const ChunkRef> chunks);
  /// Evict this one first: a newer chunk covers it.
  void demote(ChunkRef chunk);

  /// One hold on many chunks, until unpin() or the deadline.
  PinId pin(std::vector<ChunkRef> chunks, std::string owner, TimeNs now, TimeNs deadline);
  /// False when the hold had expired or never was.
  bool unpin(PinId id);
  bool pinned(PinId id) const { return pins_.contains(id.value); }
  /// Ends holds whose deadline has passed; returns their owners.
  std::vector<std::string> expire_pins(TimeNs now);

  /// Keys evicted or condemned since the last call: announce them before the plan that reuses their memory goes out.
  std::vector<ChunkKey> take_evicted();
  /// All ready chunks, for a snapshot to the controller.
  std::vector<const Slot*> ready() const;

  std::uint32_t num_slots() const { return static_cast<std::uint32_t>(slots_.size()); }
  std::uint32_t num_pinned() const { return pinned_; }
  std::uint32_t num_ready() const { return static_cast<std::uint32_t>(lru_.size()); }
  std::size_t num_pins() const { return pins_.size(); }
  struct Pin {
    std::vector<ChunkRef> chunks;
    std::string owner;
    TimeNs deadline = 0;
  };
  /// All holds, by number.
  const std::map<std::uint64_t, Pin>& pins() const { return pins_; }
  std::uint32_t num_writing() const { return writing_; }

 private:
  Slot& checked(ChunkRef chunk);
  void retire(Slot& slot);
  void free_or_retire(Slot& slot);

  std::uint32_t num_ranks_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::list<std::uint32_t> lru_;  // ready slots, least recently used first
  std::uint32_t writing_ = 0;
  std::uint32_t pinned_ = 0;
  std::unordered_map<ChunkKey, std::uint32_t> by_key_;
  std::unordered_map<ChunkKey, std::vector<std::uint32_t>> by_group_;  // oldest first
  std::map<std::uint64_t, Pin> pins_;
  std::uint64_t last_pin_ = 0;
  std::vector<ChunkKey> evicted_;
};

}  // namespace kvferry
