// A GPU that is simulated in host memory. Its work runs as late, and in as unusual an order, as streams and events
// allow. So code that does not order its work by events fails here, while a real GPU would mostly hide the mistake.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "transport/base/device.h"
#include "transport/shared_memory.h"

namespace kvferry {

/// Threads: any.
class SimDevice final : public Device {
 public:
  enum class Drive {
    kByHand,       // work runs in step(), in run_all() and while the host waits; the same seed gives the same order
    kInBackground  // a thread of the device runs the work
  };
  explicit SimDevice(std::uint32_t seed, Drive drive = Drive::kByHand);
  ~SimDevice() override;

  /// Runs a piece of work that may run now, from a stream that the seed chooses. Returns false if no work may run.
  bool step();
  void run_all();
  /// Returns true if no stream has work, also none that is running.
  bool is_idle() const;
  /// Adds a test's own work to a stream. In the stream's order, `work` is called until it returns true. `work` must not
  /// block.
  void enqueue(DeviceStream stream, std::function<bool()> work);
  /// Does the same as release(), for work in a stream, which must not wait for other work.
  void release_now(std::byte* base);
  /// Makes the next `calls` calls that can fail do so.
  void refuse_next(int calls);
  /// Lets the next `granted` calls that can fail succeed, and makes the `calls` calls after them fail.
  void refuse_after(int granted, int calls);
  /// While `held`, the device runs no copy into pinned memory.
  void hold_copies_to_host(bool held) { are_copies_to_host_held_ = held; }
  /// Returns the calls of pin(), unpin() and bind_thread() so far, in order.
  std::vector<std::string> history() const;
  /// Returns the threads that have called bind_thread().
  std::set<std::thread::id> bound_threads() const;
  /// Declares that `memory` is a SharedMemory with this name, from its beginning on, so that other processes can open
  /// it.
  void share(std::span<std::byte> memory, std::string name);
  /// Returns the number of streams, events and pieces of memory that were not given back, plus the memory of other
  /// processes that is still open.
  std::size_t num_alive() const;
  /// Returns how often the host waited for an event that was not reached, or released memory, for which it waits too.
  std::uint64_t num_host_waits() const;
  /// Returns how often memory was allocated or pinned.
  std::uint64_t num_allocations() const;

  std::string describe() const override { return "simulated GPU"; }
  bool is_host() const override { return true; }
  Result<void> bind_thread() override;
  Result<std::byte*> allocate(MemoryKind kind, std::uint64_t bytes) override;
  void release(MemoryKind kind, std::byte* base) override;
  Result<std::uint64_t> free_bytes() override;
  Result<void> pin(std::span<std::byte> memory) override;
  void unpin(std::span<std::byte> memory) override;
  Result<DeviceStream> make_stream() override;
  void drop_stream(DeviceStream stream) override;
  Result<EventHandle> record(DeviceStream stream) override;
  void drop_event(EventHandle event) override;
  Result<bool> is_reached(EventHandle event) override;
  Result<void> wait(EventHandle event) override;
  Result<void> wait_on(DeviceStream stream, EventHandle event) override;
  Result<void> copy(std::span<const DeviceCopy> copies, DeviceStream stream) override;
  Result<std::string> export_memory(std::span<const std::byte> memory) override;
  Result<std::byte*> open_memory(const std::string& exported, std::uint64_t bytes) override;
  void close_memory(std::byte* base) override;
  Result<std::unique_ptr<Checksums>> checksums(std::span<const std::span<const std::byte>> ranges,
                                               DeviceStream stream) override;

 private:
  struct Event {
    bool is_reached = false;
  };
  using EventPtr = std::shared_ptr<Event>;
  struct Stream {
    std::deque<std::function<bool()>> work;
    bool is_busy = false;     // a thread runs the stream's first piece of work
    bool is_dropped = false;  // the stream is removed when its work is done
  };

  Result<void> check();
  EventPtr event_of(EventHandle handle) const;
  void enqueue_locked(DeviceStream stream, std::function<bool()> work);

  mutable std::mutex mutex_;
  std::mt19937 random_;
  int granted_ = 0, refusals_ = 0;
  std::map<DeviceStream, Stream> streams_;
  std::map<EventHandle, EventPtr> events_;
  std::map<std::byte*, std::unique_ptr<std::byte[]>> memory_;
  struct Pin {
    std::size_t bytes = 0;
    int count = 0;
  };
  std::map<std::byte*, Pin> pinned_;
  // maps the begin of shared memory to its size in bytes and its name
  std::map<const std::byte*, std::pair<std::uint64_t, std::string>> shared_;
  std::map<std::byte*, SharedMemory> opened_;
  std::vector<std::string> history_;
  std::set<std::thread::id> bound_threads_;
  std::uintptr_t last_handle_ = 0;
  std::uint64_t num_host_waits_ = 0, num_allocations_ = 0;
  bool is_stopping_ = false;
  std::atomic<bool> are_copies_to_host_held_ = false;
  std::condition_variable has_work_;
  std::thread thread_;
};

}  // namespace kvferry
