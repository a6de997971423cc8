// What goes wrong in a world, and what a controller orders: crashes, cut links, slow nodes, damage, evictions, resets.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "schedule_log.h"
#include "sim_world.h"

namespace kvferry::sim {

void World::crash(std::size_t index) {
  Node& node = nodes_[index];
  if (!node.is_up || stepping_ == index) return;
  tell("node {} dies", index);
  for (const Node& reader : nodes_)
    for (const auto& [id, pull] : reader.pulls) tally_.crashed_while_read += pull.wanted.endpoint == node.endpoint;
  tally_.crashes += 1;
  tally_.prefill_crashes += is_prefill(index);
  tally_.growth_holder_died += has_growing(index);
  for (const auto& [id, pull] : node.pulls)
    tally_.growth_reader_died += std::ranges::any_of(pull.ranks, [](const RankPullPtr& rank) {
      return std::ranges::any_of(rank->growths, [](const auto& growth) { return growth.second.is_open; });
    });
  mishaps_.to_link(&Tally::excused_died, index, index, now());
  std::erase_if(suspected_, [&](const auto& link) { return link.first == index; });
  tally_.add(node.engine->tally());
  node.is_up = false;
  node.incarnation += 1;
  node.back_at = now() + dice_.between(1, 500) * kMillisecond;
  node.pulls.clear();
  node.pushes = {};
  node.brought_by.clear();
  node.told_early.clear();
  node.growth_began.clear();
  node.first_asked.clear();
  node.last_fetch = 0;
  node.asked.clear();
  node.forged_answers.clear();
  at(now() + 100 * kMillisecond, [&node] { node.listed.clear(); });  // the directory notices the loss late
}

void World::trouble() {
  if (num_nodes() > 1 && dice_.chance(network_.loses_directory)) {
    directory_up_ = !directory_up_;
    tally_.controller_losses += !directory_up_;
    tell("the directory {}", directory_up_ ? "is back" : "is gone");
    for (Node& node : nodes_) node.engine->core().set_directory_up(directory_up_);
  }
  if (num_nodes() > 1 && dice_.chance(network_.cuts)) {
    const std::size_t a = dice_.between(0, num_nodes() - 1), b = other(a);
    cut_until_[std::minmax(a, b)] = now() + dice_.between(1, 3000) * kMillisecond;
    tally_.partitions += 1;
  }
  if (num_nodes() > 1 && dice_.chance(network_.blocks)) {
    const std::size_t a = dice_.between(0, num_nodes() - 1), b = other(a);
    blocked_until_[std::minmax(a, b)] = now() + dice_.between(1, 60) * kSecond;
    tally_.blocked += 1;
  }
  for (std::size_t i = 0; i < num_nodes(); ++i) {
    Node& node = nodes_[i];
    if (num_nodes() > 1 && dice_.chance(network_.crashes))
      // a node may also crash in the middle of other nodes' steps
      at(now() + dice_.between(0, 30) * kMillisecond, [this, i] { crash(i); });
    if (!node.is_up) {
      if (now() >= node.back_at) start(i);
      continue;
    }
    trouble_node(i);
  }
}

void World::trouble_node(std::size_t index) {
  Node& node = nodes_[index];
  if (dice_.chance(options_.preempts_all)) node.engine->preempt_all();
  if (dice_.chance(options_.resets_idle)) node.engine->reset_idle_cache();
  if (dice_.chance(options_.sleeps)) {
    excuse_all_unpublished(index);
    node.engine->sleep();
  }
  if (dice_.chance(options_.updates)) {
    excuse_all_unpublished(index);
    node.engine->update_weights(now());
  }
  if (dice_.chance(options_.resets_connector)) {
    excuse_all_unpublished(index);
    tally_.resets_connector += 1;
    node.engine->core().reset_cache();
  }
  if (dice_.chance(network_.damages_pool))
    tally_.damaged_at_rest += node.engine->workers().back().damage(dice_.between(0, options_.core.num_slots - 1));
  if (num_nodes() == 1) return;
  if (dice_.chance(options_.orders)) at(now() + delay(index, index), [this, index] { order(index); });
  if (dice_.chance(network_.slows)) {
    node.slow_until = now() + dice_.between(1, 5000) * kMillisecond;
    tally_.slow_peers += 1;
  }
  if (dice_.chance(0.05)) node.listed_before = node.listed;
  if (dice_.chance(network_.garbage)) garbage(index);
}

/// Evicts chunks as an order does.
void World::evict(std::size_t index, std::span<const ChunkKey> keys) {
  SchedulerCore& core = nodes_[index].engine->core();
  for (const ChunkKey& key : keys)
    if (const ChunkPool::Slot* slot = core.pool().find(key)) excuse_unpublished(index, *slot);
  core.evict_ordered(keys);
}

/// Excuses that the chunk in this slot gets lost. The core does not announce its eviction if some rank has the chunk in
/// its frame only, because the chunk is not published then.
void World::excuse_unpublished(std::size_t index, const ChunkPool::Slot& slot) {
  if (slot.state == ChunkPool::State::kReady && !slot.is_complete())
    to_chunk(&Tally::excused_evicted, index, slot.meta.key);
}

void World::excuse_all_unpublished(std::size_t index) {
  tally_.growth_reset += has_growing(index);
  const ChunkPool& pool = nodes_[index].engine->core().pool();
  for (std::uint32_t i = 0; i < pool.num_slots(); ++i) {
    excuse_unpublished(index, pool.slot(i));
    if (is_save(pool.slot(i))) to_chunk(&Tally::excused_save_failed, index, pool.slot(i).meta.key);
  }
}

/// Sends an order that a controller may send at any time, about chunks that some node has or had.
void World::order(std::size_t index) {
  if (!nodes_[index].is_up) return;
  SchedulerCore& core = nodes_[index].engine->core();
  const std::size_t from = other(index);
  tally_.orders += 1;
  std::vector<ChunkMeta> chunks;
  for (const auto& [key, chunk] : nodes_[dice_.chance(0.5) ? index : from].listed)
    if (dice_.chance(0.5)) chunks.push_back(chunk);
  std::vector<ChunkKey> keys;
  for (const ChunkMeta& chunk : chunks) keys.push_back(chunk.key);
  const TimeNs ttl = dice_.between(0, 10) * kSecond;
  const std::uint64_t pin = dice_.between(1, 3);
  if (dice_.chance(0.1)) {
    tally_.purges += 1;
    for (const std::size_t node : {index, from}) mishaps_.to_link(&Tally::excused_purged, node, node, now());
    if (dice_.chance(0.3)) {
      core.admit_ordered("member:" + nodes_[from].member);
      return core.admit_ordered(nodes_[from].endpoint);
    }
    const Node& purged = nodes_[dice_.chance(0.9) ? from : index];
    const std::uint64_t id = dice_.between(1, 1000);
    const bool is_of_member = id % 2 == 0;
    tally_.purges_of_members += is_of_member;
    return core.purge_ordered(id, is_of_member ? "member:" + purged.member : purged.endpoint, now());
  }
  switch (dice_.between(0, 4)) {
    case 0:
      return core.pin_ordered(pin, keys, ttl, now());
    case 1:
      return core.unpin_ordered(pin);
    case 2:
      return evict(index, keys);
    case 3:
      excuse_all_unpublished(index);
      return core.reset_cache();
    default:
      return core.replicate_ordered({nodes_[from].endpoint, std::move(chunks), ttl, nodes_[from].member}, now());
  }
}

void World::calm_down() {
  tell("from now on nothing goes wrong");
  network_ = {};
  cut_until_.clear();
  blocked_until_.clear();
  for (Node& node : nodes_) node.slow_until = 0;
  options_.refuses = options_.preempts_all = options_.resets_idle = options_.resets_connector = 0;
  options_.sleeps = options_.updates = options_.orders = 0;
}

}  // namespace kvferry::sim
