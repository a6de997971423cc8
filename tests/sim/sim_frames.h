// The frames of GPU memory of one rank: the real tables of frames and of leased frames, and stamps for what the frames
// hold.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "connector/core/frame_table.h"
#include "connector/core/leased_frames.h"
#include "sim_text.h"
#include "transport/base/clock.h"

namespace kvferry::sim {

class Frames {
 public:
  explicit Frames(std::uint32_t num_frames) : table_(num_frames), stamps_(num_frames), num_filled_(num_frames) {}
  Frames(const Frames&) = delete;  // leased_ refers to table_

  /// Writes a saved chunk (kGathering), or one of another node (kLanding), into a frame. Returns false if no frame is
  /// free. After true, written_back() must follow when the copy to the chunk's slot has ended.
  bool write(ChunkRef chunk, FrameTable::State purpose, const std::vector<Stamp>& stamps, std::uint64_t checksum);
  void written_back(ChunkRef chunk, bool ok);
  /// Reserves a frame for a chunk of `num_stamps` stamps, which put() fills in parts. Until then the frame has what it
  /// had before. `purpose` is as in write(). Returns false if no frame is free. After true, end() must follow.
  bool begin(ChunkRef chunk, FrameTable::State purpose, std::size_t num_stamps);
  void put(ChunkRef chunk, std::size_t first, std::span<const Stamp> stamps);
  /// Ends what begin() began. If ok, written_back() must follow; else the frame belongs to no chunk any more.
  void end(ChunkRef chunk, bool ok, std::uint64_t checksum);
  /// Returns what the frame that put() fills holds.
  const std::vector<Stamp>& filled(ChunkRef chunk) const { return stamps_.at(filling_.at(chunk).frame.frame); }
  /// Separates the frame of a slot that gets other bytes.
  void drop(std::uint32_t slot) { table_.drop_slot(slot); }
  /// Returns what the frame holds from which the chunk can be loaded; nullptr if there is no such frame.
  const std::vector<Stamp>* find(ChunkRef chunk) const;

  // ---- what other nodes read under a lease ----
  std::vector<std::uint32_t> pin(std::uint64_t lease, std::span<const ChunkRef> chunks, TimeNs until,
                                 const std::vector<bool>& are_growing) {
    return leased_.begin(lease, chunks, until, are_growing);
  }
  void unpin(std::uint64_t lease) { leased_.end(lease); }
  void expire(TimeNs now) { leased_.expire(now); }
  /// Returns what a peer's one-sided read would get now; empty if there is no such frame.
  std::vector<Stamp> read(std::uint32_t frame) const {
    return frame < stamps_.size() ? stamps_[frame] : std::vector<Stamp>{};
  }
  /// Returns true if the frame holds the chunk, though the slot may have another one by now.
  bool holds(std::uint32_t frame, ChunkRef chunk) const {
    return frame < stamps_.size() && table_.frame({frame, 0}).chunk == chunk;
  }
  /// Returns up to which stamp the frame is filled.
  std::size_t num_filled(std::uint32_t frame) const { return frame < num_filled_.size() ? num_filled_[frame] : 0; }
  /// Returns the number of pins, for leases and for copies to slots.
  std::size_t num_pins() const { return table_.pins().size(); }

 private:
  FrameTable table_;
  LeasedFrames leased_{table_};
  std::vector<std::vector<Stamp>> stamps_;  // [frame]
  std::vector<std::size_t> num_filled_;     // [frame]
  std::map<ChunkRef, FrameTable::Reserved> filling_, writing_back_;
};

}  // namespace kvferry::sim
