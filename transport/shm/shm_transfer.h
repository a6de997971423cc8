// One accepted transfer in progress, piece by piece. Private to this folder.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/piece_cursor.h"
#include "transport/range_verifier.h"
#include "transport/shm/copy_thread_pool.h"
#include "transport/shm/messages.h"
#include "transport/transfer_table.h"

namespace kvferry::shm {

/// How this process reaches the peer's memory.
struct RemoteMemory {
  std::byte* mapped_region = nullptr;  // where the region is mapped; null: not mapped, CMA reaches it
  std::uint64_t mapped_bytes = 0;
  int pid = 0;
};

class ShmTransfer {
 public:
  ShmTransfer(AcceptedTransfer accepted, RegionMemoryKey key)
      : accepted_(std::move(accepted)), key_(std::move(key)), pass_(ControlPage::pass(accepted_.remote)) {}

  const AcceptedTransfer& accepted() const { return accepted_; }
  const RegionMemoryKey& key() const { return key_; }
  /// Returns what the owner's control page must show in the slot of the region or grant.
  std::uint64_t pass() const { return pass_; }
  TransferId id() const { return accepted_.id; }
  void feed(const FedCopies& more) { accepted_.append(more); }
  /// Returns whether copies are left, including empty ones.
  bool has_copies() const { return !cursor_.is_at_end(accepted_.copies); }
  /// Returns whether all bytes are copied and no more copies will be fed.
  bool is_copied() const { return !has_copies() && accepted_.is_complete; }
  std::uint64_t bytes_left() const;
  const RangeVerifier& verifier() const { return verifier_; }

  /// Copies the next piece. Errors: those of copy_by_cma(); kRefused if the mapping is shorter than the peer's
  /// descriptor says.
  Result<void> copy_piece(const RemoteMemory& remote, CopyThreadPool& threads);

 private:
  /// The slices that one thread copies: slices_[begin, end). The first slice belongs to copies[first_range].
  struct Part {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::uint32_t first_range = 0;
    Result<void> result;
    std::vector<std::uint32_t> corrupt_ranges;
  };

  bool has_checksums() const { return accepted_.has_checksums(); }
  void cut_piece(std::uint64_t bytes_max);
  void copy_part(Part& part, const RemoteMemory& remote);
  Result<void> copy(std::span<const CopyRange> slices, const RemoteMemory& remote) const;
  /// Hashes slices that have just been copied, and compares the checksums of the ranges that end in them. `range`:
  /// index of the first slice's range; check() sets it to the range of the slice after the last one.
  void check(std::span<const CopyRange> slices, std::uint32_t& range, RangeDigest& digest,
             std::vector<std::uint32_t>& corrupt_ranges) const;

  AcceptedTransfer accepted_;
  RegionMemoryKey key_;
  std::uint64_t pass_;
  RangeVerifier verifier_{accepted_};
  PieceCursor cursor_;
  std::vector<CopyRange> slices_;  // the current piece, cut into slices that each lie in one copy
  std::vector<Part> parts_;        // division of the slices among threads
  RangeDigest unfinished_;         // hash state of a range that continues in the next piece
  bool bypass_cache_ = false;
};

}  // namespace kvferry::shm
