// A directory as it outlives its process: what is written of it while it goes on, and how another one gets it back.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "controller/directory/directory.h"
#include "controller/index/table_block.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

/// A node as it is at one moment, without its chunks.
struct NodeImage {
  std::uint64_t id = 0;
  std::string name_space, engine_id;
  std::uint64_t incarnation = 0;
  std::string role, endpoint, fingerprint;
  std::uint64_t next_sequence = 0;
  Life seen = 0;  // what its chunks go by in blocks
  Life next = 0;  // of a snapshot under way; 0: none
  bool owes_snapshot = true, seen_is_partial = false, next_is_partial = false;
  std::string serves{}, version{};
  KVFERRY_FIELDS(id, name_space, engine_id, incarnation, role, endpoint, fingerprint, next_sequence, seen, next,
                 owes_snapshot, seen_is_partial, next_is_partial, serves, version);
};

/// All nodes at one moment.
struct DirectoryImage {
  std::uint64_t last_node_id = 0;
  std::uint64_t index_version = 0;
  std::vector<NodeImage> nodes;
  std::map<std::string, std::uint64_t> num_keys;  // by namespace
  KVFERRY_FIELDS(last_node_id, index_version, nodes, num_keys);
};

/// A snapshot that stops nobody is an image and a walk that begins at the same moment, and the journal from then on:
/// what the walk saw late the journal tells again, and what it tells is true whatever was seen.
/// Threads: the directory's. No call takes longer than a look-up or two, but image(), which is linear in the nodes.
class DirectoryState {
 public:
  explicit DirectoryState(Directory& directory) : directory_(directory) {}

  DirectoryImage image() const;
  /// From here to end_walk() tables don't move their entries together.
  void begin_walk();
  /// Fills the next block, which may be empty, and names its namespace. False: the walk has seen everything.
  bool walk(TableBlock& block, std::string& name_space);
  void end_walk();

  // To reload, into a directory that is empty and has no journal: the image, the blocks in any order, end_blocks(), the
  // journal by replay_...(), and finish(). All that is told twice, or of nodes that are unknown, does nothing.
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
  /// Nobody is confirmed, everybody's lease begins now, and the version of the index is one that was never told.
  void finish(TimeNs now);

  std::uint64_t index_version() const { return directory_.index_version_; }
  /// One that was told before the restart.
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
  std::optional<std::string> walked_;  // the namespace that the walk is in
  ChunkTable::Walk walk_;
  std::map<std::string, std::unordered_map<Life, ChunkTable::HolderIndex>> holders_;  // while reloading
  std::vector<LoadedTail> tails_;                                                     // likewise
};

}  // namespace kvferry::controller
