#include "transport/ucx/ucx_backend.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

#include "transport/backend_transport.h"
#include "transport/base/check.h"
#include "transport/base/log.h"

namespace kvferry::ucx {

Result<void> UcxBackend::start() {
  std::promise<Result<void>> started;
  std::future<Result<void>> outcome = started.get_future();
  thread_ = std::thread(&UcxBackend::thread_main, this, std::move(started));
  return outcome.get();
}

std::string UcxBackend::describe() const {
  const std::lock_guard lock(path_mutex_);
  return fmt::format("UCX {} over {}{}", api().ucp_get_version_string(),
                     path_.empty() ? "a UCX transport that is chosen at the first connection" : path_,
                     net_devices_.why.empty() ? "" : fmt::format(", with {}", net_devices_.why));
}

Result<std::uint64_t> UcxBackend::check_address(const std::string& address) {
  const Address peer = KVFERRY_TRY(read_address<Address>(address, kProtocolVersion, "UCX"));
  if (peer.worker_address.empty() || peer.worker_address.size() > kWorkerAddressBytesMax)
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("the peer's address holds a UCX address of {} bytes; 1 to {} are allowed",
                             peer.worker_address.size(), kWorkerAddressBytesMax)};
  return peer.incarnation;
}

void UcxBackend::thread_main(std::promise<Result<void>> started) {
  // If there is a GPU, it becomes this thread's current GPU in CUDA, because UCX asks CUDA for the thread's current GPU
  // when UCX starts and in each call of progress().
  Result<void> ready = options_.device != nullptr ? options_.device->bind_thread() : Result<void>();
  if (ready) ready = set_up();
  const bool is_up = static_cast<bool>(ready);
  started.set_value(std::move(ready));
  if (is_up) take_turns("kvferry-ucx");
  tear_down();
}

bool UcxBackend::turn() {
  bool is_busy = inbox_.run();
  is_busy |= worker_->progress();
  now_ = clock_.now();
  advance_transfers(now_);
  advance_peers(now_);
  complete_finished();
  return is_busy || !may_sleep();
}

bool UcxBackend::is_over() const {
  return is_stopping_ && transfers_.empty() &&
         std::all_of(peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second.peer->is_closed(); });
}

void UcxBackend::idle(TimeNs busy_at) {
  if (now_ - busy_at < options_.spin_ns || !inbox_.prepare_to_sleep() || !worker_->arm()) return;
  const TimeNs deadline = next_deadline(now_);
  sleep(worker_->event_fd(), deadline == 0 ? 60 * kSecond : std::clamp<TimeNs>(deadline - now_, 0, 60 * kSecond));
}

void UcxBackend::tear_down() {
  constexpr TimeNs kFlushPatience = 200 * kMillisecond;
  if (worker_) worker_->flush(clock_, kFlushPatience);
  peers_.clear();
  for (const auto& [region, memory] : memories_) worker_->unmap_memory(memory.handle);
  for (const auto& [device, stream] : hash_streams_) device->drop_stream(stream);
  worker_.reset();
}

UcxBackend::Transfers::iterator UcxBackend::find(TransferId id) {
  return std::find_if(transfers_.begin(), transfers_.end(), [id](const auto& one) { return one->id() == id; });
}

void UcxBackend::submit(AcceptedTransfer accepted) {
  UcxPeer& peer = *peers_.at(accepted.peer).peer;
  peer.connect();
  const LocalMemory& memory = memories_.at(accepted.local);
  if (accepted.remote.grant != 0 && memory.device != nullptr)
    return table_.complete(accepted.id, ErrorCode::kRefused,
                           "UCX reaches a granted region by messages only, which can't carry this node's GPU memory");
  auto transfer = std::make_unique<UcxTransfer>(options_, peer, pending_messages_, std::move(accepted), memory);
  const auto goes_after = [](Priority priority, const auto& other) { return priority < other->priority(); };
  const auto place = std::upper_bound(transfers_.begin(), transfers_.end(), transfer->priority(), goes_after);
  transfers_.insert(place, std::move(transfer));
}

