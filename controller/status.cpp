#include "controller/status.h"

#include "controller/endpoint.h"
#include "controller/wire.h"
#include "controller/zmq_io.h"

namespace kvferry::controller {

Result<Status> fetch_status(const std::string& endpoint, std::int64_t timeout_ms) {
  if (Result<void> checked = check_endpoint(endpoint, EndpointUse::kConnect); !checked)
    return std::move(checked).error();
  const Error unreachable{ErrorCode::kUnavailable,
                          fmt::format("controller {} not reachable within {} ms", endpoint, timeout_ms)};
  try {
    zmq::context_t context{1};
    zmq::socket_t socket{context, zmq::socket_type::dealer};
    set_common_options(socket, endpoint);
    socket.set(zmq::sockopt::maxmsgsize, std::int64_t{-1});  // thousands of nodes; the user chose whom to ask
    socket.set(zmq::sockopt::rcvtimeo, static_cast<int>(timeout_ms));
    socket.connect(endpoint);
    if (!try_send(socket, encode(wire::StatusRequest{}))) return unreachable;
    zmq::message_t answer;
    if (!socket.recv(answer)) return unreachable;
    Result<wire::Message> message = wire::parse(answer.to_string_view());
    if (!message) return std::move(message).error();
    if (auto* refused = std::get_if<wire::Refused>(&*message)) return Error{ErrorCode::kRefused, refused->reason};
    auto* reply = std::get_if<wire::StatusReply>(&*message);
    if (reply == nullptr)
      return Error{ErrorCode::kCorrupt, fmt::format("controller {} answered with another kind of message", endpoint)};
    return std::move(reply->status);
  } catch (const zmq::error_t& failure) {
    return Error{ErrorCode::kUnavailable, fmt::format("controller {} not reachable: {}", endpoint, failure.what())};
  }
}

}  // namespace kvferry::controller
