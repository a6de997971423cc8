// Selects the address of this host that a node advertises to other nodes.
#pragma once

#include <chrono>
#include <string>

#include "transport/base/result.h"

namespace kvferry {

struct AdvertisedHost {
  std::string host;     // numeric address that peers connect to
  std::string warning;  // why other hosts may be unable to reach `host`; empty if there is no reason
};

/// Returns the local address on the route to the first of `controllers` (endpoints separated by commas) that has a
/// route and is not on this host's loopback. As long as there is none, and some controller has no route, searches
/// again, for up to `resolve_for`. If there is still none, returns loopback if at least one controller is on loopback
/// and all others are on loopback or are Unix sockets. Otherwise returns the source address of packets to other
/// networks, another address of this host if there is none, or loopback if this host has no other address. Sends
/// packets only to name servers.
AdvertisedHost select_advertised_host(const std::string& controllers,
                                      std::chrono::milliseconds resolve_for = std::chrono::seconds(5));

/// Resolves the setting advertise_host, a name or an address of this host, to a numeric address, preferably IPv4. If a
/// name other than "localhost" resolves to loopback (on Debian, the host's own name does), returns
/// select_advertised_host() instead. Errors: kInvalidArgument if the name cannot be resolved.
Result<std::string> address_of_this_host(std::string name, const std::string& controllers);

}  // namespace kvferry
