#include "kernels/device/segment_hash.h"

#define XXH_INLINE_ALL  // defines XXH3_kSecret, which no function of the library returns
#include <xxhash.h>

#include <cstring>

namespace kvferry::device {

SegmentSecret segment_secret() {
  static_assert(sizeof XXH3_kSecret == 192);
  const auto words = [](std::uint64_t* to, std::size_t count, std::size_t offset) {
    std::memcpy(to, XXH3_kSecret + offset, count * sizeof *to);
  };
  SegmentSecret secret;
  words(secret.stripe, kBlockStripes + 7, 0);
  words(secret.last_stripe, 8, sizeof XXH3_kSecret - kStripeBytes - 7);
  words(secret.scramble, 8, sizeof XXH3_kSecret - kStripeBytes);
  words(secret.merge, 8, 11);
  return secret;
}

}  // namespace kvferry::device
