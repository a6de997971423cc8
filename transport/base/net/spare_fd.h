// A reserved file descriptor, with which a process can refuse connections even if no other descriptor is left.
#pragma once

#include <cstdint>

#include "transport/base/owned_fd.h"

namespace kvferry::net {

/// For the owner of a listening socket. If no descriptor is left, a connection can't be accepted. The pending
/// connection would keep the listening socket readable, so that the owner's thread would never sleep.
class SpareFd {
 public:
  SpareFd();
  /// The caller must call this function right after accept() has failed, before errno changes. If no descriptor was
  /// left, accepts and closes the next connection and returns true, because more connections may be pending. Only the
  /// 1st, 2nd, 4th, 8th ... refusal is logged, under the name `who`.
  bool refuse(int listener, const char* who);
  std::uint64_t num_refused() const { return num_refused_; }

 private:
  OwnedFd spare_;
  std::uint64_t num_refused_ = 0;
};

}  // namespace kvferry::net
