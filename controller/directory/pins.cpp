#include "controller/directory/pins.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvferry::controller {

Result<ControllerPinId> Pins::add(const std::string& name_space, const std::string& owner, std::vector<ChunkKey> keys,
                          TimeNs now, TimeNs ttl) {
  const auto bad = [](std::string what) { return Error{ErrorCode::kInvalidArgument, std::move(what)}; };
  if (owner.empty()) return bad("a hold needs an owner's name");
  if (ttl <= 0 || ttl > options_.ttl_max) {
    return bad(
        fmt::format("a hold of {} ms; 1 to {} are allowed", ttl / kMillisecond, options_.ttl_max / kMillisecond));
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  if (keys.empty() || keys.size() > options_.keys_per_hold_max) {
    return bad(fmt::format("a hold of {} keys; 1 to {} are allowed", keys.size(), options_.keys_per_hold_max));
  }
  const auto full = [&](std::string_view whose, std::size_t num_held, std::size_t max) {
    return Error{ErrorCode::kFull, fmt::format("{} {} of the {} keys that are allowed; {} more are too many", whose,
                                               num_held, max, keys.size())};
  };
  if (num_keys_ + keys.size() > options_.keys_max)
    return full("all owners together hold", num_keys_, options_.keys_max);
  const auto known = num_keys_of_.find(owner);
  const std::size_t num_of_owner = known == num_keys_of_.end() ? 0 : known->second;
  if (num_of_owner + keys.size() > options_.keys_per_owner_max)
    return full(fmt::format("'{}' holds", owner), num_of_owner, options_.keys_per_owner_max);
  const ControllerPinId id{++last_id_};
  for (const ChunkKey& key : keys) by_key_[{name_space, key}].push_back(id);
  num_keys_ += keys.size();
  num_keys_of_[owner] += keys.size();
  holds_.emplace(id, Hold{name_space, owner, std::move(keys), now + ttl, {}});
  return id;
}

Result<std::set<NodeId>> Pins::release(ControllerPinId hold) {
  const auto found = holds_.find(hold);
  if (found == holds_.end()) return Error{ErrorCode::kNotFound, fmt::format("there is no hold {}", hold)};
  std::set<NodeId> asked = std::move(found->second.asked);
  end(found);
  return asked;
}

std::map<ControllerPinId, std::set<NodeId>> Pins::release_owner(const std::string& owner) {
  std::map<ControllerPinId, std::set<NodeId>> released;
  for (auto it = holds_.begin(); it != holds_.end();) {
    if (it->second.owner != owner) {
      ++it;
      continue;
    }
    released[it->first] = std::move(it->second.asked);
    it = end(it);
  }
  return released;
}

std::size_t Pins::expire(TimeNs now) {
  std::size_t num_expired = 0;
  for (auto it = holds_.begin(); it != holds_.end();) {
    const bool is_over = it->second.deadline <= now;
    num_expired += is_over ? 1 : 0;
    it = is_over ? end(it) : std::next(it);
  }
  return num_expired;
}

std::vector<Pins::Wish> Pins::wishes(const std::string& name_space, NodeId node, std::span<const ChunkKey> keys,
                                       TimeNs now) {
  std::map<ControllerPinId, Wish> wanted;
  if (!by_key_.empty()) {
    for (const ChunkKey& key : keys) {
      const auto found = by_key_.find({name_space, key});
      if (found == by_key_.end()) continue;
      for (const ControllerPinId id : found->second) wanted[id].keys.push_back(key);
    }
  }
  std::vector<Wish> wishes;
  for (auto& [id, wish] : wanted) {
    Hold& hold = holds_.at(id);
    if (hold.deadline <= now) continue;
    hold.asked.insert(node);
    wishes.push_back({id, std::move(wish.keys), hold.deadline - now});
  }
  return wishes;
}

void Pins::forget(NodeId node) {
  for (auto& [id, hold] : holds_) hold.asked.erase(node);
}

const Pins::Hold* Pins::find(ControllerPinId hold) const {
  const auto found = holds_.find(hold);
  return found == holds_.end() ? nullptr : &found->second;
}

Pins::ById::iterator Pins::end(ById::iterator hold) {
  for (const ChunkKey& key : hold->second.keys) {
    const auto place = by_key_.find({hold->second.name_space, key});
    std::erase(place->second, hold->first);
    if (place->second.empty()) by_key_.erase(place);
  }
  num_keys_ -= hold->second.keys.size();
  const auto owner = num_keys_of_.find(hold->second.owner);
  if ((owner->second -= hold->second.keys.size()) == 0) num_keys_of_.erase(owner);
  return holds_.erase(hold);
}

}  // namespace kvferry::controller
