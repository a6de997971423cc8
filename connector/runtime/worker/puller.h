// Puller is the part of the service loop that executes PullOrders: it copies chunks of other nodes into this rank's
// pool, verifies them, and reports one outcome for each order. A chunk has landed when the store reports that the chunk
// is in its slot or, verified, in a frame, or that its landing failed. For a chunk that an outcome reports in a frame,
// Puller sends a SlotsWritten message when the chunk's copy to its slot has ended.
//
// A chunk that the holder has in a frame of GPU memory is pulled into a frame here, if a path leads from GPU to GPU and
// a frame is free here. All other chunks are pulled from slot to slot. If a transfer from frame to frame fails before
// the pull's deadline, and not because of a wrong checksum, its chunks are pulled once more, from slot to slot. A chunk
// that is not in the holder's slot yet (PullItem::lacks_slots) is pulled into a frame, or fails.
//
// Of a chunk that the holder still writes (PullItem::is_growing), grow() pulls the layers that the holder has
// announced, without checksums, and ends the chunk when the holder has told the checksum of the whole chunk, which the
// store compares. If nothing is announced for kGrowthPause, the holder counts as lost, and its growing chunks fail.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "connector/runtime/worker/frame_paths.h"
#include "connector/runtime/worker/transport_peers.h"
#include "connector/runtime/worker/worker_parts.h"

namespace kvferry {

/// Executes the PullOrders of one rank. All methods run on the service thread.
class Puller {
 public:
  static constexpr TimeNs kGrowthPause = 1 * kSecond;

  Puller(const WorkerParts& parts, TransportPeers& peers, const SendOutcome& send)
      : parts_(parts), peers_(peers), send_(send) {}

  /// Starts the transfers of an order. An order with invalid numbers is refused: its outcome says that every chunk
  /// failed.
  void start(PullOrder order);
  /// Pulls announced layers of growing chunks. Ignores what does not fit a pull in progress.
  void grow(const PullProgress& progress);
  /// The loop calls completed() when a transfer has ended, with the limit of its path, and landed() when a chunk has
  /// landed. Both return false if the transfer or the chunk belongs to no pull.
  bool completed(const Completion& completion, std::uint32_t limit_mb_per_s);
  bool landed(const ChunkStore::Landed& chunk);
  /// Submits again the transfers for which the transport had no room, cancels pulls whose deadline has passed, and
  /// cancels transfers between frames that still run after half of the pull's time. Sends SlotsWritten messages.
  void progress();
  /// Returns true if some chunk has been passed to the store and is not in its slot yet.
  bool is_landing() const { return !landing_.empty(); }
  bool is_busy() const { return !running_.empty() || !waiting_.empty() || !growing_.empty(); }

 private:
  struct Pull {
    explicit Pull(PullOrder from)
        : order(std::move(from)),
          num_left(order.items.size()),
          ok(num_left),
          checksums(num_left),
          num_pieces(num_left),
          in_frames(num_left),
          growths(num_left) {}
    /// Returns true if the holder has other parallelism. Each chunk is then put together from runs (parts) of the
    /// chunks of one or more of the holder's ranks.
    bool has_runs() const { return !order.sources.empty(); }

