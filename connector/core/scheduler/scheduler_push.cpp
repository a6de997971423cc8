// Pushes as the scheduler core sees them: it tells both sides of them (push_sender.h, push_receiver.h) what happens.
#include <algorithm>
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// The whole prompt, as it will be saved: the decode node says what of it it wants.
void SchedulerCore::offer_prompt(RequestState& request, PushTarget target) {
  TokenChain& chain = request.chain;
  std::vector<ChunkMeta> chunks;
  const std::uint32_t num_full = request.num_prompt_tokens / config_.chunk_tokens;
  for (std::uint32_t i = 0; i < num_full; ++i) chunks.push_back({chain.key(i), config_.chunk_tokens, false, {}});
  if (const std::uint32_t rest = request.num_prompt_tokens % config_.chunk_tokens; rest > 0) {
    ChunkMeta tail{chain.tail_key(num_full, rest), rest, true, {}};
    if (rest >= kTailGroupTokens) tail.tail_group = chain.tail_group(num_full);
    chunks.push_back(std::move(tail));
  }
  sender_.offer(request.id, std::move(target), chunks, now_);
  take_push_actions();
}

/// The prompt was handed over, so its push is all but done: what is not there in a moment will not come.
void SchedulerCore::shorten_push_deadlines(RequestState& request) {
  TokenChain& chain = request.chain;
  std::vector<ChunkKey> keys(chain.keys().begin(), chain.keys().end());
  const std::uint32_t end = std::min(request.source->num_tokens, chain.size());
  if (const std::uint32_t rest = end % config_.chunk_tokens; rest > 0)
    keys.push_back(chain.tail_key(end / config_.chunk_tokens, rest));
  receiver_.shorten_deadline(keys, now_);
}

void SchedulerCore::take_push_actions() {
  for (auto& action : sender_.take_actions())
    std::visit([&](auto& one) { actions_.push_back(std::move(one)); }, action);
  for (auto& action : receiver_.take_actions())
    std::visit([&](auto& one) { actions_.push_back(std::move(one)); }, action);
  for (const RequestId& id : sender_.take_delivered()) {
    if (RequestState* request = find(id)) request->is_delivered = true;
    if (const auto handoff = handoffs_.find(id.value); handoff != handoffs_.end()) {
      pool_.unpin(handoff->second);
      handoffs_.erase(handoff);
    }
  }
  counters_.pushed_chunks = sender_.counters().pushed_chunks;
  counters_.push_failures = sender_.counters().push_failures;
  counters_.received_chunks = receiver_.num_received();
}

void SchedulerCore::push_answered(std::uint64_t push, const std::string& endpoint, const PushReply& reply, TimeNs now) {
  now_ = now;
  if (!reply.refused.empty())
    actions_.push_back(LogLine{fmt::format("{} refuses pushes: {}", endpoint, reply.refused), true});
  sender_.answered(push, endpoint, reply, now);
  take_push_actions();
}

void SchedulerCore::chunk_push_ended(const PushOutcome& outcome, TimeNs now) {
  now_ = now;
  sender_.chunk_push_ended(outcome, now);
  take_push_actions();
}

PushReply SchedulerCore::push_offered(const std::string& from, const PushOffer& offer, TimeNs now) {
  now_ = now;
  PushReply reply = receiver_.offered(from, offer, now);
  take_push_actions();
  announce_evictions();
  return reply;
}

void SchedulerCore::push_grant_failed(std::uint64_t ticket, std::span<const std::uint32_t> indices, TimeNs now) {
  now_ = now;
  receiver_.grant_failed(ticket, indices);
  take_push_actions();
}

void SchedulerCore::push_settled(const PushSettlement& settlement, TimeNs now) {
  now_ = now;
  receiver_.settled(settlement);
  take_push_actions();
}

void SchedulerCore::push_revoked(const Revocation& answer, TimeNs now) {
  now_ = now;
  for (const ChunkRef chunk : receiver_.revoked(answer)) publish(chunk);
  take_push_actions();
}

}  // namespace kvferry
