// One accepted transfer on its way, piece by piece. Private to this folder.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/base/checksum.h"
#include "transport/transfer_table.h"
#include "transport/shm/copy_thread_pool.h"
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

  /// Copies the next piece, a millisecond's work or so. Errors: those of copy_by_cma(), and kRefused when the mapping
  /// is shorter than the peer says.
  Result<void> copy_piece(const RemoteMemory& remote, CopyThreadPool& crew);

 private:
  /// What one thread copies: slices_[begin, end), the first of them of copies[first_range].
  struct Part {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::uint32_t first_range = 0;
    Result<void> result;
    std::vector<std::uint32_t> corrupt_ranges;
  };

  bool has_checksums() const { return !accepted_.checksums.empty(); }
  void cut_piece(std::uint64_t bytes_max);
  void copy_part(Part& part, const RemoteMemory& remote);
  Result<void> copy(std::span<const CopyRange> slices, const RemoteMemory& remote) const;
  /// Compares the checksums of what has just been copied; `range` is that of the first slice, and of the next one
  /// afterwards.
  void check(std::span<const CopyRange> slices, std::uint32_t& range, std::optional<ChecksumStream>& unfinished,
             std::vector<std::uint32_t>& corrupt_ranges) const;

  AcceptedTransfer accepted_;
  RegionKey key_;
  std::size_t next_ = 0;                      // of accepted_.copies
  std::uint64_t next_bytes_ = 0;              // of copies[next_], already copied
  std::vector<CopyRange> slices_;             // of the piece
  std::vector<Part> parts_;                   // of the piece
  std::optional<ChecksumStream> unfinished_;  // of copies[next_], between two pieces
  std::vector<std::uint32_t> corrupt_ranges_;
  bool bypass_cache_ = false;
};

}  // namespace kvferry::shm
