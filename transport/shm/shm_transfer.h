// One accepted transfer on its way, piece by piece. Private to this folder.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/base/checksum.h"
#include "transport/ledger.h"
#include "transport/shm/messages.h"

namespace kvferry::shm {

/// Where the peer's memory is for this process.
struct RemoteMemory {
  std::byte* mapped_region = nullptr;  // its region's first byte here; null: by CMA
  std::uint64_t mapped_bytes = 0;
  int pid = 0;
};

class ShmTransfer {
 public:
  ShmTransfer(AcceptedTransfer accepted, RegionKey key) : accepted_(std::move(accepted)), key_(key) {}

  const AcceptedTransfer& accepted() const { return accepted_; }
  const RegionKey& key() const { return key_; }
  TransferId id() const { return accepted_.id; }
  void feed(FedCopies more);
  bool has_copies() const { return next_ < accepted_.copies.size(); }
  /// All is copied and nothing more will be fed.
  bool is_copied() const { return !has_copies() && accepted_.is_complete; }
  std::uint64_t bytes_left() const;
  const std::vector<std::uint32_t>& corrupt_ranges() const { return corrupt_ranges_; }

  /// Copies up to `bytes_max` more. Errors: those of copy_by_cma(), and kRefused when the mapping is shorter than the
  /// peer says.
  Result<void> copy_piece(const RemoteMemory& remote, std::uint64_t bytes_max);

 private:
  std::span<const CopyRange> next_piece(std::uint64_t bytes_max);
  void check(std::span<const CopyRange> piece);

  AcceptedTransfer accepted_;
  RegionKey key_;
  std::size_t next_ = 0;          // of accepted_.copies
  std::uint64_t next_bytes_ = 0;  // of copies[next_], already copied
  std::vector<CopyRange> piece_;
  std::optional<ChecksumStream> checksum_;  // of copies[next_]
  std::uint32_t checked_ = 0;               // ranges whose checksum was compared
  std::vector<std::uint32_t> corrupt_ranges_;
  bool bypass_cache_ = false;
};

}  // namespace kvferry::shm
