#include "transport/gpu_ipc/gpu_ipc_backend.h"

#include <algorithm>
#include <utility>

#include "transport/address_secret.h"
#include "transport/backend_transport.h"

namespace kvferry::gpu_ipc {
namespace {

constexpr std::uint32_t kProtocolVersion = 1;
// How long the progress thread polls a busy device without a pause after the last progress. A thread that sleeps
// between pieces may leave the device idle.
constexpr TimeNs kDeviceSpinNs = 200'000;
constexpr TimeNs kPollNs = 50'000;  // longest pause between polls when nothing has progressed for kDeviceSpinNs
// Size of the piece that an idle GPU gets. Small, because the GPU waits while the host prepares it. Each further piece
// is as large as what is in flight, up to piece_bytes.
constexpr std::uint64_t kFirstPieceBytes = 8 << 20;
constexpr TimeNs kBacklogNs = 10 * kMillisecond;  // longest time between checks of a completion queue without room
constexpr TimeNs kIdleNs = 60 * kSecond;
// How long a transfer whose memory can't be opened waits for the news that its peer has ended. The kernel takes a dying
// process's memory and its sockets away one after the other.
constexpr TimeNs kLossNoticeNs = 250 * kMillisecond;

}  // namespace

GpuIpcBackend::GpuIpcBackend(const GpuIpcOptions& options, const Streams& streams, std::unique_ptr<Transport> control)
    : InboxBackend(options.transfers_max),
      options_(options),
      device_(*options.device),
      streams_(streams),
      control_(std::move(control)),
      control_region_(control_->register_region(&control_memory_, sizeof(control_memory_)).value()),
      address_(encode(Address{kProtocolVersion, incarnation_, control_->address(),
                              control_->export_region(control_region_).value(), where_})) {
  control_->set_wait_interrupt_fd(inbox_.wake().fd());
  control_->set_source_address(source_address(options_.key, address_, change_gpu_ipc_secret));
  thread_ = std::thread(&GpuIpcBackend::run, this);
}

GpuIpcBackend::~GpuIpcBackend() {
  join();
  for (const DeviceStream stream : streams_) device_.drop_stream(stream);
}

std::string GpuIpcBackend::describe() const {
  return fmt::format("mapped GPU memory of other processes, copied by {}; control link: {}", device_.describe(),
                     control_->describe());
}

Result<std::uint64_t> GpuIpcBackend::check_address(const std::string& address) {
  const Address parsed = KVFERRY_TRY(read_address<Address>(address, kProtocolVersion, "GPU memory"));
  const Result<PeerId> control = control_->connect(parsed.control);
  if (!control) return control.error();  // for example, the peer is on another host
  return parsed.incarnation;
}

Result<Backend::RegionKey> GpuIpcBackend::open_region(RegionId, const MemoryRegion& memory) {
  if (memory.device == nullptr)
    return Error{ErrorCode::kUnavailable, "the gpu_ipc backend moves GPU memory only and can't reach host memory"};
  if (memory.device != &device_)
    return Error{ErrorCode::kUnavailable, fmt::format("the gpu_ipc backend of {} can't reach memory of {}",
                                                      device_.describe(), memory.device->describe())};
  Result<std::string> handle = device_.export_memory({static_cast<const std::byte*>(memory.base), memory.bytes});
  if (!handle) return std::move(handle).error().with("the gpu_ipc backend can't use this GPU memory");
  return RegionKey{std::move(*handle), true};
}

Result<GrantId> GpuIpcBackend::grant(RegionId region, std::uint64_t, std::uint64_t, const GrantTerms&) {
  if (Result<std::string> known = table_.exported(region); !known) return std::move(known).error();
  return Error{
      ErrorCode::kUnavailable,
      fmt::format("no part of region {} can be granted: peers map the region's GPU memory, so a grant could not be "
                  "revoked",
                  region)};
}

void GpuIpcBackend::run() {
  // An error can be ignored here: if the GPU can't be used, the copies fail too, and their transfers report the reason.
  static_cast<void>(device_.bind_thread());
  take_turns("kvferry-gpu-ipc");
  control_->shutdown();  // completes all transfers of the control link
  drain_control();
  advance_all();
  peers_.clear();
  control_requests_.clear();
}

bool GpuIpcBackend::turn() {
  bool is_busy = inbox_.run();
  is_busy |= drain_control();
  is_busy |= advance_all();
  // wait(0) sends the requests on this thread, sooner than the control link's own thread would wake up.
  if (std::exchange(has_control_requests_to_push_, false)) control_->wait(0);
  now_ = clock_.now();
  return is_busy;
}

bool GpuIpcBackend::is_over() const {
  const auto only_waits_for_control = [](const auto& ones) {
    return std::ranges::all_of(ones, [](const auto& entry) { return entry.second->notification.value != 0; });
  };
  return is_stopping_ && std::ranges::all_of(transfers_, only_waits_for_control);
}

void GpuIpcBackend::idle(TimeNs busy_at) {
  if ((is_polling_ && now_ - busy_at < kDeviceSpinNs) || !inbox_.prepare_to_sleep()) return;
  if (!is_polling_ && !has_backlog_)
    control_->wait(kIdleNs);  // returns early when a task is posted
  else
    sleep(has_backlog_ ? -1 : control_->event_fd(), is_polling_ ? kPollNs : kBacklogNs);
}

bool GpuIpcBackend::advance_all() {
  bool is_busy = false;
  is_polling_ = false;
  // Finished copies of all transfers are counted before any transfer enqueues more, so that the most urgent transfers
  // get the room that these copies leave below in_flight_bytes.
  for (auto& ones : transfers_) {
    for (auto& [id, transfer] : ones) is_busy |= reap(*transfer);
  }
  for (auto& ones : transfers_) {
    for (auto& [id, transfer] : ones) is_busy |= advance(*transfer);
  }
  for (auto& ones : transfers_) {
    for (const TransferId id : over_) ones.erase(id);
  }
  over_.clear();
  return is_busy;
}

bool GpuIpcBackend::reap(Transfer& transfer) {
  if (transfer.notification.value != 0) return false;
  const std::uint64_t through = transfer.device.reap(clock_.now());
  bytes_in_flight_ -= through;
  return through > 0;
}

bool GpuIpcBackend::advance(Transfer& transfer) {
  if (transfer.notification.value != 0) return false;
  DeviceTransfer& device = transfer.device;
  if (!device.has_ended() && !transfer.peer->why_lost.empty())
    device.end(ErrorCode::kPeerLost, transfer.peer->why_lost);
  if (transfer.unopened_since != 0 && clock_.now() - transfer.unopened_since >= kLossNoticeNs)
    device.end(ErrorCode::kInternal, transfer.why_unopened);
  bool is_busy = false;
  while (!device.has_ended() && transfer.unopened_since == 0 && transfer.peer->is_verified && device.has_more() &&
         bytes_in_flight_ + next_piece_bytes() <= options_.in_flight_bytes)
    is_busy |= post_piece(transfer);
  if (!device.is_quiet() || transfer.unopened_since != 0) is_polling_ = true;
  if (device.has_ended() && device.is_quiet()) {
    if (device.was_given_up()) given_up_.push_back(transfer.mappings);
    complete(device.accepted().id, device.code(), device.what(), device.corrupt_ranges());
    return true;
  }
  // The hello is also sent for a transfer that waits to be fed, so that the peer's death is noticed.
  if (!transfer.peer->has_hello) send_hello(transfer.peer);
  if (!transfer.peer->is_verified || !device.is_through()) return is_busy;
  return notify(transfer) || is_busy;
}

bool GpuIpcBackend::post_piece(Transfer& transfer) {
  DeviceTransfer& device = transfer.device;
  if (transfer.mappings == nullptr) transfer.mappings = transfer.peer->mappings;
  const Result<std::byte*> remote =
      transfer.mappings->open(device.accepted().remote.rkey, device.accepted().remote.bytes);
  if (!remote) {
    transfer.unopened_since = clock_.now();
    transfer.why_unopened = fmt::format("cannot open the peer's memory: {}{}", remote.error().what,
                                        likely_reason(where_, transfer.peer->where));
    return true;
  }
  bytes_in_flight_ += device.post(*remote, next_piece_bytes(), copies_);
  return true;
}

std::uint64_t GpuIpcBackend::next_piece_bytes() const {
  return std::min({std::max(kFirstPieceBytes, bytes_in_flight_), options_.piece_bytes, options_.in_flight_bytes});
}

void GpuIpcBackend::lose(Peer& peer, const std::string& why) {
  if (!peer.why_lost.empty()) return;
  peer.why_lost = why.empty() ? "the peer is gone: its process has ended or closed the connection" : why;
  peer.mappings.reset();
  control_->disconnect(peer.control);
  table_.lose_peer(peer.id);
}

void GpuIpcBackend::complete(TransferId id, ErrorCode code, std::string what,
                             std::vector<std::uint32_t> corrupt_ranges) {
  over_.push_back(id);
  table_.complete(id, code, std::move(what), std::move(corrupt_ranges));
}

GpuIpcBackend::Transfer* GpuIpcBackend::find(TransferId id) {
  for (auto& ones : transfers_) {
    if (const auto found = ones.find(id); found != ones.end()) return found->second.get();
  }
  return nullptr;
}

void GpuIpcBackend::add_peer(PeerId peer, const std::string& bytes) {
  Address address = decode<Address>(bytes, "peer address").value();
  const Result<PeerId> control = control_->connect(address.control);
  const auto added = std::make_shared<Peer>();
  added->id = peer;
  added->control_region = std::move(address.control_region);
  added->where = std::move(address.where);
  added->mappings = std::make_shared<Mappings>(device_);
  if (control) added->control = *control;
  if (!control) added->why_lost = control.error().what;
  peers_.emplace(peer, added);
}

void GpuIpcBackend::drop_peer(PeerId peer) {
  const PeerPtr dropped = std::move(peers_.extract(peer).mapped());
  control_->disconnect(dropped->control);
  if (dropped->why_lost.empty()) dropped->why_lost = "this process disconnected the peer";
  dropped->mappings.reset();
}

void GpuIpcBackend::submit(AcceptedTransfer accepted) {
  const PeerPtr& peer = peers_.at(accepted.peer);
  const TransferId id = accepted.id;
  auto& ones = transfers_[static_cast<std::size_t>(accepted.priority)];
  ones.emplace(id, new Transfer{.device{std::move(accepted), device_, streams_}, .peer = peer});
}

void GpuIpcBackend::feed(FedCopies more) {
  if (Transfer* const transfer = find(more.id)) transfer->device.feed(more);
}

void GpuIpcBackend::cancel(PeerId, TransferId id) {
  Transfer* const transfer = find(id);
  if (transfer == nullptr) return;
  if (transfer->notification.value != 0) return control_->cancel(transfer->notification);
  transfer->device.end(ErrorCode::kCancelled, "this process cancelled the transfer");
}

void GpuIpcBackend::stop() {
  is_stopping_ = true;
  for (auto& ones : transfers_) {
    for (auto& [id, transfer] : ones)
      transfer->device.end(ErrorCode::kCancelled, "this process shuts its transport down");
  }
}

}  // namespace kvferry::gpu_ipc

