// Regions and grants of a planner: each consists of regions or grants of the backends that reach the memory. Private to
// this folder.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/planner/backends.h"
#include "transport/planner/plan_address.h"

namespace kvferry::planner {

/// The regions and grants of one planner. Threads: any.
class PlannedRegions {
 public:
  /// `backends` must outlive this object.
  explicit PlannedRegions(const Backends& backends) : backends_(backends) {}

  /// Registers host memory with all backends that move host memory, or with none. Registers GPU memory with the
  /// backends that reach it. kUnavailable: no backend reaches the memory. Other errors: those of the backends.
  Result<RegionId> register_region(const MemoryRegion& memory);
  /// After kFull the region may be unusable. The caller must call again, to unregister it from the remaining backends.
  Result<void> unregister_region(RegionId id);
  Result<RegionParts> parts_of(RegionId id) const;

  Result<GrantId> grant(RegionId id, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms);
  Result<RegionParts> parts_of(GrantId id) const;
  Result<void> revoke(GrantId id);

  struct Found {
    MemoryClass kind = MemoryClass::kOther;
    // The region's id in each backend; nullopt if the region is not registered with that backend.
    std::vector<std::optional<RegionId>> ids;
  };
  std::optional<Found> find(RegionId id) const;

 private:
  struct Grant {
    RegionId region;
    MemoryClass kind = MemoryClass::kOther;
    std::vector<std::optional<GrantId>> ids;  // the grant's id in each backend that has it
    bool is_revoked = false;                  // set by revoke(); a backend may still have the grant
  };
  struct Region : Found {
    bool is_unregistered = false;  // unregistered in at least one backend
  };

  Result<void> unregister(Region& region) const;
  /// Returns one part for each backend that has an id in `ids`.
  template <class Id, class Export>
  Result<RegionParts> parts_of(MemoryClass kind, const std::vector<std::optional<Id>>& ids, Export exported) const;

  const Backends& backends_;
  mutable std::mutex mutex_;
  std::map<RegionId, Region> regions_;
  std::map<GrantId, Grant> grants_;
  std::uint32_t num_regions_made_ = 0;
  std::uint32_t num_grants_made_ = 0;
};

/// Returns the error for an unknown id.
template <class Id>
Error unknown(std::string_view what, Id id) {
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("{} {} does not exist: it was never made, or is removed", what, id)};
}

}  // namespace kvferry::planner
