#include "connector/core/pool/provenance.h"

#include <algorithm>

namespace kvferry {
namespace {

constexpr std::size_t kGiversMax = 32, kEndpointBytesMax = 512;
constexpr std::size_t kPurgedMax = 1024;
// Limit on the places of loaded chunks that are remembered. With full chunks of 256 tokens, the default, these places
// stand for 33 million tokens.
constexpr std::size_t kLoadedMax = 1 << 17;

bool is_possible(const std::string& giver) { return giver.size() <= kEndpointBytesMax; }

}  // namespace

void add_givers(Givers& givers, const Givers& more) {
  if (more.empty() || more == givers) return;
  givers.insert(givers.end(), more.begin(), more.end());
  std::ranges::sort(givers);
  givers.erase(std::unique(givers.begin(), givers.end()), givers.end());
  if (givers.size() > kGiversMax || !std::ranges::all_of(givers, is_possible)) givers = {std::string(kUnknownGiver)};
}

Givers givers_of(const std::string& endpoint, const std::string& member) {
  Givers givers;
  add_givers(givers, member.empty() ? Givers{endpoint} : Givers{fmt::format("{}{}", kMemberPrefix, member), endpoint});
  return givers;
}

bool Provenance::purge(const std::string& giver, std::uint64_t id, TimeNs until) {
  if (!is_possible(giver)) return true;  // no chunk can have this giver
  const auto last = purged_.find(giver);
  if (last != purged_.end() && last->second.id == id) return false;
  purged_[giver] = {id, until};
  if (purged_.size() > kPurgedMax)
    purged_.erase(std::ranges::min_element(purged_, {}, [](const auto& entry) { return entry.second.until; }));
  return true;
}

void Provenance::admit(const std::string& giver) {
  const auto last = purged_.find(giver);
  if (last != purged_.end()) last->second.is_admitted = true;
}

void Provenance::tick(TimeNs now) {
  std::erase_if(purged_, [&](const auto& entry) { return entry.second.until <= now; });
}

bool Provenance::is_purged(const Givers& givers) const {
  const auto is_refused = [](const auto& entry) { return !entry.second.is_admitted; };
  const auto is_purged = [&](const std::string& giver) {
    if (giver == kUnknownGiver) return std::ranges::any_of(purged_, is_refused);
    const auto last = purged_.find(giver);
    return last != purged_.end() && is_refused(*last);
  };
  return !purged_.empty() && std::ranges::any_of(givers, is_purged);
}

ChunkKey after(const ChunkKey& parent) {
  ChunkKey key = parent;
  key.bytes.back() ^= 1;  // no chunk has this key: no two digests differ in only this bit
  return key;
}

void Provenance::loaded(const ChunkKey& place, const Givers& givers) {
  if (const auto found = by_place_.find(place); found != by_place_.end()) {
    add_givers(found->second->second, givers);
    loaded_.splice(loaded_.end(), loaded_, found->second);
    return;
  }
  by_place_[place] = loaded_.insert(loaded_.end(), {place, givers});
  if (loaded_.size() <= kLoadedMax) return;
  by_place_.erase(loaded_.front().first);
  loaded_.pop_front();
}

const Givers* Provenance::loaded_at(const ChunkKey& place) {
  const auto found = by_place_.find(place);
  if (found == by_place_.end()) return nullptr;
  loaded_.splice(loaded_.end(), loaded_, found->second);
  return &found->second->second;
}

bool Provenance::drop_loaded_if_purged() {
  if (!std::ranges::any_of(loaded_, [&](const auto& entry) { return is_purged(entry.second); })) return false;
  loaded_.clear();
  by_place_.clear();
  return true;
}

}  // namespace kvferry
