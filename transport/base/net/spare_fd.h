// A file descriptor kept back for the time when a process has no other one left.
#pragma once

#include <cstdint>

#include "transport/base/owned_fd.h"

namespace kvferry::net {

/// For the owner of a listening socket. Without a descriptor a connection can't be accepted, and would stay pending and
/// keep the listener readable, so that its owner never sleeps.
class SpareFd {
 public:
  SpareFd();
  /// To be called when accept() has failed, before errno changes. If no descriptor was left, closes the connection that
  /// was next and returns true: the listener may have more. Only the 1st, 2nd, 4th, 8th ... is logged.
  bool refuse(int listener, const char* who);
  std::uint64_t num_refused() const { return num_refused_; }

 private:
  OwnedFd spare_;
  std::uint64_t num_refused_ = 0;
};

}  // namespace kvferry::net
