#include "transport/planner/planned_regions.h"

#include <utility>

namespace kvferry::planner {

Result<RegionId> PlannedRegions::register_region(const MemoryRegion& memory) {
  Region region;
  region.kind = memory.device != nullptr ? MemoryClass::kDevice
                : memory.fd >= 0         ? MemoryClass::kShared
                                         : MemoryClass::kOther;
  std::string problems;
  bool is_reached = false;
  for (const OpenBackend& backend : backends_) {
    if (region.kind != MemoryClass::kDevice && !backend.moves_host_memory) {
      region.ids.emplace_back();
      continue;
    }
    Result<RegionId> id = backend.transport->register_region(memory);
    if (id) {
      region.ids.emplace_back(*id);
      is_reached = true;
    } else if (region.kind == MemoryClass::kDevice && id.error().code == ErrorCode::kUnavailable) {
      region.ids.emplace_back();
      problems += fmt::format("{}{}: {}", problems.empty() ? "" : "; ", backend.name, id.error().what);
    } else {
      static_cast<void>(unregister(region));
      return id;
    }
  }
  if (!is_reached)
    return Error{
        ErrorCode::kUnavailable,
        fmt::format("no path reaches this memory: {}",
                    problems.empty()
                        ? "it is host memory, and the setting path of this process allows only paths for GPU memory; "
                          "set it to auto"
                        : problems)};
  const std::lock_guard lock(mutex_);
  const RegionId id{++num_regions_made_};
  regions_.emplace(id, std::move(region));
  return id;
}

Result<void> PlannedRegions::unregister_region(RegionId id) {
  const std::lock_guard lock(mutex_);
  const auto region = regions_.find(id);
  if (region == regions_.end()) return unknown("region", id);
  KVFERRY_TRY(unregister(region->second));
  std::erase_if(grants_, [id](const auto& grant) { return grant.second.region == id; });
  regions_.erase(region);
  return {};
}

Result<void> PlannedRegions::unregister(Region& region) const {
  for (std::size_t index = 0; index < region.ids.size(); ++index) {
    if (!region.ids[index]) continue;
    KVFERRY_TRY(backends_[index].transport->unregister_region(*region.ids[index]));
    region.ids[index].reset();
    region.is_unregistered = true;
  }
  return {};
}

std::optional<PlannedRegions::Found> PlannedRegions::find(RegionId id) const {
  const std::lock_guard lock(mutex_);
  const auto region = regions_.find(id);
  if (region == regions_.end() || region->second.is_unregistered) return std::nullopt;
  return region->second;
}

template <class Id, class Export>
Result<RegionParts> PlannedRegions::parts_of(MemoryClass kind, const std::vector<std::optional<Id>>& ids,
                                             Export exported) const {
  RegionParts parts{static_cast<std::uint8_t>(kind), {}};
  for (std::size_t index = 0; index < backends_.size(); ++index) {
    if (!ids[index]) continue;
    std::string part = KVFERRY_TRY(exported(*backends_[index].transport, *ids[index]));
    parts.parts.push_back({std::string(backends_[index].name), std::move(part)});
  }
  return parts;
}

Result<RegionParts> PlannedRegions::parts_of(RegionId id) const {
  const std::optional<Found> region = find(id);
  if (!region) return unknown("region", id);
  return parts_of(region->kind, region->ids,
                  [](const Transport& transport, RegionId inner) { return transport.export_region(inner); });
}

Result<RegionParts> PlannedRegions::parts_of(GrantId id) const {
  const std::lock_guard lock(mutex_);
  const auto grant = grants_.find(id);
  if (grant == grants_.end() || grant->second.is_revoked) return unknown("grant", id);
  return parts_of(grant->second.kind, grant->second.ids,
                  [](const Transport& transport, GrantId inner) { return transport.export_grant(inner); });
}

Result<GrantId> PlannedRegions::grant(RegionId id, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) {
  const std::lock_guard lock(mutex_);
  const auto region = regions_.find(id);
  if (region == regions_.end() || region->second.is_unregistered) return unknown("region", id);
  Grant grant{id, region->second.kind, {}};
  std::optional<Error> refusal;  // the last refusal of a backend that can't grant a part of GPU memory
  bool is_given = false;
  for (std::size_t index = 0; index < backends_.size(); ++index) {
    const std::optional<RegionId> inner = region->second.ids[index];
    if (!inner) {
      grant.ids.emplace_back();
      continue;
    }
    Result<GrantId> given = backends_[index].transport->grant(*inner, offset, bytes, terms);
    if (given) {
      grant.ids.emplace_back(*given);
      is_given = true;
    } else if (grant.kind == MemoryClass::kDevice && given.error().code == ErrorCode::kUnavailable) {
      grant.ids.emplace_back();
      refusal = std::move(given).error();
    } else {
      for (std::size_t before = 0; before < index; ++before) {
        if (grant.ids[before]) static_cast<void>(backends_[before].transport->revoke(*grant.ids[before]));
      }
      return given;
    }
  }
  if (!is_given) return *std::move(refusal);
  const GrantId outer{++num_grants_made_};
  grants_.emplace(outer, std::move(grant));
  return outer;
}

Result<void> PlannedRegions::revoke(GrantId id) {
  const std::lock_guard lock(mutex_);
  const auto grant = grants_.find(id);
  if (grant == grants_.end()) return unknown("grant", id);
  grant->second.is_revoked = true;
  // A backend returns kFull while a peer's copy still uses the grant. The other backends revoke the grant nevertheless,
  // so that no further copy begins there.
  Result<void> outcome;
  for (std::size_t index = 0; index < backends_.size(); ++index) {
    std::optional<GrantId>& inner = grant->second.ids[index];
    if (!inner) continue;
    Result<void> ok = backends_[index].transport->revoke(*inner);
    if (ok) inner.reset();
    if (!ok) outcome = std::move(ok);
  }
  if (outcome) grants_.erase(grant);
  return outcome;
}

}  // namespace kvferry::planner
