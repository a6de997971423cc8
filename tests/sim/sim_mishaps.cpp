// What the world notes of its mishaps besides those that it makes itself, for the judgement of handoffs.
#include <utility>

#include "sim_world.h"

namespace kvferry::sim {

Handoff World::handoff(std::size_t from, std::size_t to, const RequestSpec& spec, TimeNs asked) const {
  Handoff handoff;
  handoff.from = from;
  handoff.to = to;
  handoff.asked = asked;
  handoff.handed = now();
  handoff.num_tokens = static_cast<std::uint32_t>(spec.prompt.size());
  TokenChain chain(root_key(options_.core.fingerprint, spec.extras), options_.core.chunk_tokens, {});
  chain.append(spec.prompt);
  handoff.chunks = chain.prefix(handoff.num_tokens);
  for (const ChunkMeta& chunk : handoff.chunks) {
    const ChunkPool::Slot* slot = nodes_[from].engine->core().pool().find(chunk.key);
    handoff.is_there.push_back(slot != nullptr && slot->state == ChunkPool::State::kReady);
  }
  handoff.is_suspect = suspected_.contains({to, from});
  return handoff;
}

void World::note_suspicion(std::size_t index, const std::string& log_line) {
  for (std::size_t other = 0; other < num_nodes(); ++other) {
    if (!log_line.starts_with("nothing arrived from " + nodes_[other].endpoint)) continue;
    suspected_.insert({index, other});
    mishaps_.to_link(&Tally::excused_suspected, index, other, now());
  }
}

void World::note_full_pool(std::size_t index) {
  const std::uint64_t pool_full = nodes_[index].engine->core().counters().pool_full;
  if (std::exchange(nodes_[index].pool_full, pool_full) != pool_full)
    mishaps_.to_link(&Tally::excused_no_slot, index, index, now());
}

}  // namespace kvferry::sim
