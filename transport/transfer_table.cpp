#include "transport/transfer_table.h"

#include <limits>
#include <random>
#include <utility>

#include "transport/base/check.h"
#include "transport/copy_plan.h"

namespace kvferry {

Result<void> TransferTable::check_region(const void* base, std::uint64_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(base);
  if (base == nullptr || bytes == 0 || bytes > std::numeric_limits<std::uintptr_t>::max() - first)
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("cannot register {} bytes at {}: a mapped, non-empty range is needed", bytes, fmt::ptr(base))};
  return {};
}

Result<void> TransferTable::check_host_region(const MemoryRegion& memory, std::string_view backend) {
  if (memory.device != nullptr)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("{} can't reach memory of {}: it moves host memory", backend, memory.device->describe())};
  return check_region(memory.base, memory.bytes);
}

std::uint64_t TransferTable::random_incarnation() {
  std::random_device random;
  return (std::uint64_t{random()} << 32) | random();
}

RegionId TransferTable::new_region_id() {
  const std::lock_guard lock(mutex_);
  return RegionId{++num_regions_made_};
}

void TransferTable::add_region(RegionId id, void* base, std::uint64_t bytes, std::string exported) {
  const std::lock_guard lock(mutex_);
  regions_.emplace(id, Region{static_cast<std::byte*>(base), bytes, std::move(exported)});
}

Result<std::string> TransferTable::exported(RegionId region) const {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end())
    return Error{ErrorCode::kInvalidArgument, fmt::format("region {} is not registered", region)};
  return found->second.exported;
}

Result<void> TransferTable::remove_region(RegionId region) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end())
    return Error{ErrorCode::kInvalidArgument, fmt::format("region {} is not registered", region)};
  if (found->second.num_users > 0)
    return Error{ErrorCode::kFull,
                 fmt::format("{} transfers still use region {}; unregister it after their completions",
                             found->second.num_users, region)};
  if (found->second.num_borrowers > 0)
    return Error{ErrorCode::kFull, fmt::format("{} peers are in the middle of a copy with region {}; try again",
                                               found->second.num_borrowers, region)};
  std::erase_if(grants_, [&](const auto& entry) { return entry.second.region == region; });
  regions_.erase(found);
  return {};
}

Result<GrantId> TransferTable::add_grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, std::string rkey) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end())
    return Error{ErrorCode::kInvalidArgument, fmt::format("region {} is not registered", region)};
  if (bytes == 0 || !is_inside(offset, bytes, found->second.bytes))
    return Error{ErrorCode::kInvalidArgument, fmt::format("a grant of [{}, +{}) does not fit region {} of {} bytes",
                                                          offset, bytes, region, found->second.bytes)};
  if (grants_.size() >= kGrantsMax)
    return Error{ErrorCode::kFull, fmt::format("{} grants are out, which is the limit; revoke one first", kGrantsMax)};
  RegionDescriptor descriptor = decode<RegionDescriptor>(found->second.exported, "own descriptor").value();
  const GrantId id{++num_grants_made_};
  descriptor.base += offset;
  descriptor.bytes = bytes;
  descriptor.rkey = std::move(rkey);
  descriptor.grant = id.value;
  grants_.emplace(id, Grant{region, offset, bytes, encode(descriptor)});
  return id;
}

Result<std::string> TransferTable::exported(GrantId grant) const {
  const std::lock_guard lock(mutex_);
  const auto found = grants_.find(grant);
  if (found == grants_.end() || found->second.is_revoked)
    return Error{ErrorCode::kInvalidArgument, fmt::format("grant {} is not out", grant)};
  return found->second.exported;
}

Result<void> TransferTable::remove_grant(GrantId grant) {
  const std::lock_guard lock(mutex_);
  const auto found = grants_.find(grant);
  if (found == grants_.end()) return Error{ErrorCode::kInvalidArgument, fmt::format("grant {} is not out", grant)};
  found->second.is_revoked = true;
  if (found->second.num_borrowers > 0)
    return Error{ErrorCode::kFull, fmt::format("a peer is in the middle of a copy by grant {}; ask again", grant)};
  grants_.erase(found);
  return {};
}

Result<std::byte*> TransferTable::borrow(RegionId region, GrantId grant, std::uint64_t offset, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end())
    return Error{ErrorCode::kRefused, fmt::format("the peer has unregistered region {}", region)};
  if (grant.value == 0) {
    if (!is_inside(offset, bytes, found->second.bytes))
      return Error{ErrorCode::kRefused,
                   fmt::format("[{}, +{}) is not inside the peer's region {}", offset, bytes, region)};
    ++found->second.num_borrowers;
    return found->second.base + offset;
  }
  const auto lent = grants_.find(grant);
  if (lent == grants_.end() || lent->second.region != region || lent->second.is_revoked)
    return Error{ErrorCode::kRefused, fmt::format("the peer has taken grant {} back", grant)};
  if (!is_inside(offset, bytes, lent->second.bytes))
    return Error{ErrorCode::kRefused, fmt::format("[{}, +{}) is not inside the peer's grant {}", offset, bytes, grant)};
  ++found->second.num_borrowers;
  ++lent->second.num_borrowers;
  return found->second.base + lent->second.offset + offset;
}

