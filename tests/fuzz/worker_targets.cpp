// Fuzz target for a worker's service, which gets orders from a local socket. The input has one envelope after the
// other.
#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/worker/puller.h"
#include "connector/runtime/worker/pusher.h"
#include "connector/runtime/worker/run_hasher.h"
#include "connector/runtime/worker/slot_grants.h"
#include "tests/fuzz/examples.h"
#include "tests/fuzz/target.h"
#include "tests/transport/loopback/loopback_fabric.h"
#include "transport/base/checksum.h"

namespace kvferry::fuzz {
namespace {

constexpr std::uint64_t kSlotBytes = 256;
constexpr std::uint32_t kNumSlots = 8;
constexpr std::uint64_t kPoolBytes = kSlotBytes * kNumSlots;

/// A store in which chunks arrive in their slots at once.
class PlainStore final : public ChunkStore {
 public:
  explicit PlainStore(RegionId pool) : pool_(pool) {}
  std::string describe() const override { return {}; }
  void save(const std::vector<SaveJob>&, DeviceStream) override {}
  std::vector<SaveDone> take_saved() override { return {}; }
  void load(std::vector<LoadJob>, const IsReadable&, DeviceStream) override {}
  std::vector<Loaded> take_loaded() override { return {}; }
  Result<Place> land(ChunkRef chunk, std::uint64_t bytes) override {
    KVFERRY_CHECK(chunk.slot < kNumSlots && bytes <= kSlotBytes, "{} bytes in slot {}", bytes, chunk.slot);
    return Place{pool_, chunk.slot * kSlotBytes};
  }
  void landed(std::span<const Landed> chunks) override { landed_.insert(landed_.end(), chunks.begin(), chunks.end()); }
  std::vector<Landed> take_landed() override { return std::exchange(landed_, {}); }
  std::size_t num_fenced() const override { return 0; }

 private:
  RegionId pool_;
  std::vector<Landed> landed_;
};

/// The other node. Orders can't contain its address and region, so they say "address" and "region" instead.
struct Peer {
  LoopbackFabric fabric;
  std::vector<std::byte> memory = std::vector<std::byte>(kPoolBytes);
  std::unique_ptr<Transport> transport = fabric.make_transport();
  RegionId region = transport->register_region(memory.data(), memory.size()).value();
  std::string exported = transport->export_region(region).value();

  void translate(std::string& address, std::string& name) const {
    if (address == "address") address = transport->address();
    if (name == "region" || name == "grant") name = exported;
  }
};

class Service {
 public:
  explicit Service(Peer& peer) : peer_(peer) {}
  ~Service() { transport_->shutdown(); }

  void take(WorkerOrder& order) {
    std::visit(Overloaded{[&](PullOrder& pull) {
                            peer_.translate(pull.remote_address, pull.remote_region);
                            for (PullSource& source : pull.sources) peer_.translate(source.address, source.region);
                            puller_.start(std::move(pull));
                          },
                          [&](const PullProgress& pull) { puller_.grow(pull); },
                          [&](ChecksumOrder& checksums) { hasher_.start(std::move(checksums)); },
                          [&](PushOrder& push) {
                            for (std::string& grant : push.grants) peer_.translate(push.remote_address, grant);
                            pusher_.set_target(std::move(push));
                          },
                          [&](const PushStart& push) { pusher_.start(push); },
                          [&](const PushDrop& push) { pusher_.drop(push.value); },
                          [&](const GrantOrder& grants) { slots_.grant(grants); },
                          [&](const Revocation& grants) { slots_.revoke(grants); },
                          [&](const FramePinOrder& leased) {
                            (void)store_.pin_frames(leased.lease, leased.chunks, leased.timeout_ms);
                          },
                          [&](const FrameUnpin& lease) { store_.unpin_frames(lease.value); }},
               order);
  }
  /// Runs one turn of the service's loop.
  void turn() {
    for (const Completion& completion : transport_->poll())
      if (!puller_.completed(completion, 0)) pusher_.completed(completion, 0);
    for (const ChunkStore::Landed& chunk : store_.take_landed())
      if (!puller_.landed(chunk)) slots_.landed(chunk);
    pusher_.progress(send_);
    slots_.progress();
    hasher_.progress();
    puller_.progress();
    peers_.expire();
  }

 private:
  Peer& peer_;
  std::vector<std::byte> pool_ = std::vector<std::byte>(kPoolBytes);
  std::unique_ptr<Transport> transport_ = peer_.fabric.make_transport();
  RegionId region_ = transport_->register_region(pool_.data(), pool_.size()).value();
  SharedWorkerCore core_{0, kNumSlots};
  PlainStore store_{region_};
  SteadyClock clock_;
  WorkerParts parts_{*transport_, store_,         core_,
                     clock_,      pool_,          region_,
                     kSlotBytes,  kSlotBytes / 8, {kSlotBytes / 16, kSlotBytes / 16}};
  SendOutcome send_ = [](const std::string& bytes) { KVFERRY_CHECK(decode<Envelope>(bytes, "outcome"), "no outcome"); };
  TransportPeers peers_{*transport_, clock_};
  Puller puller_{parts_, peers_, send_};
  Pusher pusher_{parts_, peers_, [] {}};
  SlotGrants slots_{parts_, send_};
  RunHasher hasher_{parts_, send_};
};

void run_worker_orders(std::string_view bytes) {
  static Peer& peer = *new Peer;
  Service service(peer);
  Cutter cutter(bytes);
  while (!cutter.empty()) {
    if (const auto envelope = decode<Envelope>(cutter.part(), "order"))
      if (auto order = unseal<WorkerOrder>(*envelope)) service.take(*order);
    service.turn();
  }
  service.turn();
}

std::vector<std::string> worker_order_seeds() {
  std::string all;
  for (const AnyMessage& message : examples_between_nodes()) all += as_part(encoded(message));
  const std::uint64_t sum = chunk_checksum(std::vector<std::byte>(kSlotBytes));
  return {all, as_part(seal(1, PullOrder{2, "address", "region", 100, {{{1, 7}, {2, 7}, 8, {sum}, {}}}})) +
                   as_part(seal(1, ChecksumOrder{1, 8, {{0, 0, 0, 4}, {0, 4, 0, 4}}, {{{2, 7}, 8, sum}}, 100, 0})) +
                   as_part(seal(1, PushOrder{5, "address", {"grant"}})) +
                   as_part(seal(1, PushStart{5, 0, {2, 7}, 8, {sum}}))};
}

}  // namespace

const std::vector<Target> kWorkerTargets = {{"worker_orders", run_worker_orders, worker_order_seeds}};

}  // namespace kvferry::fuzz
