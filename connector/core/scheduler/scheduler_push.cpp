// Pushes: passes events to the two sides (push_sender.h, push_receiver.h).
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// Offers the whole prompt, as it will be saved; the decode node chooses the chunks that it needs.
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
}

/// The request of a handed-over prompt has arrived, so its push is nearly done: chunks missing soon are pulled instead.
void SchedulerCore::shorten_push_deadlines(RequestState& request) {
  TokenChain& chain = request.chain;
  std::vector<ChunkKey> keys(chain.keys().begin(), chain.keys().end());
  const std::uint32_t end = std::min(request.source->num_tokens, chain.size());
  if (const std::uint32_t rest = end % config_.chunk_tokens; rest > 0)
    keys.push_back(chain.tail_key(end / config_.chunk_tokens, rest));
  receiver_.shorten_deadline(keys, now_);
}

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
