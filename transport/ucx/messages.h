// What two UCX transports say to each other besides the bytes they move, and what an address is made of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/wire.h"

namespace kvferry::ucx {

constexpr std::uint32_t kProtocolVersion = 2;

/// What address() gives.
struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  std::string worker_address;  // UCX's own
  KVFERRY_FIELDS(protocol_version, incarnation, worker_address);
};

enum AmId : unsigned {
  kHelloAm = 1,
  kWelcomeAm = 2,
  kNotificationAm = 3,
  kPingAm = 4,
  kPongAm = 5,
  kBlocksAm = 6,
  kAnswerAm = 7
};

/// First on every new endpoint: ports and host names are reused, and one-sided reads that reach a stranger would read
/// whatever lies at these addresses there. Nothing else is posted before the Welcome.
struct Hello {
  std::uint32_t protocol_version = 0;
  std::uint64_t to_incarnation = 0;
  std::uint32_t token = 0;  // comes back in the Welcome
  KVFERRY_FIELDS(protocol_version, to_incarnation, token);
};

struct Welcome {
  std::uint32_t token = 0;
  std::string refusal;  // one clause for people; empty: welcome
  KVFERRY_FIELDS(token, refusal);
};

/// Asks for a sign of life and is sent back as it is.
struct Ping {
  std::uint32_t token = 0;
  KVFERRY_FIELDS(token);
};

/// The bytes of one BlocksMessage at most. With what stands before them they still fit one segment of TCP
/// (ucp_worker.cpp), so that the receiver unpacks them from where the socket put them.
constexpr std::uint64_t kMessageBytesMax = 240 << 10;
constexpr std::size_t kMessageExtentsMax = 512;

/// Many blocks in one message, which the receiver's progress thread copies to or from where they belong. The bytes of a
/// push follow the message, those of a pull the answer; see packed.h.
struct BlocksMessage {
  std::uint64_t token = 0;  // comes back in the answer
  bool is_pull = false;
  std::uint32_t region = 0;
  std::uint32_t grant = 0;             // 0: none, offsets count from the region's start
  std::vector<std::uint64_t> extents;  // offset, bytes, offset, bytes, ...
  std::string from;                    // of the notification
  std::string notification;            // delivered if nothing was refused
  KVFERRY_FIELDS(token, is_pull, region, grant, extents, from, notification);
};

struct BlocksAnswer {
  std::uint64_t token = 0;
  std::int32_t code = 0;  // an ErrorCode: kOk, kRefused or kInvalidArgument
  std::string what;
  KVFERRY_FIELDS(token, code, what);
};

struct NotificationMessage {
  std::string from;
  std::string body;
  KVFERRY_FIELDS(from, body);
};

}  // namespace kvferry::ucx
