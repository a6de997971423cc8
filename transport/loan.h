// Memory that a peer's copy has borrowed from the ledger, given back by whoever drops it.
#pragma once

#include <utility>

#include "transport/ledger.h"

namespace kvferry {

class Loan {
 public:
  Loan() = default;
  Loan(Ledger& ledger, RegionId region, GrantId grant) : ledger_(&ledger), region_(region), grant_(grant) {}
  Loan(Loan&& other) noexcept
      : ledger_(std::exchange(other.ledger_, nullptr)), region_(other.region_), grant_(other.grant_) {}
  Loan& operator=(Loan&& other) noexcept {
    std::swap(ledger_, other.ledger_);
    std::swap(region_, other.region_);
    std::swap(grant_, other.grant_);
    return *this;
  }
  ~Loan() { give_back(); }
  void give_back() {
    if (ledger_ != nullptr) std::exchange(ledger_, nullptr)->give_back(region_, grant_);
  }

 private:
  Ledger* ledger_ = nullptr;
  RegionId region_;
  GrantId grant_;
};

}  // namespace kvferry
