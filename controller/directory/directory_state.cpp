#include "controller/directory/directory_state.h"

#include <algorithm>

namespace kvferry::controller {
namespace {

constexpr std::size_t kKeysPerBlock = 4096;  // 64 KiB of keys, which a walk visits in about 50 us
// The index version is (number of restarts << kRestartBits) + number of changes since the last restart, so that it
// increases at a restart too.
constexpr unsigned kRestartBits = 32;

}  // namespace

DirectoryImage DirectoryState::image() const {
  DirectoryImage image{directory_.last_node_id_, directory_.index_version_, {}, {}};
  image.nodes.reserve(directory_.nodes_.size());
  for (const auto& [name, home] : directory_.namespaces_) {
    image.num_keys[name] = home->table.num_keys();
    for (const auto& [engine_id, id] : home->nodes) {
      const Directory::Node& node = *directory_.nodes_.at(id);
      NodeImage node_image{.id = id,
                           .info = node.info,
                           .next_sequence = node.next_sequence,
                           .seen = home->table.life(node.seen.index),
                           .owes_snapshot = node.owes_snapshot,
                           .seen_is_partial = node.seen.is_partial};
      if (node.next) {
        node_image.next = home->table.life(node.next->index);
        node_image.next_is_partial = node.next->is_partial;
      }
      image.nodes.push_back(std::move(node_image));
    }
  }
  return image;
}

void DirectoryState::begin_walk() {
  for (auto& [name, home] : directory_.namespaces_) home->table.set_pinned(true);
  walked_.reset();
}

bool DirectoryState::walk(TableBlock& block, std::string& name_space) {
  const auto& spaces = directory_.namespaces_;
  // A namespace that was removed meanwhile had no nodes, so nothing of it needs to be saved; a namespace that was
  // created meanwhile is in the journal.
  auto it = walked_ ? spaces.find(*walked_) : spaces.begin();
  if (it == spaces.end() && walked_) {
    it = spaces.upper_bound(*walked_);
    walk_ = {};
  }
  if (!walked_) walk_ = {};
  block.clear();
  if (it == spaces.end()) return false;
  walked_ = name_space = it->first;
  if (it->second->table.walk(walk_, kKeysPerBlock, block)) return true;
  walk_ = {};
  if (++it == spaces.end()) return false;
  walked_ = it->first;
  return true;
}

void DirectoryState::end_walk() {
  for (auto& [name, home] : directory_.namespaces_) home->table.set_pinned(false);
}

void DirectoryState::begin_reload(const DirectoryImage& image) {
  directory_.is_reloading_ = true;
  directory_.last_node_id_ = std::max(directory_.last_node_id_, image.last_node_id);
  at_least_version(image.index_version);
  for (const NodeImage& node_image : image.nodes) {
    const NodeInfo& info = node_image.info;
    auto& home = directory_.namespaces_[info.name_space];
    if (home == nullptr) {
      home.reset(new Directory::Namespace{
          info.fingerprint, ChunkTable(directory_.options_.tails_per_group_max, directory_.options_.index), {}, {}});
      const auto num_keys = image.num_keys.find(info.name_space);
      if (num_keys != image.num_keys.end() && num_keys->second <= directory_.options_.chunks_max)
        home->table.reserve(num_keys->second);
    }
    // Only a damaged image has a node twice.
    if (directory_.find(node_image.id) != nullptr || home->nodes.contains(info.engine_id.value)) continue;
    auto node = std::make_unique<Directory::Node>(
        Directory::Node{.info = info,
                        .home = home.get(),
                        .seen = {.index = home->table.add_holder(), .is_partial = node_image.seen_is_partial},
                        .next_sequence = node_image.next_sequence,
                        .heard_below = node_image.next_sequence,
                        .owes_snapshot = node_image.owes_snapshot});
    auto& holders = holders_[info.name_space];
    holders[node_image.seen] = node->seen.index;
    if (node_image.next != 0) {
      const bool is_seen = node_image.next == node_image.seen;
      node->next = Directory::Generation{.index = is_seen ? node->seen.index : home->table.add_hidden_holder(),
                                         .is_partial = node_image.next_is_partial};
      holders[node_image.next] = node->next->index;
    }
    directory_.last_node_id_ = std::max(directory_.last_node_id_, node_image.id.value);
    home->nodes[info.engine_id.value] = node_image.id;
    home->by_index[node->seen.index] = node.get();
    directory_.nodes_[node_image.id] = std::move(node);
  }
}

void DirectoryState::reload(const std::string& name_space, const TableBlock& block) {
  const auto home = directory_.namespaces_.find(name_space);
  // A namespace that is missing here had no nodes when the image was made, and the journal has all of its chunks.
  if (home == directory_.namespaces_.end()) return;
  const auto& holders = holders_[name_space];
  ChunkTable& table = home->second->table;
  table.restore(block, holders);
  for (const TableBlock::Tail& tail : block.tails) {
    const auto holder = holders.find(tail.life);
    if (holder != holders.end()) tails_.push_back({tail, &table, holder->second});
  }
}

void DirectoryState::end_blocks() {
  std::ranges::sort(tails_, {}, [](const LoadedTail& loaded) { return loaded.tail.age; });
  for (const LoadedTail& loaded : tails_) loaded.table->restore_tail(loaded.holder, loaded.tail);
  tails_ = {};
  holders_.clear();
  for (auto& [id, node] : directory_.nodes_) directory_.recount(*node);
}

void DirectoryState::replay_joined(NodeId id, const NodeInfo& info, std::uint64_t next_sequence) {
  directory_.is_reloading_ = true;
  const bool is_known = directory_.find(id) != nullptr;
  const std::uint64_t last = directory_.last_node_id_;
  if (!is_known) directory_.last_node_id_ = id.value - 1;  // makes join() assign `id` to the node
  // The result is ignored: join() may refuse the node, e.g. if the limit on nodes is lower than before the restart.
  (void)directory_.join(info, next_sequence, 0);
  directory_.last_node_id_ = std::max({last, directory_.last_node_id_, id.value});
}

void DirectoryState::replay_published(NodeId id, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                                      std::span<const ChunkEntry> chunks, bool is_partial) {
  directory_.is_reloading_ = true;
  directory_.publish(id, sequence, mark, chunks, 0, tier);
  Directory::Node* node = directory_.find(id);
  if (node == nullptr || !is_partial) return;
  node->seen.is_partial = true;
  if (node->next) node->next->is_partial = true;
}

void DirectoryState::replay_snapshot_dropped(NodeId id) {
  if (Directory::Node* node = directory_.find(id); node != nullptr) directory_.drop_snapshot(*node);
}

void DirectoryState::finish(TimeNs now) {
  for (auto& [id, node] : directory_.nodes_) {
    node->is_reloaded = true;
    node->heard_at = now;
    node->snapshot_begun_at = now;
    node->heard_below = node->next_sequence;
    node->asked_at.reset();
    node->num_differed = 0;
  }
  directory_.index_version_ = ((directory_.index_version_ >> kRestartBits) + 1) << kRestartBits;
  directory_.is_reloading_ = false;
}

}  // namespace kvferry::controller
