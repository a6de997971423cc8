// The access of one copy to registered memory, which can't be unregistered until the access ends.
#pragma once

#include <utility>

#include "transport/transfer_table.h"

namespace kvferry {

/// One access that TransferTable::begin_access() has allowed; the destructor ends it. An empty object is no access.
class MemoryAccess {
 public:
  MemoryAccess() = default;
  MemoryAccess(TransferTable& table, RegionId region, GrantId grant) : table_(&table), region_(region), grant_(grant) {}
  MemoryAccess(MemoryAccess&& other) noexcept
      : table_(std::exchange(other.table_, nullptr)), region_(other.region_), grant_(other.grant_) {}
  MemoryAccess& operator=(MemoryAccess&& other) noexcept {
    std::swap(table_, other.table_);
    std::swap(region_, other.region_);
    std::swap(grant_, other.grant_);
    return *this;
  }
  ~MemoryAccess() { end(); }
  void end() {
    if (table_ != nullptr) std::exchange(table_, nullptr)->end_access(region_, grant_);
  }

 private:
  TransferTable* table_ = nullptr;
  RegionId region_;
  GrantId grant_;
};

}  // namespace kvferry