namespace kvferry {

Result<std::string> change_gpu_ipc_secret(const std::string& bytes, const SecretChange& change) {
  gpu_ipc::Address address =
      KVFERRY_TRY(read_address<gpu_ipc::Address>(bytes, gpu_ipc::kProtocolVersion, "GPU memory"));
  address.control = KVFERRY_TRY(change_shm_secret(address.control, change));
  return encode(address);
}

Result<std::unique_ptr<Transport>> make_gpu_ipc_transport(const GpuIpcOptions& options) {
  if (options.device == nullptr)
    return Error{ErrorCode::kInvalidArgument, "path gpu_ipc needs a GPU, but this process was given no device"};
  KVFERRY_TRY(check_options("the gpu_ipc backend", {{"transfers_max", options.transfers_max},
                                                    {"piece_bytes", options.piece_bytes},
                                                    {"in_flight_bytes", options.in_flight_bytes},
                                                    {"silence_ns", options.silence_ns}}));
  ShmOptions link;
  // A thread that waits on the link polls for this long before it sleeps, so that a notification that comes soon need
  // not wake it.
  link.spin_ns = gpu_ipc::kDeviceSpinNs;
  link.silence_ns = options.silence_ns;
  link.key = options.key;
  link.transfers_max = 1 << 20;  // room for the pending notifications, and for a hello and a watch for each peer
  std::unique_ptr<Transport> control = KVFERRY_TRY(make_shm_transport(link));
  gpu_ipc::Streams streams;
  for (std::size_t made = 0; made < streams.size(); ++made) {
    Result<DeviceStream> stream = options.device->make_stream();
    if (!stream) {
      for (std::size_t i = 0; i < made; ++i) options.device->drop_stream(streams[i]);
      return std::move(stream).error();
    }
    streams[made] = *stream;
  }
  auto backend = std::make_unique<gpu_ipc::GpuIpcBackend>(options, streams, std::move(control));
  return std::unique_ptr<Transport>(std::make_unique<BackendTransport>(std::move(backend)));
}

}  // namespace kvferry
