#include "transport/range_verifier.h"

#include <algorithm>
#include <utility>

namespace kvferry {

bool RangeVerifier::has_arrived(std::size_t range, std::uint64_t bytes) {
  if (arrived_bytes_.size() <= range) arrived_bytes_.resize(transfer_.copies.size());
  arrived_bytes_[range] += bytes;
  return arrived_bytes_[range] == transfer_.copies[range].bytes;
}

std::vector<std::uint32_t> RangeVerifier::corrupt_ranges() const {
  std::vector<std::uint32_t> sorted = corrupt_;
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

std::string RangeVerifier::what() const {
  return fmt::format("the bytes of {} of {} ranges differ from their checksums", corrupt_.size(),
                     transfer_.checksums.size());
}

Result<void> RangeVerifier::start_on_device(Device& device, DeviceStream stream) {
  std::vector<std::span<const std::byte>> ranges;
  ranges.reserve(transfer_.copies.size());
  for (const CopyRange& copy : transfer_.copies)
    ranges.emplace_back(transfer_.local_base + copy.local_offset, copy.bytes);
  hashes_ = KVFERRY_TRY(device.checksums(ranges, stream));
  return {};
}

Result<void> RangeVerifier::compare_device() {
  const std::unique_ptr<Device::Checksums> hashes = std::move(hashes_);
  const std::vector<std::uint64_t> digests = KVFERRY_TRY(hashes->take());
  for (std::size_t range = 0; range < digests.size(); ++range) compare(range, digests[range]);
  return {};
}

}  // namespace kvferry
