#include "connector/runtime/links/directory_link.h"

#include <optional>
#include <variant>
#include <vector>

#include "transport/base/log.h"

namespace kvferry {
namespace {

constexpr std::size_t kLookupsMax = 10'000;  // pending ones; the oldest are dropped beyond that

std::vector<controller::ChunkEntry> entries_of(const std::vector<ChunkMeta>& chunks) {
  std::vector<controller::ChunkEntry> entries;
  for (const ChunkMeta& chunk : chunks)
    entries.push_back({chunk.key, chunk.num_tokens, chunk.is_tail, chunk.tail_group.value_or(ChunkKey{})});
  return entries;
}

ChunkMeta meta_of(const controller::ChunkEntry& chunk) {
  const bool has_group = chunk.is_tail && chunk.num_tokens >= kTailGroupTokens;
  return {chunk.key, chunk.num_tokens, chunk.is_tail, has_group ? std::optional(chunk.tail_group) : std::nullopt};
}

HolderOffer offer_of(const controller::Holder& holder) {
  HolderOffer offer{holder.engine_id, holder.endpoint, holder.num_full_chunks, {}};
  for (const controller::ChunkEntry& tail : holder.tails) offer.tails.push_back({tail.key, tail.num_tokens, true, {}});
  return offer;
}

}  // namespace

void DirectoryLink::execute(QueryDirectory& query) {
  const auto token = directory_->lookup({std::move(query.keys), std::move(query.tail_groups), {}});
  if (!token) {
    with_core_([&](SchedulerCore& core) { core.directory_answered(query.fetch, {}, clock_.now()); });
    return;
  }
  fetch_of_lookup_[*token] = query.fetch;
  while (fetch_of_lookup_.size() > kLookupsMax) fetch_of_lookup_.erase(fetch_of_lookup_.begin());
}

void DirectoryLink::execute(PublishChunks& published) { directory_->publish(entries_of(published.chunks)); }

void DirectoryLink::take_events() {
  for (controller::ClientEvent& event : directory_->process(clock_.now()))
    std::visit([this](auto& one) { take(one); }, event);
}

void DirectoryLink::leave() {
  if (directory_) directory_->leave();
  directory_.reset();
}

void DirectoryLink::take(controller::LookupReply& reply) {
  const auto found = fetch_of_lookup_.find(reply.token);
  if (found == fetch_of_lookup_.end()) return;
  std::vector<HolderOffer> offers;
  for (const controller::Holder& holder : reply.holders) offers.push_back(offer_of(holder));
  with_core_([&](SchedulerCore& core) { core.directory_answered(found->second, std::move(offers), clock_.now()); });
  fetch_of_lookup_.erase(found);
}

void DirectoryLink::take(controller::LookupFailed& failed) {
  fetch_of_lookup_.erase(failed.token);  // the core has its own deadline for the answer
}

void DirectoryLink::take(controller::Registered&) {
  log().info("registered with the controller");
  with_core_([](SchedulerCore& core) { core.set_directory_up(true); });
}

void DirectoryLink::take(controller::Refused& refused) {
  log().error("the controller refuses this node: {}", refused.reason);
  with_core_([](SchedulerCore& core) { core.set_directory_up(false); });
}

void DirectoryLink::take(controller::Lost& lost) {
  log().warn("lost the controller ({}); requests go on without it", lost.reason);
  with_core_([](SchedulerCore& core) { core.set_directory_up(false); });
}

void DirectoryLink::take(controller::SnapshotWanted&) {
  std::vector<controller::ChunkEntry> entries;
  with_core_([&](SchedulerCore& core) { entries = entries_of(core.snapshot()); });
  directory_->publish(entries);
  directory_->end_snapshot();
  log().info("published a snapshot of {} chunks to the controller", entries.size());
}

void DirectoryLink::take(controller::PinChunks& wanted) {
  with_core_([&](SchedulerCore& core) { core.pin_ordered(wanted.pin_id, wanted.keys, wanted.ttl, clock_.now()); });
}

void DirectoryLink::take(controller::UnpinChunks& wanted) {
  with_core_([&](SchedulerCore& core) { core.unpin_ordered(wanted.pin_id); });
}

void DirectoryLink::take(controller::ReplicateChunks& wanted) {
  ReplicateOrder order{std::move(wanted.engine_id), std::move(wanted.endpoint), {}, wanted.ttl};
  for (const controller::ChunkEntry& chunk : wanted.chunks) order.chunks.push_back(meta_of(chunk));
  with_core_([&](SchedulerCore& core) { core.replicate_ordered(std::move(order), clock_.now()); });
}

void DirectoryLink::take(controller::EvictChunks& wanted) {
  with_core_([&](SchedulerCore& core) {
    if (wanted.all)
      core.reset_cache();
    else
      core.evict_ordered(wanted.keys);
  });
  log().info("evicted {} on the controller's order",
             wanted.all ? "all chunks" : fmt::format("{} chunks", wanted.keys.size()));
}

}  // namespace kvferry
