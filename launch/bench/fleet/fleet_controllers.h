// The controllers of `kvferry bench fleet`, each in a process of its own. Several controllers share an etcd and a
// Redis, which are started too.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "launch/bench/harness/programs.h"

namespace kvferry::bench {

struct FleetControllersOptions {
  // Number of controllers. If there are several, start() also starts the etcd and the Redis that they need.
  std::size_t num_replicas = 1;
  bool over_streams = false;  // true if nodes connect by streams, false if by ZeroMQ
};

class FleetControllers {
 public:
  explicit FleetControllers(const FleetControllersOptions& options) : options_(options) {}
  FleetControllers(const FleetControllers&) = delete;
  FleetControllers& operator=(const FleetControllers&) = delete;
  ~FleetControllers();
  /// Returns when all controllers listen. The controllers are pinned to core 1 if the machine has more than one core.
  /// Failures: kUnavailable if a program is missing or does not start.
  void start();

  /// Returns the endpoints to which nodes connect.
  const std::vector<std::string>& endpoints() const { return endpoints_; }
  /// Returns the replica's ZeroMQ endpoint, for status queries.
  const std::string& address(std::size_t replica) const { return addresses_[replica]; }
  /// Ends the replica's process with SIGKILL.
  void kill(std::size_t replica);
  /// Starts the replica again with the same port, state and name. Returns before the replica listens.
  void start_again(std::size_t replica);

  double cpu_s(std::size_t replica) const;  // Returns the processor time of all threads of the replica in seconds.
  double rss_mib(std::size_t replica) const;
  std::size_t num_files(std::size_t replica) const;

 private:
  void start_services();

  const FleetControllersOptions options_;
  TemporaryFolder folder_;
  std::string etcd_, redis_;
  std::vector<std::uint16_t> ports_;
  std::vector<std::string> addresses_, endpoints_;
  std::vector<std::unique_ptr<ChildProcess>> services_, controllers_;
};

}  // namespace kvferry::bench
