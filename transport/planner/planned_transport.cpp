// The planner: a transport made of transports, that sends each transfer the way which is fastest to its peer.
#include <sys/epoll.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/log.h"
#include "transport/base/owned_fd.h"
#include "transport/planner/backends.h"
#include "transport/planner/plan_address.h"
#include "transport/planner/prober.h"
#include "transport/shared_memory.h"

namespace kvferry {
namespace {

using planner::Backend;
using planner::Measurements;

constexpr TimeNs kSliceNs = 20 * kMillisecond;  // of a wait in a backend that can't be interrupted

/// Threads: any. A transfer's id carries its backend, so nothing about transfers is kept here.
class PlannedTransport final : public Transport {
 public:
  PlannedTransport(const TransportOptions& options, std::vector<Backend> backends)
      : options_(options),
        backends_(std::move(backends)),
        events_(::epoll_create1(EPOLL_CLOEXEC)),
        private_probe_(planner::kProbeBytes),
        prober_(options) {
    KVFERRY_CHECK(events_, "no file descriptor left for epoll: {}", std::strerror(errno));
    for (const Backend& backend : backends_) {
      epoll_event event{EPOLLIN, {}};
      ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, backend.transport->event_fd(), &event);
      for (const Backend& other : backends_) {
        if (&other != &backend) is_interruptible_ &= backend.transport->end_waits_by(other.transport->event_fd());
      }
    }
  }
  ~PlannedTransport() override { shutdown(); }

  /// Registers what peers measure with.
  Result<void> open() {
    Result<SharedMemory> memory = SharedMemory::create("probe", planner::kProbeBytes);
    if (!memory) return std::move(memory).error();
    shared_probe_.emplace(std::move(*memory));
    address_.protocol_version = planner::kProtocolVersion;
    for (const auto& [region, parts] : {std::pair{shared_probe_->region(), &address_.shared_probe},
                                        {MemoryRegion{private_probe_.data(), private_probe_.size()},
                                         &address_.private_probe}}) {
      const Result<RegionId> id = register_region(region);
      if (!id) return Error{id.error().code, id.error().what};
      *parts = parts_of(*id).value();
    }
    for (const Backend& backend : backends_)
      address_.parts.push_back({std::string(backend.name), backend.transport->address()});
    for (const Backend& backend : backends_) backend.transport->sign_as(encode(address_));
    return {};
  }

  std::string address() const override { return encode(address_); }

  std::string describe() const override {
    std::string text = fmt::format("path {}", name_of(options_.path));
    for (const Backend& backend : backends_) text += fmt::format("; {}", backend.transport->describe());
    const std::lock_guard lock(mutex_);
    for (const auto& [id, peer] : peers_) text += fmt::format("; peer {}: {}", id, peer.measured);
    return text;
  }

  Result<RegionId> register_region(const MemoryRegion& memory) override {
    Region region;
    region.is_shared = memory.fd >= 0;
    for (const Backend& backend : backends_) {
      Result<RegionId> id = backend.transport->register_region(memory);
      if (!id) {
        static_cast<void>(unregister(region));
        return id;
      }
      region.ids.emplace_back(*id);
    }
    const std::lock_guard lock(mutex_);
    const RegionId id{++num_regions_made_};
    regions_.emplace(id, std::move(region));
    return id;
  }

  Result<std::string> export_region(RegionId id) const override {
    Result<planner::RegionParts> parts = parts_of(id);
    if (!parts) return std::move(parts).error();
    return encode(*parts);
  }

  Result<void> unregister_region(RegionId id) override {
    const std::lock_guard lock(mutex_);
    const auto region = regions_.find(id);
    if (region == regions_.end()) return unknown("region", id);
    if (Result<void> ok = unregister(region->second); !ok) return ok;
    std::erase_if(grants_, [id](const auto& grant) { return grant.second.region == id; });
    regions_.erase(region);
    return {};
  }

