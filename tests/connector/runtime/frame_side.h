// A worker on a simulated GPU, with the real transport, store and service thread, and a toy engine's blocks.
#pragma once

#include <poll.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/zmq_link.h"
#include "connector/runtime/worker/service_loop.h"
#include "tests/connector/runtime/toy_engine.h"
#include "tests/transport/ucx_over_tcp.h"
#include "transport/base/checksum.h"
#include "transport/make_transport.h"
#include "transport/shared_memory.h"

namespace kvferry {

inline constexpr std::uint32_t kSlots = 8, kTokens = ToyEngine::kChunkTokens;

struct SideOptions {
  std::uint32_t num_frames = 6;  // 0: no frames
  Path path = Path::kAuto;
  bool has_unlike_layers = false;
};

/// A worker: GPU, engine, pool, transport, store and service thread.
struct Side {
  explicit Side(std::uint32_t seed, SideOptions options = {})
      : device(std::make_shared<SimDevice>(seed, SimDevice::Drive::kInBackground)),
        engine(device.get(), options.has_unlike_layers),
        pool(SharedMemory::create("frames_test", kSlots * engine.chunk_bytes()).value()) {
    let_ucx_use_tcp();  // so that GPU memory has this path too
    TransportOptions wanted;
    wanted.path = options.path;
    wanted.device = device.get();
    transport = make_transport(wanted).value();
    region = transport->register_region(pool.region()).value();
    ChunkStoreParts parts{engine.layouts(), 0, pool.span(), engine.chunk_bytes(), region};
    const std::uint64_t bytes = options.num_frames * ((engine.chunk_bytes() + 255) / 256 * 256);
    store =
        make_gpu_store(std::move(parts), {make_sim_gpu(device), bytes, true, 30 * kSecond, clock, *transport}).value();
    loop = ServiceLoop::start({*transport, *store, core, clock, pool.span(), region, engine.chunk_bytes(),
                               engine.chunk_bytes() / kTokens, layer_bytes(), num_layers()})
               .value();
    link = ClientSocket::connect(loop->endpoint()).value();
  }
  ~Side() {
    device->refuse_next(0);
    loop->shutdown();
    transport->shutdown();
  }

  /// Returns the bytes of a token in each layer.
  std::vector<std::uint64_t> layer_bytes() const {
    std::vector<std::uint64_t> bytes;
    for (const KvLayout& layout : engine.layouts())
      bytes.insert(bytes.end(), layout.layers.size(), layout.bytes_per_token() / layout.layers.size());
    return bytes;
  }
  std::uint32_t num_layers() const { return static_cast<std::uint32_t>(layer_bytes().size()); }

