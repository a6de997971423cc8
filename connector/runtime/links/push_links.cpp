#include "connector/runtime/links/push_links.h"

#include <algorithm>
#include <utility>

#include "connector/runtime/links/frame_leases.h"

namespace kvferry {
namespace {

constexpr auto kDeclined = static_cast<std::uint8_t>(PushVerdict::kDeclined);
constexpr auto kGranted = static_cast<std::uint8_t>(PushVerdict::kGranted);
constexpr auto kPulled = static_cast<std::uint8_t>(PushVerdict::kPulled);

}  // namespace

// ---- actions of the core ----

void PushLinks::execute(OfferPush& wanted) {
  wanted.offer.shards = shards_of(parts_.ranks);
  wanted.offer.has_frames = FrameLeases::has_frames(parts_.ranks);
  if (parts_.send_node(wanted.endpoint, wanted.push, wanted.offer)) return;
  // If the offer can't be sent, the node counts as one that grants nothing.
  parts_.with_core([&](SchedulerCore& core, TimeNs now) { core.push_answered(wanted.push, wanted.endpoint, {}, now); });
}

void PushLinks::execute(StartPush& wanted) {
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank) {
    if (!parts_.send_worker(rank, wanted.push, wanted))
      ended({wanted.push, rank, wanted.index, false,
             fmt::format("the order to push a chunk could not be sent to the worker of rank {}", rank)});
  }
}

void PushLinks::execute(AnnounceLayers& wanted) {
  // If the announcement is lost, the decode node pulls these layers when it learns of later ones.
  parts_.send_node(wanted.endpoint, 0, wanted.progress);
}

void PushLinks::execute(SettlePush& wanted) {
  // If the settlement is lost, the decode node revokes the grants at their deadline.
  parts_.send_node(wanted.endpoint, 0, wanted.settlement);
}

void PushLinks::execute(DropPush& wanted) {
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank)
    parts_.send_worker(rank, wanted.push, PushDrop{{wanted.push}});
}

void PushLinks::execute(GrantSlots& wanted) {
  const auto granting = granting_.find(wanted.reservation);
  if (granting != granting_.end()) wanted.member = granting->second.asker.member;
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank) {
    if (!parts_.send_worker(rank, wanted.reservation, wanted))
      granted({wanted.reservation, rank, std::vector<std::string>(wanted.chunks.size())});
  }
}

void PushLinks::execute(RevokeSlots& wanted) {
  // If an order can't be sent, the slots stay out of use, because the prefill node may still write into them.
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank) parts_.send_worker(rank, wanted.reservation, wanted);
}

// ---- messages of other nodes ----

void PushLinks::offered(Asker asker, PushOffer offer) {
  offer.has_frames = offer.has_frames && FrameLeases::has_frames(parts_.ranks);
  Granting granting{std::move(asker), {}, {}, {}, static_cast<std::uint32_t>(parts_.ranks.size())};
  PushReply& reply = granting.reply;
  reply.verdicts.assign(offer.chunks.size(), kDeclined);
  if (offer.shards == shards_of(parts_.ranks)) {
    parts_.with_core([&](SchedulerCore& core, TimeNs now) {
      reply = core.push_offered("offer " + std::to_string(granting.asker.id), offer, now, granting.asker.member,
                                granting.asker.id);
    });
  }
  if (reply.reservation == 0 || std::ranges::find(reply.verdicts, kGranted) == reply.verdicts.end()) {
    parts_.answer(granting.asker, PushAnswer{reply, {}, {}});  // the workers grant nothing
    return;
  }
  for (std::uint32_t index = 0; index < reply.verdicts.size(); ++index)
    if (reply.verdicts[index] == kGranted) granting.indices.push_back(index);
  granting.grants.assign(parts_.ranks.size(), std::vector<std::string>(offer.chunks.size()));
  granting_.emplace(reply.reservation, std::move(granting));
}

