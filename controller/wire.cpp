#include "controller/wire.h"

namespace kvferry::controller::wire {
namespace {

constexpr std::size_t kDepthMax = 16;

/// Tries each type of the variant until one has the header's type number.
template <std::size_t I = 0>
Result<Message> convert_by_type(std::uint32_t type, const msgpack::object& object) {
  if constexpr (I == std::variant_size_v<Message>) {
    return Error{ErrorCode::kCorrupt, fmt::format("malformed controller message: unknown type {}", type)};
  } else {
    using Candidate = std::variant_alternative_t<I, Message>;
    if (Candidate{}.header.type == type) return Message(object.as<Candidate>());
    return convert_by_type<I + 1>(type, object);
  }
}

}  // namespace

Result<Message> parse(std::string_view bytes) {
  try {
    // An element takes at least one byte, so no honest length exceeds the message's own; msgpack would allocate for it.
    const std::size_t limit = bytes.size();
    const msgpack::object_handle handle =
        msgpack::unpack(bytes.data(), bytes.size(), nullptr, nullptr,
                        msgpack::unpack_limit(limit, limit, limit, limit, limit, kDepthMax));
    const msgpack::object& object = handle.get();
    if (object.type != msgpack::type::ARRAY || object.via.array.size == 0) throw msgpack::type_error();
    const auto header = object.via.array.ptr[0].as<Header>();
    if (header.version != kProtocolVersion && header.type != Refused{}.header.type) {
      return Error{ErrorCode::kRefused,
                   fmt::format("the other side speaks controller protocol version {}, this side version {}; run the "
                               "same kvferry release on both",
                               header.version, kProtocolVersion)};
    }
    return convert_by_type(header.type, object);
  } catch (const std::exception& failure) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("malformed controller message ({} bytes): {}", bytes.size(), failure.what())};
  }
}

std::optional<Tier> tier_of(std::uint32_t number) {
  return number < kNumTiers ? std::optional(static_cast<Tier>(number)) : std::nullopt;
}

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

Result<std::vector<ChunkEntry>> from_columns(const TailColumns& tails) {
  const std::size_t num_tails = tails.keys.keys.size();
  if (tails.groups.keys.size() != num_tails || tails.num_tokens.size() != num_tails) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("malformed controller message: {} tails with {} groups and {} lengths", num_tails,
                             tails.groups.keys.size(), tails.num_tokens.size())};
  }
  std::vector<ChunkEntry> entries;
  entries.reserve(num_tails);
  for (std::size_t i = 0; i < num_tails; ++i)
    entries.push_back({tails.keys.keys[i], tails.num_tokens[i], true, tails.groups.keys[i]});
  return entries;
}

}  // namespace kvferry::controller::wire
