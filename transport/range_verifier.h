// Computes the checksums of a transfer's ranges, and compares them with the checksums that the submitter passed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/base/checksum.h"
#include "transport/base/device.h"
#include "transport/transfer_table.h"

namespace kvferry {

/// Computes the checksums of consecutive ranges, whose bytes are added in order and in pieces of any size.
class RangeDigest {
 public:
  /// Hashes a piece. `ends_range`: the piece is the last one of its range. The range's checksum is then returned, and
  /// the next piece begins another range.
  std::optional<std::uint64_t> add(std::span<const std::byte> bytes, bool ends_range) {
    if (ends_range && !stream_) return chunk_checksum(bytes);
    if (!stream_) stream_.emplace();
    stream_->update(bytes);
    if (!ends_range) return std::nullopt;
    const std::uint64_t digest = stream_->digest();
    stream_.reset();
    return digest;
  }

 private:
  std::optional<ChecksumStream> stream_;
};

/// Finds the corrupt ranges of one transfer. A transfer with checksums has exactly one copy for each range.
class RangeVerifier {
 public:
  /// `transfer` must outlive the verifier. Transport::feed() may add ranges to the transfer.
  explicit RangeVerifier(const AcceptedTransfer& transfer) : transfer_(transfer) {}
  RangeVerifier(const RangeVerifier&) = delete;
  RangeVerifier& operator=(const RangeVerifier&) = delete;

  void compare(std::size_t range, std::uint64_t digest) {
    if (digest != transfer_.checksums[range]) mark_corrupt(static_cast<std::uint32_t>(range));
  }
  void mark_corrupt(std::uint32_t range) { corrupt_.push_back(range); }
  /// Hashes the range's local bytes on the CPU and compares the checksum.
  void compare_local(std::size_t range) {
    const CopyRange& copy = transfer_.copies[range];
    compare(range, chunk_checksum({transfer_.local_base + copy.local_offset, copy.bytes}));
  }
  /// Counts bytes that arrived, in any order. Returns true if they complete the range. Must be called once for an empty
  /// range.
  bool has_arrived(std::size_t range, std::uint64_t bytes);

  bool has_corrupt() const { return !corrupt_.empty(); }
  /// Returns the corrupt ranges in ascending order.
  std::vector<std::uint32_t> corrupt_ranges() const;
  /// Returns the text for Completion::what, with the number of corrupt ranges.
  std::string what() const;

  /// Starts hashing all ranges' local bytes on their GPU, after the work that is already enqueued on `stream`.
  Result<void> start_on_device(Device& device, DeviceStream stream);
  /// Returns whether a GPU may still be reading the local bytes.
  bool is_hashing() const { return hashes_ != nullptr; }
  /// Returns whether the GPU has hashed all ranges.
  Result<bool> is_device_done() const { return hashes_->is_done(); }
  /// Waits for the GPU and compares the checksums. Afterwards is_hashing() is false, also after an error.
  Result<void> compare_device();
  /// Drops the checksums, which the GPU may still be computing.
  void drop_device() { hashes_.reset(); }

 private:
  const AcceptedTransfer& transfer_;
  std::vector<std::uint32_t> corrupt_;
  std::vector<std::uint64_t> arrived_bytes_;  // number of bytes that have arrived, by range
  std::unique_ptr<Device::Checksums> hashes_;
};

}  // namespace kvferry
