#include "transport/base/net/host_port.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace kvferry::net {
namespace {

bool is_ipv6_digit(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F') || c == ':' || c == '.';
}

/// Returns true if `host` has the form of an IPv6 address, with or without a scope such as %eth0.
bool is_ipv6(std::string_view host) {
  const std::string_view digits = host.substr(0, host.find('%'));
  return digits.find(':') != std::string_view::npos && std::all_of(digits.begin(), digits.end(), is_ipv6_digit);
}

bool is_name(std::string_view host) {
  return std::all_of(host.begin(), host.end(), [](char c) { return c > ' ' && c != 0x7f; }) &&
         host.find_first_of("/;:[]@") == std::string_view::npos;
}

}  // namespace

Result<PortRange> parse_port_range(std::string_view text) {
  if (text.empty()) return PortRange{};
  const std::string_view first = text.substr(0, text.find('-'));
  const std::string_view last = first.size() == text.size() ? first : text.substr(first.size() + 1);
  PortRange ports;
  for (const auto& [number, port] : {std::pair(first, &ports.first), std::pair(last, &ports.last)}) {
    const auto [parsed, failure] = std::from_chars(number.data(), number.data() + number.size(), *port);
    if (failure != std::errc() || parsed != number.data() + number.size()) ports = {};
  }
  if (ports.first > 0 && ports.first <= ports.last) return ports;
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("'{}' is not a port range; allowed: FIRST-LAST or PORT, with ports from 1 to 65535", text)};
}

Result<HostPort> parse_host_port(std::string_view text, std::optional<std::uint16_t> default_port) {
  const Error bad{
      ErrorCode::kInvalidArgument,
      fmt::format("'{}' is not an address; allowed: HOST:PORT or [IPV6]:PORT with a port of 0 to 65535", text)};
  const bool is_bracketed = text.starts_with('[');
  const std::size_t host_end = text.find(is_bracketed ? ']' : ':');
  const std::string_view host = text.substr(0, host_end).substr(is_bracketed ? 1 : 0);
  std::string_view rest = host_end == std::string_view::npos ? "" : text.substr(host_end);
  if (is_bracketed && rest.empty()) return bad;
  if (is_bracketed) rest.remove_prefix(1);
  if (host.empty() || !(is_bracketed ? is_ipv6(host) : is_name(host))) return bad;
  if (rest.empty() && default_port) return HostPort{std::string(host), *default_port};
  if (!rest.starts_with(':')) return bad;
  std::uint16_t port = 0;
  const char* const end = rest.data() + rest.size();
  const auto [parsed, failure] = std::from_chars(rest.data() + 1, end, port);
  if (failure != std::errc() || parsed != end) return bad;
  return HostPort{std::string(host), port};
}

std::string to_text(const HostPort& address) {
  const bool is_bracketed = address.host.find(':') != std::string::npos;
  return is_bracketed ? fmt::format("[{}]:{}", address.host, address.port)
                      : fmt::format("{}:{}", address.host, address.port);
}

std::optional<HostPort> address_of_endpoint(std::string_view endpoint) {
  for (const std::string_view scheme : {"tcp://", "stream://", "http://"}) {
    if (!endpoint.starts_with(scheme)) continue;
    if (Result<HostPort> address = parse_host_port(endpoint.substr(scheme.size()))) return std::move(*address);
  }
  return std::nullopt;
}

}  // namespace kvferry::net
