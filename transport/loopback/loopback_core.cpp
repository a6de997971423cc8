#include "transport/loopback/loopback_core.h"

#include <cstring>
#include <utility>

namespace kvferry {

LoopbackCore::LoopbackCore(LoopbackOptions options) : options_(options), random_(options.seed), held_(options.held) {}

std::uint64_t LoopbackCore::random_below(std::uint64_t bound) { return random_() % bound; }

std::shared_ptr<LoopbackNode> LoopbackCore::add_node(std::uint32_t transfers_max) {
  const std::lock_guard lock(mutex_);
  auto node = std::make_shared<LoopbackNode>(transfers_max);
  node->incarnation = ++num_nodes_made_;
  node->address = fmt::format("loopback:{}", node->incarnation);
  nodes_.emplace(node->address, node);
  return node;
}

Result<PeerId> LoopbackCore::connect(LoopbackNode& node, const std::string& address) {
  const std::lock_guard lock(mutex_);
  if (!node.alive) return Error{ErrorCode::kCancelled, "the transport is shut down"};
  const auto found = nodes_.find(address);
  if (found == nodes_.end())
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("malformed peer address of {} bytes: it must be what address() of a transport of this fabric gave",
                    address.size())};
  const Ledger::Connected connected = node.ledger.connect(address, found->second->incarnation);
  node.peers.try_emplace(connected.peer, LoopbackPeer{address, false});
  return connected.peer;
}

void LoopbackCore::disconnect(LoopbackNode& node, PeerId peer) {
  const std::lock_guard lock(mutex_);
  if (!node.ledger.forget_peer(peer)) return;
  lose_locked(node, peer, "disconnected");
  node.peers.erase(peer);
}

Result<TransferId> LoopbackCore::submit(LoopbackNode& node, PagedTransfer transfer) {
  const std::lock_guard lock(mutex_);
  if (!node.alive) return Error{ErrorCode::kCancelled, "the transport is shut down"};
  Result<AcceptedTransfer> accepted = node.ledger.accept(std::move(transfer));
  if (!accepted) return std::move(accepted).error();
  const TransferId id = accepted->id;
  const std::size_t num_copies = accepted->copies.size();
  Moving moving{&node, nodes_.at(node.peers.at(accepted->peer).address), std::move(*accepted), 0, 0, std::nullopt};
  if (options_.delay_steps_max > 0)
    moving.delay_steps = static_cast<std::uint32_t>(random_below(std::uint64_t{options_.delay_steps_max} + 1));
  if (options_.loss_rate > 0 && std::bernoulli_distribution(options_.loss_rate)(random_))
    moving.lost_at = random_below(num_copies + 1);
  if (fail_next_ > 0) {
    --fail_next_;
    moving.lost_at = 0;
  }
  moving_.push_back(std::move(moving));
  if (!held_) run_locked();
  return id;
}

void LoopbackCore::cancel(LoopbackNode& node, TransferId id) {
  const std::lock_guard lock(mutex_);
  if (!node.ledger.request_cancel(id)) return;
  for (std::size_t index = moving_.size(); index-- > 0;) {
    if (moving_[index].owner == &node && moving_[index].transfer.id == id)
      finish_locked(index, ErrorCode::kCancelled, "cancelled");
  }
}

bool LoopbackCore::is_alive(const LoopbackNode& node) {
  const std::lock_guard lock(mutex_);
  return node.alive;
}

void LoopbackCore::end(LoopbackNode& node) {
  const std::lock_guard lock(mutex_);
  end_locked(node);
}

void LoopbackCore::end_locked(LoopbackNode& node) {
  if (!std::exchange(node.alive, false)) return;
  for (std::size_t index = moving_.size(); index-- > 0;) {
    if (moving_[index].owner == &node) finish_locked(index, ErrorCode::kCancelled, "the transport is shut down");
  }
  for (auto& [address, other] : nodes_) {
    for (const auto& [peer, entry] : other->peers) {
      if (entry.address == node.address) lose_locked(*other, peer, "the peer is gone");
    }
  }
}

void LoopbackCore::hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void LoopbackCore::release() {
  const std::lock_guard lock(mutex_);
  held_ = false;
  run_locked();
}

bool LoopbackCore::step() {
  const std::lock_guard lock(mutex_);
  return step_locked();
}

void LoopbackCore::kill(const std::string& address) {
  const std::lock_guard lock(mutex_);
  if (const auto found = nodes_.find(address); found != nodes_.end()) end_locked(*found->second);
}

void LoopbackCore::fail_next(std::uint32_t num_transfers) {
  const std::lock_guard lock(mutex_);
  fail_next_ = num_transfers;
}

void LoopbackCore::run_locked() {
  while (step_locked()) continue;
}

bool LoopbackCore::step_locked() {
  if (moving_.empty()) return false;
  const std::size_t index = random_below(moving_.size());
  Moving& moving = moving_[index];
  const AcceptedTransfer& transfer = moving.transfer;
  if (!moving.target->alive || moving.lost_at == moving.num_copied || moving.owner->peers.at(transfer.peer).lost) {
    lose_locked(*moving.owner, transfer.peer, moving.target->alive ? "the connection broke" : "the peer is gone");
  } else if (moving.num_copied < transfer.copies.size()) {
    const CopyRange& copy = transfer.copies[moving.num_copied++];
    std::byte* local = transfer.local_base + copy.local_offset;
    auto* remote = reinterpret_cast<std::byte*>(transfer.remote.base + copy.remote_offset);
    const bool is_pull = transfer.direction == Direction::kPull;
    std::memmove(is_pull ? local : remote, is_pull ? remote : local, copy.bytes);
  } else if (moving.delay_steps > 0) {
    --moving.delay_steps;
  } else {
    if (!transfer.notification.empty())
      moving.target->ledger.outbox().notify({moving.owner->address, transfer.notification});
    finish_locked(index, ErrorCode::kOk, "");
  }
  return true;
}

void LoopbackCore::lose_locked(LoopbackNode& owner, PeerId peer, const std::string& what) {
  owner.ledger.lose_peer(peer);
  owner.peers.at(peer).lost = true;
  for (std::size_t index = moving_.size(); index-- > 0;) {
    if (moving_[index].owner == &owner && moving_[index].transfer.peer == peer)
      finish_locked(index, ErrorCode::kPeerLost, what);
  }
}

void LoopbackCore::finish_locked(std::size_t index, ErrorCode code, std::string what) {
  const Moving finished = std::move(moving_[index]);
  moving_[index] = std::move(moving_.back());
  moving_.pop_back();
  finished.owner->ledger.complete(finished.transfer.id, code, std::move(what));
}

}  // namespace kvferry
