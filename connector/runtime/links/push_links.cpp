#include "connector/runtime/links/push_links.h"

#include <algorithm>
#include <utility>

namespace kvferry {
namespace {

bool is(const Envelope& envelope, NodeMessage type) { return envelope.type == static_cast<std::uint32_t>(type); }

}  // namespace

void PushLinks::execute(OfferPush& offered) {
  offered.offer.shards = shards();
  const std::string& endpoint = offered.target.endpoint;
  if (parts_.send_node(endpoint,
                       seal(NodeMessage::kPushOffer, offered.push, offered.offer, parts_.version_with(endpoint))))
    return;
  // Nobody there: the same as a node that lends nothing.
  parts_.tell_core(
      [&](SchedulerCore& core) { core.push_answered(offered.push, offered.target.endpoint, {}, parts_.clock.now()); });
}

void PushLinks::execute(StartPush& started) {
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank) {
    if (parts_.send_worker(rank, seal(NodeMessage::kPushStart, started.start.push, started.start))) continue;
    const PushOutcome lost{started.start.push, rank, started.start.index, false, "the worker takes no orders"};
    parts_.tell_core([&](SchedulerCore& core) { core.chunk_push_ended(lost, parts_.clock.now()); });
  }
}

void PushLinks::execute(SettlePush& settled) {
  // Where it is lost the other side's loan ends at its deadline.
  parts_.send_node(settled.endpoint,
                   seal(NodeMessage::kPushSettlement, 0, settled.settlement, parts_.version_with(settled.endpoint)));
}

void PushLinks::execute(DropPush& dropped) {
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank)
    parts_.send_worker(rank, seal(NodeMessage::kPushDrop, dropped.push, dropped.push));
}

void PushLinks::execute(GrantSlots& lent_slots) {
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank) {
    if (parts_.send_worker(rank, seal(NodeMessage::kLendOrder, lent_slots.order.ticket, lent_slots.order))) continue;
    lent({lent_slots.order.ticket, rank, std::vector<std::string>(lent_slots.order.chunks.size())});
  }
}

void PushLinks::execute(RevokeSlots& reclaimed) {
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank) {
    if (parts_.send_worker(rank, seal(NodeMessage::kReclaim, reclaimed.revocation.ticket, reclaimed.revocation))) continue;
    Revocation lost = reclaimed.revocation;
    lost.rank = rank;
    for (RevokedChunk& chunk : lost.chunks) chunk.ok = false;
    parts_.tell_core([&](SchedulerCore& core) { core.push_revoked(lost, parts_.clock.now()); });
  }
}

bool PushLinks::take_request(const std::string& sender, const Envelope& envelope) {
  if (is(envelope, NodeMessage::kPushOffer)) {
    if (const auto offer = decode<PushOffer>(envelope.body, "push offer")) offered(sender, envelope, *offer);
    return true;
  }
  if (is(envelope, NodeMessage::kPushSettlement)) {
    if (const auto settlement = decode<PushSettlement>(envelope.body, "push settlement"))
      parts_.tell_core([&](SchedulerCore& core) { core.push_settled(*settlement); });
    return true;
  }
  return false;
}

void PushLinks::offered(const std::string& sender, const Envelope& envelope, const PushOffer& offer) {
  const std::uint64_t push = envelope.id;
  Lending lending{sender, push, envelope.version, {}, {}, {}, static_cast<std::uint32_t>(parts_.ranks.size())};
  lending.reply.verdicts.assign(offer.chunks.size(), static_cast<std::uint8_t>(PushVerdict::kDeclined));
  if (offer.shards == shards()) {
    parts_.tell_core([&](SchedulerCore& core) {
      lending.reply = core.push_offered("offer " + std::to_string(push), offer, parts_.clock.now());
    });
  }
  if (lending.reply.ticket == 0) {
    parts_.answer_node(sender,
                       seal(NodeMessage::kPushAnswer, push, PushAnswer{lending.reply, {}, {}}, lending.version));
    return;
  }
  for (std::uint32_t index = 0; index < lending.reply.verdicts.size(); ++index)
    if (lending.reply.verdicts[index] == static_cast<std::uint8_t>(PushVerdict::kGranted)) lending.indices.push_back(index);
  lending.grants.assign(parts_.ranks.size(), std::vector<std::string>(offer.chunks.size()));
  lending_.emplace(lending.reply.ticket, std::move(lending));
}

