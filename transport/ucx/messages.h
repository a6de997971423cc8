// The active messages between two UCX transports, and the content of an address.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/wire.h"

namespace kvferry::ucx {

constexpr std::uint32_t kProtocolVersion = 4;

/// The decoded form of Transport::address().
struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  std::string worker_address;  // address of the UCX worker, at most kWorkerAddressBytesMax bytes
  std::string secret;          // address_secret.h; a message other than an answer is dropped if it lacks it
  KVFERRY_FIELDS(protocol_version, incarnation, worker_address, secret);
};

constexpr std::size_t kWorkerAddressBytesMax = 64 << 10;
constexpr std::size_t kRkeyBytesMax = 64 << 10;

enum AmId : unsigned {
  kHelloAm = 1,
  kWelcomeAm = 2,
  kNotificationAm = 3,
  kPingAm = 4,
  kPongAm = 5,
  kBlocksAm = 6,
  kAnswerAm = 7
};

/// The first message to a peer's address; nothing else is posted to it before the Welcome. Ports are reused, so the
/// address may by now reach another process, whose memory a one-sided operation would touch.
struct Hello {
  std::uint32_t protocol_version = 0;
  std::uint64_t to_incarnation = 0;
  std::uint64_t token = 0;  // random; the Welcome and pongs repeat it
  std::string secret;
  KVFERRY_FIELDS(protocol_version, to_incarnation, token, secret);
};

struct Welcome {
  std::uint64_t token = 0;
  std::string refusal;  // reason for a refusal; empty: accepted
  KVFERRY_FIELDS(token, refusal);
};

/// Asks whether the peer is alive; the pong is the same message with an empty secret, which is not checked.
struct Ping {
  std::uint64_t token = 0;
  std::string secret;
  KVFERRY_FIELDS(token, secret);
};

/// Limit of the block bytes of one BlocksMessage. It leaves room for the message's extents in a TCP segment of 256 KiB
/// (ucp_worker.cpp sets this size for UCX before 1.14), so that the receiver unpacks the message without another copy.
constexpr std::uint64_t kMessageBytesMax = 240 << 10;
constexpr std::size_t kMessageExtentsMax = 512;

/// Many blocks in one message; the receiver's progress thread copies them from or to its memory. The bytes of a push
/// follow the message, those of a pull follow the answer (packed.h).
struct BlocksMessage {
  std::uint64_t token = 0;  // random; the answer repeats it
  bool is_pull = false;
  std::uint32_t region = 0;
  std::uint64_t grant = 0;             // 0: no grant, so offsets count from the region's start, not from the grant's
  std::vector<std::uint64_t> extents;  // offset and length of each block, one after the other
  std::string from;                    // the notification's source address
  std::string notification;            // the notification, to be delivered once the blocks are copied
  std::string secret;
  KVFERRY_FIELDS(token, is_pull, region, grant, extents, from, notification, secret);
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
  std::string secret;
  KVFERRY_FIELDS(from, body, secret);
};

}  // namespace kvferry::ucx
