// The endpoints that kvferry accepts. They are checked before use, because ZeroMQ's error is just "Invalid argument".
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/base/net/host_port.h"
#include "transport/base/result.h"

namespace kvferry::controller {

enum class EndpointUse {
  kBind,        // over ZeroMQ: tcp://, ipc://; port 0: any free one
  kBindStream,  // unix://, stream://; port 0: any free one
  kConnect,     // tcp://, ipc://, unix:// or stream://; port 0 is not allowed
};

/// Returns the forms of an endpoint that are allowed for `use`, for error messages.
std::string_view allowed_endpoints(EndpointUse use);
/// kInvalidArgument: `endpoint` has none of the allowed forms, which the message lists.
Result<void> check_endpoint(std::string_view endpoint, EndpointUse use);

/// Checks an endpoint of those who have a cluster key. kInvalidArgument: it is stream://, which is not encrypted.
Result<void> check_for_cluster_key(std::string_view endpoint);

/// Returns whether processes of other hosts could reach a listener: it is tcp://, stream:// or http://, and not on
/// loopback.
bool is_beyond_loopback(std::string_view endpoint);
/// Checks where a process without a cluster key wants to listen. kInvalidArgument: is_beyond_loopback(), which only the
/// setting `insecure` allows.
Result<void> check_without_key(std::string_view endpoint);

/// Splits a list of controllers at its commas. kInvalidArgument: an element is not an endpoint, or is repeated.
Result<std::vector<std::string>> split_endpoints(std::string_view list);

/// The address in a stream's endpoint: a path, or a host and a port.
struct StreamAddress {
  std::string path{};  // path of the Unix socket; empty for TCP
  net::HostPort tcp{};

  bool is_unix() const { return !path.empty(); }
};
bool is_stream(std::string_view endpoint);
/// `endpoint` must have passed check_endpoint() and is_stream().
StreamAddress stream_address(std::string_view endpoint);

}  // namespace kvferry::controller
