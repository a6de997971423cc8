// What two TCP transports say to each other: a fixed little-endian header, then what it announces, in this order:
// entries, their checksums, a text, the payload. Every number in it may come from a stranger.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/result.h"
#include "transport/base/wire.h"

namespace kvferry::tcp {

static_assert(std::endian::native == std::endian::little, "frames are sent as they lie in memory");

constexpr std::uint32_t kProtocolVersion = 1;
constexpr std::uint64_t kMagic = 0x31'59'52'52'45'46'56'4b;  // "KVFERRY1", the id of a hello

enum class FrameKind : std::uint8_t {
  kHello = 1,  // text: Hello
  kWelcome,    // text: why not, or empty
  kPush,       // entries and their payload; with kFinal the notification
  kPull,       // entries that are wanted
  kData,       // the payload of `request`, or with kRefused the reason
  kAnswer,     // how the push `transfer` ended; text: AnswerBody, or empty when all is well
  kNotify,     // text: the notification of a pull; answered
  kCancel,     // what is queued of the pull `transfer` need not be sent
  kPing,
  kPong,
};

enum Flags : std::uint8_t {
  kFinal = 1,      // of a push: it has num_segments in all
  kAborted = 2,    // with kFinal: no answer and no notification
  kChecksums = 4,  // one for each entry, looked at where the range ends
  kRefused = 8,
  kUnsound = 16,  // with kFinal: the initiator knows of a wrong range itself; never announce it
};

struct FrameHeader {
  FrameKind kind{};
  std::uint8_t flags = 0;
  std::uint8_t priority = 0;
  std::uint8_t code = 0;          // of an answer: an ErrorCode
  std::uint32_t num_entries = 0;  // frames of a push without entries are not counted as segments
  std::uint64_t id = 0;           // the initiator's TransferId
  std::uint32_t request = 0;      // counts the pulls of one connection
  std::uint32_t region = 0;
  std::uint32_t grant = 0;
  std::uint32_t num_segments = 0;
  std::uint32_t text_bytes = 0;
  std::uint32_t payload_bytes = 0;
};
static_assert(sizeof(FrameHeader) == 40);

/// A range, or the part of one that a segment has.
struct Entry {
  std::uint64_t offset = 0;  // in the target's region or grant
  std::uint32_t bytes = 0;
  std::uint32_t index = 0;  // of the range in its transfer, and kEndsRange
};
static_assert(sizeof(Entry) == 16);
constexpr std::uint32_t kEndsRange = std::uint32_t{1} << 31;

constexpr std::uint32_t kEntriesMax = 1000;  // with head and read-ahead still one system call (IOV_MAX)
constexpr std::uint32_t kPayloadMax = 64 << 20;
constexpr std::uint32_t kRequestsMax = 256;  // pulls of one connection that are not answered yet
constexpr std::uint32_t kHelloBytesMax = 8192;
constexpr std::uint32_t kAnswerBytesMax = 1 << 20;
constexpr std::size_t kCorruptMax = 100'000;  // ranges told in one answer

struct Endpoint {
  std::string host;  // numeric
  std::uint16_t port = 0;
  KVFERRY_FIELDS(host, port);
};

/// What address() gives.
struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  std::string secret;  // 16 random bytes: who has not been told the address is refused
  std::vector<Endpoint> endpoints;
  KVFERRY_FIELDS(protocol_version, incarnation, secret, endpoints);
};

struct Hello {
  std::uint32_t protocol_version = 0;
  std::uint64_t to_incarnation = 0;
  std::string secret;
  std::string from;        // the initiator's address()
  std::uint64_t link = 0;  // connections that share it share their transfers
  KVFERRY_FIELDS(protocol_version, to_incarnation, secret, from, link);
};

struct AnswerBody {
  std::string what;
  std::vector<std::uint32_t> corrupt_ranges;
  KVFERRY_FIELDS(what, corrupt_ranges);
};

/// All of a frame but its payload, where it lies in the connection's buffer: valid for one call.
struct FrameHead {
  FrameHeader header;
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

inline std::size_t head_bytes(const FrameHeader& header) {
  const std::size_t entry_bytes =
      sizeof(Entry) + ((header.flags & kChecksums) != 0 ? sizeof(std::uint64_t) : std::size_t{0});
  return sizeof(FrameHeader) + header.num_entries * entry_bytes + header.text_bytes;
}

inline void append_bytes(std::string& to, const void* bytes, std::size_t num_bytes) {
  to.append(static_cast<const char*>(bytes), num_bytes);
}

/// A frame without entries and payload.
inline void append_frame(std::string& to, FrameHeader header, std::string_view text = {}) {
  header.text_bytes = static_cast<std::uint32_t>(text.size());
  append_bytes(to, &header, sizeof(header));
  to.append(text);
}

}  // namespace kvferry::tcp
