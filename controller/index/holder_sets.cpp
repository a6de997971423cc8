#include "controller/index/holder_sets.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "transport/base/check.h"

namespace kvferry::controller {

namespace {

constexpr std::size_t kSharedTableMin = 64;

std::uint64_t hash(std::span<const Placement> members) {
  std::uint64_t h = members.size();
  for (const Placement placement : members) {
    h = (h ^ placement.bits) * 0x9e3779b97f4a7c15;
    h ^= h >> 29;
  }
  return h;
}

}  // namespace

bool HolderSets::repeats(const Change& last, Id& set, Placement placement) {
  if (last.to == 0 || last.from != set || last.placement != placement) return false;
  const Id to = last.to;  // a copy, because release() may reset `last`
  ++record_of(to)->num_references;
  release(set);
  set = to;
  return true;
}

bool HolderSets::add(Id& set, Placement placement) {
  if (repeats(last_add_, set, placement)) return true;
  const std::span<const Placement> old = members(set);
  const auto at = std::lower_bound(old.begin(), old.end(), placement);
  if (at != old.end() && *at == placement) return false;
  scratch_.assign(old.begin(), at);
  scratch_.push_back(placement);
  scratch_.insert(scratch_.end(), at, old.end());
  const Id from = set;
  set = make(scratch_);
  if (record_of(set)->is_shared != 0) last_add_ = {from, set, placement};
  release(from);
  return true;
}

bool HolderSets::remove(Id& set, Placement placement) {
  if (repeats(last_remove_, set, placement)) return true;
  const std::span<const Placement> old = members(set);
  const auto at = std::lower_bound(old.begin(), old.end(), placement);
  if (at == old.end() || *at != placement) return false;
  scratch_.assign(old.begin(), at);
  scratch_.insert(scratch_.end(), at + 1, old.end());
  const Id from = set;
  set = scratch_.empty() ? 0 : make(scratch_);
  if (set != 0 && record_of(set)->is_shared != 0) last_remove_ = {from, set, placement};
  release(from);
  return true;
}

HolderSets::Id HolderSets::make(std::span<const Placement> members) {
  if (!shared_.empty()) {
    for (std::size_t i = bucket_of(members); shared_[i] != 0; i = (i + 1) & (shared_.size() - 1)) {
      const std::span<const Placement> known = this->members(shared_[i]);
      if (!std::equal(known.begin(), known.end(), members.begin(), members.end())) continue;
      ++record_of(shared_[i])->num_references;
      return shared_[i];
    }
  }
  // Sets with one member are always shared: there are few of them, and most chunks use one of them.
  const bool is_shared = members.size() == 1 || num_shared_ < shared_max_;
  const Id set = allocate(members, is_shared);
  if (is_shared)
    add_to_shared(set);
  else
    ++num_single_;
  return set;
}

HolderSets::Id HolderSets::allocate_again(Id set) {
  const std::span<const Placement> old = members(set);
  scratch_.assign(old.begin(), old.end());
  ++num_single_;
  return allocate(scratch_, false);
}

HolderSets::Id HolderSets::allocate(std::span<const Placement> members, bool is_shared) {
  const auto size_class = static_cast<unsigned>(std::bit_width(members.size() - 1));
  SizeClass& home = classes_[size_class];
  std::uint32_t index = 0;
  if (home.first_free != kNone) {
    index = home.first_free;
    home.first_free = record_of(size_class << kIndexBits | index)->num_references;
  } else {
    if (home.num_records == 0 && size_class == 0) ++home.num_records;  // skips id 0, which stands for the empty set
    index = home.num_records++;
    KVFERRY_CHECK(index < 1U << kIndexBits, "the index has no room for more than {} sets of up to {} holders",
                  1U << kIndexBits, std::size_t{1} << size_class);
    if (index >> block_log(size_class) >= home.blocks.size()) {
      const std::size_t block_bytes = record_bytes(size_class) << block_log(size_class);
      home.blocks.push_back(std::make_unique_for_overwrite<std::byte[]>(block_bytes));
    }
  }
  const Id set = size_class << kIndexBits | index;
  Record* record = record_of(set);
  record->num_references = 1;
  record->num_members = static_cast<std::uint32_t>(members.size()) & 0x7fffffff;
  record->is_shared = is_shared ? 1 : 0;
  std::copy(members.begin(), members.end(), record->members);
  return set;
}

void HolderSets::release(Id set) {
  if (set == 0) return;
  Record* record = record_of(set);
  if (--record->num_references > 0) return;
  if (record->is_shared != 0)
    remove_from_shared(set);
  else
    --num_single_;
  SizeClass& home = classes_[set >> kIndexBits];
  record->num_references = std::exchange(home.first_free, set & ((1U << kIndexBits) - 1));
  for (Change* last : {&last_add_, &last_remove_}) {
    if (last->from == set || last->to == set) *last = {};
  }
}

std::size_t HolderSets::bucket_of(std::span<const Placement> members) const {
  return hash(members) & (shared_.size() - 1);
}

void HolderSets::add_to_shared(Id set) {
  if ((num_shared_ + 1) * 2 > shared_.size()) {
    std::vector<Id> old(std::max(kSharedTableMin, shared_.size() * 2));
    old.swap(shared_);
    num_shared_ = 0;
    for (const Id moved : old) {
      if (moved != 0) add_to_shared(moved);
    }
  }
  std::size_t i = bucket_of(members(set));
  while (shared_[i] != 0) i = (i + 1) & (shared_.size() - 1);
  shared_[i] = set;
  ++num_shared_;
}

/// Fills the hole with following sets (backward-shift deletion), so that no tombstone is needed. No set moves to a
/// place before its bucket, where a search for the set begins.
void HolderSets::remove_from_shared(Id set) {
  const std::size_t mask = shared_.size() - 1;
  std::size_t hole = bucket_of(members(set));
  while (shared_[hole] != set) hole = (hole + 1) & mask;
  for (std::size_t i = (hole + 1) & mask; shared_[i] != 0; i = (i + 1) & mask) {
    const std::size_t distance = (i - bucket_of(members(shared_[i]))) & mask;
    if (distance < ((i - hole) & mask)) continue;
    shared_[hole] = shared_[i];
    hole = i;
  }
  shared_[hole] = 0;
  --num_shared_;
}

}  // namespace kvferry::controller
