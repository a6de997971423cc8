// What a server does when file descriptors run out: it refuses new connections, and does not spin.
#pragma once

#include <cstdint>
#include <string>

#include "transport/base/owned_fd.h"

namespace kvferry::net {

/// For the owner of a listening socket. If no descriptor is left, a connection can't be accepted. The pending
/// connection would keep the listening socket readable, so that the owner's thread would never sleep.
class SpareFd {
 public:
  SpareFd();
  /// The caller must call this function right after accept() has failed, before errno changes. If no descriptor was
  /// left, accepts and closes the next connection. Returns true if a connection was closed; more connections may be
  /// pending then. Only the 1st, 2nd, 4th, 8th ... refusal is logged, under the name `who`.
  bool refuse(int listener, const char* who);
  std::uint64_t num_refused() const { return num_refused_; }

 private:
  OwnedFd spare_;
  std::uint64_t num_refused_ = 0;
};

/// For a listening socket whose owner is a library that accepts connections itself.
class FdReserve {
 public:
  /// Ends the connection `fd`, which was accepted just now, if few descriptors are left; the library then closes it.
  /// The kernel gives each new descriptor the lowest free number, so a number close to the limit means that few are
  /// left. Only the 1st, 2nd, 4th, 8th ... refusal is logged, under the name `who`.
  void accepted(int fd, const std::string& who);
  std::uint64_t num_refused() const { return num_refused_; }

 private:
  std::uint64_t num_refused_ = 0;
};

}  // namespace kvferry::net
