#include "connector/runtime/links/frame_leases.h"

#include <algorithm>
#include <utility>

namespace kvferry {

bool FrameLeases::has_frames(const std::vector<RankEndpoint>& ranks) {
  return !ranks.empty() && std::ranges::none_of(ranks, [](const auto& rank) { return rank.frames_region.empty(); });
}

FramePinOrder FrameLeases::begin(Asker asker, LeaseAnswer answer, TimeNs now, TimeNs ttl, TimeNs patience_ends) {
  std::erase_if(leases_, [&](const auto& lease) { return lease.second <= now; });
  FramePinOrder order{answer.reply.lease, 0, ttl / kMillisecond, {}};
  for (const LeasedChunk& chunk : answer.reply.chunks) {
    order.chunks.push_back(chunk.chunk);
    order.are_growing.push_back(chunk.is_growing);
  }
  leases_.emplace(order.lease, now + ttl);
  waiting_.emplace(order.lease, Waiting{{std::move(asker), std::move(answer)}, {}, patience_ends});
  return order;
}

void FrameLeases::take(const FramePinOutcome& outcome) {
  const auto found = waiting_.find(outcome.lease);
  if (found == waiting_.end()) return;  // the outcome came too late
  const LeaseAnswer& answer = found->second.ready.answer;
  if (outcome.rank >= answer.ranks.size() || outcome.frames.size() != answer.reply.chunks.size()) return;
  found->second.frames[outcome.rank] = outcome.frames;
}

std::vector<FrameLeases::Ready> FrameLeases::take_ready(TimeNs now) {
  std::vector<Ready> all;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    Waiting& waiting = it->second;
    LeaseAnswer& answer = waiting.ready.answer;
    if (waiting.frames.size() < answer.ranks.size() && now < waiting.deadline) {
      ++it;
      continue;
    }
    for (std::size_t i = 0; i < answer.reply.chunks.size(); ++i) {
      std::vector<std::uint32_t> frames(answer.ranks.size(), kNoFrame);
      for (const auto& [rank, pinned] : waiting.frames) frames[rank] = pinned[i];
      const bool has_any = std::ranges::any_of(frames, [](std::uint32_t frame) { return frame != kNoFrame; });
      if (has_any) answer.reply.chunks[i].frames = std::move(frames);
    }
    std::erase_if(answer.reply.chunks, [](const LeasedChunk& chunk) {
      return chunk.lacks_slots &&
             (chunk.frames.empty() || std::ranges::find(chunk.frames, kNoFrame) != chunk.frames.end());
    });
    all.push_back(std::move(waiting.ready));
    it = waiting_.erase(it);
  }
  return all;
}

}  // namespace kvferry
