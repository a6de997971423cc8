// The controller's id of a registered node.
#pragma once

#include <cstdint>

#include "transport/base/ids.h"

namespace kvferry::controller {

/// One registered (namespace, engine id, incarnation). Never reused, so late messages of an expired node or a fenced
/// incarnation match no node.
using NodeId = StrongId<struct NodeIdTag, std::uint64_t>;

}  // namespace kvferry::controller
