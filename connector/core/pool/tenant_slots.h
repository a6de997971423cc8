// The slots of a chunk pool by tenant: how many each tenant has, in which order its chunks are evicted, and whose chunk
// makes room for a new one. A tenant's share of the pool is the number of slots divided by the number of tenants that
// are not idle and have slots; the tenant that needs a slot is counted too. A tenant may have more than its share, but
// then its chunks are evicted before those of tenants within their share. Idle tenants have used none of their chunks
// for long: they have no share, and their chunks are evicted before all others. The class has no clock: the caller
// passes the time.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "connector/core/tenant_id.h"
#include "transport/base/clock.h"

namespace kvferry {

class TenantSlots {
 public:
  explicit TenantSlots(std::uint32_t num_slots) : num_slots_(num_slots) {}

  using Lru = std::list<std::uint32_t>;  // slots in the order of eviction: demoted ones, then the least recently used
  struct Tenant {
    TenantId id = 0;
    Lru ready;                    // slots of the tenant's ready chunks
    std::uint32_t num_slots = 0;  // slots in use, also those that are being written
    std::uint64_t last_use = 0;   // number of the tenant's last use; the uses of all tenants are numbered together
    TimeNs used_at = 0;
    bool is_idle = false;
  };
  /// Counts one more slot of the tenant, and marks the tenant as just used. The reference is valid until give_back()
  /// was called for each of the tenant's slots.
  Tenant& take(TenantId id);
  /// Counts one slot of the tenant less. A tenant without slots is dropped.
  void give_back(Tenant& tenant);
  void used(Tenant& tenant);
  /// Marks the tenants that were not used for `idle_after` as idle. Looks for them at most once per second.
  void advance(TimeNs now, TimeNs idle_after);

  /// Returns the share of each tenant if `asker` uses the pool now.
  std::uint32_t share(TenantId asker) const;
  /// Returns true if the tenant has more than its share, which is 0 if it is idle.
  static bool is_above(const Tenant& tenant, std::uint32_t share) { return tenant.is_idle || tenant.num_slots > share; }
  struct Victim {
    std::uint32_t slot = 0;
    const Tenant& tenant;
  };
  /// Returns the slot that makes room for a new chunk of `asker`: the first slot of Tenant::ready for which `may_go`
  /// returns true, of an idle tenant, or else of the tenant with the most slots above its share. Among equal tenants
  /// the least recently used one comes first. If no tenant above its share has such a slot, returns the first such slot
  /// of `asker` itself, or nullopt if `asker` has none. `share` is what share(asker) returns.
  std::optional<Victim> victim(TenantId asker, std::uint32_t share,
                               const std::function<bool(std::uint32_t slot)>& may_go) const;

  std::size_t num_tenants() const { return tenants_.size(); }
  /// Calls `visit` with each tenant, in the order in which their chunks are evicted.
  template <class Visit>
  void for_each(Visit visit) const {
    for (const auto& [rank, tenant] : by_rank_) visit(*tenant);
  }

 private:
  using Rank = std::pair<std::uint32_t, std::uint64_t>;
  Rank rank_of(const Tenant& tenant) const {
    return {tenant.is_idle ? 0 : 1 + num_slots_ - tenant.num_slots, tenant.last_use};
  }
  template <class Change>
  void change(Tenant& tenant, Change apply);

  std::uint32_t num_slots_;
  std::uint64_t num_uses_ = 0;
  TimeNs now_ = 0, next_check_ = 0;
  std::size_t num_idle_ = 0;
  std::unordered_map<TenantId, Tenant> tenants_;
  /// Idle tenants first, then the others by their number of slots, the highest first. Equal tenants are in the order of
  /// their last use.
  std::map<Rank, Tenant*> by_rank_;
};

}  // namespace kvferry
