#include "controller/protocol/publish_parts.h"

namespace kvferry::controller {

SnapshotMark mark_of(const wire::Publish& publish) {
  if (publish.begins_snapshot) return publish.has_end ? SnapshotMark::kBegins : SnapshotMark::kReplaces;
  return publish.ends_snapshot ? SnapshotMark::kEnds : SnapshotMark::kNone;
}

Result<std::vector<ChunkEntry>> chunks_of(const wire::Publish& publish) {
  if (!wire::tier_of(publish.tier)) {
    return Error{ErrorCode::kCorrupt, fmt::format("tier {}; 0 to {} are allowed", publish.tier, kNumTiers - 1)};
  }
  Result<std::vector<ChunkEntry>> chunks = wire::from_columns(publish.tails);
  if (!chunks) return chunks;
  chunks->reserve(chunks->size() + publish.full.keys.size());
  for (const ChunkKey& key : publish.full.keys) chunks->push_back({.key = key, .tail_group = {}});
  return chunks;
}

}  // namespace kvferry::controller
