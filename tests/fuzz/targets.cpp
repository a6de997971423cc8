#include "tests/fuzz/target.h"

namespace kvferry::fuzz {

std::span<const Target> targets() {
  static const std::vector<Target> all = [] {
    std::vector<Target> made;
    for (const auto* some : {&kBaseTargets, &kControllerTargets, &kServerTargets, &kConnectorTargets, &kWorkerTargets,
                             &kTransportTargets, &kTcpTargets, &kShmTargets})
      made.insert(made.end(), some->begin(), some->end());
    return made;
  }();
  return all;
}

}  // namespace kvferry::fuzz
