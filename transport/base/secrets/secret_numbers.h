// Unguessable ids for leases, slot reservations and grants, because a peer that knows such an id can end or use what
// the id names. The class has no I/O: it derives the ids from a random secret that the constructor gets.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace kvferry {

class SecretNumbers {
 public:
  /// Two objects with the same secret draw the same numbers in the same order.
  explicit SecretNumbers(std::string secret) : secret_(std::move(secret)) {}

  /// Returns the next number, never 0. A peer can't compute a number from other numbers that it has received.
  std::uint64_t draw();

 private:
  std::string secret_;
  std::uint64_t num_drawn_ = 0;
};

}  // namespace kvferry
