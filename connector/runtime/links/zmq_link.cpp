#include "connector/runtime/links/zmq_link.h"

#include <utility>
#include <zmq.hpp>

namespace kvferry {
namespace {

constexpr std::int64_t kMessageBytesMax = 64
                                          << 20;  // of a stranger; the largest honest message is a lease of 10^5 keys

zmq::context_t& context() {
  static zmq::context_t instance(1);
  return instance;
}

zmq::socket_t make_socket(zmq::socket_type type) {
  zmq::socket_t socket(context(), type);
  socket.set(zmq::sockopt::linger, 0);
  socket.set(zmq::sockopt::maxmsgsize, kMessageBytesMax);
  socket.set(zmq::sockopt::reconnect_ivl, 50);
  socket.set(zmq::sockopt::reconnect_ivl_max, 1000);
  return socket;
}

bool send_bytes(zmq::socket_t& socket, std::string_view bytes, zmq::send_flags flags) {
  try {
    return socket.send(zmq::const_buffer(bytes.data(), bytes.size()), flags | zmq::send_flags::dontwait).has_value();
  } catch (const zmq::error_t&) {
    return false;  // EHOSTUNREACH: the other side is gone
  }
}

std::optional<std::string> receive_bytes(zmq::socket_t& socket) {
  try {
    zmq::message_t message;
    if (!socket.recv(message, zmq::recv_flags::dontwait)) return std::nullopt;
    return message.to_string();
  } catch (const zmq::error_t&) {
    return std::nullopt;
  }
}

}  // namespace

struct ServerSocket::Impl {
  zmq::socket_t socket = make_socket(zmq::socket_type::router);
};

ServerSocket::ServerSocket(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ServerSocket::~ServerSocket() = default;

Result<std::unique_ptr<ServerSocket>> ServerSocket::bind(const std::string& endpoint) {
  try {
    auto impl = std::make_unique<Impl>();
    impl->socket.set(zmq::sockopt::router_mandatory, true);
    impl->socket.set(zmq::sockopt::router_handover, true);
    impl->socket.bind(endpoint);
    std::unique_ptr<ServerSocket> made(new ServerSocket(std::move(impl)));
    made->endpoint_ = made->impl_->socket.get(zmq::sockopt::last_endpoint);
    return made;
  } catch (const zmq::error_t& failure) {
    return Error{ErrorCode::kUnavailable, fmt::format("can't listen on {}: {}", endpoint, failure.what())};
  }
}

int ServerSocket::fd() const { return impl_->socket.get(zmq::sockopt::fd); }

std::optional<ServerSocket::Message> ServerSocket::receive() {
  while (true) {
    std::optional<std::string> sender = receive_bytes(impl_->socket);
    if (!sender) return std::nullopt;
    if (!impl_->socket.get(zmq::sockopt::rcvmore)) continue;  // a stranger's empty message
    std::optional<std::string> bytes = receive_bytes(impl_->socket);
    bool more = impl_->socket.get(zmq::sockopt::rcvmore) != 0;
    const bool whole = bytes && !more;
    while (more && receive_bytes(impl_->socket)) more = impl_->socket.get(zmq::sockopt::rcvmore) != 0;
    if (whole) return Message{std::move(*sender), std::move(*bytes)};
  }
}

bool ServerSocket::send(const std::string& to, std::string_view bytes) {
  return send_bytes(impl_->socket, to, zmq::send_flags::sndmore) &&
         send_bytes(impl_->socket, bytes, zmq::send_flags::none);
}

struct ClientSocket::Impl {
  zmq::socket_t socket = make_socket(zmq::socket_type::dealer);
};

ClientSocket::ClientSocket(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ClientSocket::~ClientSocket() = default;

Result<std::unique_ptr<ClientSocket>> ClientSocket::connect(const std::string& endpoint) {
  try {
    auto impl = std::make_unique<Impl>();
    impl->socket.connect(endpoint);
    return std::unique_ptr<ClientSocket>(new ClientSocket(std::move(impl)));
  } catch (const zmq::error_t& failure) {
    return Error{ErrorCode::kInvalidArgument, fmt::format("'{}' is not an address: {}", endpoint, failure.what())};
  }
}

int ClientSocket::fd() const { return impl_->socket.get(zmq::sockopt::fd); }
std::optional<std::string> ClientSocket::receive() { return receive_bytes(impl_->socket); }
bool ClientSocket::send(std::string_view bytes) { return send_bytes(impl_->socket, bytes, zmq::send_flags::none); }

}  // namespace kvferry
