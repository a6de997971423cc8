// The packets between two transports of one host over their Unix socket. Private to this folder.
#pragma once

#include <cstdint>
#include <string>

#include "transport/base/clock.h"
#include "transport/base/wire.h"

namespace kvferry::shm {

constexpr std::uint32_t kProtocolVersion = 3;

/// The decoded form of Transport::address().
struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  std::uint64_t host = 0;   // host_identity(), which differs by boot and network namespace
  std::string socket_name;  // name in the namespace of abstract Unix sockets
  std::string secret;       // proves that a peer has been given the address (address_secret.h)
  KVFERRY_FIELDS(protocol_version, incarnation, host, socket_name, secret);
};

/// A packet consists of its type, which is one byte, and a body, which is empty for some types.
enum class Type : char {
  kHello = 'H',       // body: Hello; the first packet of a connection
  kWelcome = 'W',     // body: Welcome; with the notification ring and the control page as descriptors, unless refused
  kMapRequest = 'm',  // body: MapRequest
  kMapReply = 'M',    // body: MapReply; with the region's descriptor, unless refused
  kUnmap = 'u',  // body: MapRequest; the region's owner has unregistered the region, and the receiver must unmap it
  kWake = 'w',   // no body; the sender has written to the notification ring
  kPing = 'p',   // no body; asks for a kPong
  kPong = 'P',   // no body; answers a kPing
};

struct Hello {
  std::uint32_t protocol_version = 0;
  std::uint64_t to_incarnation = 0;
  std::string secret;
  std::string from;  // source address of the sender's notifications
  KVFERRY_FIELDS(protocol_version, to_incarnation, secret, from);
};

struct Welcome {
  std::string refusal;      // reason for a refusal; empty: accepted
  std::uint64_t probe = 0;  // address in the sender's process that the receiver may read, to try CMA
  // The member as which the sender knows the receiver (AskingMember), if there is a list of members.
  bool knows_member = false;
  std::string member = {};
  KVFERRY_FIELDS(refusal, probe, knows_member, member);
};

struct MapRequest {
  std::uint32_t region = 0;
  bool writes = false;      // true: a writable descriptor is requested; false: one that can only be read
  std::uint64_t grant = 0;  // the grant that allows the access; 0: no grant
  KVFERRY_FIELDS(region, writes, grant);
};

struct MapReply {
  std::uint32_t region = 0;
  std::string refusal;
  std::uint64_t fd_offset = 0;
  std::uint64_t bytes = 0;
  bool writes = false;
  KVFERRY_FIELDS(region, refusal, fd_offset, bytes, writes);
};

/// The rkey in this backend's region descriptors.
struct RegionMemoryKey {
  bool is_shared = false;         // the region can be mapped; otherwise only CMA reaches it
  std::uint64_t region_base = 0;  // start of the whole region; a grant's RegionDescriptor::base is the grant's start
  std::uint32_t slot = 0;         // slot of the grant or region on the owner's control page
  bool needs_grant_to_write = false;
  // What a grant allows and when it expires, by the monotonic clock that all processes of a host share; 0: never.
  bool reads = true;
  bool writes = true;
  TimeNs expires_at = 0;
  std::string member = {};  // GrantTerms::member
  KVFERRY_FIELDS(is_shared, region_base, slot, needs_grant_to_write, reads, writes, expires_at, member);
};

}  // namespace kvferry::shm
