// The planner: a transport that owns one transport for each backend, and submits each transfer to the fastest that
// reaches both ends.
// Over 300 lines, because one class implements the whole Transport interface on top of its backends.
#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "transport/backend.h"
#include "transport/base/check.h"
#include "transport/base/log.h"
#include "transport/base/owned_fd.h"
#include "transport/base/printable.h"
#include "transport/planner/backends.h"
#include "transport/planner/plan_address.h"
#include "transport/planner/planned_regions.h"
#include "transport/planner/prober.h"
#include "transport/shared_memory.h"

namespace kvferry {
namespace {

using planner::Backends;
using planner::kMemoryClasses;
using planner::Measurements;
using planner::MemoryClass;
using planner::OpenBackend;

/// The planner's transport. Threads: any. It keeps no state of transfers, because their ids name the backends.
class PlannedTransport final : public Transport {
 public:
  PlannedTransport(const TransportOptions& options, Backends backends)
      : options_(options),
        backends_(std::move(backends)),
        events_(::epoll_create1(EPOLL_CLOEXEC)),
        private_probe_(planner::kProbeBytes),
        regions_(backends_),
        prober_(options) {
    KVFERRY_CHECK(events_,
                  "cannot create an epoll descriptor: {}; if descriptors are used up, raise the limit (ulimit -n)",
                  std::strerror(errno));
    for (const OpenBackend& backend : backends_) {
      epoll_event event{EPOLLIN, {}};
      ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, backend.transport->event_fd(), &event);
      for (const OpenBackend& other : backends_) {
        if (&other != &backend) backend.transport->set_wait_interrupt_fd(other.transport->event_fd());
      }
    }
  }
  ~PlannedTransport() override {
    shutdown();
    if (device_probe_ != nullptr) options_.device->release(MemoryKind::kDevice, device_probe_);
  }

  /// Registers the memory that peers pull to measure the paths.
  Result<void> open() {
    shared_probe_.emplace(KVFERRY_TRY(SharedMemory::create("probe", planner::kProbeBytes)));
    address_.protocol_version = planner::kProtocolVersion;
    std::vector<MemoryRegion> probes = {shared_probe_->region(), {private_probe_.data(), private_probe_.size()}};
    if (options_.device != nullptr) {
      device_probe_ = KVFERRY_TRY(options_.device->allocate(MemoryKind::kDevice, planner::kProbeBytes));
      probes.push_back({device_probe_, planner::kProbeBytes, -1, 0, options_.device});
    }
    for (const MemoryRegion& probe : probes) {
      const Result<RegionId> id = register_region(probe);
      if (!id && id.error().code == ErrorCode::kUnavailable) {
        log().warn("transport: peers can't measure paths to {}: {}",
                   probe.device != nullptr ? "memory of " + probe.device->describe() : "host memory", id.error().what);
        continue;
      }
      if (!id) return id.error();
      address_.probes.push_back(regions_.parts_of(*id).value());
    }
    for (const OpenBackend& backend : backends_)
      address_.parts.push_back({std::string(backend.name), backend.transport->address()});
    const std::string source = source_address(options_.common.key, encode(address_), change_secrets);
    for (const OpenBackend& backend : backends_) backend.transport->set_source_address(source);
    return {};
  }

  std::string address() const override { return encode(address_); }

  std::string describe() const override {
    std::string text = fmt::format("path {}", name_of(options_.path));
    for (const OpenBackend& backend : backends_) text += fmt::format("; {}", backend.transport->describe());
    const std::lock_guard lock(mutex_);
    for (const auto& [id, peer] : peers_) text += fmt::format("; peer {}: {}", id, peer.measured.describe());
    return text;
  }

  Result<RegionId> register_region(const MemoryRegion& memory) override { return regions_.register_region(memory); }
  Result<std::string> export_region(RegionId id) const override { return encode(KVFERRY_TRY(regions_.parts_of(id))); }
  Result<void> unregister_region(RegionId id) override { return regions_.unregister_region(id); }
  using Transport::grant;
  Result<GrantId> grant(RegionId id, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) override {
    return regions_.grant(id, offset, bytes, terms);
  }
  Result<std::string> export_grant(GrantId id) const override { return encode(KVFERRY_TRY(regions_.parts_of(id))); }
  Result<void> revoke(GrantId id) override { return regions_.revoke(id); }

