// Regions and grants of a planner: each is one of every backend that can carry it. Private to this folder.
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

/// Threads: any.
class RegionBook {
 public:
  /// The backends outlive the book.
  explicit RegionBook(const std::vector<Backend>& backends) : backends_(backends) {}

  /// With all backends, or none. GPU memory: with those that reach it, kUnavailable with their reasons if none does.
  Result<RegionId> register_region(const MemoryRegion& memory);
  /// kFull may leave it half unregistered: nobody can use it any more, and what worked is not tried again.
  Result<void> unregister_region(RegionId id);
  Result<RegionParts> parts_of(RegionId id) const;

  Result<GrantId> grant(RegionId id, std::uint64_t offset, std::uint64_t bytes);
  Result<RegionParts> parts_of(GrantId id) const;
  Result<void> revoke(GrantId id);

  struct Found {
    MemoryClass kind = MemoryClass::kOther;
    std::vector<std::optional<RegionId>> ids;  // one a backend; none: it can't reach it, or it is unregistered there
  };
  std::optional<Found> find(RegionId id) const;

 private:
  struct Grant {
    RegionId region;
    MemoryClass kind = MemoryClass::kOther;
    std::vector<std::optional<GrantId>> ids;
    bool is_revoked = false;  // in part, so far
  };
  struct Region : Found {
    bool is_unregistered = false;  // in part, so far
  };

  Result<void> unregister(Region& region) const;

  const std::vector<Backend>& backends_;
  mutable std::mutex mutex_;
  std::map<RegionId, Region> regions_;
  std::map<GrantId, Grant> grants_;
  std::uint32_t num_regions_made_ = 0;
  std::uint32_t num_grants_made_ = 0;
};

/// The error for an id that nobody knows.
template <class Id>
Error unknown(std::string_view what, Id id) {
  return Error{ErrorCode::kInvalidArgument, fmt::format("{} {} is not known", what, id)};
}

}  // namespace kvferry::planner
