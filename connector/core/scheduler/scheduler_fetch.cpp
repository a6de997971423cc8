// Fetches, which copy chunks of other nodes into this node's pool before a request is admitted. The handoff source is
// asked first, then the directory's holders, best first; each holder grants a lease before its chunks are pulled.
#include <algorithm>
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// Lets a fetch ask the handoff source at `endpoint` once more, which has the missing chunks in its slots by then. Its
/// lease is kept until that, because the source unpins the prompt when the lease ends.
static void ask_source_again(RequestState& request, const std::string& endpoint) {
  if (!request.source || request.source->endpoint != endpoint) return;
  if (std::exchange(request.fetch->asked_again, true)) return;
  request.fetch->asked_source = false;
  request.source_left = true;
}

void SchedulerCore::start_fetch(RequestState& request, TimeNs now) {
  request.fetched = true;
  request.source_left = false;
  Fetch fetch;
  fetch.id = ++last_id_;
  fetch.started = now;
  fetch.asked_source = !request.source;
  request.fetch = std::move(fetch);
  fetches_[request.fetch->id] = request.id;
  advance_fetch(request, now);
}

void SchedulerCore::end_fetch(RequestState& request, TimeNs now) {
  request.fetch_ns += now - request.fetch->started;
  request.next_fetch_at = now + config_.refetch_after;
  fetches_.erase(request.fetch->id);
  request.fetch.reset();
}

/// Returns the chunks of `offer` that the request can use and the pool neither has nor receives, in prefix order: full
/// chunks, then the longest matching tail; also the last full chunk, if the pool's copy lacks the model's state.
std::vector<ChunkMeta> SchedulerCore::missing_from(RequestState& request, const HolderOffer& offer) {
  TokenChain& chain = request.chain;
  const std::uint32_t full = std::min(offer.num_full_chunks, chain.num_full_chunks());
  const Coverage coverage = cover(request);
  std::vector<ChunkMeta> missing;
  for (std::uint32_t i = 0; i < full; ++i) {
    if (i * config_.chunk_tokens + 1 >= chain.size()) break;  // the engine computes the last token anyway
    const ChunkPool::Slot* present = find_chunk(chain.key(i), config_.chunk_tokens);
    // Only the state at the end of the longest possible hit is needed, not the states before it.
    const bool is_last = (i + 1) * config_.chunk_tokens == reusable(chain.size() - 1);
    if (present == nullptr || (is_last && lacks_state(*present)))
      missing.push_back(chain.meta(i, config_.chunk_tokens));
  }
  const std::uint32_t start = full * config_.chunk_tokens;
  if (offer.num_full_chunks > full || start + 1 >= chain.size()) return missing;
  const ChunkMeta* best = nullptr;
  for (const ChunkMeta& tail : offer.tails) {
    const std::uint32_t n = tail.num_tokens;
    if (n == 0 || n >= config_.chunk_tokens || n > chain.size() - start || start + n <= coverage.tokens) continue;
    if (best != nullptr && n <= best->num_tokens) continue;
    if (chain.tail_key(full, n) == tail.key) best = &tail;
  }
  if (best != nullptr && find_chunk(best->key, best->num_tokens) == nullptr)
    missing.push_back(chain.meta(full, best->num_tokens));
  return missing;
}

