// Counts the machine's resources that this process and its children use, to check that a long run gives all of them
// back.
#pragma once

#include <cstdint>
#include <string>

namespace kvferry::soak {

/// The resources of this process and its children together.
struct Resources {
  std::uint64_t num_processes = 0;
  std::uint64_t num_fds = 0;
  std::uint64_t num_threads = 0;
  std::uint64_t num_segments = 0;  // shared memory segments that at least one of them has mapped
  std::uint64_t rss_bytes = 0;

  static Resources now();
  std::string str() const;
};

}  // namespace kvferry::soak
