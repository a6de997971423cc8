// The messages between two TCP transports: a fixed little-endian header, then what the header announces, in this order:
// entries, their checksums, a text, the payload. The receiver must check every number in a message.
//
// The initiator of a transfer is the node that submits it; the target is the initiator's peer. A segment is the part of
// a transfer's bytes that one kPush, or one kPull and its kData, moves.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/net/host_port.h"
#include "transport/base/result.h"
#include "transport/base/wire.h"

namespace kvferry::tcp {

static_assert(std::endian::native == std::endian::little,
              "headers are sent as they are in memory, so this machine must be little-endian");

constexpr std::uint32_t kProtocolVersion = 2;
constexpr std::uint64_t kMagic = 0x31'59'52'52'45'46'56'4b;  // "KVFERRY1", MessageHeader::id of a hello

enum class MessageKind : std::uint8_t {
  kHello = 1,  // text: an encoded Hello
  kWelcome,    // text: why the hello was refused; empty if it was accepted
  kPush,       // entries and their payload; with kFinal also the notification
  kPull,       // entries that the initiator requests
  kData,       // the payload for the kPull with the same `number`; with kRefused no payload, but the reason as text
  kAnswer,     // the outcome of push `id`, or of the kNotify with `id`; text: AnswerBody, or empty if it succeeded
  kNotify,     // text: the notification of a pull; the target answers it with kAnswer
  kCancel,     // the queued rest of pull `id` need not be sent
  kPing,
  kPong,
};

enum Flags : std::uint8_t {
  kFinal = 1,      // the last message of a push; its number counts the segments of the whole push
  kAborted = 2,    // with kFinal: the initiator has given up the push; the target does not answer or notify its caller
  kChecksums = 4,  // the message has a checksum for each entry, compared when the entry's range has arrived
  kRefused = 8,    // in a kData message: the pull is refused, and there is no payload
  kUnsound = 16,   // with kFinal: the initiator has found a corrupt range itself; the target must not notify its caller
};

struct MessageHeader {
  MessageKind kind{};
  std::uint8_t flags = 0;
  std::uint8_t priority = 0;
  std::uint8_t code = 0;          // an ErrorCode, in an answer
  std::uint32_t num_entries = 0;  // a push's messages without entries do not count as segments
  std::uint64_t id = 0;           // the initiator's id of the transfer; in a kHello: kMagic
  std::uint64_t grant = 0;        // 0: no grant, so offsets count from the region's start, not from the grant's
  std::uint32_t region = 0;
  std::uint32_t number = 0;  // kPull, kData: number of the kPull on its connection; kFinal: number of segments
  std::uint32_t text_bytes = 0;
  std::uint32_t payload_bytes = 0;
};
static_assert(sizeof(MessageHeader) == 40);

/// A range, or the part of a range that is in a segment.
struct Entry {
  std::uint64_t offset = 0;  // offset in the target's region or grant
  std::uint32_t bytes = 0;
  std::uint32_t index = 0;  // in a push: the range's index in its transfer, and the flag kEndsRange; in a pull: 0
};
static_assert(sizeof(Entry) == 16);
constexpr std::uint32_t kEndsRange = std::uint32_t{1} << 31;

// Limit on a message's entries, so that head, payload and read-ahead fit into one system call (IOV_MAX).
constexpr std::uint32_t kEntriesMax = 1000;
constexpr std::uint32_t kPayloadMax = 64 << 20;
constexpr std::uint32_t kRequestsMax = 256;  // limit on unanswered kPull messages of a connection; more end the link
// Limits on a message's text: before the peer has sent a valid Hello or Welcome, and afterwards.
constexpr std::uint32_t kHelloBytesMax = 8192;
constexpr std::uint32_t kAnswerBytesMax = 1 << 20;
constexpr std::size_t kCorruptMax = 100'000;  // limit on ranges named in an answer; further ones are left out

using Endpoint = net::HostPort;  // where a peer listens; the host is numeric

/// The decoded form of Transport::address().
struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  std::string secret;  // 16 random bytes: a peer whose Hello does not have them is refused
  std::vector<Endpoint> endpoints;
  bool has_key = false;  // whether connections begin with a TLS handshake
  KVFERRY_FIELDS(protocol_version, incarnation, secret, endpoints, has_key);
};

struct Hello {
  std::uint32_t protocol_version = 0;
  std::uint64_t to_incarnation = 0;
  std::string secret;
  std::string from;        // the initiator's source address
  std::uint64_t link = 0;  // connections with the same number form one link
  KVFERRY_FIELDS(protocol_version, to_incarnation, secret, from, link);
};

struct AnswerBody {
  std::string what;
  std::vector<std::uint32_t> corrupt_ranges;
  KVFERRY_FIELDS(what, corrupt_ranges);
};

/// A message without its payload, in the connection's buffer; valid during one call of the handler.
struct MessageHead {
  MessageHeader header;
  const std::byte* entries = nullptr;

  Entry entry(std::size_t index) const {
    Entry one;
    std::memcpy(&one, entries + index * sizeof(Entry), sizeof(one));
    return one;
  }
  std::uint64_t checksum(std::size_t index) const {
    std::uint64_t one;
    std::memcpy(&one, entries + header.num_entries * sizeof(Entry) + index * sizeof(one), sizeof(one));
    return one;
  }
  std::string_view text() const {
    const std::size_t entry_bytes =
        sizeof(Entry) + ((header.flags & kChecksums) != 0 ? sizeof(std::uint64_t) : std::size_t{0});
    return {reinterpret_cast<const char*>(entries) + header.num_entries * entry_bytes, header.text_bytes};
  }
};

inline std::size_t head_bytes(const MessageHeader& header) {
  const std::size_t entry_bytes =
      sizeof(Entry) + ((header.flags & kChecksums) != 0 ? sizeof(std::uint64_t) : std::size_t{0});
  return sizeof(MessageHeader) + header.num_entries * entry_bytes + header.text_bytes;
}

inline void append_bytes(std::string& to, const void* bytes, std::size_t num_bytes) {
  to.append(static_cast<const char*>(bytes), num_bytes);
}

/// Appends the header and the text of a message without entries.
inline void append_message(std::string& to, MessageHeader header, std::string_view text = {}) {
  header.text_bytes = static_cast<std::uint32_t>(text.size());
  append_bytes(to, &header, sizeof(header));
  to.append(text);
}

}  // namespace kvferry::tcp
