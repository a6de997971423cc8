#include "truth.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace kvferry::faults {
namespace {

constexpr TimeNs kRemembered = 60 * kSecond;

/// Returns ~0 if the name is not that of a worker.
std::uint32_t number_of(const std::string& name) {
  std::uint32_t number = ~0U;
  if (name.starts_with("worker-")) std::from_chars(name.data() + 7, name.data() + name.size(), number);
  return number;
}

}  // namespace

std::vector<ChunkKey> keys_of_prefix(std::uint32_t prefix) {
  std::vector<ChunkKey> keys;
  for (std::uint32_t i = 0; i < kPrefixKeys; ++i) keys.push_back(root_key("faults", fmt::format("{} {}", prefix, i)));
  return keys;
}

Truth::Truth(std::uint32_t num_workers, std::uint32_t num_prefixes) : num_prefixes_(num_prefixes) {
  workers_.resize(num_workers);
  for (Worker& worker : workers_) worker.by_prefix.assign(num_prefixes, {{-kRemembered, 0}});
}

std::string Truth::name_of(std::uint32_t worker) { return fmt::format("worker-{}", worker); }

std::uint32_t Truth::depth(std::uint32_t worker, std::uint32_t prefix) const {
  return workers_[worker].by_prefix[prefix].back().depth;
}

void Truth::set(std::uint32_t worker, std::uint32_t prefix, std::uint32_t depth, TimeNs now) {
  std::deque<Change>& changes = workers_[worker].by_prefix[prefix];
  changes.push_back({now, depth});
  while (changes.size() > 2 && changes[1].at < now - kRemembered) changes.pop_front();
}

void Truth::die(std::uint32_t worker, TimeNs now) {
  workers_[worker].incarnation = 0;
  for (std::uint32_t prefix = 0; prefix < num_prefixes_; ++prefix)
    if (depth(worker, prefix) > 0) set(worker, prefix, 0, now);
}

void Truth::live(std::uint32_t worker, std::uint64_t incarnation) { workers_[worker].incarnation = incarnation; }

std::string Truth::stale(std::uint32_t prefix, const std::vector<controller::Holder>& holders, TimeNs asked, TimeNs now,
                         TimeNs bound) {
  for (const controller::Holder& holder : holders) {
    const std::uint32_t worker = number_of(holder.engine_id.value);
    if (worker >= workers_.size()) return fmt::format("'{}' is credited, and is nobody", holder.engine_id);
    const std::deque<Change>& changes = workers_[worker].by_prefix[prefix];
    std::uint32_t most = changes.back().depth;
    TimeNs last_so_deep = 0;
    for (std::size_t i = changes.size(); i-- > 0;) {
      const TimeNs until = i + 1 < changes.size() ? changes[i + 1].at : now;
      if (changes[i].depth >= holder.num_full_chunks) last_so_deep = std::max(last_so_deep, until);
      if (until >= asked - bound) most = std::max(most, changes[i].depth);
    }
    oldest_credit_ = std::max(oldest_credit_, asked - last_so_deep);
    if (holder.num_full_chunks <= most) continue;
    return fmt::format(
        "{} is credited with {} chunks of prefix {}; it had {} at most since {:.2f} s before, and was so "
        "deep {:.2f} s ago",
        holder.engine_id, holder.num_full_chunks, prefix, most, static_cast<double>(bound) * 1e-9,
        static_cast<double>(asked - last_so_deep) * 1e-9);
  }
  return {};
}

std::string Truth::differs(std::uint32_t prefix, const std::vector<controller::Holder>& holders) const {
  for (std::uint32_t worker = 0; worker < workers_.size(); ++worker) {
    const auto found = std::find_if(holders.begin(), holders.end(), [&](const controller::Holder& holder) {
      return number_of(holder.engine_id.value) == worker;
    });
    const std::uint32_t credited = found == holders.end() ? 0 : found->num_full_chunks;
    if (credited != depth(worker, prefix)) {
      return fmt::format("worker-{} has {} chunks of prefix {} and is credited with {}", worker, depth(worker, prefix),
                         prefix, credited);
    }
    if (credited > 0 && found->incarnation.value != workers_[worker].incarnation)
      return fmt::format("worker-{} is credited by an older incarnation", worker);
  }
  return {};
}

}  // namespace kvferry::faults