/// Asks the next node with missing chunks, or the directory. Ends the fetch if it can't, or if load_timeout has passed.
void SchedulerCore::advance_fetch(RequestState& request, TimeNs now) {
  Fetch& fetch = *request.fetch;
  if (fetch.stage == Fetch::Stage::kLease || fetch.stage == Fetch::Stage::kPull) {
    // The fetch gets a new id, so that late answers to the previous try are ignored.
    fetches_.erase(fetch.id);
    fetch.id = ++last_id_;
    fetches_[fetch.id] = request.id;
  }
  fetch.stage = Fetch::Stage::kDirectory;
  const bool late = now >= fetch.started + config_.load_timeout;
  while (!late) {
    HolderOffer offer;
    std::string handoff;
    if (!std::exchange(fetch.asked_source, true)) {
      const HandoffSource& source = *request.source;
      const std::uint32_t tokens = std::min(source.num_tokens, request.chain.size());
      offer = {source.endpoint, tokens / config_.chunk_tokens, {}, source.member};
      if (const std::uint32_t rest = tokens % config_.chunk_tokens; rest > 0)
        offer.tails.push_back(request.chain.meta(offer.num_full_chunks, rest));
      handoff = source.handoff;
      // Chunks that a push writes are not requested. If the push fails, the source is asked again, because the
      // directory is not asked for tails shorter than kTailGroupTokens.
      request.source_left = has_writing(handed_off(request));
    } else if (!fetch.asked_directory) {
      fetch.asked_directory = true;
      if (ask_directory(request, now)) return;
      continue;
    } else if (!fetch.offers.empty()) {
      offer = std::move(fetch.offers.front());
      fetch.offers.erase(fetch.offers.begin());
    } else {
      break;
    }
    std::vector<ChunkMeta> wanted;
    if (provenance_.is_purged(givers_of(offer.endpoint, offer.member)))
      blame(request, Cause::kRefused, offer.endpoint, "no KV is accepted from it, because an operator has purged it");
    else if (suspects_.allows(offer.endpoint, now))
      wanted = missing_from(request, offer);
    else
      blame(request, Cause::kSuspect, offer.endpoint);
    if (wanted.empty()) continue;
    RequestLease lease{fetch.id, offer.endpoint, {config_.fingerprint, {}, handoff}};
    lease.request.is_sure_of_frames = frame_holders_.contains(offer.endpoint);
    for (const ChunkMeta& chunk : wanted) lease.request.keys.push_back(chunk.key);
    suspects_.asked(offer.endpoint, now);
    fetch.stage = Fetch::Stage::kLease;
    fetch.try_deadline = now + config_.try_timeout;
    fetch.endpoint = offer.endpoint;
    fetch.member = offer.member;
    fetch.wanted = std::move(wanted);
    actions_.push_back(std::move(lease));
    return;
  }
  end_fetch(request, now);
}

/// Queries the directory. Returns false if that can't be reached, or the request is too short or wholly in the pool.
bool SchedulerCore::ask_directory(RequestState& request, TimeNs now) {
  TokenChain& chain = request.chain;
  if (!could_grow(request, cover(request), 0)) return false;
  if (!directory_up_) {
    blame(request, Cause::kNoController);
    return false;
  }
  QueryDirectory query;
  query.fetch = request.fetch->id;
  query.keys.assign(chain.keys().begin(), chain.keys().end());
  for (std::uint32_t i = 0; i <= chain.num_full_chunks(); ++i) {
    const auto group = chain.tail_group(i);
    if (!group) break;
    query.tail_groups.push_back(*group);
  }
  if (query.keys.empty() && query.tail_groups.empty()) return false;
  request.fetch->try_deadline = now + config_.try_timeout;
  actions_.push_back(std::move(query));
  return true;
}

void SchedulerCore::directory_answered(std::uint64_t fetch, std::vector<HolderOffer> offers, TimeNs now) {
  const auto found = fetches_.find(fetch);
  if (found == fetches_.end()) return;
  RequestState& request = requests_.at(found->second);
  if (request.fetch->stage != Fetch::Stage::kDirectory) return;
  now_ = now;
  if (offers.empty()) blame(request, Cause::kNoHolder);
  request.fetch->offers = std::move(offers);
  advance_fetch(request, now);
}

