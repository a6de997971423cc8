// A TCP relay on this host. Its connections can be broken or held up, and then be repaired.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <thread>

#include "transport/base/owned_fd.h"

namespace kvferry::faults {

/// Threads: set() may be called by any thread. The relay's own thread moves the bytes.
class CutRelay {
 public:
  enum class Way {
    kOpen,
    kBroken,  // existing and new connections are reset
    // connections stay, but no bytes pass until the relay is set to another state, as with a cable that is unplugged
    kCut
  };

  /// Forwards connections from a port of its own to `target_port`. Both ports are at 127.0.0.1.
  explicit CutRelay(std::uint16_t target_port);
  ~CutRelay();
  std::uint16_t port() const { return port_; }
  void set(Way way) { way_ = way; }

 private:
  void run();
  void accept_one();
  void move_bytes(int from);
  void close_pair(int fd);

  std::uint16_t target_port_;
  std::uint16_t port_ = 0;
  OwnedFd listener_;
  OwnedFd epoll_;
  std::map<int, int> other_end_;  // maps each descriptor to the descriptor of its other end, in both directions
  std::atomic<Way> way_{Way::kOpen};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvferry::faults
