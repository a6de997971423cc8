// Reading and writing the controller's messages.
#pragma once

#include <cstdint>
#include <msgpack.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "controller/protocol/messages.h"
#include "controller/protocol/values.h"
#include "transport/base/result.h"
#include "transport/base/versions.h"

namespace kvferry::controller::wire {

// Limit on the size of a message other than a StatusReply. The receiver ends a connection on which a longer message
// arrives.
constexpr std::size_t kMessageBytesMax = std::size_t{4} << 20;
// Limit on the chunks that a client puts into a Publish, and on the keys in an Evict. It keeps these messages far below
// kMessageBytesMax.
constexpr std::size_t kChunksPerPublishMax = 16'384;
constexpr std::size_t kKeysPerLookupMax = 65'536;  // limit on keys, groups and exact tails together

/// Parses a message. `Message`: FromNode or FromController. Never throws. Memory is bounded by a small multiple of
/// bytes.size(), whatever lengths the bytes claim. Errors: kCorrupt: `bytes` are not one of these messages; kRefused:
/// the message's version is outside of `versions`; the error names both. Hello and Refused are accepted in any version.
template <class Message>
Result<Message> parse(std::string_view bytes, VersionRange versions = kProtocol);
extern template Result<FromNode> parse(std::string_view bytes, VersionRange versions);
extern template Result<FromController> parse(std::string_view bytes, VersionRange versions);

/// Returns the version of an encoded message. `bytes` must come from encode().
std::uint32_t version_of(std::string_view bytes);
/// Changes the version of an encoded message. `version`: 1 to 127.
void set_version(std::string& bytes, std::uint32_t version);

/// Returns nullopt for a tier that this release doesn't know.
std::optional<Tier> tier_of(std::uint32_t number);

SnapshotMark mark_of(const Publish& publish);
/// Returns the chunks of a Publish. kCorrupt: the Publish has columns of unequal length, or a tier that this release
/// doesn't know.
Result<std::vector<ChunkEntry>> chunks_of(const Publish& publish);

// For speed, lookups are read in place and answered without intermediate objects. All other messages, and lookups that
// are encoded in another way, go through parse().

/// A Lookup that refers to keys stored elsewhere, such as in the bytes of the message.
struct LookupFields {
  std::uint32_t version = kProtocolVersion;
  std::uint64_t incarnation = 0;
  std::uint64_t token = 0;
  LookupView query;
};
/// Reads a Lookup of one of `versions` with the same result as parse(). Returns nullopt for all other messages, and for
/// some lookups that are not encoded as this release encodes them; the caller must then call parse().
std::optional<LookupFields> read_lookup(std::string_view bytes, VersionRange versions = kProtocol);

/// Replaces the contents of `buffer` by the bytes of a LookupReply, as encode() would write them.
void write_reply(msgpack::sbuffer& buffer, std::uint32_t version, std::uint64_t token,
                 std::span<const HolderView> holders, std::uint64_t index_version);

}  // namespace kvferry::controller::wire