void SchedulerCore::lease_answered(std::uint64_t fetch, const std::string& endpoint, const LeaseReply& reply,
                                   TimeNs now) {
  // If a pull uses the lease already, the answer is a duplicate. The lease is released after that pull.
  const auto is_in_use = [&](const auto& entry) {
    return reply.lease != 0 && entry.second.endpoint == endpoint && entry.second.lease == reply.lease;
  };
  if (std::any_of(pulls_.begin(), pulls_.end(), is_in_use)) return;
  const auto release = [&] {
    if (reply.lease != 0) actions_.push_back(ReleaseLease{endpoint, reply.lease});
  };
  const bool is_replication = is_replication_lease(fetch);
  const auto found = fetches_.find(fetch);
  AnnouncedPushes::Push* const announced = announced_.waiting_for(fetch);
  const std::string* const asked = is_replication            ? &replications_.front().endpoint
                                   : announced != nullptr    ? &announced->endpoint
                                   : found != fetches_.end() ? &requests_.at(found->second).fetch->endpoint
                                                             : nullptr;
  if (asked != nullptr && *asked != endpoint) {
    counters_.unasked_answers += 1;
    return release();
  }
  if (is_replication) return replication_lease_answered(reply, now);
  if (announced != nullptr) return announced_lease_answered(*announced, reply, now);
  if (found == fetches_.end() || requests_.at(found->second).fetch->stage != Fetch::Stage::kLease) return release();
  RequestState& request = requests_.at(found->second);
  Fetch& current = *request.fetch;
  now_ = now;
  if (!reply.refused.empty()) {
    blame(request, Cause::kRefused, endpoint, reply.refused);
    actions_.push_back(
        LogLine{fmt::format("node {} leases no KV for request {}: {}; other nodes are asked, and the rest is computed",
                            endpoint, request.id, reply.refused),
                true});
  } else if (reply.chunks.size() < current.wanted.size()) {
    blame(request, Cause::kEvictedThere, endpoint);
    if (frame_holders_.missed(endpoint)) ask_source_again(request, endpoint);  // there may have been too few frames
  }
  // A push may have reserved slots for requested chunks in the meantime. Those chunks are not pulled now; if the push
  // fails, the source is asked again.
  if (request.source && has_writing(current.wanted)) {
    request.source_left = true;
    receiver_.shorten_deadline(current.wanted, now);
  }
  const StartPull* pull = start_pull(request.id, endpoint, current.member, current.wanted, reply, now);
  if (pull == nullptr) {
    suspects_.had_nothing(endpoint);
    release_lease(&request, {endpoint, reply.lease});
    return advance_fetch(request, now);
  }
  current.stage = Fetch::Stage::kPull;
  current.pull = pull->pull;
  current.try_deadline = pull->deadline + config_.try_timeout;
}