void TransferTable::give_back(RegionId region, GrantId grant) {
  const std::lock_guard lock(mutex_);
  --regions_.at(region).num_borrowers;
  if (grant.value != 0) --grants_.at(grant).num_borrowers;
}

TransferTable::Connected TransferTable::connect(const std::string& address, std::uint64_t incarnation) {
  const std::lock_guard lock(mutex_);
  if (const auto found = connected_.find(address); found != connected_.end()) return {found->second, false};
  const PeerId id{++num_peers_made_};
  peers_.emplace(id, Peer{address, incarnation});
  connected_.emplace(address, id);
  return {id, true};
}

bool TransferTable::forget_peer(PeerId peer) {
  lose_peer(peer);
  const std::lock_guard lock(mutex_);
  return peers_.erase(peer) > 0;
}

void TransferTable::lose_peer(PeerId peer) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  const auto connected = connected_.find(found->second.address);
  if (connected != connected_.end() && connected->second == peer) connected_.erase(connected);
}

Result<AcceptedTransfer> TransferTable::accept(PagedTransfer transfer) {
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
  // Unread completions count as well, so that an owner who never polls can't make the completion_queue grow without limit.
  if (open_.size() + completion_queue_.num_completions() >= transfers_max_)
    return Error{
        ErrorCode::kFull,
        fmt::format("{} transfers are in flight or unread, which is the limit; poll and try again", transfers_max_)};
  Open open;
  open.region = transfer.local;
  open.remote_bytes = remote->bytes;
  open.is_complete = !transfer.is_fed;
  open.has_checksums = !transfer.checksums.empty();
  open.has_ranges = !transfer.ranges.empty();
  Result<std::vector<CopyRange>> copies = plan(open, transfer.ranges, transfer.checksums.size());
  if (!copies) return std::move(copies).error();

  const TransferId id{++num_transfers_made_};
  open_.emplace(id, open);
  ++region->second.num_users;
  return AcceptedTransfer{id,
                          transfer.peer,
                          transfer.direction,
                          transfer.local,
                          region->second.base,
                          std::move(*remote),
                          std::move(*copies),
                          std::move(transfer.checksums),
                          std::move(transfer.notification),
                          transfer.priority,
                          !transfer.is_fed};
}

Result<std::vector<CopyRange>> TransferTable::plan(const Open& open, const std::vector<CopyRange>& ranges,
                                            std::size_t num_checksums) const {
  if (num_checksums != 0 && num_checksums != ranges.size())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("{} checksums for {} ranges: one each or none is allowed", num_checksums, ranges.size())};
  Result<std::vector<CopyRange>> copies = plan_copies(ranges, regions_.at(open.region).bytes, open.remote_bytes);
  if (copies && num_checksums != 0) return ranges;
  return copies;
}

Result<FedCopies> TransferTable::feed(TransferId id, const std::vector<CopyRange>& ranges,
                               std::vector<std::uint64_t> checksums, bool is_last) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  if (found == open_.end() || found->second.is_complete)
    return Error{ErrorCode::kInvalidArgument, fmt::format("transfer {} takes no more ranges", id)};
  Open& open = found->second;
  if (open.has_ranges && !ranges.empty() && open.has_checksums == checksums.empty())
    return Error{ErrorCode::kInvalidArgument, fmt::format("transfer {} was begun {} checksums and must go on so", id,
                                                          open.has_checksums ? "with" : "without")};
  Result<std::vector<CopyRange>> copies = plan(open, ranges, checksums.size());
  if (!copies) return std::move(copies).error();
  open.has_checksums |= !checksums.empty();
  open.has_ranges |= !ranges.empty();
  open.is_complete = is_last;
  return FedCopies{std::move(*copies), std::move(checksums), is_last};
}

bool TransferTable::request_cancel(TransferId id) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  return found != open_.end() && !std::exchange(found->second.cancel_requested, true);
}

void TransferTable::complete(TransferId id, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt_ranges) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  KVFERRY_CHECK(found != open_.end(), "transfer {} completed twice", id);
  --regions_.at(found->second.region).num_users;
  open_.erase(found);
  completion_queue_.complete({id, code, std::move(what), std::move(corrupt_ranges)});
}

std::size_t TransferTable::num_open() const {
  const std::lock_guard lock(mutex_);
  return open_.size();
}

}  // namespace kvferry
