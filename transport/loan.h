// Memory that a peer's copy has borrowed from the transfer_table, given back by whoever drops it.
#pragma once

#include <utility>

#include "transport/transfer_table.h"

namespace kvferry {

class Loan {
 public:
  Loan() = default;
  Loan(TransferTable& transfer_table, RegionId region, GrantId grant) : table_(&transfer_table), region_(region), grant_(grant) {}
  Loan(Loan&& other) noexcept
      : table_(std::exchange(other.table_, nullptr)), region_(other.region_), grant_(other.grant_) {}
  Loan& operator=(Loan&& other) noexcept {
    std::swap(table_, other.table_);
    std::swap(region_, other.region_);
    std::swap(grant_, other.grant_);
    return *this;
  }
  ~Loan() { give_back(); }
  void give_back() {
    if (table_ != nullptr) std::exchange(table_, nullptr)->give_back(region_, grant_);
  }

 private:
  TransferTable* table_ = nullptr;
  RegionId region_;
  GrantId grant_;
};

}  // namespace kvferry
