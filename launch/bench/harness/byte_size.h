// Sizes as people write them: 4096, 4KiB, 1.5MiB.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::bench {

/// A number, with B, KiB, MiB or GiB behind it or nothing (bytes). kInvalidArgument: anything else, or no whole bytes.
Result<std::uint64_t> parse_byte_size(std::string_view text);

/// The largest unit that divides it: "4KiB", "4097".
std::string byte_size_text(std::uint64_t bytes);

/// The words between commas; an empty word stays in, for the caller to refuse.
std::vector<std::string> split_list(std::string_view text);

}  // namespace kvferry::bench
