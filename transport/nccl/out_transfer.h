// One accepted transfer: how it is cut into pieces, what is still missing of it, and how it ends. Pure: it touches no
// memory and sends nothing. Private to this folder.
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
#include "transport/transfer_table.h"
#include "transport/nccl/messages.h"

namespace kvferry::nccl {

/// Some bytes of one copy.
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
  bool is_pull() const { return what_.direction == Direction::kPull; }
  bool has_checksums() const { return !what_.checksums.empty(); }
  void feed(FedCopies more);

  /// Nothing is to begin for it any more; the first reason stays.
  void end(ErrorCode code, std::string what);
  bool is_ended() const { return code_ != ErrorCode::kOk; }
  ErrorCode code() const { return code_; }
  const std::string& why() const { return why_; }

  /// Bytes that nobody has taken yet.
  bool has_piece() const { return !is_ended() && next_copy_ < what_.copies.size(); }
  /// The next of them, over as many copies as fit.
  std::vector<Part> take_piece(std::uint64_t bytes_max);
  /// All bytes of a piece are where they belong.
  void arrived(std::span<const Part> parts);

  /// Whole copies that arrived and were not compared yet.
  bool has_hashable() const { return !is_ended() && !to_hash_.empty(); }
  std::vector<Part> take_hashable();
  /// What they hash to.
  void hashed(std::span<const Part> copies, std::span<const std::uint64_t> checksums);

  /// Every byte has arrived and was found right, and no more follow: what is left is to notify the peer, if asked to.
  bool is_delivered() const;
  /// Every byte arrived and was compared, and some were wrong. In order.
  const std::vector<std::uint32_t>& corrupt() const { return corrupt_; }
  void end_if_corrupt();

  std::uint32_t num_touching = 0;  // pieces and hashes under way that touch local memory, or may begin to
  bool is_notifying = false;
  bool is_notified = false;
  TimeNs ended_at = 0;

 private:
  void skip_empty_copies();
  bool is_all_here() const;

  AcceptedTransfer what_;
  std::size_t next_copy_ = 0;
  std::uint64_t next_at_ = 0;
  std::uint64_t missing_bytes_ = 0;
  std::vector<std::uint64_t> missing_of_copy_;  // with checksums
  std::vector<std::size_t> to_hash_;
  std::size_t num_hashing_ = 0;
  std::vector<std::uint32_t> corrupt_;
  ErrorCode code_ = ErrorCode::kOk;
  std::string why_;
};

}  // namespace kvferry::nccl
