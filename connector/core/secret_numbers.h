// Numbers that a peer knows only if it was told, because a peer that names a lease or a reservation can end it. Pure:
// they follow from a secret that the runtime draws.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace kvferry {

class SecretNumbers {
 public:
  /// The same secret gives the same numbers.
  explicit SecretNumbers(std::string secret) : secret_(std::move(secret)) {}

  /// Returns another number each time, never 0. A peer can compute none from those that it was told.
  std::uint64_t draw();

 private:
  std::string secret_;
  std::uint64_t num_drawn_ = 0;
};

}  // namespace kvferry
