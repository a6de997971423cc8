#include "transport/nccl/control_plane.h"

#include <algorithm>
#include <utility>

#include "transport/backend.h"
#include "transport/base/log.h"

namespace kvferry::nccl {
namespace {

// Maximum of message parts to one peer whose transfers have not ended. Further parts wait in the peer's `queue_`.
constexpr std::size_t kSentMax = 64;
constexpr std::size_t kPartBytes = 48 << 10;       // longer messages are split into several notifications
constexpr std::size_t kMessageBytesMax = 1 << 20;  // longer messages are dropped
constexpr TimeNs kPartialMax = 60 * kSecond;  // a message is dropped if it is incomplete this long after its first part
constexpr std::size_t kStreamBytes = 8;
// Each part begins with stream_ and one byte: 1 if more parts follow, otherwise 0.
constexpr std::size_t kHeadBytes = kStreamBytes + 1;

}  // namespace

Result<std::unique_ptr<ControlPlane>> ControlPlane::open(const TcpOptions& options) {
  TcpOptions own = options;
  own.connections = own.local_connections = 1;  // one connection keeps the messages in order
  own.transfers_max = 1 << 20;                  // so high that kSentMax, a limit for each peer, is reached first
  std::unique_ptr<Transport> inner = KVFERRY_TRY(make_tcp_transport(own));
  std::unique_ptr<ControlPlane> plane(new ControlPlane(std::move(inner)));
  plane->region_ = KVFERRY_TRY(plane->inner_->register_region(plane->memory_.data(), plane->memory_.size()));
  plane->address_.address = plane->inner_->address();
  plane->address_.region = KVFERRY_TRY(plane->inner_->export_region(plane->region_));
  return plane;
}

ControlPeerPtr ControlPlane::reach(const ControlAddress& address, TimeNs now) {
  const auto found = std::find_if(peers_.begin(), peers_.end(), [&](const ControlPeerPtr& peer) {
    return !peer->is_lost_ && peer->address_.address == address.address;
  });
  if (found != peers_.end()) return *found;
  auto peer = std::make_shared<ControlPeer>();
  peer->address_ = address;
  peer->stream_ = random_bytes(kStreamBytes);
  peer->alive_at_ = now;
  if (Result<PeerId> id = inner_->connect(address.address)) {
    peer->id_ = *id;
  } else {
    lose(*peer, id.error().what);
  }
  peers_.push_back(peer);
  return peer;
}

void ControlPlane::send(ControlPeer& peer, const std::string& message) {
  if (peer.is_lost_) return;
  std::string_view left = message;
  do {
    std::string part = peer.stream_;
    part.push_back(left.size() > kPartBytes ? 1 : 0);
    part.append(left.substr(0, kPartBytes));
    left.remove_prefix(std::min(left.size(), kPartBytes));
    peer.queue_.push_back(std::move(part));
  } while (!left.empty());
  const auto found = std::find_if(peers_.begin(), peers_.end(), [&](const auto& one) { return one.get() == &peer; });
  if (found != peers_.end()) submit_queued(ControlPeerPtr(*found));
}

void ControlPlane::submit_queued(const ControlPeerPtr& peer) {
  while (!peer->is_lost_ && !peer->queue_.empty() && peer->num_sent_ < kSentMax) {
    PagedTransfer transfer{peer->id_, Direction::kPush, region_, peer->address_.region, {}, peer->queue_.front()};
    transfer.priority = Priority::kUrgent;
    const Result<TransferId> id = inner_->submit(std::move(transfer));
    if (!id && id.error().code == ErrorCode::kFull) return;
    if (!id) return lose(*peer, id.error().what);
    peer->queue_.pop_front();
    ++peer->num_sent_;
    sent_.emplace(*id, peer);
  }
}

void ControlPlane::lose(ControlPeer& peer, const std::string& why) {
  if (std::exchange(peer.is_lost_, true)) return;
  peer.why_ = why;
  peer.queue_.clear();
  inner_->disconnect(peer.id_);  // the next connect() makes a new connection
}

std::vector<ControlPlane::Incoming> ControlPlane::advance(TimeNs now) {
  for (const Completion& completion : inner_->poll()) {
    const auto sent = sent_.extract(completion.id);
    if (!sent) continue;
    ControlPeer& peer = *sent.mapped();
    --peer.num_sent_;
    if (completion.code == ErrorCode::kOk) {
      peer.alive_at_ = now;
    } else {
      lose(peer, completion.what);
    }
  }
  std::vector<Incoming> incoming;
  for (Notification& note : inner_->poll_notifications()) receive(std::move(note), now, incoming);
  std::erase_if(partial_, [now](const auto& entry) { return now - entry.second.since >= kPartialMax; });
  for (const ControlPeerPtr& peer : peers_) submit_queued(peer);
  std::erase_if(peers_, [this](const ControlPeerPtr& peer) {
    if (peer.use_count() > 1 || !(peer->is_lost_ || peer->is_flushed())) return false;
    if (!peer->is_lost_) inner_->disconnect(peer->id_);
    return true;
  });
  return incoming;
}

void ControlPlane::receive(Notification note, TimeNs now, std::vector<Incoming>& incoming) {
  if (note.body.size() < kHeadBytes) return;
  const std::string stream = note.body.substr(0, kStreamBytes);
  const bool has_more = note.body[kStreamBytes] != 0;
  const std::string_view bytes = std::string_view(note.body).substr(kHeadBytes);
  const std::pair sender(note.member, note.from);
  const auto found = partial_.find(sender);
  if (found == partial_.end() && !has_more) {
    incoming.push_back({std::move(note.from), std::string(bytes), std::move(note.member)});
    return;
  }
  Partial& partial = partial_[sender];
  // A partial message of an earlier connection is dropped, because its missing parts never come.
  if (partial.stream != stream) partial = {stream, {}, now, false};
  if (!partial.is_dropped) partial.bytes.append(bytes);
  if (partial.bytes.size() > kMessageBytesMax) {
    log().warn("nccl: dropped a message of a peer, because it has more than the allowed {} bytes", kMessageBytesMax);
    partial.bytes = {};
    partial.is_dropped = true;
  }
  if (has_more) return;
  if (!partial.is_dropped) incoming.push_back({note.from, std::move(partial.bytes), note.member});
  partial_.erase(sender);
}

bool ControlPlane::is_flushed() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const ControlPeerPtr& peer) { return peer->is_lost() || peer->is_flushed(); });
}

}  // namespace kvferry::nccl
