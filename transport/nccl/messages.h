// What two NCCL transports say to each other on the control link, and what an address is made of.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/wire.h"

namespace kvferry::nccl {

constexpr std::uint32_t kProtocolVersion = 1;

/// Where a transport's control link is reached: its address, and an exported region that stands in transfers of no
/// bytes.
struct ControlAddress {
  std::string address;
  std::string region;
  KVFERRY_FIELDS(address, region);
};

/// What address() gives.
struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  ControlAddress control;
  KVFERRY_FIELDS(protocol_version, incarnation, control);
};

enum class Kind : std::uint8_t {
  kHello = 1,  // the first of a session
  kOpen,       // here is the communicator of one direction: begin it too
  kAsk,        // one piece of work with the target's memory
  kData,       // the pull `token` comes next in its communicator
  kAnswer,     // how an ask or a notification ended
  kNotify,
  kPing,  // is this session still known?
  kBye,   // it is over
};

struct Hello {
  std::uint32_t protocol_version = 0;
  ControlAddress from;
  KVFERRY_FIELDS(protocol_version, from);
};

struct Open {
  bool is_pull = false;  // the target sends
  std::string id;
  KVFERRY_FIELDS(is_pull, id);
};

enum class Purpose : std::uint8_t {
  kPull,
  kPush,  // its bytes come next in the communicator
  kHash   // of each extent, once what was pushed before has landed
};

/// Bytes and extents of one piece at most. With pieces so small cancel() and revoke() need not wait for long.
constexpr std::uint64_t kPieceBytesMax = 8 << 20;
constexpr std::size_t kExtentsMax = 512;
/// Asked by one peer and not answered yet.
constexpr std::size_t kServedMax = 128;

struct Ask {
  std::uint64_t token = 0;
  std::uint8_t purpose = 0;
  std::uint32_t region = 0;
  std::uint32_t grant = 0;             // 0: none, offsets count from the region's start
  std::uint64_t packed_bytes_max = 0;  // extents of up to this many travel as one
  std::vector<std::uint64_t> extents;  // offset, bytes, offset, bytes, ...
  KVFERRY_FIELDS(token, purpose, region, grant, packed_bytes_max, extents);
};

struct Data {
  std::uint64_t token = 0;
  KVFERRY_FIELDS(token);
};

struct Answer {
  std::uint64_t token = 0;
  std::int32_t code = 0;  // an ErrorCode
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
  std::string why;  // one clause for people
  KVFERRY_FIELDS(why);
};

/// A message's head; the body is one of the structs above.
struct Message {
  std::uint64_t session = 0;  // the initiator's, random
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
