#include "transport/transfer_table.h"

#include <limits>
#include <utility>

#include "transport/base/check.h"
#include "transport/copy_plan.h"

namespace kvferry {

static Error not_registered(RegionId region, SourceLine where = SourceLine::current()) {
  return {ErrorCode::kInvalidArgument,
          fmt::format("memory region {} is not registered: it never was, or it was unregistered", region), where};
}

Result<void> check_terms(GrantId grant, const GrantTerms& terms, TimeNs expires_at, bool writes, TimeNs now,
                         AskingMember member) {
  if (expires_at != 0 && now >= expires_at)
    return Error{ErrorCode::kRefused, fmt::format("the peer's grant {} has expired; get a new one", grant)};
  if (writes ? !terms.writes : !terms.reads)
    return Error{ErrorCode::kRefused,
                 fmt::format("the peer's grant {} does not allow {}", grant, writes ? "writes" : "reads")};
  if (member && !terms.member.empty() && *member != terms.member)
    return Error{ErrorCode::kRefused, fmt::format("only another member may use the peer's grant {}", grant)};
  return {};
}

Result<void> TransferTable::check_region(const void* base, std::uint64_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(base);
  if (base == nullptr || bytes == 0 || bytes > std::numeric_limits<std::uintptr_t>::max() - first)
    return Error{ErrorCode::kInvalidArgument, fmt::format("cannot register {} bytes of memory at address {}; allowed: "
                                                          "1 byte or more, not at address 0, ending below 2^64",
                                                          bytes, fmt::ptr(base))};
  return {};
}

Result<void> TransferTable::check_host_region(const MemoryRegion& memory, std::string_view backend) {
  if (memory.device != nullptr)
    return Error{ErrorCode::kUnavailable, fmt::format("{} moves host memory only and can't reach memory of {}", backend,
                                                      memory.device->describe())};
  return check_region(memory.base, memory.bytes);
}

RegionId TransferTable::new_region_id() {
  const std::lock_guard lock(mutex_);
  return RegionId{++num_regions_made_};
}

void TransferTable::add_region(RegionId id, const MemoryRegion& memory, std::string exported) {
  const std::lock_guard lock(mutex_);
  regions_.emplace(
      id, Region{static_cast<std::byte*>(memory.base), memory.bytes, std::move(exported), memory.needs_grant_to_write});
}

Result<std::string> TransferTable::exported(RegionId region) const {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end()) return not_registered(region);
  return found->second.exported;
}

Result<void> TransferTable::remove_region(RegionId region) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end()) return not_registered(region);
  if (found->second.num_users > 0)
    return Error{ErrorCode::kFull,
                 fmt::format("{} transfers still use region {}; unregister it after their completions",
                             found->second.num_users, region)};
  if (found->second.num_accesses > 0)
    return Error{ErrorCode::kFull,
                 fmt::format("{} copies of peers still use region {}; try again", found->second.num_accesses, region)};
  std::erase_if(grants_, [&](const auto& entry) { return entry.second.region == region; });
  regions_.erase(found);
  return {};
}

Result<GrantId> TransferTable::add_grant(RegionId region, std::uint64_t offset, std::uint64_t bytes,
                                         const GrantTerms& terms, std::string rkey) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end()) return not_registered(region);
  if (bytes == 0 || !is_inside(offset, bytes, found->second.bytes))
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("a grant of {} bytes at offset {} is empty or exceeds region {} of {} bytes", bytes,
                             offset, region, found->second.bytes)};
  if (terms.lasts_ns < 0 || (!terms.reads && !terms.writes))
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("a grant (reads {}, writes {}) of {} ns must allow reads or writes, and last 0 ns or more",
                             terms.reads, terms.writes, terms.lasts_ns)};
  if (grants_.size() >= kGrantsMax)
    return Error{ErrorCode::kFull, fmt::format("the limit of {} grants is reached; revoke one first", kGrantsMax)};
  RegionDescriptor descriptor = decode<RegionDescriptor>(found->second.exported, "own descriptor").value();
  GrantId id{grant_ids_.draw()};
  while (grants_.contains(id)) id.value = grant_ids_.draw();
  descriptor.base += offset;
  descriptor.bytes = bytes;
  descriptor.rkey = std::move(rkey);
  descriptor.grant = id.value;
  grants_.emplace(id, Grant{region, offset, bytes, terms, expires_at(terms), encode(descriptor)});
  return id;
}

