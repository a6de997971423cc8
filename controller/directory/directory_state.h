// Saving a directory while it is in use, and reloading it in the controller's next process.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "controller/directory/directory.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

/// A node at one moment, without its chunks.
struct NodeImage {
  NodeId id;
  NodeInfo info{};
  std::uint64_t next_sequence = 0;
  Life seen = 0;  // id under which TableBlock lists the node's chunks that lookups find
  Life next = 0;  // id under which TableBlock lists the chunks of the node's unfinished snapshot; 0: no snapshot
  bool owes_snapshot = true, seen_is_partial = false, next_is_partial = false;
  KVFERRY_FIELDS(id, info.name_space, info.engine_id, info.incarnation, info.role, info.endpoint, info.fingerprint,
                 next_sequence, seen, next, owes_snapshot, seen_is_partial, next_is_partial, info.serves, info.version,
                 info.secret, info.details);
};

/// A node's registration, as stored in the log of the state folder.
struct JoinedRecord {
  NodeId id;
  NodeInfo info{};
  std::uint64_t next_sequence = 0;
  KVFERRY_FIELDS(id, info.name_space, info.engine_id, info.incarnation, info.role, info.endpoint, info.fingerprint,
                 next_sequence, info.serves, info.version, info.secret, info.details);
};

/// All nodes at one moment.
struct DirectoryImage {
  std::uint64_t last_node_id = 0;
  std::uint64_t index_version = 0;
  std::vector<NodeImage> nodes;
  std::map<std::string, std::uint64_t> num_keys;  // [namespace] number of keys
  KVFERRY_FIELDS(last_node_id, index_version, nodes, num_keys);
};

/// Saves a directory without blocking lookups, and reloads it. The saved state consists of an image, of the blocks of a
/// walk through the tables that begins when the image is made, and of the journal from then on. A change during the
/// walk may be in a block and in the journal too; that does no harm, because journal records can be applied twice.
/// Threads: the directory's. walk() takes as long as a lookup or two; image() takes time linear in the number of nodes.
class DirectoryState {
 public:
  explicit DirectoryState(Directory& directory) : directory_(directory) {}

  DirectoryImage image() const;
  /// Begins a walk through all tables. The tables do not compact their entries until end_walk().
  void begin_walk();
  /// Sets `block` to the next block, which may be empty, and `name_space` to its namespace. Returns false if this block
  /// is the last one.
  bool walk(TableBlock& block, std::string& name_space);
  void end_walk();

  // Reloading requires an empty directory without a journal. If there is an image, call begin_reload(), reload() for
  // the blocks in any order, and end_blocks(). Then call replay_...() for the journal's records, and finish(). Records
  // of changes that the blocks contain already do no harm.
  void begin_reload(const DirectoryImage& image);
  void reload(const std::string& name_space, const TableBlock& block);
  void end_blocks();
  void replay_joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence);
  void replay_gone(NodeId node) { directory_.leave(node); }
  void replay_published(NodeId node, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                        std::span<const ChunkEntry> chunks, bool is_partial);
  void replay_evicted(NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys) {
    directory_.evict(node, sequence, keys, 0);
  }
  void replay_snapshot_dropped(NodeId node);
  /// Ends the reload: all nodes are unconfirmed, all leases begin now, and the index version is higher than before.
  void finish(TimeNs now);

  std::uint64_t index_version() const { return directory_.index_version_; }
  /// Raises the index version to at least `version`, the index version of an earlier process.
  void at_least_version(std::uint64_t version) {
    directory_.index_version_ = std::max(directory_.index_version_, version);
  }

 private:
  struct LoadedTail {
    TableBlock::Tail tail;
    ChunkTable* table = nullptr;
    ChunkTable::HolderIndex holder = 0;
  };

  Directory& directory_;
  std::optional<std::string> walked_;  // namespace of the walk's next block
  ChunkTable::Walk walk_;
  // [namespace][Life in the saved blocks] holder in the reloaded table; used only while reloading
  std::map<std::string, std::unordered_map<Life, ChunkTable::HolderIndex>> holders_;
  std::vector<LoadedTail> tails_;  // tails of the reloaded blocks; used only while reloading
};

}  // namespace kvferry::controller
