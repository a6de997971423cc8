// The prefill side of pushes: it knows which chunk of which prompt is pushed to which decode node. At the end of a
// chunk's push it settles the chunk: if the decode node has reserved a slot, it tells that node whether the chunk is
// complete.
//
// PushSender is a part of the scheduler core, which passes events to it; the runtime executes the actions.
// `reservation` is the id of a slot reservation. An offered chunk usually passes through these calls and states:
//
//   offer() -> kOffered -> answered() -> kAccepted -> saving() or chunk_ready() -> kTransferring -> kFinished: settled
//
// If saving() comes before answered(), the chunk has no state kAccepted. If the chunk is complete in the pool when the
// answer comes, answered() begins the transfer. A chunk that the decode node does not accept, or whose push fails, is
// finished early.
//
// A chunk is settled as ok only if every rank has pushed it and the chunk is verified in this node's own pool. A chunk
// that the decode node pulls (PushVerdict::kPulled) is not pushed: it is settled as soon as it is ready in the pool,
// and finished when the decode node's lease on it ends:
//
//   kOffered -> answered() -> kAccepted -> chunk_ready() -> kAnnounced -> lease_ended() -> kFinished
//
// With CoreConfig::pushes_layers, saving() begins a transfer (kTransferring) of such a chunk too, in which
// layers_saved() announces layers. Its end, after which the chunk is kAnnounced, is as that of a transfer without a
// grant.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "connector/core/push/push_parts.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"

namespace kvferry {

class PushSender {
 public:
  /// `delivered` is called for each request whose push has ended without a declined or failed chunk.
  PushSender(PushParts parts, std::function<void(const RequestId&)> delivered)
      : parts_(parts), delivered_(std::move(delivered)) {}

  /// Offers a prompt's chunks, in order, to the node at `endpoint`. `record`: the request's number in the flight
  /// recorder.
  void offer(const RequestId& request, const std::string& endpoint, std::span<const ChunkMeta> chunks, TimeNs now,
             std::uint64_t record = 0);
  bool awaits_answer(std::uint64_t push, const std::string& endpoint) const;
  /// Handles a decode node's answer to an offer. An answer that is not awaited is counted and ignored.
  void answered(std::uint64_t push, const std::string& endpoint, const PushReply& reply, TimeNs now);
  /// A place in a push: the push that a chunk belongs to, and the chunk's index in the offer.
  struct Tag {
    std::uint64_t push = 0;
    std::uint32_t index = 0;
    auto operator<=>(const Tag&) const = default;
  };
  /// Records that a save of the chunk into this slot is planned. Returns the chunk's place in a push that needs the
  /// chunk: the workers then send the chunk as they save it. Returns nullopt if no push needs the chunk.
  std::optional<Tag> saving(const ChunkKey& key, ChunkRef chunk, TimeNs now);
  /// Records that the chunk is ready: it was saved, pulled, or received by a push. Called again when the chunk is
  /// complete in its slot, if some rank had it in a frame only before.
  void chunk_ready(const ChunkPool::Slot& slot, TimeNs now);
  void chunk_write_failed(ChunkRef chunk);
  /// Records that a rank has layers of chunks in its frames. Announces the layers that all ranks have to a decode node
  /// that pulls the chunks.
  void layers_saved(const LayersSaved& saved);
  /// Returns true if layers of this chunk, which is being saved, were announced for this push.
  bool is_growing(std::uint64_t push, const ChunkKey& key, ChunkRef chunk) const;
  /// Records the end of one rank's transfer of a chunk. The runtime must call this exactly once for each rank and
  /// transferred chunk.
  void chunk_push_ended(const PushOutcome& outcome);
  /// Ends the push of a finished request's chunks that are neither in the pool nor being written.
  void request_finished(const RequestId& request);
  /// Returns true if a push of this number is in progress.
  bool knows(std::uint64_t push) const { return pushes_.contains(push); }
  /// Records that the decode node's lease on a chunk of this push, of which the chunk was announced, has ended.
  void lease_ended(std::uint64_t push, const ChunkKey& chunk);
  void tick(TimeNs now);

  std::size_t num_pushes() const { return pushes_.size(); }

 private:
  enum class State : std::uint8_t {
    kOffered,       // the chunk is offered, and the decode node has not answered yet
    kAccepted,      // the decode node has reserved a slot for the chunk
    kTransferring,  // the workers were ordered to push the chunk
    kAnnounced,     // the chunk was settled, and the decode node pulls it
    kFinished       // the push of this chunk has ended; if a slot was reserved, the settlement was sent
  };
  struct Item {
    ChunkMeta meta;
    State state = State::kOffered;
    bool is_granted = false;  // true while the decode node has a slot reserved and waits for the settlement
    bool is_pulled = false;   // true if the decode node waits for the settlement to pull the chunk
    ChunkRef chunk;           // the chunk's slot; valid once the state was kTransferring
    PinId pin;
    bool is_ready = false;  // true once the chunk is verified in this node's pool
    bool failed = false;
    std::set<std::uint32_t> ranks_done;
    std::vector<std::uint32_t> layers_done;  // [rank] LayersSaved::done; empty: no rank has reported
    std::uint32_t layers_told = 0;           // PushProgress::done of the last announcement

    /// True if the chunk is pulled by the decode node, and still being saved by this node.
    bool is_growing() const { return is_pulled && state == State::kTransferring && !is_ready && !failed; }
  };
  struct Push {
    RequestId request;
    std::string endpoint;
    std::uint64_t reservation = 0;  // id of the decode node's slot reservation
    bool is_answered = false;
    bool is_dropped = false;
    bool takes_layers = false;   // PushReply::takes_layers
    bool is_incomplete = false;  // true if the decode node lacks some chunk and will not receive it
    TimeNs deadline = 0;
    TimeNs erase_at = 0;  // if is_dropped: time at which the push is erased even if some rank has not reported
    std::vector<Item> items;
    std::uint64_t record = 0;  // the request's number in the flight recorder
    TimeNs began = 0;
    TimeNs ready_at = 0;  // time at which Item::is_ready last became true
    LifeEvent event{};    // what the flight recorder will get about this push
  };

  void start_transfer(std::uint64_t id, Push& push, std::uint32_t index, const ChunkPool::Slot& slot, TimeNs now);
  void advance(std::uint64_t id, Push& push, std::uint32_t index);
  void fail(std::uint64_t id, Push& push, std::uint32_t index);
  /// Keeps the first cause of a failure for the flight recorder, because later failures often follow from it.
  static void note(Push& push, Cause cause, std::string_view why = {}) {
    if (push.event.why() != Cause::kNone) return;
    push.event.cause = static_cast<std::uint8_t>(cause);
    push.event.note = why;
  }
  void settle(Push& push, std::uint32_t index, bool ok);
  void drop(std::uint64_t id, Push& push, TimeNs now);
  void erase_if_finished(std::uint64_t id);
  void finish(std::uint64_t id, Push& push, std::uint32_t index);

  PushParts parts_;
  std::function<void(const RequestId&)> delivered_;
  std::map<std::uint64_t, Push> pushes_;
  std::unordered_map<ChunkKey, std::set<Tag>> waiting_;  // [chunk] places in which the chunk is not kFinished
  std::uint64_t next_push_ = parts_.numbers.draw();
};

}  // namespace kvferry
