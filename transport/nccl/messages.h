// The messages between two NCCL transports on the control link, and the content of an address.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/wire.h"

namespace kvferry::nccl {

constexpr std::uint32_t kProtocolVersion = 2;

/// How to reach a transport's control link: its address, and the exported region that messages name as their target.
struct ControlAddress {
  std::string address;
  std::string region;
  KVFERRY_FIELDS(address, region);
};

/// The decoded form of Transport::address().
struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  ControlAddress control;
  KVFERRY_FIELDS(protocol_version, incarnation, control);
};

enum class Kind : std::uint8_t {
  kHello = 1,  // the first message of a session
  kOpen,       // names the communicator of one direction, for the target to join
  kAsk,        // requests a piece of a pull or push, or checksums of the target's memory
  kData,       // announces that the bytes of pull `token` are next in the communicator
  kAnswer,     // the outcome of a kAsk or kNotify; a pull that succeeds gets none
  kNotify,
  kPing,  // answered by kBye if the receiver does not have the session
  kBye,   // ends the session
};

struct Hello {
  std::uint32_t protocol_version = 0;
  ControlAddress from;
  KVFERRY_FIELDS(protocol_version, from);
};

struct Open {
  bool is_pull = false;  // true: the target sends; false: the target receives
  std::string id;
  KVFERRY_FIELDS(is_pull, id);
};

enum class Purpose : std::uint8_t {
  kPull,
  kPush,  // announces that the initiator sends the bytes next in the communicator
  kHash   // requests the checksum of each extent; sent after the pushes to these extents have been answered
};

/// Limits of one piece. They are low because cancel() and revoke() wait for pieces that have begun.
constexpr std::uint64_t kPieceBytesMax = 8 << 20;
constexpr std::size_t kExtentsMax = 512;
/// Limit on a session's kAsk requests that the target has not finished; one more ends the session.
constexpr std::size_t kServedMax = 128;

struct Ask {
  std::uint64_t token = 0;
  std::uint8_t purpose = 0;
  std::uint32_t region = 0;
  std::uint64_t grant = 0;             // 0: no grant, so offsets count from the region's start, not from the grant's
  std::uint64_t packed_bytes_max = 0;  // extents of up to this many bytes are sent together
  std::vector<std::uint64_t> extents;  // offset and length of each extent, one after the other
  KVFERRY_FIELDS(token, purpose, region, grant, packed_bytes_max, extents);
};

struct Data {
  std::uint64_t token = 0;
  KVFERRY_FIELDS(token);
};

struct Answer {
  std::uint64_t token = 0;
  std::int32_t code = 0;  // the outcome as an ErrorCode
  std::string what;
  std::vector<std::uint64_t> checksums;
  KVFERRY_FIELDS(token, code, what, checksums);
};

struct Notify {
  std::uint64_t token = 0;
  std::string from;
  std::string body;
  KVFERRY_FIELDS(token, from, body);
};

struct Bye {
  std::string why;  // reason for the end of the session, for logs
  KVFERRY_FIELDS(why);
};

/// A message; the body is one of the structs above, encoded.
struct Message {
  std::uint64_t session = 0;  // chosen by the initiator, random
  Kind kind{};
  std::string_view body;
};

inline std::string pack_message(std::uint64_t session, Kind kind, std::string_view body = {}) {
  std::string packed(reinterpret_cast<const char*>(&session), sizeof(session));
  packed.push_back(static_cast<char>(kind));
  return packed.append(body);
}

inline std::optional<Message> read_message(std::string_view packed) {
  Message message;
  if (packed.size() <= sizeof(message.session)) return std::nullopt;
  std::memcpy(&message.session, packed.data(), sizeof(message.session));
  message.kind = static_cast<Kind>(packed[sizeof(message.session)]);
  message.body = packed.substr(sizeof(message.session) + 1);
  return message;
}

}  // namespace kvferry::nccl