    PullOrder order;
    std::size_t num_left = 0;               // number of items that have no outcome yet
    std::vector<bool> ok;                   // [item] true from plan() on; false again after a failure
    std::vector<std::uint64_t> checksums;   // [item] checksum of this rank's chunk; 0 until all its bytes are verified
    std::vector<std::uint32_t> num_pieces;  // [item] number of the item's pieces that have not ended
    std::string what;                       // reason of the last failure; empty: none
    ErrorCode code = ErrorCode::kOk;        // code of the last failure
    std::string_view path;                  // the path of the last transfer
    std::uint32_t limit_mb_per_s = 0;       // measured limit of the path, see PullOutcome
    TimeNs began = 0, posted_at = 0, arrived_at = 0;  // times of the order, last submit, last transfer's end
    bool is_overdue = false;
    bool uses_frames = false;  // true if a path leads from the holder's frames to frames here
    std::string frames_why;    // why `uses_frames` is false; empty if it is true, or if neither node has frames
    std::uint32_t num_in_frames = 0, num_past_frames = 0;  // numbers of chunks, see PullOutcome
    std::string host_why;                                  // see PullOutcome
    std::vector<bool> in_frames;  // [item] true if the chunk is in a frame, and still being copied to its slot
    bool has_ended = false;       // true once the core has ended the pull
    /// What was pulled of a growing chunk. While `is_open`, num_pieces counts one piece more than there are transfers.
    struct Growth {
      bool is_open = false;
      std::uint64_t offset = 0;  // the chunk's place in this node's frames
      std::uint32_t layers = 0;  // number of layers that were asked for
    };
    std::vector<Growth> growths;  // [item]
    TimeNs grown_at = 0;          // time of the order, or of the last announcement of layers
  };
  using PullPtr = std::shared_ptr<Pull>;
  /// One transfer: what a pull reads from one source into one region.
  struct Piece {
    PullPtr pull;
    std::string address, remote_region;
    RegionId region;
    bool is_in_frames = false;  // true if the transfer is from the holder's frames into frames here
    bool is_growing = false;    // true if the transfer is of layers of growing chunks
    bool is_given_up = false;   // true if the transfer between frames was cancelled, since it took too long
    std::vector<CopyRange> ranges;
    std::vector<std::uint64_t> checksums;  // [range] expected checksum
    std::vector<std::size_t> items;        // [range] index in PullOrder::items
  };
  using Pieces = std::map<std::pair<RegionId, std::uint32_t>, Piece>;  // keyed by region and source

  Result<void> check(const PullOrder& order) const;
  void look_for_frames(Pull& pull);
  void plan_or_settle(const PullPtr& pull, std::size_t item, Pieces& pieces) {
    const Result<void> planned = plan(pull, item, pieces);
    if (planned) return;
    pull->what = planned.error().what;
    pull->code = planned.error().code;
    settle(*pull, item, false);
  }
  Result<void> plan(const PullPtr& pull, std::size_t item, Pieces& pieces);
  struct Target {
    ChunkStore::Place place;
    bool is_in_frames = false;
  };
  Result<Target> place_of(Pull& pull, const PullItem& item);
  void submit(Piece piece);
  void submit_from_slots(const Piece& failed, const std::string& why);
  void close_growth(const PullPtr& pull, std::size_t item, bool ok);
  using LandedChunks = std::vector<ChunkStore::Landed>;
  void end_piece(const PullPtr& pull, std::size_t item, LandedChunks& landed);
  void close(const Piece& piece, const std::vector<bool>& ok, const Completion& end);  // `ok` is indexed by range
  void fail(const Piece& piece, ErrorCode code, const std::string& what) {
    close(piece, std::vector<bool>(piece.ranges.size(), false), {{}, code, what});
  }
  std::uint64_t checksum_of(const Pull& pull, std::size_t item) const;
  void settle(Pull& pull, std::size_t item, bool ok);
  void slot_written(Pull& pull, std::size_t item, bool ok);
  void end(Pull& pull);

  const WorkerParts& parts_;
  TransportPeers& peers_;
  const SendOutcome& send_;
  FramePaths frame_paths_{parts_, peers_};
  std::map<TransferId, Piece> running_;
  std::map<std::uint64_t, PullPtr> growing_;  // [pull] pulls in progress with growing chunks
  std::vector<Piece> waiting_;                // pieces to submit again, because the transport was full
  std::map<ChunkRef, std::pair<PullPtr, std::size_t>> landing_;
  SlotsWritten written_;  // copies to slots that have ended since the last progress()
};

}  // namespace kvferry