  Result<PeerId> connect(const std::string& bytes) override {
    planner::Address address = KVFERRY_TRY(read_address<planner::Address>(bytes, planner::kProtocolVersion, "planner"));
    Peer peer;
    std::vector<std::string> reached;
    std::vector<std::size_t> order;  // indexes in backends_ of the backends that reach the peer
    std::string problems;
    for (const OpenBackend& backend : backends_) {
      const std::string* part = planner::find_part(address.parts, backend.name);
      Result<PeerId> inner = part == nullptr ? Error{ErrorCode::kInvalidArgument, "the peer does not have this backend"}
                                             : backend.transport->connect(*part);
      if (!inner && inner.error().code == ErrorCode::kCancelled) return inner;
      if (inner) reached.emplace_back(backend.name);
      if (inner) order.push_back(peer.ids.size());
      if (!inner) problems += fmt::format("{}{}: {}", problems.empty() ? "" : "; ", backend.name, inner.error().what);
      peer.ids.push_back(inner ? std::optional(*inner) : std::nullopt);
    }
    if (reached.empty())
      return Error{ErrorCode::kInvalidArgument, fmt::format("no backend reaches the peer (setting path is {}): {}",
                                                            name_of(options_.path), problems)};
    const std::lock_guard lock(mutex_);
    const auto known = connected_.find(bytes);
    if (known != connected_.end() && peers_.at(known->second).ids == peer.ids)
      return known->second;  // equal ids show that no connection was lost since the former connect()
    peer.address = bytes;
    peer.routes.fill(order);
    const PeerId id{++num_peers_made_};
    peers_.emplace(id, std::move(peer));
    connected_[bytes] = id;
    prober_.probe(std::move(address), std::move(reached),
                  [this, id](const Measurements& found) { choose_routes(id, found); });
    return id;
  }

  void disconnect(PeerId id) override {
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(id);
    if (found == peers_.end()) return;
    const Peer peer = std::move(peers_.extract(found).mapped());
    if (const auto known = connected_.find(peer.address); known != connected_.end() && known->second == id)
      connected_.erase(known);
    for (std::size_t index = 0; index < backends_.size(); ++index) {
      // Another peer has the same address if connect() was called again after a connection was lost. The two share the
      // connections that were not lost.
      const bool is_shared = std::any_of(peers_.begin(), peers_.end(),
                                         [&](const auto& other) { return other.second.ids[index] == peer.ids[index]; });
      if (peer.ids[index] && !is_shared) backends_[index].transport->disconnect(*peer.ids[index]);
    }
  }

  Result<TransferId> submit(PagedTransfer transfer) override {
    const Result<planner::RegionParts> remote =
        decode<planner::RegionParts>(transfer.remote_region, "description of the peer's memory region");
    if (!remote) return Error{ErrorCode::kInvalidArgument, remote.error().what};
    std::size_t route = 0;
    {
      const std::lock_guard lock(mutex_);
      const Ends ends = KVFERRY_TRY(ends_of(transfer.peer, transfer.local, *remote));
      if (ends.routes.empty())
        return Error{
            ErrorCode::kInvalidArgument,
            fmt::format("no path to peer {} reaches both region {} here and the peer's region (setting path is {})",
                        transfer.peer, transfer.local, name_of(options_.path))};
      route = ends.routes.front();
      transfer.peer = *ends.peer->ids[route];
      transfer.local = *ends.region.ids[route];
    }
    transfer.remote_region = *planner::find_part(remote->parts, backends_[route].name);
    busiest_.store(route, std::memory_order_relaxed);
    const TransferId inner = KVFERRY_TRY(backends_[route].transport->submit(std::move(transfer)));
    return outer_id(route, inner);
  }

  Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                    bool is_last) override {
    return route_of(id).feed(inner_id(id), std::move(ranges), std::move(checksums), is_last);
  }
  void cancel(TransferId id) override { route_of(id).cancel(inner_id(id)); }

