#include "controller/protocol/wire.h"

#include "transport/base/check.h"

namespace kvferry::controller::wire {
namespace {

constexpr std::size_t kDepthMax = 16;

/// Tries each type of the variant until one has the header's type number.
template <class Message, std::size_t I = 0>
Result<Message> convert_by_type(std::uint32_t type, const msgpack::object& object) {
  if constexpr (I == std::variant_size_v<Message>) {
    return Error{ErrorCode::kCorrupt, fmt::format("malformed controller message: unknown type {}", type)};
  } else {
    using Candidate = std::variant_alternative_t<I, Message>;
    if (Candidate{}.header.type == type) return Message(object.as<Candidate>());
    return convert_by_type<Message, I + 1>(type, object);
  }
}

}  // namespace

template <class Message>
Result<Message> parse(std::string_view bytes, VersionRange versions) {
  try {
    // An element takes at least one byte, so a valid length never exceeds the message's. msgpack would allocate for it.
    const std::size_t limit = bytes.size();
    const msgpack::object_handle handle =
        msgpack::unpack(bytes.data(), bytes.size(), nullptr, nullptr,
                        msgpack::unpack_limit(limit, limit, limit, limit, limit, kDepthMax));
    const msgpack::object& object = handle.get();
    if (object.type != msgpack::type::ARRAY || object.via.array.size == 0) throw msgpack::type_error();
    const auto header = object.via.array.ptr[0].as<Header>();
    const bool is_of_all_versions = header.type == Refused{}.header.type || header.type == Hello{}.header.type;
    if (!versions.has(header.version) && !is_of_all_versions) {
      const auto refused = common_version("controller protocol", {"this side", kvferry::version(), versions},
                                          {"the other", "", {header.version, header.version}});
      return refused.error();
    }
    return convert_by_type<Message>(header.type, object);
  } catch (const std::exception& failure) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("malformed controller message ({} bytes): {}", bytes.size(), failure.what())};
  }
}

template Result<FromNode> parse(std::string_view bytes, VersionRange versions);
template Result<FromController> parse(std::string_view bytes, VersionRange versions);

namespace {

/// Position of the version: behind the first bytes of the message's array and of its header's.
std::size_t version_at(std::string_view bytes) {
  const bool is_long = !bytes.empty() && static_cast<unsigned char>(bytes[0]) == 0xdc;  // an array of 16 fields or more
  const std::size_t at = is_long ? 4 : 2;
  KVFERRY_CHECK(bytes.size() > at && static_cast<unsigned char>(bytes[at - 1]) == 0x92 &&
                    static_cast<unsigned char>(bytes[at]) < 0x80,
                "not an encoded message");
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

SnapshotMark mark_of(const Publish& publish) {
  if (publish.begins_snapshot) return publish.has_end ? SnapshotMark::kBegins : SnapshotMark::kReplaces;
  return publish.ends_snapshot ? SnapshotMark::kEnds : SnapshotMark::kNone;
}

Result<std::vector<ChunkEntry>> chunks_of(const Publish& publish) {
  if (tier_of(publish.tier)) return join_entries(publish.full, publish.tails);
  return Error{ErrorCode::kCorrupt, fmt::format("tier {}; 0 to {} are allowed", publish.tier, kNumTiers - 1)};
}

}  // namespace kvferry::controller::wire