TimeNs TransferTable::expires_at(const GrantTerms& terms) const {
  const TimeNs now = clock_.now();
  const bool ends = terms.lasts_ns != 0 && terms.lasts_ns <= std::numeric_limits<TimeNs>::max() - now;
  return ends ? now + terms.lasts_ns : 0;
}

Result<std::string> TransferTable::exported(GrantId grant) const {
  const std::lock_guard lock(mutex_);
  const auto found = grants_.find(grant);
  if (found == grants_.end() || found->second.is_revoked)
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("grant {} does not exist: it was never given, or is revoked", grant)};
  return found->second.exported;
}

Result<void> TransferTable::remove_grant(GrantId grant) {
  const std::lock_guard lock(mutex_);
  const auto found = grants_.find(grant);
  if (found == grants_.end())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("grant {} does not exist: it was never given, or is revoked", grant)};
  found->second.is_revoked = true;
  if (found->second.num_accesses > 0)
    return Error{ErrorCode::kFull, fmt::format("a peer's copy still uses grant {}; try again", grant)};
  grants_.erase(found);
  return {};
}

Result<std::byte*> TransferTable::begin_access(RegionId region, GrantId grant, std::uint64_t offset,
                                               std::uint64_t bytes, bool writes, AskingMember member) {
  const std::lock_guard lock(mutex_);
  Result<std::byte*> memory = open_access(region, grant, offset, bytes, writes, member);
  if (!memory) ++num_refused_;
  return memory;
}

Result<std::byte*> TransferTable::open_access(RegionId region, GrantId grant, std::uint64_t offset, std::uint64_t bytes,
                                              bool writes, AskingMember member) {
  const auto found = regions_.find(region);
  if (found == regions_.end())
    return Error{ErrorCode::kRefused, fmt::format("the peer has unregistered region {}", region)};
  if (grant.value == 0) {
    if (writes && found->second.needs_grant_to_write)
      return Error{
          ErrorCode::kRefused,
          fmt::format("the peer's region {} can be written only with a grant, and this transfer has none", region)};
    if (!is_inside(offset, bytes, found->second.bytes))
      return Error{ErrorCode::kRefused,
                   fmt::format("{} bytes at offset {} are not inside the peer's region {}, which has {} bytes", bytes,
                               offset, region, found->second.bytes)};
    ++found->second.num_accesses;
    return found->second.base + offset;
  }
  const auto granted = grants_.find(grant);
  if (granted == grants_.end() || granted->second.region != region || granted->second.is_revoked)
    return Error{ErrorCode::kRefused, fmt::format("the peer has revoked grant {}, or never gave it", grant)};
  KVFERRY_TRY(check_terms(grant, granted->second.terms, granted->second.expires_at, writes, clock_.now(), member));
  if (!is_inside(offset, bytes, granted->second.bytes))
    return Error{ErrorCode::kRefused,
                 fmt::format("{} bytes at offset {} are not inside the peer's grant {}, which has {} bytes", bytes,
                             offset, grant, granted->second.bytes)};
  ++found->second.num_accesses;
  ++granted->second.num_accesses;
  return found->second.base + granted->second.offset + offset;
}

void TransferTable::end_access(RegionId region, GrantId grant) {
  const std::lock_guard lock(mutex_);
  --regions_.at(region).num_accesses;
  if (grant.value != 0) --grants_.at(grant).num_accesses;
}

