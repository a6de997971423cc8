// A request's start, token updates and end; the pool's publications, evictions and reset; tick(). The other
// scheduler_*.cpp files define the other functions of SchedulerCore.
#include "connector/core/scheduler/scheduler_core.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "connector/core/promises.h"

namespace kvferry {

SchedulerCore::SchedulerCore(CoreConfig config)
    : config_(std::move(config)),
      pool_(config_.num_slots, config_.num_ranks),
      sender_({config_, pool_, actions_, counters_, numbers_, recorder_, provenance_, now_},
              [this](const RequestId& id) {
                if (RequestState* request = find(id)) request->is_delivered = true;
                unpin_handoff(handoffs_.find(id.value));
              }),
      receiver_({config_, pool_, actions_, counters_, numbers_, recorder_, provenance_, now_}, announced_) {
  KVFERRY_CHECK(!config_.groups.empty(), "the engine has no KV cache group; at least one is needed");
  config_.whole_blocks |= config_.keeps_state;
  const KvGroup* windowed = nullptr;  // the last KV group with a window
  for (const KvGroup& group : config_.groups) {
    block_tokens_ = std::lcm(block_tokens_, group.block_tokens);
    KVFERRY_CHECK(!config_.keeps_state || (config_.chunk_tokens == group.block_tokens &&
                                           (group.window == 0 || group.window == group.block_tokens)),
                  "a model with state needs chunks, windows and blocks of one size, not of {}, {} and {} tokens",
                  config_.chunk_tokens, group.window, group.block_tokens);
    if (group.window == 0) continue;
    has_unlike_windows_ |= windowed != nullptr && group != *windowed;
    windowed = &group;
  }
  has_windows_ = windowed != nullptr;
  KVFERRY_CHECK(!config_.whole_blocks || config_.chunk_tokens % block_tokens_ == 0,
                "chunks of whole blocks need a multiple of {} tokens, not {}", block_tokens_, config_.chunk_tokens);
  KVFERRY_CHECK(has_windows_ || !config_.keeps_state,
                "a model with state needs a KV cache group with a window, which none of its {} groups has",
                config_.groups.size());
}

RequestState* SchedulerCore::find(const RequestId& id) {
  const auto found = requests_.find(id);
  return found == requests_.end() ? nullptr : &found->second;
}

void SchedulerCore::add_request(NewRequest request, TimeNs now) {
  now_ = now;
  if (requests_.contains(request.id) || request.tokens.empty()) return;
  const ChunkKey root = request.extras.empty() ? plain_root_ : root_key(config_.fingerprint, request.extras);
  RequestState& state =
      requests_.try_emplace(request.id, request, root, config_.chunk_tokens, progress_.add()).first->second;
  if (state.cacheable) known_keys_.recall(request.digests, state.chain);
  const std::size_t num_recalled = state.chain.hashed_keys().size();
  // vLLM may reuse an id while the earlier request's load is in progress. The attempt's number distinguishes the two
  // loads.
  const auto after = loads_.upper_bound({request.id.value, std::numeric_limits<std::uint32_t>::max()});
  if (after != loads_.begin() && std::prev(after)->first.first == request.id.value)
    state.attempt.value = std::prev(after)->first.second;
  if (state.source) state.source->num_tokens = reusable(state.source->num_tokens);
  const Coverage coverage = state.cacheable ? cover(state) : Coverage{};
  record_arrival(state, coverage, request);
  // A prompt that was handed over is computed, so its push should end soon. Chunks that do not arrive soon are pulled.
  if (state.source && receiver_.num_reserved_chunks() > 0) receiver_.shorten_deadline(handed_off(state), now);
  if (state.cacheable && !state.prepares && could_grow(state, coverage, 0)) start_fetch(state, now);
  if (state.cacheable && state.handoff && request.push_to && !config_.only_reads)
    sender_.offer(state.id, *request.push_to, state.chain.prefix(reusable(state.num_prompt_tokens)), now, state.record);
  known_keys_.remember(request.digests, state.chain, num_recalled);
}

void SchedulerCore::update_tokens(const RequestId& id, std::uint32_t keep, std::span<const std::int32_t> new_tokens) {
  if (RequestState* request = find(id)) {
    if (keep < request->chain.size()) {  // KV of truncated tokens is invalid
      request->computed = std::min(request->computed, keep);
      request->saved = std::min(request->saved, keep - keep % config_.chunk_tokens);
    }
    request->chain.truncate(keep);
    request->chain.append(new_tokens);
  }
}

std::uint32_t SchedulerCore::num_tokens(const RequestId& id) const {
  const auto found = requests_.find(id);
  return found == requests_.end() ? 0 : found->second.chain.size();
}

RequestHandle SchedulerCore::handle_of(const RequestId& id) const {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return {};
  Progress& progress = found->second.progress;
  return {&progress, progress.generation};
}

FinishedRequest SchedulerCore::finished(const RequestId& id, std::uint32_t num_computed, const BlockTable& blocks,
                                        bool aborted, TimeNs now) {
  now_ = now;
  FinishedRequest result;
  RequestState* found = find(id);
  if (found == nullptr) return result;
  RequestState& request = *found;
  result.known = true;
  result.preemptions = request.preemptions;
  result.fetch_ns = request.fetch_ns;
  if (request.running && !aborted) {
    request.blocks = blocks;
    request.computed = num_computed;
    plan_leftover_saves(request, config_.save_partial_chunks);
    if (request.handoff) {
      result.handoff = true;
      result.handoff_tokens = std::min(num_computed, request.num_prompt_tokens);
      result.handoff_name = pin_handoff(request, result.handoff_tokens, now);
    }
  }
  LifeEvent& event = record(request, LifeKind::kFinished, aborted ? Cause::kAborted : Cause::kNone);
  event.tokens = request.chain.size();
  event.expected = result.handoff_tokens;
  sender_.request_finished(id);
  drop_source(request);
  result.admissions = std::move(request.admissions);
  end_attempt(request);
  for (Preparation& preparation : preparations_)
    if (preparation.job.request_id == id.value) preparation.has_request = false;
  // A pull in progress still fills the pool; a lease that arrives late is released.
  if (request.fetch) fetches_.erase(request.fetch->id);
  progress_.remove(request.progress);
  requests_.erase(id);
  return result;
}

/// Pins the prompt's chunks until the decode node releases its lease, at most for handoff_ttl. Pins nothing if a push
/// has delivered the prompt. Returns the hand-off's name.
std::string SchedulerCore::pin_handoff(RequestState& request, std::uint32_t num_tokens, TimeNs now) {
  const std::string& id = request.id.value;
  unpin_handoff(handoffs_.find(id));
  std::string name = fmt::format("{}.{:016x}", id, numbers_.draw());
  if (request.is_delivered) return name;
  std::vector<ChunkRef> chunks;
  for (const ChunkMeta& chunk : request.chain.prefix(reusable(num_tokens)))
    if (const ChunkPool::Slot* slot = pool_.find(chunk.key)) chunks.push_back(slot->ref);
  handoffs_[id] = {pool_.pin(std::move(chunks), "handoff of " + id, now, now + config_.handoff_ttl), name};
  return name;
}

/// Returns the hand-off of this name, handoffs_.end() if no prompt is pinned under this name.
Handoffs::iterator SchedulerCore::find_handoff(const std::string& name) {
  const auto found = handoffs_.find(name.substr(0, name.rfind('.')));
  return found == handoffs_.end() || found->second.name != name ? handoffs_.end() : found;
}

void SchedulerCore::unpin_handoff(Handoffs::iterator handoff) {
  if (handoff == handoffs_.end()) return;
  pool_.unpin(handoff->second.pin);
  handoffs_.erase(handoff);
}

void SchedulerCore::reset_cache() {
  for (const ChunkPool::Slot* slot : pool_.ready()) pool_.invalidate(slot->ref);
  invalidate_planned_saves();
  receiver_.invalidate();
  announced_.clear();
  for (auto& [id, request] : requests_) {
    request.cause = request.cacheable ? Cause::kReset : request.cause;
    request.cause_event = 0;
  }
  announce_evictions();
}

std::vector<ChunkMeta> SchedulerCore::snapshot() const {
  std::vector<ChunkMeta> chunks;
  for (const ChunkPool::Slot* slot : pool_.ready())
    if (slot->is_complete()) chunks.push_back(slot->meta);
  return chunks;
}

/// Offers a ready chunk to other nodes: to all of them if it is in every rank's slot, otherwise only to decode nodes
/// that pull it from frames.
void SchedulerCore::publish(ChunkRef chunk) {
  const ChunkPool::Slot& slot = pool_.slot(chunk.slot);
  promise::verified_only(slot.ref == chunk && slot.state == ChunkPool::State::kReady, slot.checksums.size(),
                         config_.num_ranks, chunk.slot);
  promise::purged_is_gone(provenance_.is_purged(slot.givers), chunk.slot);
  if (slot.is_complete()) actions_.push_back(PublishChunks{{slot.meta}});
  sender_.chunk_ready(slot, now_);
}

void SchedulerCore::slot_written(ChunkRef chunk, std::uint32_t rank, bool ok, TimeNs now) {
  now_ = now;
  if (!ok) counters_.slot_copies_failed += 1;
  if (pool_.slot_written(chunk, rank, ok)) publish(chunk);
  announce_evictions();
}

/// Tells the engine's KV events which of the request's tokens the chunk has, once for each chunk.
void SchedulerCore::name_chunk(const RequestState& request, ChunkRef chunk, std::uint32_t first_token) {
  if (!pool_.name(chunk)) return;
  const ChunkMeta& meta = pool_.slot(chunk.slot).meta;
  named_.push_back({request.id.value, meta.key, first_token, meta.num_tokens});
}

void SchedulerCore::announce_evictions() {
  std::vector<ChunkKey> keys = pool_.take_evicted();
  counters_.evicted_chunks += keys.size();
  counters_.evicted_for_tenants = pool_.num_evicted_for_tenants();
  if (!keys.empty()) actions_.push_back(AnnounceEvictions{std::move(keys)});
}

/// Returns the slot of the chunk with this key and this number of tokens, nullptr if there is none. A chunk with this
/// key and another length comes from another node and is wrong: the chunk is dropped, and counted once.
const ChunkPool::Slot* SchedulerCore::find_chunk(const ChunkKey& key, std::uint32_t num_tokens) {
  const ChunkPool::Slot* slot = pool_.find(key);
  if (slot == nullptr || slot->meta.num_tokens == num_tokens) return slot;
  if (!slot->write_failed) {
    counters_.mislabeled_chunks += 1;
    if (slot->state == ChunkPool::State::kReady)
      pool_.invalidate(slot->ref);
    else
      pool_.fail_write(slot->ref);
  }
  return nullptr;
}

void SchedulerCore::tick(TimeNs now) {
  now_ = now;
  sender_.tick(now);
  const std::uint64_t num_abandoned = counters_.writes_abandoned;
  receiver_.tick(now);
  has_ended_writes_ |= counters_.writes_abandoned != num_abandoned;
  if (std::exchange(has_ended_writes_, false)) ask_sources_again(now);
  counters_.pins_expired += pool_.expire_pins(now).size();
  provenance_.tick(now);
  pool_.find_idle_tenants(now, config_.tenant_idle);
  std::erase_if(handoffs_, [&](const auto& entry) { return !pool_.pinned(entry.second.pin); });
  erase_ended_leases();
  suspects_.tick(now);
  std::vector<RequestState*> overdue;  // collected first, because advance_fetch() changes fetches_
  for (const auto& [fetch, id] : fetches_)
    if (RequestState& request = requests_.at(id); request.fetch->try_deadline <= now) overdue.push_back(&request);
  for (RequestState* request : overdue) {
    counters_.fetch_timeouts += 1;
    blame_wait(*request);
    if (request->fetch->stage == Fetch::Stage::kLease) suspect(request->fetch->endpoint, now);
    advance_fetch(*request, now);
  }
  tick_announced(now);
  tick_orders(now);
}

}  // namespace kvferry
