#include "connector/runtime/links/lease_links.h"

#include <algorithm>
#include <utility>

#include "transport/base/log.h"

namespace kvferry {
namespace {

// Longest time that a lease request waits for saves: when a prompt is handed over, the GPU may still copy its last
// chunks to the pool.
constexpr TimeNs kSavePatience = 200 * kMillisecond;
// Longest time for hashing runs (parts) of chunks for a reader of other parallelism; shorter than the default of
// CoreConfig::try_timeout (1 s), for which the reader waits.
constexpr TimeNs kHashPatience = 600 * kMillisecond;
// Longest time that an answer waits for the workers to pin the frames of the leased chunks. They do so in the next turn
// of their service thread.
constexpr TimeNs kFramePatience = 100 * kMillisecond;
// Limit on requests that wait for saves; beyond this limit a request does not wait.
constexpr std::size_t kDelayedMax = 1000;

}  // namespace

void LeaseLinks::execute(RequestLease& wanted) {
  wanted.request.shards = shards_;
  wanted.request.parts = shard_parts_;
  wanted.request.wants_frames = FrameLeases::has_frames(parts_.ranks);
  if (parts_.send_node(wanted.endpoint, wanted.fetch, wanted.request)) return;
  // If the request can't be sent, the node counts as a holder without the chunks.
  parts_.with_core(
      [&](SchedulerCore& core, TimeNs now) { core.lease_answered(wanted.fetch, wanted.endpoint, {}, now); });
}

void LeaseLinks::execute(ReleaseLease& released) {
  parts_.send_node(released.endpoint, 0, LeaseRelease{{released.lease}});
}

void LeaseLinks::execute(StartPull& wanted) {
  const PeerLinks::Ranks& remote = parts_.peers.ranks_of(wanted.endpoint);
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank) {
    // PeerLinks may have dropped the peer after the lease was granted; `remote.all` is empty then, and the pull fails.
    const bool is_sent = !remote.all.empty() && parts_.send_worker(rank, wanted.pull,
                                                                   order_for(rank, wanted, parts_.ranks, remote.all,
                                                                             remote.map, parts_.clock.now()));
    if (is_sent) continue;
    const std::vector<bool> none(wanted.items.size(), false);
    parts_.with_core([&](SchedulerCore& core, TimeNs now) { core.pull_done(wanted.pull, rank, none, now); });
  }
}

void LeaseLinks::execute(GrowPull& wanted) {
  // A worker that does not get the message ends the pull at its deadline.
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank) parts_.send_worker(rank, wanted.pull, wanted);
}

void LeaseLinks::requested(Asker asker, LeaseRequest request) {
  request.is_sure_of_frames = request.is_sure_of_frames && wants_frames(request);
  const TimeNs patience = waiting_.size() < kDelayedMax ? kSavePatience : 0;
  waiting_.push_back({std::move(asker), std::move(request), parts_.clock.now() + patience});
}

void LeaseLinks::released(const LeaseRelease& lease) {
  if (frames_.end(lease.value)) {
    for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank)
      parts_.send_worker(rank, lease.value, FrameUnpin{{lease.value}});
  }
  parts_.with_core([&](SchedulerCore& core, TimeNs) { core.lease_released(lease.value); });
}

bool LeaseLinks::progress() {
  for (Request& request : std::exchange(waiting_, {})) answer(std::move(request));
  const std::vector<RunChecksums::Ready> all = run_checksums_.take_ready(parts_.clock.now());
  for (const RunChecksums::Ready& ready : all) {
    if (!ready.damaged.empty() || ready.num_late > 0)
      log().warn(
          "a node with other tensor or pipeline parallelism gets no lease on {} chunks that were evicted, because they "
          "were damaged or no longer in a slot, nor on {} chunks whose checksums took over {} ms",
          ready.damaged.size(), ready.num_late, kHashPatience / kMillisecond);
    if (!ready.damaged.empty())
      parts_.with_core([&](SchedulerCore& core, TimeNs) { core.evict_ordered(ready.damaged); });
    send(ready.asker, ready.answer);
  }
  const std::vector<FrameLeases::Ready> pinned = frames_.take_ready(parts_.clock.now());
  for (const FrameLeases::Ready& ready : pinned) send(ready.asker, ready.answer);
  return !all.empty() || !pinned.empty();
}

