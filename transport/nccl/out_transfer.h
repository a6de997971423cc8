// One accepted transfer: its division into pieces, the number of missing bytes, and its outcome. The object sends
// nothing, and computes no checksums except those of empty ranges. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/device.h"
#include "transport/nccl/messages.h"
#include "transport/piece_cursor.h"
#include "transport/range_verifier.h"
#include "transport/transfer_table.h"

namespace kvferry::nccl {

/// Consecutive bytes of one copy.
struct Part {
  std::size_t copy = 0;
  std::byte* local = nullptr;
  std::uint64_t remote_offset = 0;
  std::uint64_t bytes = 0;
};

class OutTransfer {
 public:
  explicit OutTransfer(AcceptedTransfer accepted);

  const AcceptedTransfer& what() const { return what_; }
  bool is_pull() const { return what_.is_pull(); }
  void feed(const FedCopies& more);

  /// Ends the transfer: no further work is begun for it. Only the first call's code and reason are kept.
  void end(ErrorCode code, std::string what);
  bool is_ended() const { return code_ != ErrorCode::kOk; }
  ErrorCode code() const { return code_; }
  const std::string& why() const { return why_; }

  /// Returns whether bytes are left for take_piece().
  bool has_piece() const { return !is_ended() && !cursor_.is_at_end(what_.copies); }
  /// Takes up to `bytes_max` of the next bytes, of one or more copies.
  std::vector<Part> take_piece(std::uint64_t bytes_max);
  /// Records that all bytes of a piece have arrived.
  void arrived(std::span<const Part> parts);

  /// Returns whether copies with checksums have arrived in full and were not returned by take_hashable() yet.
  bool has_hashable() const { return !is_ended() && !to_hash_.empty(); }
  std::vector<Part> take_hashable();
  /// Handles the checksums of copies that take_hashable() returned.
  void hashed(std::span<const Part> copies, std::span<const std::uint64_t> checksums);

  /// Returns true if all bytes have arrived and match their checksums, so that only the notification is left.
  bool is_delivered() const;
  std::vector<std::uint32_t> corrupt_ranges() const { return verifier_.corrupt_ranges(); }
  void end_if_corrupt();

  std::uint32_t num_touching = 0;  // number of pieces and hashes under way that may touch local memory
  bool is_notifying = false;
  bool is_notified = false;
  TimeNs ended_at = 0;

 private:
  bool is_all_here() const;

  AcceptedTransfer what_;
  RangeVerifier verifier_{what_};
  PieceCursor cursor_;
  std::uint64_t missing_bytes_ = 0;
  std::vector<std::size_t> to_hash_;
  std::size_t num_hashing_ = 0;
  ErrorCode code_ = ErrorCode::kOk;
  std::string why_;
};

}  // namespace kvferry::nccl
