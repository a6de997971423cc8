// Records mishaps that the world does not cause itself, so that handoffs can be judged.
#include <algorithm>
#include <utility>

#include "sim_world.h"

namespace kvferry::sim {

Handoff World::handoff(std::size_t from, std::size_t to, const RequestSpec& spec, TimeNs asked) const {
  Handoff made;
  made.from = from;
  made.to = to;
  made.asked = asked;
  made.handed = now();
  made.longest_wait = options_.core.load_timeout;
  made.num_tokens = static_cast<std::uint32_t>(spec.prompt.size());
  TokenChain chain(root_key(options_.core.fingerprint, extras_of(spec, nodes_[from].engine->weights_at_end(spec.id))),
                   options_.core.chunk_tokens, {});
  chain.append(spec.prompt);
  const std::uint32_t block = options_.core.whole_blocks ? alignment_of(options_.core.groups) : 1;
  made.chunks = chain.prefix(made.num_tokens - made.num_tokens % block);
  for (const ChunkMeta& chunk : made.chunks) {
    const ChunkPool::Slot* slot = nodes_[from].engine->core().pool().find(chunk.key);
    const bool is_written = slot != nullptr && (slot->state == ChunkPool::State::kReady || is_save(*slot));
    made.at_prefill.push_back(slot == nullptr      ? AtPrefill::kMissing
                              : !is_written        ? AtPrefill::kPulled
                              : slot->write_failed ? AtPrefill::kFailing
                                                   : AtPrefill::kThere);
  }
  made.is_suspect = suspected_.contains({to, from});
  constexpr auto kFailedLoads = 3;  // after this many failed loads, the core keeps no chunks of a request
  const auto has_failed = [](const Admission& admission) { return admission.loaded < admission.to_load; };
  const FinishedRequest* prefilled = finished(from, spec.id);
  made.is_uncached = prefilled != nullptr && std::ranges::count_if(prefilled->admissions, has_failed) >= kFailedLoads;
  return made;
}

void World::note_suspicion(std::size_t index, const std::string& paused_node) {
  const std::optional<std::size_t> other = node_at(paused_node);
  if (!other) return;
  suspected_.insert({index, *other});
  mishaps_.to_link(&Tally::excused_suspected, index, *other, now());
}

void World::note_full_pool(std::size_t index) {
  const std::uint64_t pool_full = nodes_[index].engine->core().counters().pool_full;
  if (std::exchange(nodes_[index].pool_full, pool_full) != pool_full)
    mishaps_.to_link(&Tally::excused_no_slot, index, index, now());
}

/// Records a forged answer to a lease request. The core may have sent the request already, although the world carries
/// it out only now.
void World::note_forged_answer(std::size_t index, std::uint64_t fetch) {
  Node& node = nodes_[index];
  node.forged_answers.insert(fetch);
  if (const auto asked = node.asked.find(fetch); asked != node.asked.end())
    mishaps_.to_chunks(&Tally::excused_garbage, index, asked->second, now(), now() + options_.core.pull_timeout);
}

/// Makes the question of a lease request. Its answer is late if the core that sent the request has gone on, perhaps one
/// step before it could report this to the world.
std::shared_ptr<World::Question> World::new_question(std::size_t asker, const std::vector<ChunkKey>& keys) {
  const auto question = std::make_shared<Question>(Question{asker, nodes_[asker].incarnation, keys, false, {}});
  mishaps_.to_chunks(&Tally::excused_time_over, asker, keys, now(), now() + options_.core.try_timeout);
  at(now() + options_.core.try_timeout - kLongestStep, [this, question] {
    if (!question->is_answered) mishaps_.to_chunks(&Tally::excused_late, question->asker, question->keys, now(), now());
  });
  return question;
}

void World::send_about(const Question& question, std::size_t from, std::size_t to, std::function<void()> what) {
  const std::uint64_t lost = tally_.lost;
  send(from, to, std::move(what));
  if (tally_.lost > lost) mishaps_.to_chunks(&Tally::excused_lost, question.asker, question.keys, now(), now());
}

}  // namespace kvferry::sim