void PushLinks::answered(const std::string& endpoint, std::uint64_t push, PushAnswer answer) {
  // The workers write to the address in this answer, so the answer must come from the node to which the offer was sent.
  bool is_awaited = false;
  parts_.with_core([&](SchedulerCore& core, TimeNs) { is_awaited = core.awaits_push_answer(push, endpoint); });
  if (!is_awaited) answer = {};
  std::vector<std::uint8_t>& verdicts = answer.reply.verdicts;
  const auto is_short = [&](const std::vector<std::string>& grants) { return grants.size() != verdicts.size(); };
  const bool fits = answer.ranks.size() == parts_.ranks.size() && answer.grants.size() == parts_.ranks.size() &&
                    std::none_of(answer.grants.begin(), answer.grants.end(), is_short);
  if (!fits)
    for (std::uint8_t& verdict : verdicts) verdict = verdict == kPulled ? kPulled : kDeclined;
  for (std::uint32_t rank = 0; is_awaited && rank < parts_.ranks.size(); ++rank) {
    PushOrder order{push, {}, {}};
    if (fits) {
      order.remote_address = answer.ranks[rank].transport_address;
      order.grants = std::move(answer.grants[rank]);
      for (std::size_t index = 0; index < verdicts.size(); ++index)
        if (verdicts[index] != kGranted) order.grants[index].clear();
    }
    parts_.send_worker(rank, push, order);
  }
  parts_.with_core([&](SchedulerCore& core, TimeNs now) { core.push_answered(push, endpoint, answer.reply, now); });
}

void PushLinks::settled(const PushSettlement& settlement) {
  parts_.with_core([&](SchedulerCore& core, TimeNs now) { core.push_settled(settlement, now); });
}

void PushLinks::progressed(const PushProgress& progress) {
  parts_.with_core([&](SchedulerCore& core, TimeNs now) { core.push_progressed(progress, now); });
}

// ---- outcomes of this engine's workers ----

void PushLinks::granted(const GrantOutcome& outcome) {
  const auto found = granting_.find(outcome.reservation);
  if (found == granting_.end()) return;
  Granting& granting = found->second;
  if (outcome.rank >= granting.grants.size()) return;
  for (std::size_t i = 0; i < std::min(granting.indices.size(), outcome.grants.size()); ++i)
    granting.grants[outcome.rank][granting.indices[i]] = outcome.grants[i];
  if (--granting.ranks_left > 0) return;
  std::vector<std::uint32_t> missing;
  for (const std::uint32_t index : granting.indices) {
    const auto lacks = [&](const std::vector<std::string>& rank) { return rank[index].empty(); };
    if (std::none_of(granting.grants.begin(), granting.grants.end(), lacks)) continue;
    missing.push_back(index);
    granting.reply.verdicts[index] = kDeclined;
  }
  if (!missing.empty())
    parts_.with_core([&](SchedulerCore& core, TimeNs) { core.push_grant_failed(outcome.reservation, missing); });
  PushAnswer answer{granting.reply, parts_.ranks, std::move(granting.grants)};
  const bool is_granted = missing.size() < granting.indices.size();
  for (RankEndpoint& rank : answer.ranks) {  // to write, the asker needs the grants and addresses, but no regions
    rank.pool_region.clear();
    rank.frames_region.clear();
    rank.transport_address = is_granted ? LinkParts::address_of(rank, granting.asker) : std::string();
  }
  parts_.answer(granting.asker, answer);
  granting_.erase(found);
}

void PushLinks::revoked(const Revoked& outcome) {
  parts_.with_core([&](SchedulerCore& core, TimeNs now) { core.push_revoked(outcome, now); });
}

void PushLinks::ended(const PushOutcome& outcome) {
  parts_.with_core([&](SchedulerCore& core, TimeNs now) { core.chunk_push_ended(outcome, now); });
}

void PushLinks::layers_saved(const LayersSaved& saved) {
  parts_.with_core([&](SchedulerCore& core, TimeNs) { core.layers_saved(saved); });
}

}  // namespace kvferry
