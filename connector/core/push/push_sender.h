// The prefill side of pushes: which chunk of which prompt goes to whom, how far it is, what the other side has to hear.
// Pure: the scheduler core owns one, tells it what happens, and carries its actions on.
//
//   offer() -> kOffered -> answered() -> kAccepted -> kTransferring (the engine's save, or chunk_ready()) -> told once: settled
//
// A chunk is told as ok only when every rank has pushed it and it is whole and verified in this node's own pool.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "connector/core/chunk_pool.h"
#include "connector/core/push/push_wire.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"

namespace kvferry {

/// The decode node that a router chose before the prefill (kv_transfer_params.kvferry_push_to).
struct PushTarget {
  EngineId engine_id;
  std::string endpoint;  // where it is asked
};

// ---- actions ----
struct OfferPush {
  std::uint64_t push = 0;
  PushTarget target;
  PushOffer offer;
};
/// To all workers.
struct StartPush {
  PushStart start;
};
/// To the other node.
struct SettlePush {
  std::string endpoint;
  PushSettlement settlement;
};
/// To all workers: end what is under way for this push and forget it.
struct DropPush {
  std::uint64_t push = 0;
};

struct PushSenderConfig {
  std::string fingerprint;
  std::uint32_t num_ranks = 1;
  TimeNs ttl = 60 * kSecond;     // from the offer to the last settlement
  TimeNs grace = 30 * kSecond;   // for workers to end what was dropped, until slots are let go all the same
  std::uint64_t first_push = 1;  // another one at each start: answers to a past life are strangers
};

struct PushCounters {
  std::uint64_t offered_chunks = 0, pushed_chunks = 0, push_failures = 0;
  bool operator==(const PushCounters&) const = default;
};

class PushSender {
 public:
  using Actions = std::vector<std::variant<OfferPush, StartPush, SettlePush, DropPush>>;

  PushSender(PushSenderConfig config, ChunkPool& pool)
      : config_(std::move(config)), pool_(pool), next_push_(config_.first_push) {}

  /// Offers a prompt's chunks, in order.
  void offer(const RequestId& request, PushTarget target, std::span<const ChunkMeta> chunks, TimeNs now);
  /// Late or unknown answers are ignored.
  void answered(std::uint64_t push, const std::string& endpoint, const PushReply& reply, TimeNs now);
  /// A save of this chunk is planned, in this slot: whom it goes to layer by layer. nullopt: nobody waits for it.
  struct Tag {
    std::uint64_t push = 0;
    std::uint32_t index = 0;
  };
  std::optional<Tag> saving(const ChunkKey& key, ChunkRef chunk, TimeNs now);
  /// A chunk is whole in the pool, whoever wrote it.
  void chunk_ready(const ChunkPool::Slot& slot, TimeNs now);
  /// The write of this slot failed.
  void chunk_write_failed(ChunkRef chunk, TimeNs now);
  /// One rank's outcome of a chunk that it was given; exactly once for each.
  void chunk_push_ended(const PushOutcome& outcome, TimeNs now);
  /// The request has left: what lies neither in the pool nor is written into it won't come.
  void request_finished(const RequestId& request, TimeNs now);
  void tick(TimeNs now);
  Actions take_actions() { return std::exchange(actions_, {}); }
  /// Requests whose whole prompt the other side has, since the last call: nobody has to wait for it any longer.
  std::vector<RequestId> take_delivered() { return std::exchange(delivered_, {}); }

  std::size_t num_pushes() const { return pushes_.size(); }
  const PushCounters& counters() const { return counters_; }

 private:
  enum class State : std::uint8_t {
    kOffered,   // offered, not answered
    kAccepted,  // a slot is lent for it
    kTransferring,  // given to the workers
    kFinished     // told, or nothing to tell
  };
  struct Item {
    ChunkMeta meta;
    State state = State::kOffered;
    bool is_granted = false;  // its outcome has to be told
    ChunkRef chunk;        // from kTransferring on
    PinId pin;
    bool is_ready = false;  // verified here
    bool failed = false;
    std::set<std::uint32_t> ranks_done;
  };
  struct Push {
    RequestId request;
    PushTarget target;
    std::uint64_t ticket = 0;
    bool is_answered = false;
    bool is_dropped = false;
    bool is_incomplete = false;  // the other side does not have, or will not get, all of it
    TimeNs deadline = 0;
    TimeNs erase_at = 0;  // of a dropped one: forgotten then
    std::vector<Item> items;
  };

  void move(std::uint64_t id, Push& push, std::uint32_t index, const ChunkPool::Slot& slot, TimeNs now);
  void advance(std::uint64_t id, Push& push, std::uint32_t index);
  void fail(std::uint64_t id, Push& push, std::uint32_t index);
  void settle(Push& push, std::uint32_t index, bool ok);
  void drop(std::uint64_t id, Push& push, TimeNs now);
  void erase_if_finished(std::uint64_t id);
  void close(std::uint64_t id, Push& push, std::uint32_t index);

  PushSenderConfig config_;
  ChunkPool& pool_;
  std::map<std::uint64_t, Push> pushes_;
  struct Place {
    std::uint64_t push = 0;
    std::uint32_t index = 0;
    auto operator<=>(const Place&) const = default;
  };
  std::unordered_map<ChunkKey, std::set<Place>> waiting_;  // items that are not over, by key
  std::uint64_t next_push_;
  Actions actions_;
  std::vector<RequestId> delivered_;
  PushCounters counters_;
};

}  // namespace kvferry
