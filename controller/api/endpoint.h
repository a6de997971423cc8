// The forms of endpoint that kvferry accepts, checked before anything is done with them: ZeroMQ's own message is just
// "Invalid argument".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::controller {

enum class EndpointUse {
  kBind,        // over ZeroMQ: tcp://, ipc://; port 0: any free one
  kBindStream,  // unix://, stream://; port 0: any free one
  kConnect,     // all four, with a port that isn't 0
};

/// For people.
std::string_view allowed_endpoints(EndpointUse use);
/// kInvalidArgument: not one of the forms; the sentence tells what is allowed.
Result<void> check_endpoint(std::string_view endpoint, EndpointUse use);

/// Of controllers to connect to, with commas between. kInvalidArgument: one is none, or there twice.
Result<std::vector<std::string>> split_endpoints(std::string_view list);

/// What an endpoint of a stream says: a path, or a host and a port.
struct StreamAddress {
  std::string path{};
  std::string host{};  // without brackets
  std::uint16_t port = 0;

  bool is_unix() const { return !path.empty(); }
};
bool is_stream(std::string_view endpoint);
/// Of one that check_endpoint() let pass and is_stream().
StreamAddress stream_address(std::string_view endpoint);

}  // namespace kvferry::controller
