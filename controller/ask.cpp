#include "controller/ask.h"

#include "controller/endpoint.h"
#include "controller/zmq_io.h"

namespace kvferry::controller {

Result<wire::Message> ask(const std::string& endpoint, std::string_view question, std::int64_t timeout_ms) {
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
    if (!try_send(socket, question)) return unreachable;
    zmq::message_t answer;
    if (!socket.recv(answer)) return unreachable;
    Result<wire::Message> message = wire::parse(answer.to_string_view());
    if (!message) return message;
    if (auto* refused = std::get_if<wire::Refused>(&*message)) return Error{ErrorCode::kRefused, refused->reason};
    return message;
  } catch (const zmq::error_t& failure) {
    return Error{ErrorCode::kUnavailable, fmt::format("controller {} not reachable: {}", endpoint, failure.what())};
  }
}

}  // namespace kvferry::controller
