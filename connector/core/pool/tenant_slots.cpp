#include "connector/core/pool/tenant_slots.h"

#include <algorithm>

#include "transport/base/check.h"

namespace kvferry {

/// Calls `apply`, which changes fields of the tenant, and moves the tenant to the place in by_rank_ that its new fields
/// give it.
template <class Change>
void TenantSlots::change(Tenant& tenant, Change apply) {
  auto node = by_rank_.extract(rank_of(tenant));  // the map's node is reused, so that nothing is allocated
  num_idle_ -= tenant.is_idle;
  apply();
  num_idle_ += tenant.is_idle;
  node.key() = rank_of(tenant);
  by_rank_.insert(std::move(node));
}

TenantSlots::Tenant& TenantSlots::take(TenantId id) {
  const auto [found, is_new] = tenants_.try_emplace(id);
  Tenant& tenant = found->second;
  if (is_new) {
    tenant.id = id;
    by_rank_.emplace(rank_of(tenant), &tenant);
  }
  change(tenant, [&] {
    tenant.num_slots += 1;
    tenant.last_use = ++num_uses_;
    tenant.is_idle = false;
  });
  tenant.used_at = now_;
  return tenant;
}

void TenantSlots::give_back(Tenant& tenant) {
  KVFERRY_CHECK(tenant.num_slots > 0, "tenant {} gives back a pool slot, but has none", tenant.id);
  change(tenant, [&] { tenant.num_slots -= 1; });
  if (tenant.num_slots > 0) return;
  num_idle_ -= tenant.is_idle;
  by_rank_.erase(rank_of(tenant));
  tenants_.erase(tenant.id);
}

void TenantSlots::used(Tenant& tenant) {
  tenant.used_at = now_;
  if (tenant.last_use == num_uses_ && !tenant.is_idle) return;
  change(tenant, [&] {
    tenant.last_use = ++num_uses_;
    tenant.is_idle = false;
  });
}

void TenantSlots::advance(TimeNs now, TimeNs idle_after) {
  now_ = now;
  if (now < next_check_) return;
  next_check_ = now + kSecond;
  for (auto& entry : tenants_) {
    Tenant& tenant = entry.second;
    if (!tenant.is_idle && now - tenant.used_at >= idle_after) change(tenant, [&] { tenant.is_idle = true; });
  }
}

std::uint32_t TenantSlots::share(TenantId asker) const {
  const auto found = tenants_.find(asker);
  const bool is_counted = found != tenants_.end() && !found->second.is_idle;
  return static_cast<std::uint32_t>(num_slots_ / (tenants_.size() - num_idle_ + (is_counted ? 0 : 1)));
}

std::optional<TenantSlots::Victim> TenantSlots::victim(TenantId asker, std::uint32_t share,
                                                       const std::function<bool(std::uint32_t)>& may_go) const {
  const auto first_of = [&](const Tenant& tenant) -> std::optional<Victim> {
    const auto found = std::ranges::find_if(tenant.ready, may_go);
    return found == tenant.ready.end() ? std::nullopt : std::optional<Victim>({*found, tenant});
  };
  for (const auto& [rank, tenant] : by_rank_) {
    if (!is_above(*tenant, share)) break;
    if (const auto found = first_of(*tenant)) return found;
  }
  const auto own = tenants_.find(asker);
  return own == tenants_.end() ? std::nullopt : first_of(own->second);
}

}  // namespace kvferry
