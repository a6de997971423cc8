// Pusher is the part of the service loop for the sending side of pushes. It writes chunks into slots that another node
// grants: layer by layer while the model computes the chunk, or the whole chunk at once.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "connector/core/push_wire.h"
#include "connector/runtime/worker/transport_peers.h"
#include "connector/runtime/worker/worker_parts.h"

namespace kvferry {

/// Methods run on two threads: the service thread, and the step thread (the engine's worker thread, which runs the
/// steps).
class Pusher {
 public:
  /// `wake` is called on the step thread when there is work for the service thread.
  Pusher(const WorkerParts& parts, TransportPeers& peers, std::function<void()> wake)
      : parts_(parts), peers_(peers), wake_(std::move(wake)) {}

  // ---- service thread ----
  /// Records the slots that another node grants for a push.
  void set_target(PushOrder order);
  /// Pushes a chunk that is already whole in its slot.
  void start(const PushStart& start);
  /// Ends a push and cancels its running transfers.
  void drop(std::uint64_t push);
  /// Returns false if the transfer belongs to no push.
  bool completed(const Completion& completion, std::uint32_t limit_mb_per_s);
  /// Submits again the transfers for which the transport had no room, and sends the outcomes. Returns true if an
  /// outcome was sent.
  bool progress(const SendOutcome& send);
  /// Tells the scheduler node which parts of chunks' layers the store has in frames; `saved.done` of `saved.of` parts.
  struct FrameLayers {
    std::vector<ChunkRef> chunks;
    std::uint32_t done = 0, of = 0;
  };
  void layers_in_frames(const FrameLayers& saved, const SendOutcome& send);
  /// Returns true if a transfer has to be retried. Nothing wakes the service thread for the retry, so progress() has to
  /// be called soon.
  bool is_waiting() const;

  // ---- step thread ----
  /// Reports that layers 0 to `layer` of the chunk are in the chunk's slot. `checksum`: that of layer `layer`.
  void layer_saved(const SaveItem& item, std::uint32_t layer, std::uint64_t checksum);
  /// Reports that the chunk is complete in a frame, and still being copied to its slot. If the other node has granted
  /// no slot, because it pulls the chunk, the push of the chunk ends here.
  void reached_frame(const SaveItem& item);
  /// Reports that the chunk is about to be packed into a frame layer by layer; layers_in_frames() follows.
  void begins_layers(const SaveItem& item);
  /// Reports the end of the save; `ok` is true if the whole chunk is in its slot.
  void saved(const SaveItem& item, bool ok, std::uint64_t checksum);

 private:
  struct Item {
    ChunkRef chunk;
    std::uint32_t num_tokens = 0;
    std::vector<std::uint64_t> layer_sums;  // [layer] checksums of the layers in the slot
    bool is_saved = false;                  // true once the save has ended
    bool is_in_frame = false;               // true once the chunk is complete in a frame or its save has ended
    bool is_whole = false;
    bool failed = false;
    std::uint64_t checksum = 0;
    std::optional<TransferId> transfer;
    std::uint32_t layers_fed = 0;
    bool is_fed_whole = false;
    bool is_over = false;
    Completion ended{};                // how the transfer ended, or why there is none; kOk while neither is known
    std::uint32_t limit_mb_per_s = 0;  // measured limit of the path, see PushOutcome
  };
  struct Push {
    std::optional<PushOrder> order;
    bool is_dropped = false;
    std::map<std::uint32_t, Item> items;  // keyed by the chunk's index in the push offer
  };

  // The caller of each method below must hold mutex_.
  Item& item_of(std::uint64_t push, std::uint32_t index, ChunkRef chunk, std::uint32_t num_tokens);
  void advance(std::uint64_t id, std::uint32_t index);
  void begin(Push& push, std::uint64_t id, std::uint32_t index, Item& item);
  void feed(Item& item);
  CopyRange layers(const Item& item, std::uint32_t first, std::uint32_t end) const;
  std::uint32_t layers_ready(const Item& item) const;
  void end(std::uint64_t id, std::uint32_t index, Item& item, const Completion& how);

  const WorkerParts& parts_;
  TransportPeers& peers_;
  std::function<void()> wake_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, Push> pushes_;
  std::set<std::uint64_t> dropped_;  // dropped pushes; the step thread may still save chunks for these pushes
  std::map<TransferId, std::pair<std::uint64_t, std::uint32_t>> running_;
  std::set<std::pair<std::uint64_t, std::uint32_t>> full_;  // (push, index) of transfers to submit again
  std::vector<std::string> outcomes_;                       // encoded Envelopes that are not sent yet
};

}  // namespace kvferry