  Result<GrantId> grant(RegionId id, std::uint64_t offset, std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    const auto region = regions_.find(id);
    if (region == regions_.end()) return unknown("region", id);
    Grant grant{id, region->second.is_shared, {}};
    for (std::size_t index = 0; index < backends_.size(); ++index) {
      const std::optional<RegionId> inner = region->second.ids[index];
      if (!inner) return unknown("region", id);
      Result<GrantId> given = backends_[index].transport->grant(*inner, offset, bytes);
      if (!given) {
        for (std::size_t before = 0; before < index; ++before)
          static_cast<void>(backends_[before].transport->revoke(*grant.ids[before]));
        return given;
      }
      grant.ids.emplace_back(*given);
    }
    const GrantId outer{++num_grants_made_};
    grants_.emplace(outer, std::move(grant));
    return outer;
  }

  Result<std::string> export_grant(GrantId id) const override {
    const std::lock_guard lock(mutex_);
    const auto grant = grants_.find(id);
    if (grant == grants_.end()) return unknown("grant", id);
    planner::RegionParts parts{grant->second.is_shared, {}};
    for (std::size_t index = 0; index < backends_.size(); ++index) {
      if (!grant->second.ids[index]) return unknown("grant", id);  // half revoked
      Result<std::string> exported = backends_[index].transport->export_grant(*grant->second.ids[index]);
      if (!exported) return exported;
      parts.parts.push_back({std::string(backends_[index].name), std::move(*exported)});
    }
    return encode(parts);
  }

  Result<void> revoke(GrantId id) override {
    const std::lock_guard lock(mutex_);
    const auto grant = grants_.find(id);
    if (grant == grants_.end()) return unknown("grant", id);
    // All of them at once, so that nobody enters elsewhere while one is waited for.
    Result<void> outcome;
    for (std::size_t index = 0; index < backends_.size(); ++index) {
      std::optional<GrantId>& inner = grant->second.ids[index];
      if (!inner) continue;
      Result<void> ok = backends_[index].transport->revoke(*inner);
      if (ok) inner.reset();
      if (!ok) outcome = std::move(ok);
    }
    if (outcome) grants_.erase(grant);
    return outcome;
  }

  Result<PeerId> connect(const std::string& bytes) override {
    Result<planner::Address> address = decode<planner::Address>(bytes, "peer address");
    if (!address) return Error{ErrorCode::kInvalidArgument, std::move(address.error().what)};
    if (address->protocol_version != planner::kProtocolVersion)
      return Error{ErrorCode::kInvalidArgument, fmt::format("the peer address is of planner protocol {}; this side speaks {}",
                                                            address->protocol_version, planner::kProtocolVersion)};
    Peer peer;
    std::vector<std::string> reached;
    std::string problems;
    for (const Backend& backend : backends_) {
      const std::string* part = planner::find_part(address->parts, backend.name);
      Result<PeerId> inner = part == nullptr ? Error{ErrorCode::kInvalidArgument, "the peer does not offer it"}
                                             : backend.transport->connect(*part);
      if (!inner && inner.error().code == ErrorCode::kCancelled) return inner;
      if (inner) reached.emplace_back(backend.name);
      if (!inner) problems += fmt::format("{}{}: {}", problems.empty() ? "" : "; ", backend.name, inner.error().what);
      peer.ids.push_back(inner ? std::optional(*inner) : std::nullopt);
    }
    if (reached.empty())
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("no path to the peer with path {}: {}", name_of(options_.path), problems)};
    const std::lock_guard lock(mutex_);
    if (const auto known = connected_.find(bytes); known != connected_.end()) {
      if (peers_.at(known->second).ids == peer.ids) return known->second;  // else lost in between
      connected_.erase(known);
    }
    peer.address = bytes;
    peer.route_shared = peer.route_other = index_of(reached.front());
    peer.measured = "not measured yet";
    const PeerId id{++num_peers_made_};
    peers_.emplace(id, std::move(peer));
    connected_.emplace(bytes, id);
    prober_.probe(std::move(*address), std::move(reached), [this, id](const Measurements& found) { take(id, found); });
    return id;
  }

