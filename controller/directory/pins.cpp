#include "controller/directory/pins.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvferry::controller {

Result<ControllerPinId> Pins::add(const std::string& name_space, const std::string& owner, std::vector<ChunkKey> keys,
                                  TimeNs now, std::uint64_t ttl_ms) {
  const auto bad = [](std::string what) { return Error{ErrorCode::kInvalidArgument, std::move(what)}; };
  if (owner.empty()) return bad("a pin needs an owner's name, but the owner's name is empty");
  const auto ttl_ms_max = static_cast<std::uint64_t>(options_.ttl_max / kMillisecond);
  if (ttl_ms == 0 || ttl_ms > ttl_ms_max)
    return bad(fmt::format("a pin can't last {} ms; 1 to {} are allowed", ttl_ms, ttl_ms_max));
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  if (keys.empty() || keys.size() > options_.keys_per_pin_max)
    return bad(fmt::format("a pin can't have {} keys; 1 to {} are allowed", keys.size(), options_.keys_per_pin_max));
  const auto full = [&](std::string_view whose, std::size_t num_pinned, std::size_t max) {
    return Error{ErrorCode::kFull,
                 fmt::format("{} has {} pinned keys, and {} more would exceed the limit of {}; unpin some first", whose,
                             num_pinned, keys.size(), max)};
  };
  if (num_keys_ + keys.size() > options_.keys_max) return full("this controller", num_keys_, options_.keys_max);
  const auto known = num_keys_of_.find(owner);
  const std::size_t num_of_owner = known == num_keys_of_.end() ? 0 : known->second;
  if (num_of_owner + keys.size() > options_.keys_per_owner_max)
    return full(fmt::format("owner '{}'", owner), num_of_owner, options_.keys_per_owner_max);
  const ControllerPinId id{++last_id_};
  for (const ChunkKey& key : keys) by_key_[{name_space, key}].push_back(id);
  num_keys_ += keys.size();
  num_keys_of_[owner] += keys.size();
  pins_.emplace(id, Pin{name_space, owner, std::move(keys), now + static_cast<TimeNs>(ttl_ms) * kMillisecond, {}});
  return id;
}

Result<std::set<NodeId>> Pins::release(ControllerPinId id) {
  const auto found = pins_.find(id);
  if (found == pins_.end())
    return Error{
        ErrorCode::kNotFound,
        fmt::format("there is no pin {}; a pin ends when it is unpinned, at its deadline, or when the controller "
                    "ends; a node's read lease also ends with the node",
                    id)};
  std::set<NodeId> nodes = std::move(found->second.nodes);
  end(found);
  return nodes;
}

std::map<ControllerPinId, std::set<NodeId>> Pins::release_owner(const std::string& owner) {
  std::map<ControllerPinId, std::set<NodeId>> released;
  for (auto it = pins_.begin(); it != pins_.end();) {
    if (it->second.owner != owner) {
      ++it;
      continue;
    }
    released[it->first] = std::move(it->second.nodes);
    it = end(it);
  }
  return released;
}

void Pins::expire(TimeNs now) {
  for (auto it = pins_.begin(); it != pins_.end();) it = it->second.deadline <= now ? end(it) : std::next(it);
}

std::vector<Pins::Order> Pins::orders_for(const std::string& name_space, NodeId node, std::span<const ChunkKey> keys,
                                          TimeNs now) {
  std::vector<Order> orders;
  if (by_key_.empty()) return orders;
  std::map<ControllerPinId, std::vector<ChunkKey>> keys_of;
  for (const ChunkKey& key : keys) {
    const auto found = by_key_.find({name_space, key});
    if (found == by_key_.end()) continue;
    for (const ControllerPinId id : found->second) keys_of[id].push_back(key);
  }
  for (auto& [id, pinned_keys] : keys_of) {
    Pin& pin = pins_.at(id);
    if (pin.deadline <= now) continue;
    pin.nodes.insert(node);
    orders.push_back({id, std::move(pinned_keys), pin.deadline - now});
  }
  return orders;
}

void Pins::remove(NodeId node) {
  for (auto& [id, pin] : pins_) pin.nodes.erase(node);
}

const Pins::Pin* Pins::find(ControllerPinId id) const {
  const auto found = pins_.find(id);
  return found == pins_.end() ? nullptr : &found->second;
}

Pins::ById::iterator Pins::end(ById::iterator pin) {
  for (const ChunkKey& key : pin->second.keys) {
    const auto place = by_key_.find({pin->second.name_space, key});
    std::erase(place->second, pin->first);
    if (place->second.empty()) by_key_.erase(place);
  }
  num_keys_ -= pin->second.keys.size();
  const auto owner = num_keys_of_.find(pin->second.owner);
  if ((owner->second -= pin->second.keys.size()) == 0) num_keys_of_.erase(owner);
  return pins_.erase(pin);
}

}  // namespace kvferry::controller
