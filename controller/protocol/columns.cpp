#include "controller/protocol/columns.h"

#include <cstring>

namespace kvferry::controller::wire {

void split_entries(std::span<const ChunkEntry> chunks, KeyBlob& full, TailColumns& tails) {
  for (const ChunkEntry& chunk : chunks) {
    if (!chunk.is_tail) {
      full.keys.push_back(chunk.key);
      continue;
    }
    tails.keys.keys.push_back(chunk.key);
    tails.groups.keys.push_back(chunk.num_tokens >= kTailGroupTokens ? chunk.tail_group : ChunkKey{});
    tails.num_tokens.push_back(chunk.num_tokens);
  }
}

TailColumns to_columns(std::span<const ChunkEntry> tails) {
  KeyBlob none;
  TailColumns columns;
  split_entries(tails, none, columns);
  return columns;
}

Result<std::vector<ChunkEntry>> join_entries(const KeyBlob& full, const TailColumns& tails) {
  const std::size_t num_tails = tails.keys.keys.size();
  if (tails.groups.keys.size() != num_tails || tails.num_tokens.size() != num_tails) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("a message of the controller's protocol lists {} keys of tails, {} groups of tails and {} "
                             "token counts of tails; the three numbers must be equal",
                             num_tails, tails.groups.keys.size(), tails.num_tokens.size())};
  }
  std::vector<ChunkEntry> entries;
  entries.reserve(num_tails + full.keys.size());
  for (std::size_t i = 0; i < num_tails; ++i)
    entries.push_back({tails.keys.keys[i], tails.num_tokens[i], true, tails.groups.keys[i]});
  for (const ChunkKey& key : full.keys) entries.push_back({.key = key, .tail_group = {}});
  return entries;
}

}  // namespace kvferry::controller::wire

namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
  namespace adaptor {

  using kvferry::ChunkKey;
  using kvferry::controller::Holder;
  using kvferry::controller::kNumTiers;
  using kvferry::controller::Tier;
  using kvferry::controller::wire::KeyBlob;
  using kvferry::controller::wire::TailColumns;
  static_assert(alignof(ChunkKey) == 1 && sizeof(ChunkKey) == 16, "chunk keys must lie side by side in memory");

  const msgpack::object& convert<KeyBlob>::operator()(const msgpack::object& o, KeyBlob& blob) const {
    if (o.type != msgpack::type::BIN || o.via.bin.size % sizeof(ChunkKey) != 0) throw msgpack::type_error();
    blob.keys.resize(o.via.bin.size / sizeof(ChunkKey));
    if (!blob.keys.empty()) std::memcpy(blob.keys.data(), o.via.bin.ptr, o.via.bin.size);
    return o;
  }

  packer<sbuffer>& pack<KeyBlob>::operator()(packer<sbuffer>& o, const KeyBlob& blob) const {
    const auto size_bytes = static_cast<std::uint32_t>(blob.keys.size() * sizeof(ChunkKey));
    return o.pack_bin(size_bytes).pack_bin_body(reinterpret_cast<const char*>(blob.keys.data()), size_bytes);
  }

  const msgpack::object& convert<Holder>::operator()(const msgpack::object& o, Holder& holder) const {
    TailColumns columns;
    auto tier = static_cast<std::uint32_t>(holder.tier);
    msgpack::type::make_define_array(holder.engine_id, holder.incarnation, holder.endpoint, holder.num_full_chunks,
                                     columns, tier, holder.confirmed, holder.member)
        .msgpack_unpack(o);
    auto tails = kvferry::controller::wire::join_entries({}, columns);
    if (!tails) throw msgpack::type_error();
    holder.tails = std::move(*tails);
    holder.tier = tier < kNumTiers ? static_cast<Tier>(tier) : Tier::kRemote;
    return o;
  }

  packer<sbuffer>& pack<Holder>::operator()(packer<sbuffer>& o, const Holder& holder) const {
    const TailColumns columns = kvferry::controller::wire::to_columns(holder.tails);
    const auto tier = static_cast<std::uint32_t>(holder.tier);
    msgpack::type::make_define_array(holder.engine_id, holder.incarnation, holder.endpoint, holder.num_full_chunks,
                                     columns, tier, holder.confirmed, holder.member)
        .msgpack_pack(o);
    return o;
  }

  }  // namespace adaptor
}
}  // namespace msgpack
