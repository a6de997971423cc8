// Measures how fast each path to a peer is, over transports made only for this measurement. Private to this folder.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "transport/make_transport.h"
#include "transport/planner/plan_address.h"

namespace kvferry::planner {

struct Measured {
  Path path = Path::kAuto;
  double gb_per_s = 0;  // measured speed; 0: the measurement failed
  std::string problem;  // reason why the measurement failed; empty if it did not
};

/// For each class of the peer's memory, the speeds of pulls from this memory, the fastest path first. GPU memory is
/// pulled into GPU memory. If TransportOptions::path is kCma, the speeds for kOther are used for kShared too.
struct Measurements {
  std::array<std::vector<Measured>, kMemoryClasses> by_class;
  std::vector<Measured>& of(MemoryClass kind) { return by_class[static_cast<std::size_t>(kind)]; }
  const std::vector<Measured>& of(MemoryClass kind) const { return by_class[static_cast<std::size_t>(kind)]; }
  /// Returns text for logs: "not measured yet", or like "pools by shm 9.8 GB/s, tcp 2.1 GB/s; other memory by ...". It
  /// leaves out the classes of which no path was measured.
  std::string describe() const;
  /// Returns the highest measured speed of a backend's paths, in bytes per second; 0: none.
  double rate_of(std::string_view backend) const;
};

/// Measures the paths to peers on a thread of its own. Threads: any may call probe(); `done` is called on the prober's
/// thread.
class Prober {
 public:
  using Done = std::function<void(const Measurements&)>;
  explicit Prober(const TransportOptions& options) : options_(options) {}
  ~Prober();

  /// Queues a measurement; peers are measured one after the other. `backends`: names of the backends that reach the
  /// peer.
  void probe(Address address, std::vector<std::string> backends, Done done);

 private:
  struct Job {
    Address address;
    std::vector<std::string> backends;
    Done done;
  };

  void thread_main();
  Measurements measure(const Job& job) const;
  Result<double> pull(Path path, const std::string& address, const std::string& region, bool is_device) const;
  Result<double> pull(Path path, const std::string& address, const std::string& region, const MemoryRegion& into) const;

  const TransportOptions options_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  std::atomic<bool> is_stopping_{false};
  std::thread thread_;  // started with the first job
};

}  // namespace kvferry::planner
