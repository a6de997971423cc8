// The connection to the far side of the benchmark, which is our own child where nobody named one.
#pragma once

#include <optional>
#include <string>

#include "launch/bench/harness/child_process.h"
#include "launch/bench/harness/tcp.h"

namespace kvferry::bench {

/// Ends its child, if it has one, when it goes.
class FarSide {
 public:
  /// kUnavailable: nobody listens there; kRefused: another version of kvferry.
  Result<void> open(const std::optional<HostPort>& address);
  /// Makes sure that the far host has a peer, too (bench_venv.h).
  Result<void> install(const std::string& what);

  LineLink& link() { return *link_; }
  const std::string& host() const { return host_; }  // our own address on the route there
  bool is_same_host() const { return is_same_host_; }

 private:
  static constexpr TimeNs kInstallPatience = 900 * kSecond;

  Result<void> greet();

  std::optional<ChildProcess> child_;
  std::optional<LineLink> link_;  // closed first: then the child ends by itself
  std::string host_;
  bool is_same_host_ = false;
};

}  // namespace kvferry::bench
