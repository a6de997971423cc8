// Turns bytes and text from other processes into printable text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvferry {

/// Returns the text with a question mark in the place of each byte that is no printable ASCII character.
inline std::string printable(std::string_view text) {
  std::string safe(text);
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
