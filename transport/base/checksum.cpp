#include "transport/base/checksum.h"

#ifdef KVFERRY_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>  // turns the XXH3_ names below into those that pick the instruction set when they run
#else
#include <xxhash.h>
#endif

#include "transport/base/check.h"

namespace kvferry {

std::uint64_t chunk_checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

ChecksumStream::ChecksumStream() : state_(XXH3_createState()) {
  KVFERRY_CHECK(state_ != nullptr && XXH3_64bits_reset(state_.get()) == XXH_OK, "no memory for a checksum's state");
}

void ChecksumStream::update(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;  // an empty span may hold a null address, which libxxhash 0.8.0 refuses
  KVFERRY_CHECK(XXH3_64bits_update(state_.get(), bytes.data(), bytes.size()) == XXH_OK, "checksum update refused");
}

std::uint64_t ChecksumStream::digest() const { return XXH3_64bits_digest(state_.get()); }

void ChecksumStream::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

}  // namespace kvferry
