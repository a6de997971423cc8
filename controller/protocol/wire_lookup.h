// The critical path of the protocol: lookups are read in place and answered without intermediate objects. All other
// messages, and lookups of another shape, go through wire::parse().
#pragma once

#include <cstdint>
#include <msgpack.hpp>
#include <optional>
#include <span>
#include <string_view>

#include "controller/protocol/holder_view.h"
#include "controller/protocol/wire.h"

namespace kvferry::controller::wire {

/// A Lookup whose keys are views of the message's bytes.
struct LookupFields {
  std::uint32_t version = kProtocolVersion;
  std::uint64_t incarnation = 0;
  std::uint64_t token = 0;
  LookupView query;
};
/// Returns nullopt unless `bytes` are a Lookup of one of the versions, encoded as this release encodes it; parse() then
/// decides. Where it returns fields, parse() would return the same.
std::optional<LookupFields> read_lookup(std::string_view bytes, VersionRange versions = kProtocol);

/// Replaces the contents of `buffer` by the bytes of a LookupReply, as encode() would write them.
void write_reply(msgpack::sbuffer& buffer, std::uint32_t version, std::uint64_t token,
                 std::span<const HolderView> holders, std::uint64_t index_version);

}  // namespace kvferry::controller::wire
