// The critical path of the protocol: look-ups read where they lie and answered without an object in between. All other
// messages, and look-ups of another shape, go through wire::parse().
#pragma once

#include <cstdint>
#include <msgpack.hpp>
#include <optional>
#include <span>
#include <string_view>

#include "controller/directory/directory.h"
#include "controller/protocol/wire.h"

namespace kvferry::controller::wire {

/// A Lookup; its keys are those of the message's bytes.
struct LookupFields {
  std::uint32_t version = kProtocolVersion;
  std::uint64_t incarnation = 0;
  std::uint64_t token = 0;
  LookupView query;
};
/// None: not a Lookup of one of the versions as this release writes it. What parse() says of the same bytes then
/// counts; where there are fields, it would say the same.
std::optional<LookupFields> read_lookup(std::string_view bytes, VersionRange versions = kProtocol);

/// The bytes of a LookupReply, as encode() writes them; what `buffer` held is gone.
void write_reply(msgpack::sbuffer& buffer, std::uint32_t version, std::uint64_t token,
                 std::span<const FoundHolder> holders, std::uint64_t index_version);

}  // namespace kvferry::controller::wire
