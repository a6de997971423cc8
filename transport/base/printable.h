// Turns bytes and text, for example those of other processes, into printable text.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvferry {

/// Limit on the bytes that are shown of a peer's text, such as a reason for a refusal.
constexpr std::size_t kPeerTextMax = 1024;

/// Returns the first `bytes_max` bytes of the text, with a question mark in the place of each byte that is no printable
/// ASCII character.
inline std::string printable(std::string_view text, std::size_t bytes_max = std::string_view::npos) {
  std::string safe(text.substr(0, bytes_max));
  std::ranges::replace_if(
      safe, [](char c) { return c < ' ' || c > '~'; }, '?');
  return safe;
}

/// Returns two digits, 0-9 and a-f, for each byte.
inline std::string hex_of(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (const char byte : bytes) {
    const auto value = static_cast<std::uint8_t>(byte);
    hex += kDigits[value / 16];
    hex += kDigits[value % 16];
  }
  return hex;
}

}  // namespace kvferry