TransferTable::Connected TransferTable::connect(const std::string& address, std::uint64_t incarnation) {
  const std::lock_guard lock(mutex_);
  if (const auto found = connected_.find(address); found != connected_.end()) return {found->second, false};
  const PeerId id{++num_peers_made_};
  peers_.emplace(id, Peer{address, incarnation});
  connected_.emplace(address, id);
  return {id, true};
}

bool TransferTable::remove_peer(PeerId peer) {
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
  Result<RegionDescriptor> remote = decode<RegionDescriptor>(transfer.remote_region, "description of a region");
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
  if (region == regions_.end()) return not_registered(transfer.local);
  if (remote->incarnation != peer->second.incarnation)
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("the remote region is not of peer {}'s process: the peer restarted after it described the "
                             "region, or another process described it; get the description from the peer again",
                             transfer.peer)};
  // Unread completions count too, so that the completion queue of a caller that never polls stays bounded.
  if (open_.size() + completion_queue_.num_completions() >= transfers_max_)
    return Error{
        ErrorCode::kFull,
        fmt::format("the limit of {} transfers, pending or with an unread completion, is reached; poll and try again",
                    transfers_max_)};
  Open open;
  open.peer = transfer.peer;
  open.region = transfer.local;
  open.remote_bytes = remote->bytes;
  open.is_complete = !transfer.is_fed;
  open.has_checksums = !transfer.checksums.empty();
  open.has_ranges = !transfer.ranges.empty();
  std::vector<CopyRange> copies = KVFERRY_TRY(plan(open, std::move(transfer.ranges), transfer.checksums.size()));

  const TransferId id{++num_transfers_made_};
  open_.emplace(id, open);
  ++region->second.num_users;
  return AcceptedTransfer{id,
                          transfer.peer,
                          transfer.direction,
                          transfer.local,
                          region->second.base,
                          std::move(*remote),
                          std::move(copies),
                          std::move(transfer.checksums),
                          std::move(transfer.notification),
                          transfer.priority,
                          !transfer.is_fed};
}

Result<std::vector<CopyRange>> TransferTable::plan(const Open& open, std::vector<CopyRange> ranges,
                                                   std::size_t num_checksums) const {
  if (num_checksums != 0 && num_checksums != ranges.size())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("{} checksums were given for {} ranges; allowed: one for each range, or none",
                             num_checksums, ranges.size())};
  const bool can_join = KVFERRY_TRY(check_ranges(ranges, regions_.at(open.region).bytes, open.remote_bytes));
  if (can_join && num_checksums == 0) join_ranges(ranges);
  return ranges;
}

Result<FedCopies> TransferTable::feed(TransferId id, std::vector<CopyRange> ranges,
                                      std::vector<std::uint64_t> checksums, bool is_last) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  if (found == open_.end() || found->second.is_complete)
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("transfer {} takes no more ranges: it has ended or has all of them", id)};
  Open& open = found->second;
  const bool has_ranges = !ranges.empty();
  if (open.has_ranges && has_ranges && open.has_checksums == checksums.empty())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("the ranges fed to transfer {} must come {} checksums, like the ranges before them", id,
                             open.has_checksums ? "with" : "without")};
  std::vector<CopyRange> copies = KVFERRY_TRY(plan(open, std::move(ranges), checksums.size()));
  open.has_checksums |= !checksums.empty();
  open.has_ranges |= has_ranges;
  open.is_complete = is_last;
  return FedCopies{id, open.peer, std::move(copies), std::move(checksums), is_last};
}

std::optional<PeerId> TransferTable::request_cancel(TransferId id) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  if (found == open_.end() || std::exchange(found->second.cancel_requested, true)) return std::nullopt;
  return found->second.peer;
}

void TransferTable::complete(TransferId id, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt_ranges,
                             std::string_view path) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  KVFERRY_CHECK(found != open_.end(), "transfer {} was completed, but is not pending", id);
  --regions_.at(found->second.region).num_users;
  open_.erase(found);
  completion_queue_.complete({id, code, std::move(what), std::move(corrupt_ranges), path});
}

}  // namespace kvferry
