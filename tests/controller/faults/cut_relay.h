// A TCP relay on this host whose connections can be broken, or stand still, and be mended.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <thread>

#include "transport/base/owned_fd.h"

namespace kvferry::faults {

/// Threads: its own carries the bytes; set() from any.
class CutRelay {
 public:
  enum class Way {
    kOpen,
    kBroken,  // connections are reset, new ones too
    kCut      // connections stay, and nothing comes through before it is mended, as with a cable that is pulled
  };

  /// From a port of its own to `target_port`, both of 127.0.0.1.
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
  std::map<int, int> other_end_;  // both directions
  std::atomic<Way> way_{Way::kOpen};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvferry::faults
