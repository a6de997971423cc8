// The interface of fuzz targets. A target passes foreign bytes to one parser, and ends the process if a promise is
// broken.
//
// kvferry_fuzz runs one target under libFuzzer. fuzz_replay_test runs all targets on their seeds and on the corpus.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/check.h"

namespace kvferry::fuzz {

struct Target {
  std::string_view name;
  void (*run)(std::string_view bytes);
  std::vector<std::string> (*seeds)();  // returns well-formed inputs
};

std::span<const Target> targets();

/// Cuts an input into bytes and parts. After the end of the input, every byte is zero and every part is empty.
class Cutter {
 public:
  explicit Cutter(std::string_view bytes) : rest_(bytes) {}

  bool empty() const { return rest_.empty(); }
  std::uint8_t byte() {
    const std::string_view one = take(1);
    return one.empty() ? 0 : static_cast<std::uint8_t>(one[0]);
  }
  /// Returns the next part. Two bytes before the part give its length. The last part may be shorter.
  std::string_view part() {
    const std::size_t low = byte();
    return take(low | std::size_t{byte()} << 8);
  }
  std::string_view rest() { return take(rest_.size()); }

 private:
  std::string_view take(std::size_t num_bytes) {
    const std::string_view taken = rest_.substr(0, num_bytes);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  std::string_view rest_;
};

/// Returns the bytes in the form that Cutter::part() reads.
inline std::string as_part(std::string_view bytes) {
  std::string part{static_cast<char>(bytes.size() & 0xff), static_cast<char>(bytes.size() >> 8)};
  return part.append(bytes.substr(0, 0xffff));
}

// Each of these lists is defined in the file of its room: connector_targets.cpp, controller_targets.cpp, ...
extern const std::vector<Target> kBaseTargets, kControllerTargets, kServerTargets, kConnectorTargets, kWorkerTargets,
    kTransportTargets, kTcpTargets, kShmTargets;

}  // namespace kvferry::fuzz
