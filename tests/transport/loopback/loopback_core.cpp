#include "tests/transport/loopback/loopback_core.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "transport/base/checksum.h"

namespace kvferry {

LoopbackCore::LoopbackCore(LoopbackOptions options) : options_(options), random_(options.seed), held_(options.held) {}

std::uint64_t LoopbackCore::random_below(std::uint64_t bound) { return random_() % bound; }

std::shared_ptr<LoopbackNode> LoopbackCore::add_node(std::uint32_t transfers_max) {
  const std::lock_guard lock(mutex_);
  const std::string address = fmt::format("loopback:{}", ++num_nodes_made_);
  auto node = std::make_shared<LoopbackNode>(transfers_max, address);
  node->incarnation = num_nodes_made_;
  node->address = node->source_address = address;
  nodes_.emplace(node->address, node);
  return node;
}

Result<PeerId> LoopbackCore::connect(LoopbackNode& node, const std::string& address) {
  const std::lock_guard lock(mutex_);
  if (!node.alive) return TransferTable::is_shut_down();
  const auto found = nodes_.find(address);
  if (found == nodes_.end())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("malformed peer address of {} bytes: it is no address of this fabric", address.size())};
  const TransferTable::Connected connected = node.transfer_table.connect(address, found->second->incarnation);
  node.peers.try_emplace(connected.peer, LoopbackPeer{address, false});
  return connected.peer;
}

void LoopbackCore::disconnect(LoopbackNode& node, PeerId peer) {
  const std::lock_guard lock(mutex_);
  if (!node.transfer_table.remove_peer(peer)) return;
  lose_locked(node, peer, "disconnected");
  node.peers.erase(peer);
}

Result<TransferId> LoopbackCore::submit(LoopbackNode& node, PagedTransfer transfer) {
  const std::lock_guard lock(mutex_);
  if (!node.alive) return TransferTable::is_shut_down();
  AcceptedTransfer accepted = KVFERRY_TRY(node.transfer_table.accept(std::move(transfer)));
  const TransferId id = accepted.id;
  const std::size_t num_copies = accepted.copies.size();
  Moving moving{&node, nodes_.at(node.peers.at(accepted.peer).address), std::move(accepted), 0, 0, std::nullopt, {}};
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

Result<void> LoopbackCore::feed(LoopbackNode& node, TransferId id, const std::vector<CopyRange>& ranges,
                                std::vector<std::uint64_t> checksums, bool is_last) {
  const std::lock_guard lock(mutex_);
  FedCopies fed = KVFERRY_TRY(node.transfer_table.feed(id, ranges, std::move(checksums), is_last));
  const auto is_it = [&](const Moving& moving) { return moving.owner == &node && moving.transfer.id == id; };
  AcceptedTransfer& transfer = std::find_if(moving_.begin(), moving_.end(), is_it)->transfer;
  transfer.append(fed);
  if (!held_) run_locked();
  return {};
}

void LoopbackCore::cancel(LoopbackNode& node, TransferId id) {
  const std::lock_guard lock(mutex_);
  if (!node.transfer_table.request_cancel(id)) return;
  for (std::size_t index = moving_.size(); index-- > 0;) {
    if (moving_[index].owner == &node && moving_[index].transfer.id == id)
      finish_locked(index, ErrorCode::kCancelled, "cancelled");
  }
}

void LoopbackCore::set_source_address(LoopbackNode& node, const std::string& address) {
  const std::lock_guard lock(mutex_);
  node.source_address = address;
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

std::vector<std::size_t> LoopbackCore::movable_locked() const {
  const auto is_movable = [](const Moving& moving) {
    return moving.num_copied < moving.transfer.copies.size() || moving.transfer.is_complete || !moving.target->alive ||
           moving.owner->peers.at(moving.transfer.peer).lost;
  };
  std::map<std::pair<LoopbackNode*, PeerId>, Priority> most_urgent;
  for (const Moving& moving : moving_) {
    if (!is_movable(moving)) continue;
    Priority& best = most_urgent.try_emplace({moving.owner, moving.transfer.peer}, Priority::kBackground).first->second;
    best = std::min(best, moving.transfer.priority);
  }
  std::vector<std::size_t> movable;
  for (std::size_t index = 0; index < moving_.size(); ++index) {
    const Moving& moving = moving_[index];
    if (is_movable(moving) && moving.transfer.priority == most_urgent.at({moving.owner, moving.transfer.peer}))
      movable.push_back(index);
  }
  return movable;
}

bool LoopbackCore::step_locked() {
  const std::vector<std::size_t> movable = movable_locked();
  if (movable.empty()) return false;
  const std::size_t index = movable[random_below(movable.size())];
  Moving& moving = moving_[index];
  const AcceptedTransfer& transfer = moving.transfer;
  if (!moving.target->alive || moving.lost_at == moving.num_copied || moving.owner->peers.at(transfer.peer).lost) {
    lose_locked(*moving.owner, transfer.peer, moving.target->alive ? "the connection broke" : "the peer is gone");
  } else if (moving.num_copied < transfer.copies.size()) {
    if (Result<void> copied = copy_locked(moving); !copied)
      finish_locked(index, copied.error().code, std::move(copied.error().what));
  } else if (moving.delay_steps > 0) {
    --moving.delay_steps;
  } else if (!moving.corrupt_ranges.empty()) {
    finish_locked(index, ErrorCode::kCorrupt, "a checksum differs");
  } else {
    if (!transfer.notification.empty())
      moving.target->transfer_table.completion_queue().notify({moving.owner->source_address, transfer.notification});
    finish_locked(index, ErrorCode::kOk, "");
  }
  return true;
}

Result<void> LoopbackCore::copy_locked(Moving& moving) {
  const AcceptedTransfer& transfer = moving.transfer;
  const CopyRange& copy = transfer.copies[moving.num_copied];
  const RegionId region{transfer.remote.region};
  const GrantId grant{transfer.remote.grant};
  std::byte* remote = KVFERRY_TRY(
      moving.target->transfer_table.begin_access(region, grant, copy.remote_offset, copy.bytes, !transfer.is_pull()));
  std::byte* local = transfer.local_base + copy.local_offset;
  const bool is_pull = transfer.direction == Direction::kPull;
  std::byte* to = is_pull ? local : remote;
  std::memmove(to, is_pull ? remote : local, copy.bytes);
  if (!transfer.checksums.empty() && chunk_checksum({to, copy.bytes}) != transfer.checksums[moving.num_copied])
    moving.corrupt_ranges.push_back(static_cast<std::uint32_t>(moving.num_copied));
  moving.target->transfer_table.end_access(region, grant);
  ++moving.num_copied;
  return {};
}

void LoopbackCore::lose_locked(LoopbackNode& owner, PeerId peer, const std::string& what) {
  owner.transfer_table.lose_peer(peer);
  owner.peers.at(peer).lost = true;
  for (std::size_t index = moving_.size(); index-- > 0;) {
    if (moving_[index].owner == &owner && moving_[index].transfer.peer == peer)
      finish_locked(index, ErrorCode::kPeerLost, what);
  }
}

void LoopbackCore::finish_locked(std::size_t index, ErrorCode code, std::string what) {
  Moving finished = std::move(moving_[index]);
  moving_[index] = std::move(moving_.back());
  moving_.pop_back();
  if (code != ErrorCode::kCorrupt) finished.corrupt_ranges.clear();
  finished.owner->transfer_table.complete(finished.transfer.id, code, std::move(what),
                                          std::move(finished.corrupt_ranges));
}

}  // namespace kvferry
