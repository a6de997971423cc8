// Pushes on the scheduler node's thread: carries what the core wants to the other node and to this engine's workers,
// and brings back what they answer. A part of NodeLinks, which owns the sockets.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"
#include "connector/runtime/links/node_wire.h"
#include "transport/base/clock.h"

namespace kvferry {

/// All of it outlives the links. The senders answer false when the message could not be left.
struct PushLinksParts {
  std::function<void(const std::function<void(SchedulerCore&)>&)> tell_core;
  std::function<bool(const std::string& endpoint, const std::string& bytes)> send_node;
  std::function<bool(const std::string& sender, const std::string& bytes)> answer_node;
  std::function<std::uint32_t(const std::string& endpoint)> version_with;  // of the protocol between nodes
  std::function<bool(std::uint32_t rank, const std::string& bytes)> send_worker;
  const std::vector<RankEndpoint>& ranks;  // this node's own
  const Clock& clock;
};

/// Threads: one owner.
class PushLinks {
 public:
  explicit PushLinks(PushLinksParts parts) : parts_(std::move(parts)) {}

  void execute(OfferPush& offered);
  void execute(StartPush& started);
  void execute(SettlePush& settled);
  void execute(DropPush& dropped);
  void execute(GrantSlots& lent);
  void execute(RevokeSlots& reclaimed);

  // Each takes a message of its kind and answers true, or leaves it.
  bool take_request(const std::string& sender, const Envelope& envelope);
  bool take_answer(const std::string& endpoint, const Envelope& envelope);
  bool take_outcome(const Envelope& envelope);

 private:
  /// An offer that is answered once every rank has lent its share.
  struct Lending {
    std::string sender;
    std::uint64_t push = 0;
    std::uint32_t version = 0;
    PushReply reply;
    std::vector<std::uint32_t> indices;  // of the chunks that are lent
    std::vector<std::vector<std::string>> grants;
    std::uint32_t ranks_left = 0;
  };
  void offered(const std::string& sender, const Envelope& envelope, const PushOffer& offer);
  void lent(const GrantOutcome& outcome);
  std::vector<Shard> shards() const;

  PushLinksParts parts_;
  std::map<std::uint64_t, Lending> lending_;  // by ticket
};

}  // namespace kvferry
