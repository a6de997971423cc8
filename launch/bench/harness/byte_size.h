// Byte sizes as users write them: 4096, 4KiB, 1.5MiB; and lists with commas.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::bench {

/// Parses a number of bytes, optionally followed by B, KiB, MiB or GiB. kInvalidArgument: anything else, or not a whole
/// number of bytes.
Result<std::uint64_t> parse_byte_size(std::string_view text);

/// The size in the largest unit that divides it: "4KiB", "4097".
std::string byte_size_text(std::uint64_t bytes);

/// The words between commas, empty ones included.
std::vector<std::string> split_list(std::string_view text);

}  // namespace kvferry::bench
