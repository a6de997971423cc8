// Leases in the simulated network: requests, the holder's wait for its saves and workers, pins of frames, releases.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "schedule_log.h"
#include "sim_world.h"

namespace kvferry::sim {

void World::lease(std::size_t node, const RequestLease& wanted) {
  Node& asker = nodes_[node];
  asker.last_fetch = wanted.fetch;
  asker.last_endpoint = wanted.endpoint;
  for (const ChunkKey& key : wanted.request.keys) asker.first_asked.try_emplace(key, wanted.endpoint);
  asker.asked[wanted.fetch] = wanted.request.keys;
  if (asker.forged_answers.contains(wanted.fetch)) note_forged_answer(node, wanted.fetch);
  const std::optional<std::size_t> to = node_at(wanted.endpoint);
  if (!to) return;  // there is no node at this endpoint, but an answer to the request may be forged
  tell("node {} wants {} chunks of node {} ({})", node, wanted.request.keys.size(), *to, wanted.fetch);
  const auto question = new_question(node, wanted.request.keys);
  RequestLease sent = wanted;
  sent.request.shards = shards_of(node);
  sent.request.parts = parts_of(asker.ranks);
  question->lie = lie(*question, node, *to, sent.request.parts);
  sent.request.wants_frames = FrameLeases::has_frames(asker.ranks);
  // Some nodes are sure of frames without a reason; no draw, so that seeds keep their schedules.
  sent.request.is_sure_of_frames |= wanted.fetch % 2 == 0;
  send_about(*question, node, *to,
             [this, to = *to, sent, question] { answer_lease(to, sent, question, now() + kSavePatience); });
}

/// Answers a lease request. First waits for the saves of chunks that belong to a handoff.
void World::answer_lease(std::size_t to, RequestLease wanted, std::shared_ptr<Question> question, TimeNs deadline) {
  Node& holder = nodes_[to];
  if (!holder.is_up) {
    tally_.crashed_while_down += 1;
    return;
  }
  SchedulerCore& core = holder.engine->core();
  const bool is_unlike = holder.run_checksums->is_needed(wanted.request);
  const bool has_frames = wanted.request.wants_frames && FrameLeases::has_frames(holder.ranks) && !is_unlike;
  wanted.request.is_sure_of_frames = wanted.request.is_sure_of_frames && has_frames;
  const auto is_being_saved = [&](const ChunkKey& key) {
    const ChunkPool::Slot* slot = core.pool().find(key);
    return slot != nullptr && !core.can_lease(wanted.request, *slot) && (is_save(*slot) || slot->ranks_in_frames > 0);
  };
  const bool waits = !wanted.request.handoff.empty() || wanted.request.push != 0;
  if (waits && now() < deadline && std::ranges::any_of(wanted.request.keys, is_being_saved)) {
    tally_.leases_after_saves += 1;
    return at(now() + kMillisecond,
              [this, to, wanted, question, deadline] { answer_lease(to, wanted, question, deadline); });
  }
  const LeaseRequest& request = wanted.request;
  LeaseAnswer answer;
  answer.ranks = holder.ranks;
  const auto send_back = [this, to, wanted, question](const LeaseAnswer& sent) {
    send_answer(to, wanted, question, sent);
  };
  if (is_unlike) {
    if (const Result<void> fits = holder.run_checksums->check(request); !fits) {
      if (!question->lie) throw Broken("exact-load: a shape that can't be read: " + fits.error().what);
      tally_.lies_refused += 1;
      answer.reply.refused = fits.error().what;
      return send_back(answer);
    }
    if (question->lie && question->lie->must_be_refused)
      throw Broken(fmt::format("verified-only: node {} {}, and node {} gives it a lease", question->asker,
                               question->lie->what, to));
  }
  answer.reply = core.lease_requested(nodes_[question->asker].engine_id.value, request, now());
  PromisesCheck::offered(core, answer.reply, request);
  if (answer.reply.lease != 0)
    leases_[{to, answer.reply.lease}] = {holder.incarnation, now() + options_.core.lease_ttl, false};
  if (!is_unlike && (!has_frames || answer.reply.chunks.empty())) return send_back(answer);
  const std::uint64_t id = holder.answers.empty() ? 1 : holder.answers.rbegin()->first + 1;
  holder.answers[id] = send_back;
  if (!is_unlike) return pin_frames(to, id, std::move(answer));
  tally_.unlike_leases += 1;
  tally_.unlike_states += options_.has_parts;
  for (const auto& order : holder.run_checksums->begin({"", id, 0}, request, std::move(answer), now(), kPatience))
    hash_runs(to, order);
  for (const TimeNs when : {TimeNs{0}, kPatience})
    at(now() + when, [this, to, incarnation = holder.incarnation] {
      if (nodes_[to].incarnation == incarnation && nodes_[to].is_up) tell_hashed(to);
    });
}

std::optional<Lie> World::lie(const Question& question, std::size_t from, std::size_t to,
                              std::vector<ShardParts>& parts) {
  if (parts.empty() || shards_of(from) == shards_of(to) || !dice_.chance(network_.lies)) return std::nullopt;
  std::optional<Lie> told = lie_about(parts, dice_, from != question.asker);
  if (!told) return std::nullopt;
  tell("node {} {} to node {}", from, told->what, to);
  tally_.lies += 1;
  mishaps_.to_chunks(&Tally::excused_parts, question.asker, question.keys, now(), now() + options_.core.pull_timeout);
  return told;
}

void World::send_answer(std::size_t from, const RequestLease& wanted, const std::shared_ptr<Question>& question,
                        LeaseAnswer answer) {
  std::vector<ShardParts> parts = parts_of(answer.ranks);
  // Two lies of one kind, the asker's of itself and the holder's, would come to what the asker has asked for.
  const std::optional<Lie> told = question->lie ? std::nullopt : lie(*question, from, question->asker, parts);
  for (std::size_t rank = 0; rank < parts.size(); ++rank) answer.ranks[rank].parts = std::move(parts[rank]);
  send_about(*question, from, question->asker,
             [this, wanted, question, answer, told] { take_answer(wanted, *question, answer, told); });
}

/// Does what LeaseLinks::answered() does. told: what the answer tells wrong of the holder's parts.
void World::take_answer(const RequestLease& wanted, Question& question, LeaseAnswer answer,
                        const std::optional<Lie>& told) {
  Node& reader = nodes_[question.asker];
  if (reader.incarnation != question.incarnation || !reader.is_up) return;
  question.is_answered = true;
  const bool is_unlike = kvferry::shards_of(answer.ranks) != shards_of(question.asker);
  const std::size_t num_leased = answer.reply.chunks.size();
  Result<ShardMap> map = fit_answer(reader.ranks, answer);
  if (map && num_leased > answer.reply.chunks.size()) {
    if (!told && !question.lie) throw Broken("exact-load: a lease has not as many checksums as there are runs");
    tally_.misled += num_leased - answer.reply.chunks.size();
  }
  if (!map && !told) throw Broken("exact-load: " + map.error().what);
  if (map && is_unlike && told && told->must_be_refused)
    throw Broken(
        fmt::format("verified-only: {} {}, and node {} reads from it", wanted.endpoint, told->what, question.asker));
  if (!map) {
    tally_.lies_refused += 1;
    if (answer.reply.refused.empty()) answer.reply.refused = map.error().what;
    answer.reply.chunks.clear();
  } else if (!answer.reply.chunks.empty()) {
    reader.holders[wanted.endpoint] = {std::move(*map), told || question.lie};
  }
  reader.engine->core().lease_answered(wanted.fetch, wanted.endpoint, answer.reply, now());
}

/// Pins the frames of leased chunks. Each rank reports them at a time of its own, in time for the answer or not.
void World::pin_frames(std::size_t index, std::uint64_t asker, LeaseAnswer answer) {
  Node& holder = nodes_[index];
  const TimeNs ttl = options_.core.lease_ttl;
  std::vector<ChunkRef> unwritten;  // leased chunks that the answer leaves out unless every rank pins them in time
  for (const LeasedChunk& chunk : answer.reply.chunks)
    if (chunk.lacks_slots) unwritten.push_back(chunk.chunk);
  const FramePinOrder order =
      holder.frame_leases.begin({"", asker, 0}, std::move(answer), now(), ttl, now() + kFramePatience);
  for (std::uint32_t rank = 0; rank < holder.ranks.size(); ++rank) {
    FramePinOutcome outcome{
        order.lease, rank,
        holder.engine->workers()[rank].frames().pin(order.lease, order.chunks, now() + ttl, order.are_growing)};
    tally_.frame_leases += std::ranges::count(outcome.frames, kNoFrame) < std::ssize(outcome.frames);
    const TimeNs late = delay(index, index);
    for (std::size_t i = 0; i < order.chunks.size(); ++i) {
      const bool is_left_out = outcome.frames[i] == kNoFrame || late >= kFramePatience - kLongestStep;
      if (is_left_out && std::ranges::find(unwritten, order.chunks[i]) != unwritten.end())
        to_chunk(&Tally::excused_in_frame, index, key_in(index, order.chunks[i].slot), late);
    }
    at(now() + late, [this, index, outcome = std::move(outcome), life = holder.incarnation] {
      if (nodes_[index].incarnation != life) return;
      nodes_[index].frame_leases.take(outcome);
      tell_pinned(index);
    });
  }
  at(now() + kFramePatience, [this, index, life = holder.incarnation] {
    if (nodes_[index].incarnation == life) tell_pinned(index);
  });
}

void World::tell_pinned(std::size_t index) {
  Node& node = nodes_[index];
  for (const FrameLeases::Ready& ready : node.frame_leases.take_ready(now())) {
    for (const LeasedChunk& chunk : ready.answer.reply.chunks) {
      tally_.leased_in_frames += chunk.lacks_slots && !chunk.is_growing;
      tally_.growing_leases += chunk.is_growing;
      if (chunk.lacks_slots && (chunk.frames.empty() || std::ranges::count(chunk.frames, kNoFrame) > 0))
        throw Broken(fmt::format("verified-only: slot {} is leased, but its chunk is in frames only, and not pinned",
                                 chunk.chunk.slot));
    }
    const auto answer = node.answers.extract(ready.asker.id);
    answer.mapped()(ready.answer);
  }
}

/// Does what a worker does: hashes each chunk at a time of its own. Some chunks are never hashed.
void World::hash_runs(std::size_t index, const RunChecksums::RankOrder& ranked) {
  const ChecksumOrder& order = ranked.order;
  for (std::uint32_t i = 0; i < order.items.size(); ++i) {
    const bool is_never = dice_.chance(network_.loses / 10);
    const TimeNs late = is_never ? kPatience : delay(index, index);
    if (late >= kPatience - kLongestStep)
      to_chunk(&Tally::excused_unhashed, index, key_in(index, order.items[i].chunk.slot), kPatience);
    if (is_never) continue;
    at(now() + late, [this, index, order, i, incarnation = nodes_[index].incarnation] {
      Node& node = nodes_[index];
      if (node.incarnation != incarnation || !node.is_up) return;
      const Worker& worker = node.engine->workers()[order.rank];
      std::vector<Stamp> stamps = worker.read_slot(order.items[i].chunk.slot);
      const std::size_t unit = worker.run_stamps(order.items[i].num_tokens);
      ChecksumOutcome outcome{order.order, order.rank, i, checksum_of(stamps) == order.items[i].checksum, {}};
      for (const ShardRun& run : order.runs)  // a forged chunk is shorter
        stamps.resize(std::max<std::size_t>(stamps.size(), (run.source + run.cells) * unit));
      for (const ShardRun& run : order.runs) {
        if (outcome.ok)
          outcome.checksums.push_back(checksum_of(std::span(stamps).subspan(run.source * unit, run.cells * unit)));
      }
      node.run_checksums->take(outcome);
      tell_hashed(index);
    });
  }
}

void World::tell_hashed(std::size_t index) {
  Node& node = nodes_[index];
  for (const RunChecksums::Ready& ready : node.run_checksums->take_ready(now())) {
    tally_.unlike_damaged += ready.damaged.size();
    tally_.unlike_late += ready.num_late;
    if (!ready.damaged.empty()) evict(index, ready.damaged);
    const auto answer = node.answers.extract(ready.asker.id);
    answer.mapped()(ready.answer);
  }
}

void World::release(std::size_t node, const ReleaseLease& released) {
  const std::optional<std::size_t> to = node_at(released.endpoint);
  if (!to) return;
  send(node, *to, [this, to = *to, lease = released.lease] {
    if (!nodes_[to].is_up) return;
    nodes_[to].engine->core().lease_released(lease);
    if (nodes_[to].frame_leases.end(lease))
      for (Worker& worker : nodes_[to].engine->workers()) worker.frames().unpin(lease);
    if (const auto found = leases_.find({to, lease}); found != leases_.end()) found->second.is_released = true;
  });
}

}  // namespace kvferry::sim