  void disconnect(PeerId id) override {
    const std::lock_guard lock(mutex_);
    const auto peer = peers_.find(id);
    if (peer == peers_.end()) return;
    const auto known = connected_.find(peer->second.address);
    const bool is_current = known != connected_.end() && known->second == id;
    for (std::size_t index = 0; index < backends_.size(); ++index) {
      if (peer->second.ids[index]) backends_[index].transport->disconnect(*peer->second.ids[index]);
    }
    if (is_current) connected_.erase(known);
    peers_.erase(peer);
  }

  Result<TransferId> submit(PagedTransfer transfer) override {
    const Result<planner::RegionParts> remote = decode<planner::RegionParts>(transfer.remote_region, "region descriptor");
    if (!remote) return Error{ErrorCode::kInvalidArgument, remote.error().what};
    std::size_t route = 0;
    {
      const std::lock_guard lock(mutex_);
      const auto peer = peers_.find(transfer.peer);
      if (peer == peers_.end())
        return Error{ErrorCode::kInvalidArgument, fmt::format("peer {} is not connected", transfer.peer)};
      const auto region = regions_.find(transfer.local);
      if (region == regions_.end()) return unknown("region", transfer.local);
      route = remote->is_shared ? peer->second.route_shared : peer->second.route_other;
      if (!region->second.ids[route]) return unknown("region", transfer.local);
      transfer.peer = *peer->second.ids[route];
      transfer.local = *region->second.ids[route];
    }
    const std::string* part = planner::find_part(remote->parts, backends_[route].name);
    if (part == nullptr)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("the remote region can't be reached over {}", backends_[route].name)};
    transfer.remote_region = *part;
    busiest_.store(route, std::memory_order_relaxed);
    const Result<TransferId> inner = backends_[route].transport->submit(std::move(transfer));
    if (!inner) return inner;
    return outer_id(route, *inner);
  }

  Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                    bool is_last) override {
    return route_of(id).feed(inner_id(id), std::move(ranges), std::move(checksums), is_last);
  }
  void cancel(TransferId id) override { route_of(id).cancel(inner_id(id)); }

  std::vector<Completion> poll() override {
    std::vector<Completion> all;
    for (std::size_t index = 0; index < backends_.size(); ++index) {
      std::vector<Completion> some = backends_[index].transport->poll();
      for (Completion& one : some) one.id = outer_id(index, one.id);
      if (all.empty()) {
        all = std::move(some);
      } else {
        all.insert(all.end(), std::make_move_iterator(some.begin()), std::make_move_iterator(some.end()));
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

  int event_fd() const override { return events_.get(); }

  bool wait(TimeNs timeout_ns) override {
    const SteadyClock clock;
    const TimeNs deadline = clock.now() + timeout_ns;
    Transport& busiest = *backends_[busiest_.load(std::memory_order_relaxed)].transport;
    while (true) {
      const TimeNs left_ns = std::max<TimeNs>(deadline - clock.now(), 0);
      if (busiest.wait(is_interruptible_ ? left_ns : std::min(left_ns, kSliceNs))) return true;
      if (backends_.size() == 1) return false;
      if (Transport::wait(0)) return true;
      if (left_ns == 0) return false;
    }
  }

  void shutdown() override {
    for (const Backend& backend : backends_) backend.transport->shutdown();
  }

 private:
  struct Region {
    bool is_shared = false;
    std::vector<std::optional<RegionId>> ids;  // one a backend; none: unregistered there already
  };
  struct Grant {
    RegionId region;
    bool is_shared = false;
    std::vector<std::optional<GrantId>> ids;
  };
  struct Peer {
    std::vector<std::optional<PeerId>> ids;  // one a backend; none: it doesn't reach the peer
    std::string address;
    std::size_t route_shared = 0;  // index of the backend for remote memory that is shared
    std::size_t route_other = 0;
    std::string measured;  // for people
  };

  template <class Id>
  static Error unknown(std::string_view what, Id id) {
    return Error{ErrorCode::kInvalidArgument, fmt::format("{} {} is not known", what, id)};
  }

  TransferId outer_id(std::size_t route, TransferId inner) const {
    return TransferId{inner.value * backends_.size() + route};
  }
  TransferId inner_id(TransferId outer) const { return TransferId{outer.value / backends_.size()}; }
  Transport& route_of(TransferId outer) const { return *backends_[outer.value % backends_.size()].transport; }
  std::size_t index_of(std::string_view name) const {
    std::size_t index = 0;
    while (index < backends_.size() && backends_[index].name != name) ++index;
    return index;
  }

  /// What worked is not tried again when the caller comes back after a kFull.
  Result<void> unregister(Region& region) const {
    for (std::size_t index = 0; index < region.ids.size(); ++index) {
      if (!region.ids[index]) continue;
      if (Result<void> ok = backends_[index].transport->unregister_region(*region.ids[index]); !ok) return ok;
      region.ids[index].reset();
    }
    return {};
  }

  Result<planner::RegionParts> parts_of(RegionId id) const {
    const std::lock_guard lock(mutex_);
    const auto region = regions_.find(id);
    if (region == regions_.end()) return unknown("region", id);
    planner::RegionParts parts{region->second.is_shared, {}};
    for (std::size_t index = 0; index < backends_.size(); ++index) {
      if (!region->second.ids[index]) return unknown("region", id);
      Result<std::string> exported = backends_[index].transport->export_region(*region->second.ids[index]);
      if (!exported) return std::move(exported).error();
      parts.parts.push_back({std::string(backends_[index].name), std::move(*exported)});
    }
    return parts;
  }

  void take(PeerId id, const Measurements& found) {
    const std::lock_guard lock(mutex_);
    const auto peer = peers_.find(id);
    if (peer == peers_.end()) return;
    peer->second.route_shared = choose(found.shared, peer->second.route_shared);
    peer->second.route_other = choose(found.other, peer->second.route_other);
    peer->second.measured = fmt::format("pools by {}; other memory by {}", Measurements::describe(found.shared),
                                        Measurements::describe(found.other));
    log().info("transport: peer {}, the first is used: {}", id, peer->second.measured);
  }
  std::size_t choose(const std::vector<planner::Measured>& measured, std::size_t otherwise) const {
    if (measured.empty() || measured.front().gb_per_s == 0) return otherwise;
    return index_of(measured.front().path == Path::kCma ? "shm" : name_of(measured.front().path));
  }

  const TransportOptions options_;
  const std::vector<Backend> backends_;
  const OwnedFd events_;  // readable while a backend's own descriptor is
  bool is_interruptible_ = true;
  std::atomic<std::size_t> busiest_{0};  // the backend to wait in
  std::optional<SharedMemory> shared_probe_;
  std::vector<std::byte> private_probe_;
  planner::Address address_;
  mutable std::mutex mutex_;
  std::map<PeerId, Peer> peers_;
  std::unordered_map<std::string, PeerId> connected_;
  std::unordered_map<RegionId, Region> regions_;
  std::unordered_map<GrantId, Grant> grants_;
  std::uint32_t num_regions_made_ = 0;
  std::uint32_t num_grants_made_ = 0;
  std::uint32_t num_peers_made_ = 0;
  planner::Prober prober_;  // last: its thread calls take()
};

}  // namespace

Result<std::unique_ptr<Transport>> make_transport(const TransportOptions& options) {
  Result<std::vector<Backend>> backends = planner::make_backends(options);
  if (!backends) return std::move(backends).error();
  auto transport = std::make_unique<PlannedTransport>(options, std::move(*backends));
  if (Result<void> ok = transport->open(); !ok) return std::move(ok).error();
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace kvferry
