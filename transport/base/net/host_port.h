// HOST:PORT as text. C++ code that reads or prints addresses uses these functions; the Python code has its own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/base/result.h"
#include "transport/base/wire.h"

namespace kvferry::net {

struct HostPort {
  std::string host;  // a name or a numeric address; an IPv6 address has no brackets here
  std::uint16_t port = 0;
  bool operator==(const HostPort&) const = default;
  KVFERRY_FIELDS(host, port);
};

/// The ports at which a process may listen; 0-0: any free port.
struct PortRange {
  std::uint16_t first = 0, last = 0;
  bool operator==(const PortRange&) const = default;
};
/// Parses "FIRST-LAST" or "PORT", with ports from 1 to 65535; "" means any port. kInvalidArgument: `text` has another
/// form.
Result<PortRange> parse_port_range(std::string_view text);

/// Calls listen(port), which returns a Result, with each port of the range until one call succeeds. Errors: for a range
/// of one port, the error of listen(); for a longer range, kUnavailable.
template <class Listen>
auto listen_in_range(PortRange ports, const Listen& listen) -> decltype(listen(std::uint16_t{})) {
  auto listening = listen(ports.first);
  for (std::uint32_t port = ports.first; !listening && port < ports.last;)
    listening = listen(static_cast<std::uint16_t>(++port));
  if (listening || ports.first == ports.last) return listening;
  return Error{ErrorCode::kUnavailable, fmt::format("none of the ports {} to {} can be used: {}", ports.first,
                                                    ports.last, listening.error().what)};
}

/// Parses "HOST:PORT" or "[IPV6]:PORT" with a port of 0 to 65535. With `default_port`, ":PORT" may be missing.
/// kInvalidArgument: `text` has another form.
Result<HostPort> parse_host_port(std::string_view text, std::optional<std::uint16_t> default_port = std::nullopt);

/// Returns "HOST:PORT" or "[IPV6]:PORT".
std::string to_text(const HostPort& address);

/// Returns the address in "tcp://HOST:PORT", "stream://HOST:PORT" or "http://HOST:PORT"; nullopt for other endpoints,
/// e.g. Unix sockets.
std::optional<HostPort> address_of_endpoint(std::string_view endpoint);

}  // namespace kvferry::net
