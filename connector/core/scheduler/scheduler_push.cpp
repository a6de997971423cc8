// Pushes: passes events to the two sides (push_sender.h, push_receiver.h).
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

void SchedulerCore::push_answered(std::uint64_t push, const std::string& endpoint, const PushReply& reply, TimeNs now) {
  now_ = now;
  if (!reply.refused.empty())
    actions_.push_back(LogLine{fmt::format("{} refuses pushes: {}", endpoint, reply.refused), true});
  sender_.answered(push, endpoint, reply, now);
}

PushReply SchedulerCore::push_offered(const std::string& from, const PushOffer& offer, TimeNs now) {
  now_ = now;
  PushReply reply = receiver_.offered(from, offer, now);
  announce_evictions();
  return reply;
}

void SchedulerCore::push_revoked(const Revocation& answer, TimeNs now) {
  now_ = now;
  for (const ChunkRef chunk : receiver_.revoked(answer)) publish(chunk);
}

}  // namespace kvferry