void PushLinks::lent(const GrantOutcome& outcome) {
  const auto found = lending_.find(outcome.ticket);
  if (found == lending_.end()) return;
  Lending& lending = found->second;
  if (outcome.rank >= lending.grants.size()) return;
  for (std::size_t i = 0; i < std::min(lending.indices.size(), outcome.grants.size()); ++i)
    lending.grants[outcome.rank][lending.indices[i]] = outcome.grants[i];
  if (--lending.ranks_left > 0) return;
  std::vector<std::uint32_t> missing;
  for (const std::uint32_t index : lending.indices) {
    const auto lacks = [&](const std::vector<std::string>& rank) { return rank[index].empty(); };
    if (!std::any_of(lending.grants.begin(), lending.grants.end(), lacks)) continue;
    missing.push_back(index);
    lending.reply.verdicts[index] = static_cast<std::uint8_t>(PushVerdict::kDeclined);
  }
  if (!missing.empty()) {
    parts_.tell_core([&](SchedulerCore& core) { core.push_grant_failed(outcome.ticket, missing); });
  }
  const PushAnswer answer{lending.reply, parts_.ranks, std::move(lending.grants)};
  parts_.answer_node(lending.sender, seal(NodeMessage::kPushAnswer, lending.push, answer, lending.version));
  lending_.erase(found);
}

std::vector<Shard> PushLinks::shards() const {
  std::vector<Shard> all;
  for (const RankEndpoint& rank : parts_.ranks) all.push_back(rank.shard);
  return all;
}

bool PushLinks::take_answer(const std::string& endpoint, const Envelope& envelope) {
  if (!is(envelope, NodeMessage::kPushAnswer)) return false;
  Result<PushAnswer> answer = decode<PushAnswer>(envelope.body, "push answer");
  if (!answer) return true;
  const std::size_t num_chunks = answer->reply.verdicts.size();
  const auto is_short = [&](const std::vector<std::string>& grants) { return grants.size() != num_chunks; };
  const bool fits = answer->ranks.size() == parts_.ranks.size() && answer->grants.size() == parts_.ranks.size() &&
                    !std::any_of(answer->grants.begin(), answer->grants.end(), is_short);
  if (!fits) answer->reply.verdicts.assign(num_chunks, static_cast<std::uint8_t>(PushVerdict::kDeclined));
  for (std::uint32_t rank = 0; rank < parts_.ranks.size(); ++rank) {
    PushOrder order{envelope.id, {}, {}};
    if (fits) {
      order.remote_address = answer->ranks[rank].transport_address;
      order.grants = std::move(answer->grants[rank]);
      for (std::size_t index = 0; index < num_chunks; ++index)
        if (answer->reply.verdicts[index] != static_cast<std::uint8_t>(PushVerdict::kGranted)) order.grants[index].clear();
    }
    parts_.send_worker(rank, seal(NodeMessage::kPushOrder, envelope.id, order));
  }
  parts_.tell_core(
      [&](SchedulerCore& core) { core.push_answered(envelope.id, endpoint, answer->reply, parts_.clock.now()); });
  return true;
}

bool PushLinks::take_outcome(const Envelope& envelope) {
  const TimeNs now = parts_.clock.now();
  if (is(envelope, NodeMessage::kLendOutcome)) {
    if (const auto outcome = decode<GrantOutcome>(envelope.body, "lend outcome")) lent(*outcome);
    return true;
  }
  if (is(envelope, NodeMessage::kReclaimed)) {
    if (const auto answer = decode<Revocation>(envelope.body, "reclaimed slots"))
      parts_.tell_core([&](SchedulerCore& core) { core.push_revoked(*answer, now); });
    return true;
  }
  if (is(envelope, NodeMessage::kPushOutcome)) {
    if (const auto outcome = decode<PushOutcome>(envelope.body, "push outcome"))
      parts_.tell_core([&](SchedulerCore& core) { core.chunk_push_ended(*outcome, now); });
    return true;
  }
  return false;
}

}  // namespace kvferry