/// Returns true if the reader may pull from this node's frames into its own: both have frames and the same shape.
bool LeaseLinks::wants_frames(const LeaseRequest& request) const {
  return request.wants_frames && FrameLeases::has_frames(parts_.ranks) && request.shards == shards_;
}

bool LeaseLinks::is_being_saved(const SchedulerCore& core, const LeaseRequest& request) const {
  if (request.handoff.empty() && request.push == 0) return false;
  return std::ranges::any_of(request.keys, [&](const ChunkKey& key) {
    const ChunkPool::Slot* const slot = core.pool().find(key);
    if (slot == nullptr || core.can_lease(request, *slot)) return false;
    return slot->ranks_in_frames > 0 || parts_.saves.contains(slot->ref);
  });
}

void LeaseLinks::answer(Request request) {
  LeaseAnswer answer;
  answer.ranks = parts_.ranks;
  if (const Result<void> fits = run_checksums_.check(request.request); !fits) {
    answer.reply.refused = fits.error().what;
    return send(request.asker, std::move(answer));
  }
  bool is_too_early = false;
  TimeNs ttl = 0;
  parts_.with_core([&](SchedulerCore& core, TimeNs now) {
    ttl = core.config().lease_ttl;
    is_too_early = now < request.deadline && is_being_saved(core, request.request);
    if (is_too_early) return;
    answer.reply =
        core.lease_requested("fetch " + std::to_string(request.asker.id) + " of a node", request.request, now);
  });
  if (is_too_early) {
    waiting_.push_back(std::move(request));
  } else if (run_checksums_.is_needed(request.request)) {
    for (const auto& [rank, order] : run_checksums_.begin(std::move(request.asker), request.request, std::move(answer),
                                                          parts_.clock.now(), kHashPatience))
      parts_.send_worker(rank, order.order, order);
  } else if (wants_frames(request.request) && !answer.reply.chunks.empty()) {
    const TimeNs now = parts_.clock.now();
    FramePinOrder order = frames_.begin(std::move(request.asker), std::move(answer), now, ttl, now + kFramePatience);
    for (order.rank = 0; order.rank < parts_.ranks.size(); ++order.rank)
      parts_.send_worker(order.rank, order.lease, order);
  } else {
    send(request.asker, std::move(answer));
  }
}

/// Sends an answer. If no chunk is leased, the answer leaves out the ranks' addresses and regions, because with these
/// any process can read the pools.
void LeaseLinks::send(const Asker& asker, LeaseAnswer answer) {
  for (RankEndpoint& rank : answer.ranks) {
    if (!answer.reply.chunks.empty()) {
      rank.transport_address = LinkParts::address_of(rank, asker);
      continue;
    }
    rank.transport_address.clear();
    rank.pool_region.clear();
    rank.frames_region.clear();
  }
  parts_.answer(asker, answer);
}

void LeaseLinks::answered(const std::string& endpoint, std::uint64_t fetch, LeaseAnswer answer) {
  Result<ShardMap> map = fit_answer(parts_.ranks, answer);
  if (map && !answer.reply.chunks.empty()) {  // if no chunk is leased, the answer has no addresses of the ranks
    parts_.peers.set_ranks(endpoint, {std::move(answer.ranks), std::move(*map)});
  } else if (!map) {
    if (answer.reply.refused.empty()) answer.reply.refused = map.error().what;
    answer.reply.chunks.clear();
  }
  parts_.with_core([&](SchedulerCore& core, TimeNs now) { core.lease_answered(fetch, endpoint, answer.reply, now); });
}

void LeaseLinks::pulled(const PullOutcome& outcome) {
  parts_.with_core([&](SchedulerCore& core, TimeNs now) {
    core.pull_done(
        outcome.pull, outcome.rank, outcome.ok, now, outcome.checksums,
        {static_cast<ErrorCode>(outcome.code), outcome.what, outcome.path, outcome.limit_mb_per_s, outcome.post,
         outcome.wire, outcome.unpack, outcome.num_in_frames, outcome.num_past_frames, outcome.host_why},
        outcome.in_frames);
  });
}

void LeaseLinks::slots_written(const SlotsWritten& slots) {
  parts_.with_core([&](SchedulerCore& core, TimeNs now) {
    for (std::size_t i = 0; i < slots.chunks.size(); ++i)
      core.slot_written(slots.chunks[i], slots.rank, i < slots.ok.size() && slots.ok[i], now);
  });
}

}  // namespace kvferry
