#include "tests/device/sim_device.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/checksum.h"
#include "transport/base/wire.h"

namespace kvferry {
namespace {

class SimChecksums final : public Device::Checksums {
 public:
  struct Shared {
    std::vector<std::uint64_t> values;
  };
  SimChecksums(std::shared_ptr<Shared> shared, DeviceEvent done) : shared_(std::move(shared)), done_(std::move(done)) {}
  Result<bool> is_done() override { return done_.is_reached(); }
  Result<std::vector<std::uint64_t>> take() override {
    if (Result<void> ok = done_.wait(); !ok) return std::move(ok).error();
    return shared_->values;
  }

 private:
  std::shared_ptr<Shared> shared_;
  DeviceEvent done_;
};

/// An exported handle: where the memory is in its own process, and where in the segment that other processes can map,
/// if there is one.
struct SimHandle {
  std::uint64_t process = 0;
  std::uint64_t address = 0;
  std::string segment;
  std::uint64_t offset = 0;
  KVFERRY_FIELDS(process, address, segment, offset);
};

std::uint64_t this_process() {
  static const std::uint64_t number = (std::uint64_t{std::random_device()()} << 32) | std::random_device()();
  return number;
}

}  // namespace

SimDevice::SimDevice(std::uint32_t seed, Drive drive) : random_(seed) {
  if (drive == Drive::kByHand) return;
  thread_ = std::thread([this] {
    while (true) {
      {
        std::unique_lock lock(mutex_);
        has_work_.wait(lock, [this] {  // waits without using the processor while there is no work
          return is_stopping_ || std::any_of(streams_.begin(), streams_.end(),
                                             [](const auto& entry) { return !entry.second.work.empty(); });
        });
        if (is_stopping_) return;
      }
      if (!step()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
}

SimDevice::~SimDevice() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  has_work_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool SimDevice::step() {
  std::unique_lock lock(mutex_);
  std::vector<DeviceStream> ready;
  for (const auto& [handle, stream] : streams_) {
    if (!stream.is_busy && !stream.work.empty()) ready.push_back(handle);
  }
  std::shuffle(ready.begin(), ready.end(), random_);
  for (const DeviceStream handle : ready) {
    Stream& stream = streams_.at(handle);
    const std::function<bool()> work = stream.work.front();
    stream.is_busy = true;
    lock.unlock();  // unlocked, because the work may come from a test that calls the device
    const bool is_done = work();
    lock.lock();
    stream.is_busy = false;
    if (!is_done) continue;
    stream.work.pop_front();
    if (stream.is_dropped && stream.work.empty()) streams_.erase(handle);
    return true;
  }
  return false;
}

void SimDevice::run_all() {
  while (step()) {
  }
}

bool SimDevice::is_idle() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(streams_.begin(), streams_.end(), [](const auto& entry) { return entry.second.work.empty(); });
}

void SimDevice::enqueue(DeviceStream stream, std::function<bool()> work) {
  const std::lock_guard lock(mutex_);
  enqueue_locked(stream, std::move(work));
}

void SimDevice::refuse_next(int calls) { refuse_after(0, calls); }

void SimDevice::refuse_after(int granted, int calls) {
  const std::lock_guard lock(mutex_);
  granted_ = granted;
  refusals_ = calls;
}

std::size_t SimDevice::num_alive() const {
  const std::lock_guard lock(mutex_);
  std::size_t alive = events_.size() + memory_.size() + pinned_.size() + opened_.size();
  for (const auto& [handle, stream] : streams_) alive += handle != nullptr && !stream.is_dropped ? 1 : 0;
  return alive;
}

std::uint64_t SimDevice::num_host_waits() const {
  const std::lock_guard lock(mutex_);
  return num_host_waits_;
}

std::uint64_t SimDevice::num_allocations() const {
  const std::lock_guard lock(mutex_);
  return num_allocations_;
}

Result<void> SimDevice::check() {
  if (refusals_ == 0) return {};
  if (granted_ > 0) {
    --granted_;
    return {};
  }
  --refusals_;
  return Error{ErrorCode::kUnavailable, "the simulated GPU refuses"};
}

SimDevice::EventPtr SimDevice::event_of(EventHandle handle) const {
  const auto found = events_.find(handle);
  KVFERRY_CHECK(found != events_.end(), "an event is used that was dropped");
  return found->second;
}

void SimDevice::enqueue_locked(DeviceStream handle, std::function<bool()> work) {
  const auto found = streams_.find(handle);
  KVFERRY_CHECK(handle == nullptr || (found != streams_.end() && !found->second.is_dropped),
                "a stream is used that was dropped");
  streams_[handle].work.push_back(std::move(work));
  has_work_.notify_one();
}

Result<void> SimDevice::bind_thread() {
  const std::lock_guard lock(mutex_);
  history_.emplace_back("bind_thread");
  bound_threads_.insert(std::this_thread::get_id());
  return {};
}

std::vector<std::string> SimDevice::history() const {
  const std::lock_guard lock(mutex_);
  return history_;
}

std::set<std::thread::id> SimDevice::bound_threads() const {
  const std::lock_guard lock(mutex_);
  return bound_threads_;
}

Result<std::byte*> SimDevice::allocate(MemoryKind, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (Result<void> ok = check(); !ok) return std::move(ok).error();
  ++num_allocations_;
  auto memory = std::make_unique<std::byte[]>(bytes);
  std::memset(memory.get(), 0xa5, bytes);  // memory that was never written must not look like zeros
  std::byte* const base = memory.get();
  memory_[base] = std::move(memory);
  return base;
}

void SimDevice::release(MemoryKind, std::byte* base) {
  {
    const std::lock_guard lock(mutex_);
    ++num_host_waits_;
  }
  run_all();
  release_now(base);
}

void SimDevice::release_now(std::byte* base) {
  const std::lock_guard lock(mutex_);
  KVFERRY_CHECK(memory_.erase(base) == 1, "memory is released that was not allocated");
}

Result<std::uint64_t> SimDevice::free_bytes() {
  const std::lock_guard lock(mutex_);
  if (Result<void> ok = check(); !ok) return std::move(ok).error();
  return std::uint64_t{4} << 30;
}

Result<void> SimDevice::pin(std::span<std::byte> memory) {
  const std::lock_guard lock(mutex_);
  if (Result<void> ok = check(); !ok) return ok;
  history_.emplace_back("pin");
  ++num_allocations_;
  Pin& pin = pinned_[memory.data()];
  KVFERRY_CHECK(pin.count == 0 || pin.bytes == memory.size(), "memory is pinned twice, with different sizes");
  pin.bytes = memory.size();
  ++pin.count;
  return {};
}

void SimDevice::unpin(std::span<std::byte> memory) {
  const std::lock_guard lock(mutex_);
  const auto found = pinned_.find(memory.data());
  KVFERRY_CHECK(found != pinned_.end(), "memory is unpinned that was not pinned");
  history_.emplace_back("unpin");
  if (--found->second.count == 0) pinned_.erase(found);
}

Result<DeviceStream> SimDevice::make_stream() {
  const std::lock_guard lock(mutex_);
  if (Result<void> ok = check(); !ok) return std::move(ok).error();
  const auto handle = reinterpret_cast<DeviceStream>(++last_handle_);
  streams_[handle] = {};
  return handle;
}

void SimDevice::drop_stream(DeviceStream handle) {
  const std::lock_guard lock(mutex_);
  Stream& stream = streams_.at(handle);
  KVFERRY_CHECK(!stream.is_dropped, "a stream is dropped twice");
  stream.is_dropped = true;
  if (stream.work.empty()) streams_.erase(handle);
}

Result<Device::EventHandle> SimDevice::record(DeviceStream stream) {
  const std::lock_guard lock(mutex_);
  if (Result<void> ok = check(); !ok) return std::move(ok).error();
  const auto handle = reinterpret_cast<EventHandle>(++last_handle_);
  auto event = std::make_shared<Event>();
  events_[handle] = event;
  enqueue_locked(stream, [this, event] {
    const std::lock_guard reaching(mutex_);
    return event->is_reached = true;
  });
  return handle;
}

void SimDevice::drop_event(EventHandle event) {
  const std::lock_guard lock(mutex_);
  KVFERRY_CHECK(events_.erase(event) == 1, "an event is dropped twice");
}

Result<bool> SimDevice::is_reached(EventHandle event) {
  const std::lock_guard lock(mutex_);
  if (Result<void> ok = check(); !ok) return std::move(ok).error();
  return event_of(event)->is_reached;
}

Result<void> SimDevice::wait(EventHandle handle) {
  EventPtr event;
  {
    const std::lock_guard lock(mutex_);
    if (Result<void> ok = check(); !ok) return ok;
    event = event_of(handle);
    num_host_waits_ += event->is_reached ? 0 : 1;
  }
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (event->is_reached) return {};
    }
    if (step()) continue;
    KVFERRY_CHECK(thread_.joinable(), "the host waits for an event that nothing leads to");
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Result<void> SimDevice::wait_on(DeviceStream stream, EventHandle handle) {
  const std::lock_guard lock(mutex_);
  if (Result<void> ok = check(); !ok) return ok;
  enqueue_locked(stream, [this, event = event_of(handle)] {
    const std::lock_guard asking(mutex_);
    return event->is_reached;
  });
  return {};
}

Result<void> SimDevice::copy(std::span<const DeviceCopy> copies, DeviceStream stream) {
  const std::lock_guard lock(mutex_);
  if (Result<void> ok = check(); !ok) return ok;
  for (const DeviceCopy& copy : copies) {
    const auto pin = pinned_.upper_bound(copy.to);
    const bool is_to_host = pin != pinned_.begin() && copy.to < std::prev(pin)->first + std::prev(pin)->second.bytes;
    enqueue_locked(stream, [this, copy, is_to_host] {
      if (is_to_host && are_copies_to_host_held_) return false;
      std::memcpy(copy.to, copy.from, copy.bytes);
      return true;
    });
  }
  return {};
}

void SimDevice::share(std::span<std::byte> memory, std::string name) {
  const std::lock_guard lock(mutex_);
  shared_[memory.data()] = {memory.size(), std::move(name)};
}

Result<std::string> SimDevice::export_memory(std::span<const std::byte> memory) {
  const std::lock_guard lock(mutex_);
  if (Result<void> ok = check(); !ok) return std::move(ok).error();
  SimHandle handle{this_process(), reinterpret_cast<std::uintptr_t>(memory.data()), "", 0};
  const auto after = shared_.upper_bound(memory.data());
  if (after != shared_.begin()) {
    const auto& [base, segment] = *std::prev(after);
    handle.offset = static_cast<std::uint64_t>(memory.data() - base);
    if (handle.offset + memory.size() <= segment.first) handle.segment = segment.second;
  }
  return encode(handle);
}

Result<std::byte*> SimDevice::open_memory(const std::string& exported, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (Result<void> ok = check(); !ok) return std::move(ok).error();
  Result<SimHandle> handle = decode<SimHandle>(exported, "handle");
  if (!handle) return std::move(handle).error();
  if (handle->process == this_process()) return reinterpret_cast<std::byte*>(handle->address);
  if (handle->segment.empty()) return Error{ErrorCode::kUnavailable, "no segment holds this memory"};
  Result<SharedMemory> segment = SharedMemory::open(handle->segment);
  if (!segment) return Error{ErrorCode::kUnavailable, segment.error().what};
  if (handle->offset > segment->bytes() || bytes > segment->bytes() - handle->offset)
    return Error{ErrorCode::kCorrupt, "the segment is too short"};
  std::byte* const base = segment->data() + handle->offset;
  opened_.emplace(base, std::move(*segment));
  return base;
}

void SimDevice::close_memory(std::byte* base) {
  const std::lock_guard lock(mutex_);
  opened_.erase(base);  // memory of this process was never opened, so there is nothing to erase
}

Result<std::unique_ptr<Device::Checksums>> SimDevice::checksums(std::span<const std::span<const std::byte>> ranges,
                                                                DeviceStream stream) {
  auto shared = std::make_shared<SimChecksums::Shared>();
  {
    const std::lock_guard lock(mutex_);
    if (Result<void> ok = check(); !ok) return std::move(ok).error();
    for (const std::span<const std::byte> range : ranges) {
      enqueue_locked(stream, [shared, range] {
        shared->values.push_back(chunk_checksum(range));
        return true;
      });
    }
  }
  Result<DeviceEvent> done = DeviceEvent::record(*this, stream);
  if (!done) return std::move(done).error();
  return std::unique_ptr<Checksums>(std::make_unique<SimChecksums>(std::move(shared), std::move(*done)));
}

}  // namespace kvferry
