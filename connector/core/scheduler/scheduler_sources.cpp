// The handoff source of a request: when it is asked again, because a push of its chunks has failed. Also blocks nodes
// from which nothing comes.
#include <algorithm>
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// Blocks fetches from the node at `endpoint` for a while: it did not answer, or some rank got no intact chunk from it.
void SchedulerCore::suspect(const std::string& endpoint, TimeNs now) {
  const TimeNs pause = suspects_.failed(endpoint, now);
  if (pause == 0) return;
  counters_.holders_suspected += 1;
  actions_.push_back(LogLine{
      fmt::format("no intact chunk came from node {} within {} ms; no KV is fetched from it for {} s. If this message "
                  "repeats, check that the node runs, and that no firewall blocks the ports of its workers",
                  endpoint, config_.try_timeout / kMillisecond, pause / kSecond),
      true, endpoint});
}

/// Returns true if some of these chunks are being written into the pool.
bool SchedulerCore::has_writing(std::span<const ChunkMeta> chunks) const {
  return std::any_of(chunks.begin(), chunks.end(), [&](const ChunkMeta& chunk) {
    const ChunkPool::Slot* slot = pool_.find(chunk.key);
    return slot != nullptr && slot->state == ChunkPool::State::kWriting && slot->meta.num_tokens == chunk.num_tokens;
  });
}

/// Returns the chunks of the tokens that the handoff source has computed for this request.
std::vector<ChunkMeta> SchedulerCore::handed_off(RequestState& request) const {
  return request.chain.prefix(reusable(std::min(request.source->num_tokens, request.chain.size())));
}

/// Returns true if the handoff source was not asked for some chunks because they were being written, and no chunk of
/// the handoff is being written any more.
bool SchedulerCore::is_source_next(RequestState& request) const {
  return request.source_left && !has_writing(handed_off(request));
}

/// Releases a lease that was granted for this request; `request` is nullptr if the request has ended, or for a
/// replication. A lease of the handoff source is kept while that source is to be asked again.
void SchedulerCore::release_lease(RequestState* request, ReleaseLease lease) {
  const bool asks_again = request != nullptr && request->source_left;
  if (request != nullptr && !asks_again) drop_source(*request);
  if (lease.lease == 0) return;
  if (asks_again && request->source->endpoint == lease.endpoint)
    request->kept_leases.push_back(std::move(lease));
  else
    actions_.push_back(std::move(lease));
}

/// Called when the request needs its handoff source no more. Releases the leases that were kept until then.
void SchedulerCore::drop_source(RequestState& request) {
  request.source_left = false;
  for (ReleaseLease& lease : std::exchange(request.kept_leases, {})) actions_.push_back(std::move(lease));
}

/// Fetches missing chunks from the handoff sources. Called after writes have ended, because the writes of a push may
/// have failed. The fetch does not wait for the next lookup: the engine may make that lookup only after the request's
/// wait_deadline.
void SchedulerCore::ask_sources_again(TimeNs now) {
  for (auto& [id, request] : requests_)
    if (!request.fetch && !request.running && is_source_next(request) && could_grow(request, cover(request), 0))
      start_fetch(request, now);
}

}  // namespace kvferry
