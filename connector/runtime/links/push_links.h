// Pushes on the scheduler node's thread: carries the core's push actions to the peer and to this engine's workers, and
// the answers of the peer and the workers to the core. A part of NodeLinks, which owns the sockets.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "connector/runtime/links/link_parts.h"

namespace kvferry {

/// Not thread-safe: only the thread of NodeLinks uses it.
class PushLinks {
 public:
  explicit PushLinks(const LinkParts& parts) : parts_(parts) {}

  void execute(OfferPush& wanted);
  void execute(StartPush& wanted);
  void execute(AnnounceLayers& wanted);
  void execute(SettlePush& wanted);
  void execute(DropPush& wanted);
  void execute(GrantSlots& wanted);
  void execute(RevokeSlots& wanted);

  void offered(Asker asker, PushOffer offer);
  void answered(const std::string& endpoint, std::uint64_t push, PushAnswer answer);
  void settled(const PushSettlement& settlement);
  void progressed(const PushProgress& progress);
  void granted(const GrantOutcome& outcome);
  void revoked(const Revoked& outcome);
  void ended(const PushOutcome& outcome);
  void layers_saved(const LayersSaved& saved);

 private:
  /// A push offer that is answered once every rank has answered its GrantOrder.
  struct Granting {
    Asker asker;
    PushReply reply;
    std::vector<std::uint32_t> indices;            // indices of the offered chunks that have a reserved slot
    std::vector<std::vector<std::string>> grants;  // [rank][offered chunk] the exported grant; empty: none
    std::uint32_t ranks_left = 0;
  };

  const LinkParts& parts_;
  std::map<std::uint64_t, Granting> granting_;  // keyed by the id of the slot reservation (PushReply::reservation)
};

}  // namespace kvferry
