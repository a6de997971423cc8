// The controllers of `kvferry bench fleet`: processes of this very program, and what joins several of them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "launch/bench/harness/child_process.h"

namespace kvferry::bench {

struct FleetControllersOptions {
  std::size_t num_replicas = 1;  // several: with etcd and Redis, which are started too
  bool over_streams = false;     // else over ZeroMQ
};

class FleetControllers {
 public:
  /// All of them listen. On core 1, where there is one. kUnavailable: a program is missing or does not come up.
  static Result<std::unique_ptr<FleetControllers>> start(const FleetControllersOptions& options);
  FleetControllers(const FleetControllers&) = delete;
  FleetControllers& operator=(const FleetControllers&) = delete;
  ~FleetControllers();

  /// Where nodes reach them.
  const std::vector<std::string>& endpoints() const { return endpoints_; }
  /// Over ZeroMQ, for questions.
  const std::string& address(std::size_t replica) const { return addresses_[replica]; }
  /// Without a word.
  void kill(std::size_t replica);
  /// On its port, its state and its name. Does not wait for it.
  Result<void> start_again(std::size_t replica);

  double cpu_s(std::size_t replica) const;    // since it began, all its threads
  double rss_mib(std::size_t replica) const;  // now
  std::size_t num_files(std::size_t replica) const;

 private:
  FleetControllers() = default;
  Result<void> start_services();
  Result<void> listens(ChildProcess& process, int port) const;

  FleetControllersOptions options_;
  std::string folder_, etcd_, redis_;
  std::vector<int> ports_;
  std::vector<std::string> addresses_, endpoints_;
  std::vector<std::optional<ChildProcess>> services_, controllers_;
};

}  // namespace kvferry::bench
