// What a Publish message says, in the directory's words.
#pragma once

#include <vector>

#include "controller/directory/directory.h"
#include "controller/protocol/wire.h"

namespace kvferry::controller {

SnapshotMark mark_of(const wire::Publish& publish);

/// kCorrupt: columns of unequal length, or a tier that this version doesn't know.
Result<std::vector<ChunkEntry>> chunks_of(const wire::Publish& publish);

}  // namespace kvferry::controller
