// The connection to the far side of the benchmark: a listener, which is a child process unless --connect names the
// address of a listener.
#pragma once

#include <optional>
#include <string>

#include "launch/bench/harness/programs.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::bench {

using net::HostPort;

/// The destructor ends the child process, if there is one.
class FarSide {
 public:
  /// Connects to the listener at the address, or starts one if there is no address. Failures: kUnavailable if the
  /// connection can't be made; kPeerLost, kTimeout or kCorrupt if no listener answers; kRefused if the listener has
  /// another version of kvferry; kCancelled.
  void open(const std::optional<HostPort>& address);
  /// Installs a system to compare with, such as nixl, on the listener's host (bench_venv.h). Does nothing if the
  /// listener is a child, because it uses this process's installation.
  void install(const std::string& what);

  LineLink& link() { return *link_; }
  const std::string& host() const { return host_; }  // this side's address on the route to the listener
  bool is_same_host() const { return is_same_host_; }

 private:
  static constexpr TimeNs kInstallPatience = 900 * kSecond;

  void greet(const HostPort& where);

  std::optional<ChildProcess> child_;
  std::optional<LineLink> link_;  // destroyed before child_, which ends when the link closes
  std::string host_;
  bool is_same_host_ = false;
};

}  // namespace kvferry::bench