  std::vector<Completion> poll() override {
    std::vector<Completion> all;
    for (std::size_t index = 0; index < backends_.size(); ++index) {
      for (Completion& one : backends_[index].transport->poll()) {
        one.id = outer_id(index, one.id);
        if (one.path.empty()) one.path = backends_[index].name;
        all.push_back(std::move(one));
      }
    }
    return all;
  }

  std::vector<Notification> poll_notifications() override {
    std::vector<Notification> all;
    for (std::size_t index = 0; index < backends_.size(); ++index) {
      for (Notification& one : backends_[index].transport->poll_notifications()) {
        busiest_.store(index, std::memory_order_relaxed);
        all.push_back(std::move(one));
      }
    }
    return all;
  }

  std::uint64_t num_refused() const override {
    std::uint64_t sum = 0;
    for (const OpenBackend& backend : backends_) sum += backend.transport->num_refused();
    return sum;
  }

  double measured_rate(PeerId id, std::string_view path) const override {
    const std::lock_guard lock(mutex_);
    const auto peer = peers_.find(id);
    return peer == peers_.end() ? 0 : peer->second.measured.rate_of(path.substr(0, path.find('/')));
  }

  Result<std::string_view> path_between(PeerId id, RegionId local, const std::string& remote_region) const override {
    const auto remote = decode<planner::RegionParts>(remote_region, "description of the peer's memory region");
    if (!remote) return Error{ErrorCode::kInvalidArgument, remote.error().what};
    const std::lock_guard lock(mutex_);
    const Ends ends = KVFERRY_TRY(ends_of(id, local, *remote));
    if (ends.routes.empty()) {
      std::string here, there;
      for (std::size_t index = 0; index < backends_.size(); ++index)
        if (ends.region.ids[index]) here += fmt::format("{}{}", here.empty() ? "" : ", ", backends_[index].name);
      for (const planner::Part& part : remote->parts)
        there += fmt::format("{}{}", there.empty() ? "" : ", ", printable(part.backend));
      return Error{
          ErrorCode::kUnavailable,
          fmt::format(
              "no path reaches the peer and the memory of both sides (paths to the memory here: {}; at the peer: {})",
              here.empty() ? "none" : here, there.empty() ? "none" : there)};
    }
    const std::string_view fastest = backends_[ends.routes.front()].name;
    if (ends.kind != MemoryClass::kDevice) return fastest;
    // For GPU memory no path that failed its measurement is returned, because the caller can use host memory instead.
    if (!ends.peer->is_measured)
      return Error{ErrorCode::kUnavailable,
                   "the paths to the peer are not measured yet, so its GPU memory is not used"};
    std::string problems;
    for (const planner::Measured& one : ends.peer->measured.of(ends.kind)) {
      const std::string_view name = planner::info_of(one.path).backend;
      if (one.gb_per_s > 0 && name == fastest) return fastest;
      if (one.gb_per_s == 0) problems += fmt::format("{}{}: {}", problems.empty() ? "" : "; ", name, one.problem);
    }
    return Error{ErrorCode::kUnavailable, fmt::format("no path to the peer's GPU memory works ({})",
                                                      problems.empty() ? "none was measured" : problems)};
  }

  int event_fd() const override { return events_.get(); }

  bool wait(TimeNs timeout_ns) override {
    // The backend's wait() returns early if another backend has something to poll or the interrupt fd is readable.
    if (backends_[busiest_.load(std::memory_order_relaxed)].transport->wait(timeout_ns)) return true;
    pollfd waiting{events_.get(), POLLIN, 0};
    return ::poll(&waiting, 1, 0) == 1;
  }
  void set_wait_interrupt_fd(int fd) override {
    for (const OpenBackend& backend : backends_) backend.transport->set_wait_interrupt_fd(fd);
  }
  void set_source_address(const std::string& address) override {
    for (const OpenBackend& backend : backends_) backend.transport->set_source_address(address);
  }

  void shutdown() override {
    for (const OpenBackend& backend : backends_) backend.transport->shutdown();
  }

