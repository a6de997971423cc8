#include "controller/protocol/wire.h"

#include "controller/protocol/msgpack_reader.h"
#include "transport/base/check.h"

namespace kvferry::controller::wire {
namespace {

constexpr std::size_t kDepthMax = 16;

/// Tries each type of the variant until one has the header's type number.
template <class Message, std::size_t I = 0>
Result<Message> convert_by_type(std::uint32_t type, const msgpack::object& object) {
  if constexpr (I == std::variant_size_v<Message>) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("a message of the controller's protocol has type {}, which this release of kvferry does "
                             "not know; its sender may be of a newer release",
                             type)};
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
    // Each element takes at least one byte, so no valid array or text is longer than the message. Without limits
    // msgpack would allocate as much memory as a claimed length needs.
    const std::size_t limit = bytes.size();
    const msgpack::object_handle handle =
        msgpack::unpack(bytes.data(), bytes.size(), nullptr, nullptr,
                        msgpack::unpack_limit(limit, limit, limit, limit, limit, kDepthMax));
    const msgpack::object& object = handle.get();
    if (object.type != msgpack::type::ARRAY || object.via.array.size == 0) throw msgpack::type_error();
    const auto header = object.via.array.ptr[0].as<Header>();
    const bool is_of_all_versions = header.type == Refused{}.header.type || header.type == Hello{}.header.type;
    if (!versions.has(header.version) && !is_of_all_versions) {
      constexpr bool kIsController = std::is_same_v<Message, FromNode>;
      const auto refused = common_version(
          "controller protocol", {kIsController ? "the controller" : "this process", kvferry::version(), versions},
          {kIsController ? "the sender" : "the controller", "of unknown release", {header.version, header.version}});
      return refused.error();
    }
    return convert_by_type<Message>(header.type, object);
  } catch (const std::exception& failure) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{} bytes can't be read as a message of the controller's protocol: {}", bytes.size(),
                             why_malformed(failure))};
  }
}

template Result<FromNode> parse(std::string_view bytes, VersionRange versions);
template Result<FromController> parse(std::string_view bytes, VersionRange versions);

namespace {

/// Returns the position of the version: after the array tags of the message and of its header.
std::size_t version_at(std::string_view bytes) {
  // 0xdc is the tag of an array of 16 to 65535 elements.
  const bool is_long = !bytes.empty() && static_cast<unsigned char>(bytes[0]) == 0xdc;
  const std::size_t at = is_long ? 4 : 2;
  KVFERRY_CHECK(bytes.size() > at && static_cast<unsigned char>(bytes[at - 1]) == 0x92 &&
                    static_cast<unsigned char>(bytes[at]) < 0x80,
                "a message of {} bytes does not begin with a header that has a protocol version below 128",
                bytes.size());
  return at;
}

}  // namespace

std::uint32_t version_of(std::string_view bytes) { return static_cast<unsigned char>(bytes[version_at(bytes)]); }

void set_version(std::string& bytes, std::uint32_t version) {
  KVFERRY_CHECK(version > 0 && version < 0x80, "protocol version {} is not between 1 and 127", version);
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
  return Error{
      ErrorCode::kCorrupt,
      fmt::format("a message that publishes chunks names tier {}; 0 to {} are allowed (gpu, host, disk, remote)",
                  publish.tier, kNumTiers - 1)};
}

std::optional<LookupFields> read_lookup(std::string_view bytes, VersionRange versions) {
  MsgpackReader reader(bytes);
  LookupFields lookup;
  std::uint32_t num_fields = 0, num_header_fields = 0;
  std::uint64_t version = 0, type = 0;
  const auto read_keys = [&](std::span<const ChunkKey>& keys) {
    static_assert(alignof(ChunkKey) == 1 && sizeof(ChunkKey) == 16,
                  "chunk keys are read at any address, so they must need no alignment");
    std::string_view blob;
    if (!reader.read_bytes(blob) || blob.size() % sizeof(ChunkKey) != 0) return false;
    keys = {reinterpret_cast<const ChunkKey*>(blob.data()), blob.size() / sizeof(ChunkKey)};
    return true;
  };
  const bool is_read = reader.read_array(num_fields) && num_fields == 6 && reader.read_array(num_header_fields) &&
                       num_header_fields == 2 && reader.read_unsigned(version) && version >= versions.oldest &&
                       version <= versions.newest && reader.read_unsigned(type) && type == Lookup{}.header.type &&
                       reader.read_unsigned(lookup.incarnation) && reader.read_unsigned(lookup.token) &&
                       read_keys(lookup.query.keys) && read_keys(lookup.query.tail_groups) &&
                       read_keys(lookup.query.exact_tails) && reader.num_left() == 0;
  lookup.version = static_cast<std::uint32_t>(version);
  return is_read ? std::optional(lookup) : std::nullopt;
}

namespace {

void write_tails(msgpack::packer<msgpack::sbuffer>& packer, std::span<const ChunkEntry> tails) {
  if (!tails.empty()) {
    packer.pack(to_columns(tails));
    return;
  }
  packer.pack_array(3);  // no tails: three empty columns, written directly to save time
  packer.pack_bin(0);
  packer.pack_bin(0);
  packer.pack_array(0);
}

}  // namespace

void write_reply(msgpack::sbuffer& buffer, std::uint32_t version, std::uint64_t token,
                 std::span<const HolderView> holders, std::uint64_t index_version) {
  buffer.clear();
  msgpack::packer packer(buffer);
  packer.pack_array(4);
  packer.pack(Header{version, LookupReply{}.header.type});
  packer.pack(token);
  packer.pack_array(static_cast<std::uint32_t>(holders.size()));
  for (const HolderView& holder : holders) {
    packer.pack_array(8);
    packer.pack(holder.info->engine_id.value);
    packer.pack(holder.info->incarnation.value);
    packer.pack(holder.info->endpoint);
    packer.pack(holder.num_full_chunks);
    write_tails(packer, holder.tails);
    packer.pack(static_cast<std::uint32_t>(holder.tier));
    packer.pack(holder.confirmed);
    packer.pack(holder.info->details.member);
  }
  packer.pack(index_version);
}

}  // namespace kvferry::controller::wire
