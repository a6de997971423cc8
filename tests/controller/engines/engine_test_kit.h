// Makes batches of events as engines write them.
#pragma once

#include <cstdint>
#include <msgpack.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "controller/engines/engine_directory.h"

namespace kvferry::controller {

enum class EventForm { kMap, kArray };

/// Makes one batch, to which events are added one by one.
class BatchMaker {
 public:
  explicit BatchMaker(EventForm form = EventForm::kMap, bool bytes = false) : form_(form), bytes_(bytes) {}

  BatchMaker& stored(const std::vector<std::uint64_t>& hashes, std::optional<std::uint64_t> parent,
                     const std::vector<std::uint32_t>& tokens, std::uint32_t block_size, const char* medium = "GPU",
                     std::optional<std::uint32_t> group = {}, const char* kind = nullptr) {
    ++num_events_;
    head("BlockStored", 10);
    field("block_hashes");
    packer_.pack_array(static_cast<std::uint32_t>(hashes.size()));
    for (const std::uint64_t hash : hashes) pack_hash(hash);
    field("parent_block_hash");
    parent ? pack_hash(*parent) : nil();
    field("token_ids");
    packer_.pack(tokens);
    field("block_size");
    packer_.pack(block_size);
    field("lora_id");
    nil();
    field("medium");
    medium == nullptr ? nil() : void(packer_.pack(medium));
    field("lora_name");
    nil();
    field("extra_keys");
    nil();
    field("group_idx");
    group ? void(packer_.pack(*group)) : nil();
    field("kv_cache_spec_kind");
    kind == nullptr ? nil() : void(packer_.pack(kind));
    return *this;
  }
  BatchMaker& removed(const std::vector<std::uint64_t>& hashes, const char* medium = "GPU",
                      std::optional<std::uint32_t> group = {}) {
    ++num_events_;
    head("BlockRemoved", 3);
    field("block_hashes");
    packer_.pack_array(static_cast<std::uint32_t>(hashes.size()));
    for (const std::uint64_t hash : hashes) pack_hash(hash);
    field("medium");
    medium == nullptr ? nil() : void(packer_.pack(medium));
    field("group_idx");
    group ? void(packer_.pack(*group)) : nil();
    return *this;
  }
  BatchMaker& cleared() {
    ++num_events_;
    head("AllBlocksCleared", 0);
    return *this;
  }
  BatchMaker& unknown() {
    ++num_events_;
    packer_.pack_map(2);
    packer_.pack("type");
    packer_.pack("BlockMoved");
    packer_.pack("where");
    packer_.pack(std::vector<std::vector<int>>{{1, 2}, {-70'000}});
    return *this;
  }
  std::string done(std::optional<std::uint32_t> rank = 0, bool with_more = false) const {
    msgpack::sbuffer all;
    msgpack::packer<msgpack::sbuffer> packer(all);
    packer.pack_array(2 + (rank || with_more ? 1 : 0) + (with_more ? 1 : 0));
    packer.pack(1.5);
    packer.pack_array(num_events_);
    all.write(events_.data(), events_.size());
    if (rank)
      packer.pack(*rank);
    else if (with_more)
      packer.pack_nil();
    if (with_more) packer.pack("news");
    return {all.data(), all.size()};
  }

 private:
  void head(const char* tag, std::uint32_t num_more) {
    const std::uint32_t num_fields = num_more + 1;
    if (form_ == EventForm::kMap) {
      packer_.pack_map(num_fields);
      packer_.pack("type");
    } else {
      packer_.pack_array(num_fields);
    }
    packer_.pack(tag);
  }
  void field(const char* name) {
    if (form_ == EventForm::kMap) packer_.pack(name);
  }
  void nil() { packer_.pack_nil(); }
  void pack_hash(std::uint64_t hash) {
    if (!bytes_) {
      packer_.pack(hash);
      return;
    }
    std::string bytes(32, '\x5a');
    for (unsigned i = 0; i < 8; ++i) bytes[24 + i] = static_cast<char>(hash >> (56 - 8 * i));
    packer_.pack_bin(32);
    packer_.pack_bin_body(bytes.data(), 32);
  }
  EventForm form_;
  bool bytes_;
  msgpack::sbuffer events_;
  msgpack::packer<msgpack::sbuffer> packer_{events_};
  std::uint32_t num_events_ = 0;
};

}  // namespace kvferry::controller
