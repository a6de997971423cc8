// What this process and its children hold of the machine, to see whether a long run gives it all back.
#pragma once

#include <cstdint>
#include <string>

namespace kvferry::soak {

/// Of this process and its children together.
struct Resources {
  std::uint64_t num_processes = 0;
  std::uint64_t num_fds = 0;
  std::uint64_t num_threads = 0;
  std::uint64_t num_segments = 0;  // of shared memory, mapped by any of them
  std::uint64_t rss_bytes = 0;

  static Resources now();
  std::string str() const;
};

}  // namespace kvferry::soak
