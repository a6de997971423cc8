// A chunk store, with an engine's blocks and with "the network", which reads and writes the slots at once.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "connector/runtime/store/chunk_store.h"
#include "tests/connector/runtime/toy_engine.h"
#include "tests/manual_clock.h"

namespace kvferry {

/// Knows the addresses of regions, and moves nothing.
class StillTransport final : public Transport {
 public:
  bool takes_devices = true;
  std::byte* base(RegionId region) const { return regions_.at(region.value); }
  std::size_t num_regions() const { return regions_.size(); }

  Result<RegionId> register_region(const MemoryRegion& memory) override {
    if (memory.device != nullptr && !takes_devices)
      return Error{ErrorCode::kUnavailable, "this transport can't reach GPU memory"};
    regions_[++last_] = static_cast<std::byte*>(memory.base);
    return RegionId{last_};
  }
  Result<void> unregister_region(RegionId region) override {
    regions_.erase(region.value);
    return {};
  }
  std::string address() const override { return {}; }
  std::string describe() const override { return "nothing"; }
  Result<std::string> export_region(RegionId) const override { return none(); }
  Result<GrantId> grant(RegionId, std::uint64_t, std::uint64_t, const GrantTerms&) override { return none(); }
  Result<std::string> export_grant(GrantId) const override { return none(); }
  Result<void> revoke(GrantId) override { return none(); }
  Result<PeerId> connect(const std::string&) override { return none(); }
  void disconnect(PeerId) override {}
  Result<TransferId> submit(PagedTransfer) override { return none(); }
  Result<void> feed(TransferId, std::vector<CopyRange>, std::vector<std::uint64_t>, bool) override { return none(); }
  void cancel(TransferId) override {}
  std::vector<Completion> poll() override { return {}; }
  std::vector<Notification> poll_notifications() override { return {}; }
  int event_fd() const override { return -1; }
  bool wait(TimeNs) override { return false; }
  void set_wait_interrupt_fd(int) override {}
  void set_source_address(const std::string&) override {}
  void shutdown() override {}

 private:
  static Error none() { return {ErrorCode::kUnavailable, "a book of regions moves nothing"}; }
  std::map<std::uint32_t, std::byte*> regions_;
  std::uint32_t last_ = 0;
};

enum class StoreKind { kHost, kGpuWithoutFrames, kGpu, kGpuWhereChunksLand };

/// A parameter of tests: a kind of store, and whether the model's layers are unlike.
struct StoreModel {
  StoreKind kind = StoreKind::kHost;
  bool has_unlike_layers = false;
};
inline std::string store_model_name(const StoreModel& model) {
  constexpr const char* kNames[] = {"Host", "GpuWithoutFrames", "Gpu", "GpuWhereChunksLand"};
  return std::string(kNames[static_cast<std::size_t>(model.kind)]) +
         (model.has_unlike_layers ? "WithUnlikeLayers" : "");
}

struct StoreOptions {
  StoreKind kind = StoreKind::kHost;
  std::uint32_t seed = 0;
  std::uint32_t num_slots = 6;
  std::uint32_t num_frames = 3;
  bool has_unlike_layers = false;
};

class TestStore {
 public:
  explicit TestStore(StoreOptions options)
      : device(options.kind == StoreKind::kHost ? nullptr : std::make_shared<SimDevice>(options.seed)),
        engine(device.get(), options.has_unlike_layers),
        pool(options.num_slots * engine.chunk_bytes()) {
    const RegionId region = *book.register_region(MemoryRegion{pool.data(), pool.size()});
    ChunkStoreParts parts{engine.layouts(), 0, pool, engine.chunk_bytes(), region};
    if (!device) {
      store = make_host_store(std::move(parts)).value();
      return;
    }
    const std::uint64_t bytes = options.kind == StoreKind::kGpuWithoutFrames ? 0 : options.num_frames * frame_bytes();
    const bool lands = options.kind == StoreKind::kGpuWhereChunksLand;
    store = make_gpu_store(std::move(parts), {make_sim_gpu(device), bytes, lands, kTimeout, clock, book}).value();
  }

  static constexpr TimeNs kTimeout = 30 * kSecond;
  std::uint64_t frame_bytes() const { return (engine.chunk_bytes() + 255) / 256 * 256; }
  std::span<std::byte> slot(std::uint32_t index, std::uint64_t bytes) {
    return std::span(pool).subspan(index * engine.chunk_bytes(), bytes);
  }
  void begin_load(const std::vector<LoadJob>& jobs) {
    store->load(
        jobs, [](ChunkRef) { return true; }, engine.stream());
  }
  /// Runs all work of the device, and returns the outcomes of the loads that have ended.
  std::vector<LoadOutcome> all_loaded() {
    run();
    std::vector<LoadOutcome> outcomes;
    for (ChunkStore::Loaded& load : store->take_loaded()) outcomes.push_back(std::move(load.outcome));
    return outcomes;
  }
  std::vector<LoadOutcome> load(const std::vector<LoadJob>& jobs) {
    begin_load(jobs);
    return all_loaded();
  }
  void save(const std::vector<SaveJob>& jobs) { store->save(jobs, engine.stream()); }
  /// Runs all work of the device, and returns what the store then reports.
  std::vector<SaveDone> all_saved() {
    if (device) device->run_all();
    return store->take_saved();
  }
  void run() {
    if (device) device->run_all();
  }

  std::shared_ptr<SimDevice> device;  // nullptr: this is the host store
  StillTransport book;
  ManualClock clock;
  ToyEngine engine;
  std::vector<std::byte> pool;
  std::unique_ptr<ChunkStore> store;
};

}  // namespace kvferry
