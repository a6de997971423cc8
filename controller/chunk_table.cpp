#include "controller/chunk_table.h"

#include <algorithm>

#include "transport/base/check.h"

namespace kvferry::controller {

ChunkTable::HolderIndex ChunkTable::add_holder() {
  if (free_.empty()) {
    holders_.emplace_back();
    return static_cast<HolderIndex>(holders_.size() - 1);
  }
  const HolderIndex holder = free_.back();
  free_.pop_back();
  return holder;
}

void ChunkTable::remove_holder(HolderIndex holder) {
  clear(holder);
  free_.push_back(holder);
}

bool ChunkTable::add(HolderIndex holder, const ChunkEntry& chunk) {
  Held& held = holders_[holder];
  const bool fresh = held.chunks.insert(chunk.key).second;
  if (fresh) index_[chunk.key].push_back(holder);
  if (const auto old = held.tails.find(chunk.key); old != held.tails.end()) {
    leave_group(holder, chunk.key, old->second);
    held.tails.erase(old);
  }
  if (chunk.is_tail) {
    const bool grouped = chunk.num_tokens >= kTailGroupTokens;
    held.tails.emplace(chunk.key, TailOf{chunk.num_tokens, grouped, grouped ? chunk.tail_group : ChunkKey{}});
    if (grouped) enter_group(holder, chunk.key, chunk.tail_group);
  }
  return fresh;
}

bool ChunkTable::remove(HolderIndex holder, const ChunkKey& key) {
  Held& held = holders_[holder];
  if (held.chunks.erase(key) == 0) return false;
  unindex(holder, key);
  if (const auto tail = held.tails.find(key); tail != held.tails.end()) {
    leave_group(holder, key, tail->second);
    held.tails.erase(tail);
  }
  return true;
}

void ChunkTable::clear(HolderIndex holder) {
  Held& held = holders_[holder];
  for (const ChunkKey& key : held.chunks) unindex(holder, key);
  for (const auto& [key, tail] : held.tails) leave_group(holder, key, tail);
  held = Held{};
}

void ChunkTable::unindex(HolderIndex holder, const ChunkKey& key) {
  const auto entry = index_.find(key);
  KVFERRY_CHECK(entry != index_.end(), "holder {} has chunk {}, the index doesn't", holder, key);
  std::vector<HolderIndex>& holders = entry->second;
  const auto it = std::find(holders.begin(), holders.end(), holder);
  KVFERRY_CHECK(it != holders.end(), "holder {} has chunk {}, the index doesn't tell", holder, key);
  *it = holders.back();
  holders.pop_back();
  if (holders.empty()) index_.erase(entry);
}

void ChunkTable::enter_group(HolderIndex holder, const ChunkKey& key, const ChunkKey& group) {
  std::vector<GroupedTail>& tails = groups_[group];
  tails.push_back({holder, key});
  const auto mine = [&](const GroupedTail& tail) { return tail.holder == holder; };
  if (std::count_if(tails.begin(), tails.end(), mine) > static_cast<std::ptrdiff_t>(kTailsPerHolderMax))
    tails.erase(std::find_if(tails.begin(), tails.end(), mine));
  if (tails.size() > tails_per_group_max_) tails.erase(tails.begin());
}

void ChunkTable::leave_group(HolderIndex holder, const ChunkKey& key, const TailOf& tail) {
  if (!tail.grouped) return;
  const auto group = groups_.find(tail.group);
  if (group == groups_.end()) return;  // pushed out by newer ones that are gone by now
  std::erase_if(group->second, [&](const GroupedTail& other) { return other.holder == holder && other.key == key; });
  if (group->second.empty()) groups_.erase(group);
}

ChunkTable::Match& ChunkTable::match_of(HolderIndex holder, std::vector<Match>& matches) {
  Held& held = holders_[holder];
  if (held.match < 0) {
    held.match = static_cast<std::int64_t>(matches.size());
    matches.push_back({holder, 0, {}});
  }
  return matches[static_cast<std::size_t>(held.match)];
}

void ChunkTable::add_tail(HolderIndex holder, const ChunkKey& key, std::vector<Match>& matches) {
  const auto found = holders_[holder].tails.find(key);
  if (found == holders_[holder].tails.end()) return;  // held, but as a full chunk
  std::vector<ChunkEntry>& tails = match_of(holder, matches).tails;
  const auto same = [&](const ChunkEntry& other) { return other.key == key; };
  if (tails.size() == kTailsPerHolderMax || std::any_of(tails.begin(), tails.end(), same)) return;
  tails.push_back({key, found->second.num_tokens, true, found->second.group});
}

std::vector<ChunkTable::Match> ChunkTable::lookup(const LookupQuery& query, HolderIndex asker) {
  std::vector<Match> matches;
  for (std::uint32_t i = 0; i < query.keys.size(); ++i) {
    const auto entry = index_.find(query.keys[i]);
    if (entry == index_.end()) break;
    bool somebody = false;
    for (const HolderIndex holder : entry->second) {
      if (holder == asker || holders_[holder].num_reached != i) continue;
      holders_[holder].num_reached = i + 1;
      if (i == 0) match_of(holder, matches);
      somebody = true;
    }
    if (!somebody) break;
  }
  for (const ChunkKey& key : query.exact_tails) {
    const auto entry = index_.find(key);
    if (entry == index_.end()) continue;
    for (const HolderIndex holder : entry->second) {
      if (holder != asker) add_tail(holder, key, matches);
    }
  }
  for (std::size_t i = query.tail_groups.size(); i-- > 0;) {
    const auto group = groups_.find(query.tail_groups[i]);
    if (group == groups_.end()) continue;
    for (auto tail = group->second.rbegin(); tail != group->second.rend(); ++tail) {
      if (tail->holder != asker && i >= holders_[tail->holder].num_reached) add_tail(tail->holder, tail->key, matches);
    }
  }
  for (Match& match : matches) {
    Held& held = holders_[match.holder];
    match.num_full_chunks = held.num_reached;
    held.num_reached = 0;
    held.match = -1;
  }
  return matches;
}

}  // namespace kvferry::controller
