#include "controller/protocol/wire.h"

#include "transport/base/check.h"

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

Result<Message> parse(std::string_view bytes, VersionRange versions) {
  try {
    // An element takes at least one byte, so no honest length exceeds the message's own; msgpack would allocate for it.
    const std::size_t limit = bytes.size();
    const msgpack::object_handle handle =
        msgpack::unpack(bytes.data(), bytes.size(), nullptr, nullptr,
                        msgpack::unpack_limit(limit, limit, limit, limit, limit, kDepthMax));
    const msgpack::object& object = handle.get();
    if (object.type != msgpack::type::ARRAY || object.via.array.size == 0) throw msgpack::type_error();
    const auto header = object.via.array.ptr[0].as<Header>();
    const bool is_timeless = header.type == Refused{}.header.type || header.type == Hello{}.header.type;
    if (!versions.has(header.version) && !is_timeless) {
      const auto refused = common_version("controller protocol", {"this side", KVFERRY_VERSION, versions},
                                          {"the other", "", {header.version, header.version}});
      return refused.error();
    }
    return convert_by_type(header.type, object);
  } catch (const std::exception& failure) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("malformed controller message ({} bytes): {}", bytes.size(), failure.what())};
  }
}

namespace {

/// Behind the heads of the message's array and of its header's.
std::size_t version_at(std::string_view bytes) {
  const bool is_long = !bytes.empty() && static_cast<unsigned char>(bytes[0]) == 0xdc;  // of 16 fields and more
  const std::size_t at = is_long ? 4 : 2;
  KVFERRY_CHECK(bytes.size() > at && static_cast<unsigned char>(bytes[at - 1]) == 0x92 &&
                    static_cast<unsigned char>(bytes[at]) < 0x80,
                "not a message of ours");
  return at;
}

}  // namespace

std::uint32_t version_of(std::string_view bytes) { return static_cast<unsigned char>(bytes[version_at(bytes)]); }

void set_version(std::string& bytes, std::uint32_t version) {
  KVFERRY_CHECK(version > 0 && version < 0x80, "protocol version {}", version);
  bytes[version_at(bytes)] = static_cast<char>(version);
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
