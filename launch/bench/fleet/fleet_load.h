// The load of `kvferry bench fleet`: the chunks that each of many nodes holds, stores, evicts and looks up.
//
// A node holds conversations of 128 chunks. The first 8 chunks of each conversation are one of 16 system prompts, which
// every node holds; the other chunks are the conversation's own. Nodes 2n and 2n + 1 share every fourth conversation. A
// node stores the next chunk of its newest conversation and evicts the last chunk of its oldest conversation, so that
// it always holds the same number of chunks. Keys are computed when they are needed, so thousands of nodes need no
// memory for them.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "controller/api/client.h"
#include "launch/bench/harness/controller_load.h"

namespace kvferry::bench {

constexpr std::size_t kConversationChunks = 128;
constexpr std::size_t kSystemChunks = 8;
constexpr std::uint64_t kSystemPrompts = 16;
constexpr std::uint64_t kOwnChunks = kConversationChunks - kSystemChunks;
/// Least number of conversations on a node: the oldest one, whose chunks the node evicts, the newest one, whose chunks
/// the node stores, and two complete ones between them.
constexpr std::uint64_t kConversationsMin = 4;

struct Conversation {
  std::uint32_t node = 0;
  std::uint64_t number = 0;  // number of the conversation among those of `node`

  /// Returns the prefix (controller_load.h) of the conversation's own chunks. Nodes 2n and 2n + 1 share the prefix of
  /// every fourth conversation.
  std::uint64_t prefix() const {
    const std::uint64_t owner = number % 4 == 0 ? node & ~std::uint32_t{1} : node;
    return owner << 24 | (number & 0xffffff);
  }
  static std::uint64_t system_prefix(std::uint64_t number) {
    return (std::uint64_t{1} << 50) + number % kSystemPrompts;
  }

  ChunkKey key(std::size_t position) const {
    ChunkKey key;
    fill_keys<ChunkKey>(position < kSystemChunks ? system_prefix(number) : prefix(), position, std::span(&key, 1));
    return key;
  }
  /// Fills `keys` with all keys of the conversation, from its first chunk to its last.
  void keys(std::vector<ChunkKey>& keys) const {
    keys.resize(kConversationChunks);
    fill_keys<ChunkKey>(system_prefix(number), 0, std::span(keys).first(kSystemChunks));
    fill_keys<ChunkKey>(prefix(), kSystemChunks, std::span(keys).subspan(kSystemChunks));
  }
};

/// The conversations that one node holds; all of them are complete at first.
class HeldConversations {
 public:
  HeldConversations(std::uint32_t node, std::uint64_t num_conversations)
      : node_(node), newest_(num_conversations - 1) {}

  void all(std::vector<controller::ChunkEntry>& chunks) const {
    chunks.clear();
    const auto add = [&](const Conversation& conversation, std::size_t position) {
      chunks.push_back({.key = conversation.key(position), .tail_group = {}});
    };
    for (std::uint64_t prompt = 0; prompt < kSystemPrompts; ++prompt) {
      for (std::size_t position = 0; position < kSystemChunks; ++position) add({node_, prompt}, position);
    }
    for (std::uint64_t number = oldest_; number <= newest_; ++number) {
      const std::size_t end = number == oldest_ ? oldest_end_ : number == newest_ ? newest_end_ : kConversationChunks;
      for (std::size_t position = kSystemChunks; position < end; ++position) add({node_, number}, position);
    }
  }

  controller::ChunkEntry store() {
    if (newest_end_ == kConversationChunks) {
      ++newest_;
      newest_end_ = kSystemChunks;
    }
    return {.key = Conversation{node_, newest_}.key(newest_end_++), .tail_group = {}};
  }
  ChunkKey evict() {
    if (oldest_end_ == kSystemChunks) {
      ++oldest_;
      oldest_end_ = kConversationChunks;
    }
    return Conversation{node_, oldest_}.key(--oldest_end_);
  }

  /// Returns a conversation that the node holds completely and will not evict soon.
  Conversation whole(std::uint64_t random) const { return {node_, oldest_ + 1 + random % (newest_ - oldest_ - 2)}; }
  /// Returns a conversation that no other node holds.
  Conversation lonely() const {
    const std::uint64_t middle = (oldest_ + newest_) / 2;
    return {node_, middle % 4 == 0 ? middle + 1 : middle};
  }

 private:
  std::uint32_t node_;
  std::uint64_t oldest_ = 0, newest_;
  std::size_t oldest_end_ = kConversationChunks, newest_end_ = kConversationChunks;
};

}  // namespace kvferry::bench
