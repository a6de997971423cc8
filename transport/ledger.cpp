#include "transport/ledger.h"

#include <limits>
#include <utility>

#include "transport/base/check.h"
#include "transport/copy_plan.h"

namespace kvferry {

Result<void> Ledger::check_region(const void* base, std::uint64_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(base);
  if (base == nullptr || bytes == 0 || bytes > std::numeric_limits<std::uintptr_t>::max() - first)
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("cannot register {} bytes at {}: a mapped, non-empty range is needed", bytes, fmt::ptr(base))};
  return {};
}

RegionId Ledger::new_region_id() {
  const std::lock_guard lock(mutex_);
  return RegionId{++num_regions_made_};
}

void Ledger::add_region(RegionId id, void* base, std::uint64_t bytes, std::string exported) {
  const std::lock_guard lock(mutex_);
  regions_.emplace(id, Region{static_cast<std::byte*>(base), bytes, std::move(exported), 0});
}

Result<std::string> Ledger::exported(RegionId region) const {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end())
    return Error{ErrorCode::kInvalidArgument, fmt::format("region {} is not registered", region)};
  return found->second.exported;
}

Result<void> Ledger::remove_region(RegionId region) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end())
    return Error{ErrorCode::kInvalidArgument, fmt::format("region {} is not registered", region)};
  if (found->second.num_users > 0)
    return Error{ErrorCode::kFull,
                 fmt::format("{} transfers still use region {}; unregister it after their completions",
                             found->second.num_users, region)};
  regions_.erase(found);
  return {};
}

Ledger::Connected Ledger::connect(const std::string& address, std::uint64_t incarnation) {
  const std::lock_guard lock(mutex_);
  if (const auto found = connected_.find(address); found != connected_.end()) return {found->second, false};
  const PeerId id{++num_peers_made_};
  peers_.emplace(id, Peer{address, incarnation});
  connected_.emplace(address, id);
  return {id, true};
}

bool Ledger::forget_peer(PeerId peer) {
  lose_peer(peer);
  const std::lock_guard lock(mutex_);
  return peers_.erase(peer) > 0;
}

void Ledger::lose_peer(PeerId peer) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  const auto connected = connected_.find(found->second.address);
  if (connected != connected_.end() && connected->second == peer) connected_.erase(connected);
}

Result<AcceptedTransfer> Ledger::accept(PagedTransfer transfer) {
  Result<RegionDescriptor> remote = decode<RegionDescriptor>(transfer.remote_region, "region descriptor");
  if (!remote) return Error{ErrorCode::kInvalidArgument, std::move(remote.error().what)};
  if (transfer.notification.size() > kNotificationBytesMax)
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("a notification of {} bytes is too long: at most {} are allowed",
                             transfer.notification.size(), kNotificationBytesMax)};

  const std::lock_guard lock(mutex_);
  const auto peer = peers_.find(transfer.peer);
  if (peer == peers_.end())
    return Error{ErrorCode::kInvalidArgument, fmt::format("peer {} is not connected", transfer.peer)};
  const auto region = regions_.find(transfer.local);
  if (region == regions_.end())
    return Error{ErrorCode::kInvalidArgument, fmt::format("region {} is not registered", transfer.local)};
  if (remote->incarnation != peer->second.incarnation)
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("the remote region belongs to another incarnation than peer {}", transfer.peer)};
  Result<std::vector<CopyRange>> copies = plan_copies(transfer.ranges, region->second.bytes, remote->bytes);
  if (!copies) return std::move(copies).error();
  // Unread completions count as well, so that an owner who never polls can't make the outbox grow without limit.
  if (open_.size() + outbox_.num_completions() >= transfers_max_)
    return Error{
        ErrorCode::kFull,
        fmt::format("{} transfers are in flight or unread, which is the limit; poll and try again", transfers_max_)};

  const TransferId id{++num_transfers_made_};
  open_.emplace(id, Open{transfer.local, false});
  ++region->second.num_users;
  return AcceptedTransfer{id,
                          transfer.peer,
                          transfer.direction,
                          transfer.local,
                          region->second.base,
                          remote->base,
                          std::move(remote->rkey),
                          std::move(*copies),
                          std::move(transfer.notification)};
}

bool Ledger::request_cancel(TransferId id) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  return found != open_.end() && !std::exchange(found->second.cancel_requested, true);
}

void Ledger::complete(TransferId id, ErrorCode code, std::string what) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  KVFERRY_CHECK(found != open_.end(), "transfer {} completed twice", id);
  --regions_.at(found->second.region).num_users;
  open_.erase(found);
  outbox_.complete({id, code, std::move(what)});
}

std::size_t Ledger::num_open() const {
  const std::lock_guard lock(mutex_);
  return open_.size();
}

}  // namespace kvferry
