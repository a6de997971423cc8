// Which address of this host others can reach.
#pragma once

#include <cstdint>
#include <string>

#include "transport/base/result.h"

namespace kvferry {

/// The local address that the system would use to reach the first of `endpoints` (tcp://HOST:PORT, with commas
/// between); 127.0.0.1 when there is no route. Asks the routing table only: nothing is sent.
std::string local_address_towards(const std::string& endpoints);

/// The address of this host that `name` stands for; an address stays as it is. A name that means this host to itself
/// only, as Debian's 127.0.1.1 does, is the address towards `endpoints`. Blocks for as long as the system looks the
/// name up. kInvalidArgument: nobody knows it.
Result<std::string> address_of_this_host(const std::string& name, const std::string& endpoints);

/// The port of tcp://HOST:PORT; 0 when there is none.
std::uint16_t port_of(const std::string& endpoint);

}  // namespace kvferry
