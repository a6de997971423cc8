// XXH3-64, the checksum of chunks, of bytes that are all there or come in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

struct XXH3_state_s;  // libxxhash's

namespace kvferry {

/// The same on every node, whatever instructions it has.
std::uint64_t chunk_checksum(std::span<const std::byte> bytes);

/// Fed while a piece is still in cache, so that hashing costs no second pass over memory. One thread at a time.
class ChecksumStream {
 public:
  ChecksumStream();
  void update(std::span<const std::byte> bytes);
  /// Of all bytes so far, in order.
  std::uint64_t digest() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace kvferry
