#include "transport/gpu_ipc/engine.h"

#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/log.h"

namespace kvferry::gpu_ipc {
namespace {

constexpr TimeNs kPollNs = 50'000;  // how often a device is asked that has been busy for longer than spin_ns
constexpr TimeNs kBacklogNs = 10 * kMillisecond;  // until the owner has read some notifications
constexpr TimeNs kIdleNs = 60 * kSecond;

}  // namespace

Engine::Engine(const GpuIpcOptions& options, TransferTable& transfer_table, DeviceStream stream, Transport& control, RegionId region)
    : options_(options),
      table_(transfer_table),
      device_(*options.device),
      stream_(stream),
      control_(control),
      control_region_(region) {
  control_.set_wait_interrupt_fd(inbox_.wake().fd());
}

Engine::~Engine() {
  join();
  device_.drop_stream(stream_);
}

void Engine::join() {
  if (thread_.joinable()) thread_.join();
}

void Engine::run() {
  ::pthread_setname_np(::pthread_self(), "kvferry-gpu-ipc");
  TimeNs busy_at = clock_.now();
  const auto is_announced = [](const auto& entry) { return entry.second->announced.value != 0; };
  const auto only_waits_for_control = [&](const auto& ones) {
    return std::all_of(ones.begin(), ones.end(), is_announced);
  };
  while (true) {
    inbox_.wake().clear();
    bool is_busy = inbox_.run();
    is_busy |= drain_control();
    is_busy |= advance_all();
    // The control link's own thread sends what it was given as well, but this one is awake.
    if (std::exchange(has_errands_to_push_, false)) control_.wait(0);
    if (is_stopping_ && std::all_of(std::begin(transfers_), std::end(transfers_), only_waits_for_control)) break;
    const TimeNs now = clock_.now();
    if (is_busy) busy_at = now;
    if (!is_busy) sleep(now - busy_at);
  }
  control_.shutdown();  // which completes all that it was given
  drain_control();
  advance_all();
  peers_.clear();
  control_requests_.clear();
}

void Engine::sleep(TimeNs idle_ns) {
  if (is_polling_ && idle_ns < options_.spin_ns) return;
  if (!is_polling_ && !has_backlog_) {
    control_.wait(kIdleNs);  // or until somebody posts a task
    return;
  }
  const TimeNs wait_ns = is_polling_ ? kPollNs : kBacklogNs;
  const timespec timeout{wait_ns / kSecond, wait_ns % kSecond};
  pollfd fds[] = {{inbox_.wake().fd(), POLLIN, 0}, {control_.event_fd(), POLLIN, 0}};
  ::ppoll(fds, has_backlog_ ? 1 : 2, &timeout, nullptr);
}

bool Engine::drain_control() {
  const std::vector<Completion> completions = control_.poll();
  for (const Completion& completion : completions) {
    const auto found = control_requests_.find(completion.id);
    KVFERRY_CHECK(found != control_requests_.end(), "the control link completed {}, which nobody gave it", completion.id);
    const ControlRequest request = std::move(found->second);
    control_requests_.erase(found);
    on_errand(request, completion);
  }
  has_backlog_ = table_.completion_queue().is_full_of_notifications();
  if (has_backlog_) return !completions.empty();
  std::vector<Notification> notes = control_.poll_notifications();
  for (Notification& note : notes) table_.completion_queue().notify(std::move(note));
  return !completions.empty() || !notes.empty();
}

bool Engine::advance_all() {
  bool is_busy = false;
  is_polling_ = false;
  for (auto& ones : transfers_) {
    for (auto& [id, transfer] : ones) is_busy |= advance(*transfer);
  }
  for (auto& ones : transfers_) {
    for (const TransferId id : over_) ones.erase(id);
  }
  over_.clear();
  return is_busy;
}

bool Engine::advance(Transfer& transfer) {
  if (transfer.announced.value != 0) return false;
  DeviceTransfer& device = transfer.device;
  const std::uint64_t through = device.reap(clock_.now());
  bytes_in_flight_ -= through;
  if (!device.has_ended() && !transfer.peer->why_lost.empty())
    device.end(ErrorCode::kPeerLost, transfer.peer->why_lost);
  bool is_busy = through > 0;
  while (!device.has_ended() && transfer.peer->is_welcome && device.has_more() &&
         bytes_in_flight_ < options_.in_flight_bytes)
    is_busy |= post_piece(transfer);
  if (!device.is_quiet()) is_polling_ = true;
  if (device.has_ended() && device.is_quiet()) {
    if (device.was_given_up()) given_up_.push_back(transfer.mappings);
    complete(device.accepted().id, device.code(), device.what(), device.corrupt_ranges());
    return true;
  }
  // A fed transfer's peer is greeted at once, so that its death is noticed.
  if (!transfer.peer->is_greeted) greet(transfer.peer);
  if (!transfer.peer->is_welcome || !device.is_through()) return is_busy;
  return announce(transfer) || is_busy;
}

bool Engine::post_piece(Transfer& transfer) {
  DeviceTransfer& device = transfer.device;
  if (transfer.mappings == nullptr) transfer.mappings = transfer.peer->mappings;
  const Result<std::byte*> remote =
      transfer.mappings->open(device.accepted().remote.rkey, device.accepted().remote.bytes);
  if (!remote) {
    device.end(ErrorCode::kInternal, "the peer's memory can't be opened: " + remote.error().what);
    return true;
  }
  const std::uint64_t room = options_.in_flight_bytes - bytes_in_flight_;
  bytes_in_flight_ += device.post(*remote, std::min(room, options_.piece_bytes));
  return true;
}

bool Engine::announce(Transfer& transfer) {
  const AcceptedTransfer& accepted = transfer.device.accepted();
  const Result<TransferId> sent = control_.submit({transfer.peer->control,
                                                   Direction::kPush,
                                                   control_region_,
                                                   transfer.peer->control_region,
                                                   {},
                                                   accepted.notification,
                                                   accepted.priority});
  if (!sent && sent.error().code == ErrorCode::kFull) {
    is_polling_ = true;
    return false;
  }
  if (!sent) {
    complete(accepted.id, ErrorCode::kPeerLost, sent.error().what);
    return true;
  }
  transfer.announced = *sent;
  transfer.mappings.reset();
  control_requests_.emplace(*sent, ControlRequest{ControlRequest::Kind::kAnnouncement, transfer.peer, accepted.id});
  return has_errands_to_push_ = true;
}

void Engine::greet(const PeerPtr& peer) {
  peer->is_greeted = true;
  // The hello ends when the peer has shown that it is the one of this address, the watch when it is gone.
  for (const ControlRequest::Kind kind : {ControlRequest::Kind::kHello, ControlRequest::Kind::kWatch}) {
    PagedTransfer nothing{peer->control, Direction::kPush, control_region_, peer->control_region, {}, ""};
    nothing.is_fed = kind == ControlRequest::Kind::kWatch;
    const Result<TransferId> sent = control_.submit(nothing);
    if (!sent) return lose(*peer, sent.error().what);
    control_requests_.emplace(*sent, ControlRequest{kind, peer, TransferId{}});
  }
  has_errands_to_push_ = true;
}

void Engine::on_errand(const ControlRequest& request, const Completion& completion) {
  const bool is_ok = completion.code == ErrorCode::kOk;
  if (!is_ok && !is_stopping_ && completion.code != ErrorCode::kCancelled) lose(*request.peer, completion.what);
  if (request.kind == ControlRequest::Kind::kHello && is_ok) request.peer->is_welcome = true;
  if (request.kind == ControlRequest::Kind::kAnnouncement) complete(request.transfer, completion.code, completion.what);
}

void Engine::lose(Peer& peer, const std::string& why) {
  if (!peer.why_lost.empty()) return;
  peer.why_lost = why.empty() ? "the peer is gone" : why;
  peer.mappings.reset();
  control_.disconnect(peer.control);
  table_.lose_peer(peer.id);
}

void Engine::complete(TransferId id, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt_ranges) {
  over_.push_back(id);
  table_.complete(id, code, std::move(what), std::move(corrupt_ranges));
}

Engine::Transfer* Engine::find(TransferId id) {
  for (auto& ones : transfers_) {
    if (const auto found = ones.find(id); found != ones.end()) return found->second.get();
  }
  return nullptr;
}

void Engine::add_peer(PeerId peer, PeerId control_peer, std::string control_region) {
  peers_.emplace(peer, std::make_shared<Peer>(Peer{.id = peer,
                                                   .control = control_peer,
                                                   .control_region = std::move(control_region),
                                                   .mappings = std::make_shared<Mappings>(device_),
                                                   .is_greeted = false,
                                                   .is_welcome = false,
                                                   .why_lost = ""}));
}

void Engine::drop_peer(PeerId peer) {
  const PeerPtr dropped = std::move(peers_.extract(peer).mapped());
  if (dropped->why_lost.empty()) dropped->why_lost = "the peer was disconnected";
  dropped->mappings.reset();
}

void Engine::submit(AcceptedTransfer accepted) {
  const auto peer = peers_.find(accepted.peer);
  KVFERRY_CHECK(peer != peers_.end(), "transfer {} was accepted for an unknown peer", accepted.id);
  const TransferId id = accepted.id;
  auto& ones = transfers_[static_cast<std::size_t>(accepted.priority)];
  ones.emplace(id, new Transfer{DeviceTransfer(std::move(accepted), device_, stream_), peer->second, nullptr, {}});
}

void Engine::feed(TransferId id, FedCopies more) {
  if (Transfer* const transfer = find(id)) transfer->device.feed(std::move(more));
}

void Engine::cancel(TransferId id) {
  Transfer* const transfer = find(id);
  if (transfer == nullptr) return;
  if (transfer->announced.value != 0) return control_.cancel(transfer->announced);
  transfer->device.end(ErrorCode::kCancelled, "cancelled");
}

void Engine::stop() {
  is_stopping_ = true;
  for (auto& ones : transfers_) {
    for (auto& [id, transfer] : ones) transfer->device.end(ErrorCode::kCancelled, "the transport was shut down");
  }
}

}  // namespace kvferry::gpu_ipc
