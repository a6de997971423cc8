// What a publish is to a snapshot.
#pragma once

namespace kvferry::controller {

/// What a publish is to a snapshot, which is all that its node holds.
enum class SnapshotMark {
  kNone,
  kReplaces,  // all that was held before is void from here on
  kBegins,    // what was held before counts until the end; what is told from here on counts after it as well
  kEnds,      // the last of it
};

}  // namespace kvferry::controller