void UcxBackend::feed(FedCopies more) {
  if (const auto transfer = find(more.id); transfer != transfers_.end()) (*transfer)->feed(more);
}

void UcxBackend::cancel(PeerId, TransferId id) {
  if (const auto transfer = find(id); transfer != transfers_.end()) (*transfer)->cancel(clock_.now());
}

void UcxBackend::add_peer(PeerId peer, const std::string& address) {
  peers_[peer].peer =
      std::make_unique<UcxPeer>(*worker_, peer, decode<Address>(address, "peer address").value(), random_number());
}

void UcxBackend::drop_peer(PeerId peer) {
  PeerEntry& entry = peers_.at(peer);
  entry.is_dropped = true;
  entry.peer->drain(clock_.now() + options_.stuck_ns);
}

Result<Backend::RegionKey> UcxBackend::open_region(RegionId id, const MemoryRegion& memory) {
  Result<std::string> rkey = std::string();
  post_and_wait([&] { rkey = map_memory(id, memory); });
  if (!rkey) return std::move(rkey).error();
  return RegionKey{std::move(*rkey), memory.device != nullptr};
}

Result<std::string> UcxBackend::map_memory(RegionId id, const MemoryRegion& memory) {
  const bool is_host = memory.device == nullptr || memory.device->is_host();
  const ucs_memory_type_t type = is_host ? UCS_MEMORY_TYPE_HOST : UCS_MEMORY_TYPE_CUDA;
  UcpWorker::Memory mapped = KVFERRY_TRY(worker_->map_memory(memory.base, memory.bytes, type));
  LocalMemory local{mapped.handle, type, memory.device, nullptr};
  if (memory.device != nullptr) {
    auto stream = hash_streams_.find(memory.device);
    if (stream == hash_streams_.end()) {
      Result<DeviceStream> made = memory.device->make_stream();
      if (!made) {
        worker_->unmap_memory(mapped.handle);
        return std::move(made).error();
      }
      stream = hash_streams_.emplace(memory.device, *made).first;
    }
    local.stream = stream->second;
  }
  memories_.emplace(id, local);
  return std::move(mapped.rkey);
}

Result<void> UcxBackend::close_region(RegionId id, bool is_stopped) {
  // A stopped backend has unmapped all memory.
  if (Result<void> ok = table_.remove_region(id); !ok || is_stopped) return ok;
  post_and_wait([&] { worker_->unmap_memory(memories_.extract(id).mapped().handle); });
  return {};
}

Result<GrantId> UcxBackend::grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) {
  if (const Result<std::string> known = table_.exported(region);
      known && decode<RegionDescriptor>(*known, "own descriptor").value().is_device)
    return Error{
        ErrorCode::kUnavailable,
        fmt::format("region {} is GPU memory, of which UCX gives no grants, because it can't revoke them; allowed: "
                    "regions of host memory",
                    region)};
  // The grant has no rkey, because this node itself copies every byte of a grant.
  return Backend::grant(region, offset, bytes, terms);
}

void UcxBackend::stop() {
  const TimeNs now = clock_.now();
  is_stopping_ = true;
  for (const auto& transfer : transfers_) transfer->cancel(now);
  for (auto& [id, entry] : peers_) entry.peer->drain(now + options_.stuck_ns);
}

void UcxBackend::advance_transfers(TimeNs now) {
  for (const auto& transfer : transfers_) {
    transfer->advance(now, *worker_, source_address_);
    const TimeNs deadline = transfer->stuck_deadline();
    if (deadline != 0 && now >= deadline)
      transfer->peer().fail(fmt::format("a cancelled transfer made no progress for {} ms, so the connection was ended",
                                        options_.stuck_ns / kMillisecond));
  }
}