  /// Packs the first `layers` layers of a save of new KV as this chunk, a chunk of push `push`. grow() packs more, and
  /// try_save() with the same seed ends the save.
  void begin_growth(ChunkRef chunk, std::uint32_t seed, std::uint64_t push, std::uint32_t layers = 1) {
    for (const BlockId block : {3, 4}) engine.overwrite(block, seed);
    loop->pusher().begins_layers({chunk, 0, kTokens, push, 0});
    grow(chunk, layers);
  }
  void grow(ChunkRef chunk, std::uint32_t layers) {
    in_step([&] { store->save_layers({save_job("r", chunk, {3, 4}, kTokens)}, layers, engine.stream()); });
  }
  /// Saves new KV as this chunk. Returns its bytes, nullopt if the save failed. If not `waits_for_slot`, returns when
  /// the chunk is complete in a frame; wait_saved() must then follow if it is in `unsaved`.
  std::optional<std::vector<std::byte>> try_save(ChunkRef chunk, std::uint32_t seed, bool waits_for_slot = true) {
    const std::vector<std::vector<BlockId>> blocks = {{3, 4}};
    for (const BlockId block : blocks[0]) engine.overwrite(block, seed);
    in_step([&] { store->save({save_job("r", chunk, blocks[0], kTokens)}, engine.stream()); });
    const auto is_told = [&] { return saved.contains(chunk) || (!waits_for_slot && unsaved.contains(chunk)); };
    wait_for_saves(is_told);
    const auto done = saved.extract(chunk);
    if (done && !done.mapped()) return std::nullopt;
    return engine.expected({0, kTokens, blocks});
  }
  /// Waits until a chunk in `unsaved` was copied to its slot. Returns false if the copy failed.
  bool wait_saved(ChunkRef chunk) {
    wait_for_saves([&] { return saved.contains(chunk); });
    return saved.extract(chunk).mapped();
  }
  void wait_for_saves(const std::function<bool()>& is_told) {
    for (int i = 0; i < 10'000; ++i) {
      std::vector<SaveDone> all;
      in_step([&] { all = store->take_saved(); });
      for (const SaveDone& done : all) {
        if (!done.is_in_frame) saved[done.chunk] = done.ok;
        done.is_in_frame ? (void)unsaved.insert(done.chunk) : (void)unsaved.erase(done.chunk);
      }
      if (is_told()) return;
      ::poll(nullptr, 0, 1);
    }
    throw std::runtime_error("a save does not end");
  }
  std::vector<std::byte> save(ChunkRef chunk, std::uint32_t seed) {
    auto bytes = try_save(chunk, seed);
    if (!bytes) throw std::runtime_error("a save failed");
    return *std::move(bytes);
  }
  /// Loads a chunk into blocks. Returns the number of tokens.
  std::uint32_t load(ChunkRef chunk, std::uint64_t checksum, const std::vector<BlockId>& blocks) {
    store->load(
        {load_job("l", chunk, checksum, kTokens, blocks, kTokens)}, [](ChunkRef) { return true; }, engine.stream());
    for (int i = 0; i < 10'000; ++i) {
      for (const ChunkStore::Loaded& load : store->take_loaded()) return load.outcome.tokens_loaded;
      ::poll(nullptr, 0, 1);
    }
    throw std::runtime_error("a load does not end");
  }
  /// Makes a call that the engine makes within a step, and counts how often the host waits for the GPU meanwhile.
  void in_step(const std::function<void()>& call) {
    const std::uint64_t before = device->num_host_waits();
    call();
    num_waits_in_steps += device->num_host_waits() - before;
  }
  /// Receives a message of the worker. What it says of written slots is kept for wait_written(), and
  /// what it says of layers for next_layers().
  std::optional<Envelope> receive() {
    const auto bytes = link->receive();
    if (!bytes) return std::nullopt;
    Envelope envelope = decode<Envelope>(*bytes, "message").value();
    if (envelope.type == kMessageType<LayersSaved>) {
      told_layers.push_back(decode<LayersSaved>(envelope.body, "saved layers").value());
      return std::nullopt;
    }
    if (envelope.type != kMessageType<SlotsWritten>) return envelope;
    const SlotsWritten told = decode<SlotsWritten>(envelope.body, "written slots").value();
    for (std::size_t i = 0; i < told.chunks.size(); ++i)
      if (!written.emplace(told.chunks[i], told.ok.at(i)).second) throw std::runtime_error("a slot is told twice");
    return std::nullopt;
  }
  /// Waits until the worker says that a chunk was copied from its frame to its slot. Returns false if the copy failed.
  bool wait_written(ChunkRef chunk) {
    for (int i = 0; i < 10'000 && !written.contains(chunk); ++i) {
      if (receive()) throw std::runtime_error("a message comes that was not asked for");
      if (!written.contains(chunk)) ::poll(nullptr, 0, 1);
    }
    return written.at(chunk);
  }
  template <class Order>
  void send(const Order& order) {
    if (!link->send(seal(1, order))) throw std::runtime_error("the order can't be sent");
  }
  /// Sends an order, and returns the answer.
  template <class Outcome, class Order>
  Outcome ask(const Order& order) {
    send(order);
    return next<Outcome>();
  }
  template <class Outcome>
  Outcome next() {
    for (int i = 0; i < 2000; ++i) {
      if (const auto envelope = receive()) return decode<Outcome>(envelope->body, "outcome").value();
      ::poll(nullptr, 0, 5);
    }
    throw std::runtime_error("an order has no outcome");
  }
  /// Returns the next message about layers in frames, nullopt if none comes for so long.
  std::optional<LayersSaved> next_layers(int timeout_ms = 10'000) {
    for (int waited = 0; told_layers.empty() && waited < timeout_ms; waited += 5) {
      if (receive()) throw std::runtime_error("a message comes that was not asked for");
      if (told_layers.empty()) ::poll(nullptr, 0, 5);
    }
    if (told_layers.empty()) return std::nullopt;
    LayersSaved first = told_layers.front();
    told_layers.pop_front();
    return first;
  }
  std::vector<std::uint32_t> lease(std::uint64_t number, std::vector<ChunkRef> chunks, std::int64_t ttl_ms = 60'000,
                                   bool are_growing = false) {
    FramePinOrder order{number, 0, ttl_ms, std::move(chunks)};
    order.are_growing.assign(order.chunks.size(), are_growing);
    return ask<FramePinOutcome>(order).frames;
  }
  std::span<std::byte> slot(std::uint32_t index) {
    return pool.span().subspan(index * engine.chunk_bytes(), engine.chunk_bytes());
  }
  std::string frames_region() {
    return store->frames() ? transport->export_region(store->frames()->region).value() : std::string();
  }
  std::uint64_t frame_bytes() { return store->frames() ? store->frames()->frame_bytes : 0; }

  /// Waits until the paths to the other side are measured.
  void meet(Side& other) {
    const PeerId peer = transport->connect(other.transport->address()).value();
    for (int i = 0; i < 10'000 && store->frames() && other.store->frames(); ++i) {
      const auto path = transport->path_between(peer, store->frames()->region, other.frames_region());
      if (path || path.error().what.find("not measured") == std::string::npos) return;
      ::poll(nullptr, 0, 1);
    }
  }
  /// Returns an order to pull from the other side's slots, and from its frames.
  PullOrder order_from(Side& other, std::uint64_t number) {
    PullOrder order{
        number, other.transport->address(), other.transport->export_region(other.region).value(), 10'000, {}};
    order.remote_frames = other.frames_region();
    order.remote_frame_bytes = other.frame_bytes();
    return order;
  }

  std::shared_ptr<SimDevice> device;
  ToyEngine engine;
  SharedMemory pool;
  SteadyClock clock;
  std::unique_ptr<Transport> transport;
  RegionId region;
  std::unique_ptr<ChunkStore> store;
  SharedWorkerCore core{0, kSlots};
  std::unique_ptr<ServiceLoop> loop;
  std::unique_ptr<ClientSocket> link;
  std::map<ChunkRef, bool> written;     // pulled chunks whose copy to the slot has ended; true: well
  std::map<ChunkRef, bool> saved;       // saved chunks of which nobody has asked yet whether they are in their slots
  std::set<ChunkRef> unsaved;           // saved chunks that are in a frame, and not in their slots yet
  std::deque<LayersSaved> told_layers;  // what the worker has told, for next_layers()
  std::uint64_t num_waits_in_steps = 0;
};

}  // namespace kvferry
