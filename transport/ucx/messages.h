// What two UCX transports say to each other besides the bytes they move, and what an address is made of.
#pragma once

#include <cstdint>
#include <string>

#include "transport/base/wire.h"

namespace kvferry::ucx {

constexpr std::uint32_t kProtocolVersion = 1;

/// What address() gives.
struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  std::string worker_address;  // UCX's own
  KVFERRY_FIELDS(protocol_version, incarnation, worker_address);
};

enum AmId : unsigned { kHelloAm = 1, kWelcomeAm = 2, kNotificationAm = 3 };

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

struct NotificationMessage {
  std::string from;
  std::string body;
  KVFERRY_FIELDS(from, body);
};

}  // namespace kvferry::ucx
