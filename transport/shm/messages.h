// What two transports of one host say to each other over their Unix socket. Private to this folder.
#pragma once

#include <cstdint>
#include <string>

#include "transport/base/wire.h"

namespace kvferry::shm {

constexpr std::uint32_t kProtocolVersion = 1;

/// What address() gives.
struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  std::uint64_t host = 0;   // of this boot and network namespace: who differs in it can't reach the socket
  std::string socket_name;  // in the abstract namespace
  std::string secret;       // who shows it was given the address
  KVFERRY_FIELDS(protocol_version, incarnation, host, socket_name, secret);
};

/// A packet is one byte of type and the message of that type.
enum class Type : char {
  kHello = 'H',       // Hello, first of all
  kWelcome = 'W',     // Welcome; with the notification ring and the control page as descriptors, unless refused
  kMapRequest = 'm',  // MapRequest
  kMapReply = 'M',    // MapReply; with the region's descriptor, unless refused
  kUnmap = 'u',       // MapRequest, from the owner: the region is gone, let go of its memory
  kWake = 'w',        // nothing: the ring has something
  kPing = 'p',        // nothing
  kPong = 'P',        // nothing
};

struct Hello {
  std::uint32_t protocol_version = 0;
  std::uint64_t to_incarnation = 0;
  std::string secret;
  std::string from;  // the sender's address(), which signs its notifications
  KVFERRY_FIELDS(protocol_version, to_incarnation, secret, from);
};

struct Welcome {
  std::string refusal;      // one clause for people; empty: welcome
  std::uint64_t probe = 0;  // an address there that may be read, to find out whether CMA is allowed
  KVFERRY_FIELDS(refusal, probe);
};

struct MapRequest {
  std::uint32_t region = 0;
  KVFERRY_FIELDS(region);
};

struct MapReply {
  std::uint32_t region = 0;
  std::string refusal;
  std::uint64_t fd_offset = 0;
  std::uint64_t bytes = 0;
  KVFERRY_FIELDS(region, refusal, fd_offset, bytes);
};

/// The rkey of this backend.
struct RegionKey {
  bool is_shared = false;         // it can be mapped; else only CMA reaches it
  std::uint64_t region_base = 0;  // a grant's descriptor counts from the grant's start
  std::uint32_t slot = 0;         // in the owner's control page, of the grant or the region
  KVFERRY_FIELDS(is_shared, region_base, slot);
};

}  // namespace kvferry::shm
