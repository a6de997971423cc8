// The role of a Publish in a snapshot.
#pragma once

namespace kvferry::controller {

/// A snapshot lists everything that a node holds.
enum class SnapshotMark {
  kNone,
  kReplaces,  // voids at once all that the node held before
  kBegins,    // what the node held before counts until the end; what it publishes from here on counts after it too
  kEnds,      // last message of the snapshot
};

}  // namespace kvferry::controller
