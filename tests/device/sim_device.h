// A GPU in host memory whose work runs as late, and in as odd an order, as streams and events allow: what is not
// ordered by an event goes wrong here, where a real GPU would mostly get it right.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
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
    kByHand,       // work runs in step(), run_all() and the waits of the host: the same seed, the same run
    kInBackground  // a thread of its own steps
  };
  explicit SimDevice(std::uint32_t seed, Drive drive = Drive::kByHand);
  ~SimDevice() override;

  /// Runs a piece of the work that may run now, of a stream that the seed chooses. False: none may.
  bool step();
  void run_all();
  /// Puts work of the test's own into a stream: called until it returns true, in the stream's order; must not block.
  void enqueue(DeviceStream stream, std::function<bool()> work);
  /// release() for work in a stream, which must not wait for others.
  void release_now(std::byte* base);
  /// The next calls that can fail do so, this many of them.
  void refuse_next(int calls);
  /// So do these after `granted` more were granted.
  void refuse_after(int granted, int calls);
  /// The memory lies in a SharedMemory of this name from its start on: other processes may open it.
  void share(std::span<std::byte> memory, std::string name);
  /// Streams, events and memory that nobody gave back, and what is open of other processes.
  std::size_t num_alive() const;

  std::string describe() const override { return "simulated GPU"; }
  bool is_host() const override { return true; }
  Result<std::byte*> allocate(MemoryKind kind, std::uint64_t bytes) override;
  void release(MemoryKind kind, std::byte* base) override;
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
    bool is_busy = false;     // a thread runs its first piece
    bool is_dropped = false;  // goes when its work is done
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
  std::map<const std::byte*, std::pair<std::uint64_t, std::string>> shared_;  // its bytes and name
  std::map<std::byte*, SharedMemory> opened_;
  std::uintptr_t last_handle_ = 0;
  bool is_stopping_ = false;
  std::condition_variable has_work_;
  std::thread thread_;
};

}  // namespace kvferry
