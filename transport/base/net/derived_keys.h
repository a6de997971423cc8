// Keys that are derived from other keys. OpenSSL's headers are included only by sources.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/base/printable.h"

namespace kvferry::net {

using Bytes32 = std::array<std::uint8_t, 32>;

/// Returns HMAC-SHA256 of `purpose` under `key`.
Bytes32 derive(std::string_view key, std::string_view purpose);
/// Returns the public key of a secret key of Curve25519, as ZeroMQ's CURVE uses it.
Bytes32 curve_public(const Bytes32& secret);
/// Returns the public key of a secret key of Ed25519, as certificates use it.
Bytes32 certificate_public(const Bytes32& secret);
Bytes32 sha256(std::string_view text);

inline std::string_view text_of(const Bytes32& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
/// bytes_of_hex() and bytes32_of_hex() return nullopt if `hex` is not a text of pairs of the digits 0-9 and a-f, and
/// bytes32_of_hex() also if `hex` does not have 64 digits.
std::optional<std::string> bytes_of_hex(std::string_view hex);
std::optional<Bytes32> bytes32_of_hex(std::string_view hex);

}  // namespace kvferry::net