/// Reserves slots for the leased chunks of `wanted` that are not in the pool, and starts their pull. Returns nullptr if
/// no chunk is pulled; the caller then releases the lease.
const StartPull* SchedulerCore::start_pull(const RequestId& request, const std::string& endpoint,
                                           const std::string& member, std::span<const ChunkMeta> wanted,
                                           const LeaseReply& reply, TimeNs now, bool is_announced) {
  FetchPull pull{request, endpoint, reply.lease, {}, now};
  pull.is_announced = is_announced;
  const std::string writer = is_announced            ? "an announced push"
                             : request.value.empty() ? "a replication"
                                                     : "fetch for " + request.value;
  for (const LeasedChunk& leased : reply.chunks) {
    if (leased.index >= wanted.size()) continue;
    ChunkMeta meta = wanted[leased.index];
    if (leased.num_tokens != meta.num_tokens) continue;
    const bool has_checksums = leased.checksums.size() == config_.num_ranks;
    const bool has_runs = leased.checksums.empty() && leased.run_checksums.size() == config_.num_ranks;
    const bool is_growing =
        is_announced && leased.is_growing && leased.checksums.empty() && leased.run_checksums.empty();
    if (!has_checksums && !has_runs && !is_growing) continue;
    if (!meta.set_windows(leased.window_from, leased.windows_from, config_.groups.size())) continue;
    if (request.value.empty()) meta.tenant = leased.tenant;  // a replication order does not name the tenant
    Givers givers = givers_of(endpoint, member);
    add_givers(givers, leased.givers);
    if (provenance_.is_purged(givers)) continue;
    if (const ChunkPool::Slot* present = pool_.find(meta.key)) {
      // The chunk is in the pool or is being written. It is replaced only if it lacks the state that the holder has.
      if (meta.window_from > 0 || !lacks_state(*present)) continue;
      pool_.invalidate(present->ref);
    }
    const auto slot = pool_.reserve(meta, writer, std::move(givers));
    if (!slot) {
      counters_.pool_full += 1;
      if (RequestState* waiting = find(request)) blame(*waiting, Cause::kPoolFull);
      break;
    }
    pull.items.push_back({leased.chunk, *slot, leased.num_tokens, leased.checksums, leased.run_checksums, leased.frames,
                          leased.lacks_slots || is_growing, is_growing});
  }
  announce_evictions();
  if (pull.items.empty()) return nullptr;
  counters_.pulls += 1;
  StartPull action{++last_id_, endpoint, reply.lease, now + config_.pull_timeout, pull.items};
  if (const RequestState* waiting = find(request)) pull.record = waiting->record;
  pulls_.emplace(action.pull, std::move(pull));
  actions_.push_back(std::move(action));
  return &std::get<StartPull>(actions_.back());
}

void SchedulerCore::pull_done(std::uint64_t id, std::uint32_t rank, const std::vector<bool>& ok, TimeNs now,
                              const std::vector<std::uint64_t>& checksums, const TransferEnd& end,
                              const std::vector<bool>& in_frames) {
  now_ = now;
  const auto found = pulls_.find(id);
  promise::exactly_once(found != pulls_.end() && ok.size() == found->second.items.size(), "the end of pull {}", id);
  FetchPull& pull = found->second;
  for (std::size_t i = 0; i < ok.size(); ++i) {
    const PullItem& item = pull.items[i];  // ok[i] is true if the bytes match the holder's checksums
    const bool has_checksums = !item.checksums.empty();
    const bool is_ok = ok[i] && (has_checksums || i < checksums.size());
    promise::verified_only_when_settled(item.is_growing && is_ok, has_checksums, item.local.slot);
    if (!is_ok) counters_.pull_failures += 1;
    const std::uint64_t checksum = has_checksums ? item.checksums.at(rank) : is_ok ? checksums[i] : 0;
    if (pool_.rank_written(item.local, rank, is_ok, checksum, i < in_frames.size() && in_frames[i])) {
      counters_.pulled_chunks += 1;
      publish(item.local);
    }
  }
  pull.has_failed |= std::ranges::find(ok, true) == ok.end();
  pull.ranks_done += 1;
  record_pull(pull, ok, end);
  if (pull.ranks_done < config_.num_ranks) return;
  // A pull that fails at once costs little. After a slow failure the holder is a suspect, so that not all wait in vain.
  if (!pull.has_failed)
    suspects_.succeeded(pull.endpoint);
  else if (now - pull.started_at >= config_.try_timeout)
    suspect(pull.endpoint, now);
  RequestState* const request = find(pull.request);
  const bool is_waiting = request != nullptr && request->fetch && request->fetch->stage == Fetch::Stage::kPull &&
                          request->fetch->pull == id;
  if (is_waiting && pull.has_lost_frames()) ask_source_again(*request, pull.endpoint);
  release_lease(request, {pull.endpoint, pull.lease});
  const bool is_replication = !pull.is_announced && pull.request.value.empty();
  pulls_.erase(found);
  has_ended_writes_ = true;
  if (is_replication) return end_replication_piece(id, now);
  if (is_waiting) advance_fetch(*request, now);
}

}  // namespace kvferry
