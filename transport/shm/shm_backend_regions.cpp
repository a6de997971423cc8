// The shared memory backend's regions and grants: each has a slot on the control page, which peers look at before they
// copy.
#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "transport/shm/shm_backend.h"

namespace kvferry::shm {
namespace {

RegionMemoryKey key_of(const std::string& descriptor) {
  const std::string rkey = decode<RegionDescriptor>(descriptor, "own descriptor").value().rkey;
  return decode<RegionMemoryKey>(rkey, "own key").value();
}

Error is_busy(GrantId grant) {
  return Error{ErrorCode::kFull, fmt::format("a peer's copy still uses grant {}; try again", grant)};
}

}  // namespace

Result<Backend::RegionKey> ShmBackend::open_region(RegionId id, const MemoryRegion& memory) {
  KVFERRY_TRY(TransferTable::check_host_region(memory, "shared memory"));
  OwnedFd fd;
  if (memory.fd >= 0) {
    fd = OwnedFd(::fcntl(memory.fd, F_DUPFD_CLOEXEC, 0));
    if (!fd)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("cannot duplicate file descriptor {} of the memory to register: it is closed, or the "
                               "process has no descriptor left (ulimit -n)",
                               memory.fd)};
  }
  const std::uint32_t slot = KVFERRY_TRY(reserve_slot());
  const RegionMemoryKey key{bool{fd}, reinterpret_cast<std::uintptr_t>(memory.base), slot, memory.needs_grant_to_write};
  post_and_wait([&] {
    if (fd) shared_regions_.insert_or_assign(id, SharedRegion{std::move(fd), memory.fd_offset, memory.bytes});
    control_->open(slot, ControlPage::pass(id.value));
  });
  return RegionKey{encode(key)};
}

Result<void> ShmBackend::close_region(RegionId id, bool) {
  for (const auto& [grant, granted] : grants_) {
    if (granted.region == id && !close_slot(granted.slot)) return is_busy(grant);
  }
  const std::string exported = KVFERRY_TRY(table_.exported(id));
  const std::uint32_t slot = key_of(exported).slot;
  if (!close_slot(slot))
    return Error{ErrorCode::kFull, fmt::format("a peer's copy still uses region {}; try again", id)};
  KVFERRY_TRY(table_.remove_region(id));
  free_slots_.push_back(slot);
  std::erase_if(grants_, [&](const auto& entry) {
    if (entry.second.region != id) return false;
    free_slots_.push_back(entry.second.slot);
    return true;
  });
  post_and_wait([&] {
    if (shared_regions_.erase(id) == 0) return;
    for (const auto& [number, inbound] : inbound_) {
      if (inbound.ring) send_message(inbound.socket.get(), Type::kUnmap, MapRequest{id.value});
    }
  });
  return {};
}

Result<GrantId> ShmBackend::grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) {
  const std::string exported = KVFERRY_TRY(table_.exported(region));
  const std::uint32_t slot = KVFERRY_TRY(reserve_slot());
  RegionMemoryKey key = key_of(exported);
  key.slot = slot;
  key.reads = terms.reads;
  key.writes = terms.writes;
  key.expires_at = table_.expires_at(terms);
  key.member = terms.member;
  Result<GrantId> id = table_.add_grant(region, offset, bytes, terms, encode(key));
  if (id) {
    const std::string granted = table_.exported(*id).value();
    control_->open(slot, ControlPage::pass(decode<RegionDescriptor>(granted, "own descriptor").value()));
    grants_.emplace(*id, Granted{region, slot});
  } else {
    free_slots_.push_back(slot);
  }
  return id;
}

Result<void> ShmBackend::revoke(GrantId grant) {
  const auto granted = grants_.find(grant);
  if (granted == grants_.end())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("grant {} does not exist: it was never given, or is revoked", grant)};
  if (!close_slot(granted->second.slot)) return is_busy(grant);
  KVFERRY_TRY(table_.remove_grant(grant));  // kFull while on_map_request() checks the grant on the progress thread
  free_slots_.push_back(granted->second.slot);
  grants_.erase(granted);
  return {};
}

Result<std::uint32_t> ShmBackend::reserve_slot() {
  if (!free_slots_.empty()) {
    const std::uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
  }
  if (num_slots_made_ == ControlPage::kSlots)
    return Error{ErrorCode::kFull,
                 fmt::format("the limit of {} regions and grants is reached; revoke a grant first", num_slots_made_)};
  return num_slots_made_++;
}

bool ShmBackend::close_slot(std::uint32_t slot) {
  bool is_quiet = false;
  post_and_wait([&] {
    control_->close(slot);
    // A peer that has died in the middle of a copy counts as inside until its Inbound is removed, soon afterwards.
    is_quiet = std::none_of(inbound_.begin(), inbound_.end(), [slot](const auto& entry) {
      return entry.second.ring && entry.second.ring->is_inside(slot);
    });
  });
  return is_quiet;
}

}  // namespace kvferry::shm
