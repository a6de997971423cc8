// The worker's part of pushes. As the sender: writes chunks into slots that another node lends, layer by layer while
// the model computes them, or whole. As the receiver: lends slots of this rank's pool and takes them back, so that
// nobody writes them any more.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "connector/core/push/push_wire.h"
#include "connector/core/worker_core.h"
#include "connector/runtime/store/chunk_store.h"
#include "connector/runtime/links/node_wire.h"
#include "transport/transport.h"

namespace kvferry {

/// What the engine works on; all of it outlives the engine.
struct PushEngineParts {
  Transport& transport;
  ChunkStore& store;
  std::span<const std::byte> pool;
  RegionId pool_region;
  std::uint64_t chunk_bytes = 0;  // of a slot
  std::uint64_t bytes_per_token = 0;
  std::uint32_t num_layers = 1;
  std::mutex& core_mutex;
  WorkerCore& core;
};

/// Threads: one link thread, which owns the worker's socket and the transport's completions, and one step thread.
class PushEngine {
 public:
  explicit PushEngine(PushEngineParts parts) : parts_(parts) {}

  // ---- link thread ----
  using Send = std::function<void(const std::string& to, const std::string& bytes)>;
  /// True: the message was one of a push's.
  bool take(const std::string& sender, const Envelope& envelope);
  /// True: the transfer was a push.
  bool completed(const Completion& completion);
  /// True: the landed chunk was a lent one.
  bool landed(const ChunkStore::Landed& chunk);
  /// Tries again what was full, and answers the scheduler. True: something was said.
  bool progress(const Send& send);
  /// Something has to be tried again in a millisecond.
  bool is_waiting() const;
  /// Called on the step thread when the link thread has something to say.
  std::function<void()> on_news = [] {};

  // ---- step thread ----
  /// Layers [0, layer] of this save lie in its slot. `checksum`: of the layer's run.
  void layer_saved(const SaveItem& item, std::uint32_t layer, std::uint64_t checksum);
  /// The save is over: all of the chunk lies in its slot, or not.
  void saved(const SaveItem& item, bool ok, std::uint64_t checksum);

 private:
  struct Item {
    ChunkRef chunk;
    std::uint32_t num_tokens = 0;
    std::vector<std::uint64_t> layer_sums;  // of the layers that are there
    bool is_saved = false;                  // nobody writes the slot any more
    bool is_whole = false;
    bool failed = false;
    std::uint64_t checksum = 0;
    std::optional<TransferId> transfer;
    std::uint32_t layers_fed = 0;
    bool is_fed_whole = false;
    bool is_over = false;
  };
  struct Push {
    std::optional<PushOrder> order;
    bool is_dropped = false;
    std::map<std::uint32_t, Item> items;  // by index
  };
  struct Lent {
    ChunkRef chunk;
    std::uint32_t num_tokens = 0;
    std::optional<GrantId> grant;
    bool has_place = false;  // the store waits for landed()
    std::optional<RevokedChunk> reclaim;
  };
  using LentKey = std::pair<std::uint64_t, std::uint32_t>;  // ticket, index

  Item& item_of(std::uint64_t push, std::uint32_t index, ChunkRef chunk, std::uint32_t num_tokens);
  void advance(std::uint64_t id, std::uint32_t index);
  void feed(Item& item);
  void begin(Push& push, std::uint64_t id, std::uint32_t index, Item& item);
  CopyRange layers(const Item& item, std::uint32_t first, std::uint32_t end) const;
  std::uint64_t layer_bytes(const Item& item) const;
  std::uint32_t layers_ready(const Item& item) const;
  void end(std::uint64_t id, std::uint32_t index, Item& item, bool ok, std::string what);
  void drop(std::uint64_t id);
  void lend(const GrantOrder& order);
  void reclaim(const Revocation& order);
  void give_back(const LentKey& key, Lent& lent);
  void taken_back(const LentKey& key, bool ok);

  PushEngineParts parts_;
  mutable std::mutex mutex_;
  std::string scheduler_;  // who gives the orders
  std::map<std::uint64_t, Push> pushes_;
  std::set<std::uint64_t> dropped_;  // the newest; a save of theirs may be planned still
  std::map<TransferId, std::pair<std::uint64_t, std::uint32_t>> running_;
  std::set<std::pair<std::uint64_t, std::uint32_t>> full_;  // to be tried again
  std::map<LentKey, Lent> lent_;
  std::map<ChunkRef, LentKey> landing_;
  std::set<LentKey> revoking_;  // somebody is in the middle of a copy
  std::vector<std::pair<NodeMessage, std::string>> completion_queue_;
  std::map<std::uint64_t, Revocation> taken_back_;  // by ticket, to be answered
};

}  // namespace kvferry