void UcxBackend::advance_peers(TimeNs now) {
  for (auto it = peers_.begin(); it != peers_.end();) {
    auto& [id, entry] = *it;
    entry.peer->watch(now, options_.silence_ns);
    entry.peer->advance_close(now);
    if (entry.peer->is_ready() && !std::exchange(entry.reported_ready, true)) {
      const std::string transports = entry.peer->transports();
      log().info("ucx: connected to a peer (number {} in this process) over {}", id, transports);
      const std::lock_guard lock(path_mutex_);
      path_ = transports;
    }
    if (entry.peer->is_failed() && !std::exchange(entry.reported_lost, true)) {
      table_.lose_peer(id);
      if (!entry.is_dropped && !is_stopping_)
        log().warn("ucx: lost the connection to a peer (number {} in this process): {}", id, entry.peer->why());
    }
    const bool is_done = entry.is_dropped && entry.peer->is_closed() && entry.peer->num_transfers == 0;
    it = is_done ? peers_.erase(it) : std::next(it);
  }
}

void UcxBackend::complete_finished() {
  std::erase_if(transfers_, [this](const std::unique_ptr<UcxTransfer>& transfer) {
    if (!transfer->is_over()) return false;
    table_.complete(transfer->id(), transfer->code(), transfer->what(), transfer->corrupt_ranges(),
                    transfer->peer().path());
    return true;
  });
}

bool UcxBackend::may_sleep() const {
  return std::none_of(transfers_.begin(), transfers_.end(), [](const auto& one) { return one->is_hashing(); });
}

TimeNs UcxBackend::next_deadline(TimeNs now) const {
  TimeNs earliest = std::numeric_limits<TimeNs>::max();
  for (const auto& transfer : transfers_) {
    if (const TimeNs deadline = transfer->stuck_deadline(); deadline != 0) earliest = std::min(earliest, deadline);
  }
  for (const auto& [id, entry] : peers_) {
    if (const TimeNs deadline = entry.peer->watch_deadline(options_.silence_ns); deadline != 0)
      earliest = std::min(earliest, deadline);
    if (entry.peer->is_draining() && !entry.peer->is_failed())
      earliest = std::min(earliest, entry.peer->drain_deadline());
    // UCX closes endpoints within ucp_worker_progress(), and no event says when to call it.
    if (entry.peer->is_failed() && !entry.peer->is_closed()) earliest = std::min(earliest, now + kMillisecond);
  }
  return earliest == std::numeric_limits<TimeNs>::max() ? 0 : earliest;
}

}  // namespace kvferry::ucx

namespace kvferry {

Result<std::string> change_ucx_secret(const std::string& bytes, const SecretChange& change) {
  ucx::Address address = KVFERRY_TRY(read_address<ucx::Address>(bytes, ucx::kProtocolVersion, "UCX"));
  address.secret = change(address.secret);
  return encode(address);
}

Result<std::unique_ptr<Transport>> make_ucx_transport(const UcxOptions& options) {
  KVFERRY_TRY(check_options("the UCX backend", {{"transfers_max", options.transfers_max},
                                                {"operations_per_transfer_max", options.operations_per_transfer_max},
                                                {"operations_per_peer_max", options.operations_per_peer_max},
                                                {"operation_bytes_max", options.operation_bytes_max},
                                                {"spin_ns", options.spin_ns, 0},
                                                {"stuck_ns", options.stuck_ns},
                                                {"silence_ns", options.silence_ns}}));
  ucx::NetDevices devices = KVFERRY_TRY(ucx::choose_net_devices(options, "/", ::getenv));
  auto backend = std::make_unique<ucx::UcxBackend>(options, std::move(devices));
  KVFERRY_TRY(backend->start());
  return std::unique_ptr<Transport>(std::make_unique<BackendTransport>(std::move(backend)));
}

}  // namespace kvferry
