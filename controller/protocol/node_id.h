// One registered node.
#pragma once

#include <cstdint>

#include "transport/base/ids.h"

namespace kvferry::controller {

/// One registered (namespace, engine id, incarnation). Never used again, so whatever comes late for an expired node or
/// a fenced incarnation finds nobody.
using NodeId = StrongId<struct NodeIdTag, std::uint64_t>;

}  // namespace kvferry::controller
