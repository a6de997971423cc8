#include "connector/runtime/links/directory_link.h"

#include <optional>
#include <variant>
#include <vector>

#include "controller/api/admin_command.h"
#include "transport/base/log.h"

namespace kvferry {
namespace {

static_assert(kMemberPrefix == controller::kMemberPrefix, "the core reads the controller's orders to purge");

// Limit on pending lookups; beyond this limit the oldest lookups are dropped.
constexpr std::size_t kLookupsMax = 10'000;

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
  HolderOffer offer{holder.endpoint, holder.num_full_chunks, {}, holder.member};
  for (const controller::ChunkEntry& tail : holder.tails) offer.tails.push_back({tail.key, tail.num_tokens, true, {}});
  return offer;
}

}  // namespace

void DirectoryLink::execute(QueryDirectory& query) {
  const auto token = directory_->lookup({std::move(query.keys), std::move(query.tail_groups), {}});
  if (!token) {
    parts_.with_core([&](SchedulerCore& core, TimeNs now) { core.directory_answered(query.fetch, {}, now); });
    return;
  }
  fetch_of_lookup_[*token] = query.fetch;
  while (fetch_of_lookup_.size() > kLookupsMax) fetch_of_lookup_.erase(fetch_of_lookup_.begin());
}

void DirectoryLink::execute(PublishChunks& published) { directory_->publish(entries_of(published.chunks)); }

void DirectoryLink::report() {
  controller::NodeReport report;
  parts_.with_core([&](SchedulerCore& core, TimeNs now) {
    activity_.read(core.recorder());
    activity_.add_to(report, now);
    report.num_slots = core.pool().num_slots();
    report.num_chunks = core.pool().num_ready();
    report.num_pinned = core.pool().num_pinned();
    report.chunk_bytes = core.config().chunk_bytes;
    report.num_pulls = core.num_pulls();
    report.num_pushes = core.num_pushes();
    report.purge_id = core.last_purge().id;
    report.num_purged = core.last_purge().num_chunks;
    report.purged_bytes = core.last_purge().num_bytes;
    report.weights_epoch = controller::report_text(parts_.weights_epoch);
  });
  directory_->set_report(encode(report));
}

void DirectoryLink::leave() {
  if (directory_) directory_->leave();
  directory_.reset();
}

void DirectoryLink::take_events() {
  for (controller::ClientEvent& event : directory_->process(parts_.clock.now())) take(event);
}

void DirectoryLink::take(controller::ClientEvent& event) {
  std::visit(
      Overloaded{
          [&](controller::LookupReply& reply) { take_answer(reply); },
          // The core needs no event for a failed lookup, since the core has its own deadline for the answer.
          [&](controller::LookupFailed& failed) { fetch_of_lookup_.erase(failed.token); },
          [&](controller::Registered&) {
            log().info("registered with controller {}", directory_->controller());
            set_up(true);
          },
          [&](controller::Refused& refused) {
            log().error(
                "controller {} refuses this node: {}; the node does not ask again until it is restarted, and works "
                "without the controller",
                directory_->controller(), refused.reason);
            set_up(false);
          },
          [&](controller::Lost& lost) {
            log().warn(
                "lost the connection to controller {} ({}); this node connects again as soon as it can, and serves "
                "requests without the controller until then",
                directory_->controller(), lost.reason);
            set_up(false);
          },
          [&](controller::SnapshotWanted&) { publish_snapshot(); },
          [&](controller::PinChunks& wanted) {
            parts_.with_core([&](SchedulerCore& core, TimeNs now) {
              core.pin_ordered(wanted.pin_id, wanted.keys, wanted.ttl, now);
            });
          },
          [&](controller::UnpinChunks& wanted) {
            parts_.with_core([&](SchedulerCore& core, TimeNs) { core.unpin_ordered(wanted.pin_id); });
          },
          [&](controller::ReplicateChunks& wanted) {
            ReplicateOrder order{std::move(wanted.endpoint), {}, wanted.ttl, std::move(wanted.member)};
            for (const controller::ChunkEntry& chunk : wanted.chunks) order.chunks.push_back(meta_of(chunk));
            parts_.with_core([&](SchedulerCore& core, TimeNs now) { core.replicate_ordered(std::move(order), now); });
          },
          [&](controller::PurgeChunks& wanted) {
            parts_.with_core([&](SchedulerCore& core, TimeNs now) {
              if (wanted.purge_id == 0)
                core.admit_ordered(wanted.giver);
              else
                core.purge_ordered(wanted.purge_id, wanted.giver, now);
            });
          },
          [&](controller::EvictChunks& wanted) {
            parts_.with_core([&](SchedulerCore& core, TimeNs) {
              if (wanted.all)
                core.reset_cache();
              else
                core.evict_ordered(wanted.keys);
            });
            log().info("on the controller's order, evicted {}",
                       wanted.all
                           ? "all chunks of this node's pool"
                           : fmt::format("those of {} named chunks that were in this node's pool", wanted.keys.size()));
          },
      },
      event);
}

void DirectoryLink::take_answer(controller::LookupReply& reply) {
  const auto found = fetch_of_lookup_.find(reply.token);
  if (found == fetch_of_lookup_.end()) return;
  std::vector<HolderOffer> offers;
  for (const controller::Holder& holder : reply.holders) offers.push_back(offer_of(holder));
  parts_.with_core(
      [&](SchedulerCore& core, TimeNs now) { core.directory_answered(found->second, std::move(offers), now); });
  fetch_of_lookup_.erase(found);
}

void DirectoryLink::publish_snapshot() {
  std::vector<controller::ChunkEntry> entries;
  parts_.with_core([&](SchedulerCore& core, TimeNs) { entries = entries_of(core.snapshot()); });
  directory_->publish(entries);
  directory_->end_snapshot();
  log().info("published a list of all {} chunks of this node's pool to the controller", entries.size());
}

void DirectoryLink::set_up(bool is_up) {
  parts_.with_core([&](SchedulerCore& core, TimeNs) { core.set_directory_up(is_up); });
}

}  // namespace kvferry
