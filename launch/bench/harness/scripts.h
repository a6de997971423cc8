// The Python programs of launch/bench/peers, which the build embeds in the binary.
#pragma once

#include <span>
#include <string_view>

namespace kvferry::bench {

struct Script {
  std::string_view name;
  std::string_view text;
};

std::span<const Script> scripts();

}  // namespace kvferry::bench