 private:
  struct Peer {
    std::vector<std::optional<PeerId>> ids;  // id of the peer in each backend that can reach it
    std::string address;
    // For each class of memory, indexes of backends: once the paths are measured, the fastest first.
    std::array<std::vector<std::size_t>, kMemoryClasses> routes;
    Measurements measured;
    bool is_measured = false;
  };
  /// The two ends of a transfer.
  struct Ends {
    const Peer* peer = nullptr;
    planner::PlannedRegions::Found region;  // the region on this side
    MemoryClass kind = MemoryClass::kOther;
    std::vector<std::size_t> routes;  // indexes of the backends that reach both ends, in the order of Peer::routes
  };
  /// Finds the two ends of a transfer. The caller must hold mutex_.
  Result<Ends> ends_of(PeerId id, RegionId local, const planner::RegionParts& remote) const {
    const auto peer = peers_.find(id);
    if (peer == peers_.end()) return Error{ErrorCode::kInvalidArgument, fmt::format("peer {} is not connected", id)};
    std::optional<planner::PlannedRegions::Found> region = regions_.find(local);
    if (!region) return planner::unknown("region", local);
    Ends ends{&peer->second, *std::move(region), remote.memory_class(), {}};
    if (ends.region.kind == MemoryClass::kDevice) ends.kind = ends.region.kind;
    for (const std::size_t index : peer->second.routes[static_cast<std::size_t>(ends.kind)]) {
      if (ends.region.ids[index] && planner::find_part(remote.parts, backends_[index].name) != nullptr)
        ends.routes.push_back(index);
    }
    return ends;
  }

  TransferId outer_id(std::size_t route, TransferId inner) const {
    return TransferId{inner.value * backends_.size() + route};
  }
  TransferId inner_id(TransferId outer) const { return TransferId{outer.value / backends_.size()}; }
  Transport& route_of(TransferId outer) const { return *backends_[outer.value % backends_.size()].transport; }
  std::size_t index_of(std::string_view name) const {
    return static_cast<std::size_t>(std::ranges::find(backends_, name, &OpenBackend::name) - backends_.begin());
  }

  void choose_routes(PeerId id, const Measurements& found) {
    const std::lock_guard lock(mutex_);
    const auto peer = peers_.find(id);
    if (peer == peers_.end()) return;
    for (std::size_t kind = 0; kind < kMemoryClasses; ++kind)
      sort_routes(found.by_class[kind], peer->second.routes[kind]);
    peer->second.measured = found;
    peer->second.is_measured = true;
    log().info("transport: measured the paths to peer {}, uses the fastest: {}", id, found.describe());
  }
  /// Puts the fastest backend first. Backends that failed or were not measured are kept at the end, as a last resort.
  void sort_routes(const std::vector<planner::Measured>& measured, std::vector<std::size_t>& routes) const {
    std::vector<std::size_t> chosen;
    for (const planner::Measured& one : measured) {
      if (one.gb_per_s > 0) chosen.push_back(index_of(planner::info_of(one.path).backend));
    }
    for (const std::size_t index : routes) {
      if (std::find(chosen.begin(), chosen.end(), index) == chosen.end()) chosen.push_back(index);
    }
    routes = std::move(chosen);
  }

  const TransportOptions options_;
  const Backends backends_;
  const OwnedFd events_;                 // epoll descriptor, readable while a backend's event_fd() is readable
  std::atomic<std::size_t> busiest_{0};  // index of the backend used last, whose wait() this transport's wait() calls
  std::optional<SharedMemory> shared_probe_;
  std::vector<std::byte> private_probe_;
  std::byte* device_probe_ = nullptr;
  planner::PlannedRegions regions_;
  planner::Address address_;
  mutable std::mutex mutex_;
  std::map<PeerId, Peer> peers_;
  std::unordered_map<std::string, PeerId> connected_;
  std::uint32_t num_peers_made_ = 0;
  planner::Prober prober_;  // last member, so that its thread, which calls choose_routes(), ends first
};

}  // namespace

Result<std::unique_ptr<Transport>> make_transport(const TransportOptions& options) {
  Backends backends = KVFERRY_TRY(planner::make_backends(options));
  auto transport = std::make_unique<PlannedTransport>(options, std::move(backends));
  KVFERRY_TRY(transport->open());
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace kvferry
