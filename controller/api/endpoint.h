// The endpoints that controllers and their clients accept. kvferry checks them itself, because ZeroMQ's errors, such as
// "Invalid argument", do not say what is wrong.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/base/net/host_port.h"
#include "transport/base/result.h"

namespace kvferry::controller {

enum class EndpointUse {
  kBind,        // for a ZeroMQ listener: tcp:// or ipc://; port 0 means any free port
  kBindStream,  // for a stream listener: unix:// or stream://; port 0 means any free port
  kConnect,     // for a client: tcp://, ipc://, unix:// or stream://; port 0 is not allowed
};

/// Returns the forms of an endpoint that are allowed for `use`, for error messages.
std::string_view allowed_endpoints(EndpointUse use);
/// Checks the form of an endpoint. kInvalidArgument: `endpoint` has none of the allowed forms, which the message lists.
Result<void> check_endpoint(std::string_view endpoint, EndpointUse use);

/// Checks that a process with a cluster key may use `endpoint`. kInvalidArgument: `endpoint` is stream://, which is not
/// encrypted.
Result<void> check_for_cluster_key(std::string_view endpoint);

/// Returns true if other hosts could reach a listener at `endpoint`: `endpoint` is tcp://, stream:// or http://, and
/// not on loopback.
bool is_beyond_loopback(std::string_view endpoint);
/// Checks that a process without a cluster key may listen at `endpoint`. kInvalidArgument: is_beyond_loopback() is
/// true, which only the setting `insecure` allows.
Result<void> check_without_key(std::string_view endpoint);

/// Splits a list of controllers' endpoints at its commas. kInvalidArgument: an element is not an endpoint, or is
/// repeated.
Result<std::vector<std::string>> split_endpoints(std::string_view list);

/// The address in a stream's endpoint: a path, or a host and a port.
struct StreamAddress {
  std::string path{};  // path of the Unix socket; empty for TCP
  net::HostPort tcp{};

  bool is_unix() const { return !path.empty(); }
};
bool is_stream(std::string_view endpoint);
/// Returns the address in a stream's endpoint. `endpoint` must have passed check_endpoint() and is_stream().
StreamAddress stream_address(std::string_view endpoint);

}  // namespace kvferry::controller
