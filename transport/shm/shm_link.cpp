#include "transport/shm/shm_link.h"

#include <algorithm>
#include <utility>

#include "transport/base/log.h"
#include "transport/base/printable.h"
#include "transport/progress_loop.h"
#include "transport/shm/block_copy.h"

namespace kvferry::shm {
namespace {

constexpr TimeNs kRetryNs = kMillisecond;  // time between attempts while the most urgent transfer waits for the peer

}  // namespace

bool ShmLink::connect(const std::string& source_address, TimeNs now) {
  if (socket_ || is_failed_) return false;
  Result<OwnedFd> socket = connect_to(address_.socket_name);
  if (!socket) {
    fail(socket.error().what);
    return false;
  }
  socket_ = std::move(*socket);
  pid_ = peer_process(socket_.get());
  send_message(socket_.get(), Type::kHello,
               Hello{kProtocolVersion, address_.incarnation, address_.secret, source_address});
  expect_answer(now);
  return true;
}

void ShmLink::expect_answer(TimeNs now) {
  if (owed_since_ == 0) owed_since_ = now;
}

void ShmLink::on_readable(TimeNs now) {
  while (!is_failed_) {
    Received received = receive_packet(socket_.get());
    if (received.is_closed) return fail("the peer is gone: its process has ended or closed the connection");
    if (!received.packet) return;
    received_at_ = now;
    owed_since_ = 0;
    on_packet(std::move(*received.packet), now);
  }
}

void ShmLink::on_packet(Packet packet, TimeNs now) {
  switch (packet.type) {
    case Type::kWelcome:
      return on_welcome(std::move(packet));
    case Type::kMapReply:
      is_blocked_ = false;
      on_map_reply(std::move(packet));
      break;
    case Type::kUnmap:
      if (const Result<MapRequest> gone = decode<MapRequest>(packet.body, "unmap message"); gone) {
        for (const bool writes : {false, true}) regions_.erase({gone->region, writes});
      }
      break;
    default:  // a pong needs no action: its arrival was recorded as a sign of life
      break;
  }
  const auto is_waiting = [](const auto& entry) { return entry.second.is_requested; };
  if (std::any_of(regions_.begin(), regions_.end(), is_waiting)) expect_answer(now);
}

void ShmLink::on_welcome(Packet packet) {
  const Result<Welcome> welcome = decode<Welcome>(packet.body, "answer of the peer to the handshake");
  if (!welcome) return fail(welcome.error().what);
  if (!welcome->refusal.empty())
    return fail("the peer refused the connection: " + printable(welcome->refusal, kPeerTextMax));
  if (packet.fds.size() != 2 || control_)
    return fail(
        fmt::format("the peer accepted the connection twice, or sent {} file descriptors with its answer instead of 2",
                    packet.fds.size()));
  Result<SharedMapping> ring = map_peers_file(std::move(packet.fds[0]), 0, NoteRing::kPageBytes, true);
  if (!ring) return fail(ring.error().what);
  Result<SharedMapping> control = map_peers_file(std::move(packet.fds[1]), 0, ControlPage::kPageBytes, false);
  if (!control) return fail(control.error().what);
  ring_.emplace(std::move(*ring));
  control_.emplace(std::move(*control));
  if (welcome->knows_member) member_ = welcome->member;
  if (!options_.use_cma) {
    cma_refusal_ = "this process does not use CMA (its path is shm)";
  } else if (pid_ == 0) {
    cma_refusal_ =
        "the peer runs in another PID namespace (start both containers with --pid=host, in Kubernetes hostPID, or run "
        "both processes in one container)";
  } else {
    std::byte probe[8];
    const CopyRange range{0, 0, sizeof(probe)};
    if (const Result<void> ok = copy_by_cma({&range, 1}, probe, welcome->probe, Direction::kPull, pid_); !ok) {
      if (ok.error().code == ErrorCode::kPeerLost || control_->is_closed())
        return fail("the peer is gone: its process has ended or closed the connection");
      cma_refusal_ = ok.error().what;
    }
  }
  log().info("shm: connected to a peer (number {} in this process, process id {}): {}", peer_, pid_, describe());
}

std::string ShmLink::describe() const {
  return fmt::format(
      "{}{}", options_.use_mappings ? "the peer's shared memory is mapped, other memory is " : "the peer's memory is ",
      cma_refusal_.empty() ? "copied by CMA (process_vm_readv)" : "not reached by CMA: " + cma_refusal_);
}

void ShmLink::on_map_reply(Packet packet) {
  const Result<MapReply> reply = decode<MapReply>(packet.body, "answer of the peer to a request for its shared memory");
  if (!reply) return fail(reply.error().what);
  const auto region = regions_.find({reply->region, reply->writes});
  if (region == regions_.end() || !region->second.is_requested) return;
  region->second.is_requested = false;
  region->second.refusal = printable(reply->refusal, kPeerTextMax);
  if (!reply->refusal.empty()) return;
  if (packet.fds.size() != 1)
    return fail(fmt::format("the peer sent {} file descriptors instead of 1 when it was asked for its shared memory",
                            packet.fds.size()));
  Result<SharedMapping> pages = map_peers_file(std::move(packet.fds[0]), reply->fd_offset, reply->bytes, reply->writes);
  if (pages) {
    region->second.pages.emplace(std::move(*pages));
  } else {
    region->second.refusal = pages.error().what;
  }
}

void ShmLink::submit(AcceptedTransfer accepted) {
  const TransferId id = accepted.id;
  if (is_failed_) return table_.complete(id, ErrorCode::kPeerLost, why_);
  Result<RegionMemoryKey> key =
      decode<RegionMemoryKey>(accepted.remote.rkey, "description of the peer's memory region");
  if (!key) return table_.complete(id, ErrorCode::kInternal, key.error().what);
  transfers_.push_back(std::make_unique<ShmTransfer>(std::move(accepted), *key));
  // If the link is ready and has no other transfer, a small transfer is copied before submit() returns, unless the
  // transfer has to wait for the peer.
  if (transfers_.size() != 1 || !is_ready() || transfers_.front()->bytes_left() > options_.inline_bytes) return;
  while (!transfers_.empty() && advance(transfers_.begin())) continue;
}

ShmLink::Transfers::iterator ShmLink::find(TransferId id) {
  return std::find_if(transfers_.begin(), transfers_.end(), [id](const auto& one) { return one->id() == id; });
}

bool ShmLink::feed(const FedCopies& more) {
  const auto transfer = find(more.id);
  if (transfer == transfers_.end()) return false;
  (*transfer)->feed(more);
  is_blocked_ = false;
  return true;
}

void ShmLink::cancel(TransferId id) {
  const auto transfer = find(id);
  if (transfer != transfers_.end()) finish(transfer, ErrorCode::kCancelled, "this process cancelled the transfer");
}

void ShmLink::cancel_all(const std::string& what) {
  while (!transfers_.empty()) finish(transfers_.begin(), ErrorCode::kCancelled, what);
}

void ShmLink::finish(Transfers::iterator transfer, ErrorCode code, std::string what) {
  const std::unique_ptr<ShmTransfer> finished = std::move(*transfer);
  transfers_.erase(transfer);
  table_.complete(finished->id(), code, std::move(what),
                  code == ErrorCode::kCorrupt ? finished->verifier().corrupt_ranges() : std::vector<std::uint32_t>{});
}

void ShmLink::fail(const std::string& why) {
  if (std::exchange(is_failed_, true)) return;
  why_ = why;
  table_.lose_peer(peer_);
  while (!transfers_.empty()) finish(transfers_.begin(), ErrorCode::kPeerLost, why);
  regions_.clear();
  ring_.reset();
  control_.reset();
  socket_ = OwnedFd();
}

ShmLink::Transfers::iterator ShmLink::most_urgent() {
  const auto can_move = [](const std::unique_ptr<ShmTransfer>& one) { return one->has_copies() || one->is_copied(); };
  auto best = transfers_.end();
  for (auto one = transfers_.begin(); one != transfers_.end(); ++one) {
    if (!can_move(*one)) continue;
    if (best == transfers_.end() || (*one)->accepted().priority < (*best)->accepted().priority) best = one;
  }
  return best;
}

bool ShmLink::advance(TimeNs now) {
  if (is_failed_ || !socket_) return false;
  // A long time in which this process itself did not run does not count as the peer's silence.
  if (now - std::exchange(advanced_at_, now) >= options_.silence_ns / 2 && owed_since_ != 0) owed_since_ = now;
  if (owed_since_ != 0 && now - std::max(owed_since_, received_at_) >= options_.silence_ns) {
    fail(fmt::format("the peer owes an answer and was silent for more than {} ms (setting silence_ms)",
                     options_.silence_ns / kMillisecond));
    return true;
  }
  if (!is_ready()) return false;
  if (is_blocked_ && now - tried_at_ < kRetryNs) return false;
  const auto transfer = most_urgent();
  if (transfer == transfers_.end()) return false;
  is_blocked_ = !advance(transfer);
  if (!is_blocked_) return true;
  // The peer has to send a region's file descriptor, or to make room in its ring. The peer is pinged, so that its
  // silence is noticed.
  tried_at_ = now;
  if (owed_since_ == 0) send_packet(socket_.get(), Type::kPing);
  expect_answer(now);
  return false;
}

TimeNs ShmLink::next_deadline() const {
  if (is_failed_ || !socket_) return ProgressLoop::kNever;
  if (is_blocked_) return tried_at_ + kRetryNs;
  return owed_since_ == 0 ? ProgressLoop::kNever : advanced_at_ + options_.silence_ns / 4;
}

/// kRefused: the transfer needs a grant, its grant has expired or does not allow the transfer's direction, the region
/// could not be mapped, or CMA does not work. A grant's terms are checked here, because the peer can't check them at
/// each copy: the peer checks them only when it is asked for the region's file descriptor.
Result<std::optional<RemoteMemory>> ShmLink::reach(const ShmTransfer& transfer) {
  const RegionDescriptor& remote = transfer.accepted().remote;
  const RegionMemoryKey& key = transfer.key();
  const bool writes = !transfer.accepted().is_pull();
  if (writes && remote.grant == 0 && key.needs_grant_to_write)
    return Error{ErrorCode::kRefused,
                 fmt::format("the peer's region {} can be written only with a grant, and this transfer has none",
                             remote.region)};
  if (remote.grant != 0)
    KVFERRY_TRY(check_terms(GrantId{remote.grant}, {.reads = key.reads, .writes = key.writes, .member = key.member},
                            key.expires_at, writes, clock_.now(), member_));
  if (key.is_shared && options_.use_mappings) {
    const auto found = regions_.try_emplace({remote.region, writes}).first;
    Region& region = found->second;
    if (region.pages)
      return std::optional(RemoteMemory{region.pages->span().data(), region.pages->span().size(), pid_});
    if (!region.refusal.empty()) return Error{ErrorCode::kRefused, regions_.extract(found).mapped().refusal};
    if (!std::exchange(region.is_requested, true))
      send_message(socket_.get(), Type::kMapRequest, MapRequest{remote.region, writes, remote.grant});
    return std::optional<RemoteMemory>();
  }
  if (!cma_refusal_.empty())
    return Error{ErrorCode::kRefused,
                 fmt::format("the peer's memory is {}, and {}",
                             key.is_shared ? "not mapped (the path is cma)" : "not shared", cma_refusal_)};
  return std::optional(RemoteMemory{nullptr, 0, pid_});
}

bool ShmLink::advance(Transfers::iterator transfer) {
  ShmTransfer& moving = **transfer;
  if (!moving.has_copies()) return moving.is_copied() && notify_and_finish(transfer);
  const Result<std::optional<RemoteMemory>> remote = reach(moving);
  if (!remote) {
    finish(transfer, remote.error().code, remote.error().what);
    return true;
  }
  if (!remote->has_value()) return false;
  const RegionDescriptor& descriptor = moving.accepted().remote;
  const std::uint32_t slot = moving.key().slot;
  ring_->enter(slot);
  const bool is_open = control_->is_open(slot, moving.pass());
  const Result<void> copied = is_open ? moving.copy_piece(**remote, threads_) : Result<void>();
  ring_->exit();
  if (!is_open) {
    if (control_->is_closed()) {
      fail("the peer is shutting down");
    } else if (descriptor.grant != 0) {
      finish(transfer, ErrorCode::kRefused,
             fmt::format("the peer has revoked grant {}, or never gave it", descriptor.grant));
    } else {
      finish(transfer, ErrorCode::kRefused, fmt::format("the peer has unregistered region {}", descriptor.region));
    }
    return true;
  }
  if (!copied && copied.error().code == ErrorCode::kPeerLost) {
    fail("the peer is gone: its process has ended or closed the connection");
  } else if (!copied) {
    finish(transfer, ErrorCode::kRefused, copied.error().what);
  } else if (moving.is_copied()) {
    notify_and_finish(transfer);
  }
  return true;
}

bool ShmLink::notify_and_finish(Transfers::iterator transfer) {
  const ShmTransfer& done = **transfer;
  if (done.verifier().has_corrupt()) {
    finish(transfer, ErrorCode::kCorrupt, done.verifier().what());
    return true;
  }
  if (!done.accepted().notification.empty()) {
    bool must_wake = false;
    if (!ring_->push(done.accepted().notification, must_wake)) return false;
    if (must_wake && !control_->is_spinning()) send_packet(socket_.get(), Type::kWake);
  }
  finish(transfer, ErrorCode::kOk, "");
  return true;
}

}  // namespace kvferry::shm
