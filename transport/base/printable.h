// Text of others made safe for terminals and logs.
#pragma once

#include <algorithm>
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

}  // namespace kvferry
