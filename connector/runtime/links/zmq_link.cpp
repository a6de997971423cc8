#include "connector/runtime/links/zmq_link.h"

#include <array>
#include <utility>

namespace kvferry {
namespace {

// Limit on the size of a message, because any process may reach the port, and a decoded message takes up to 30 times as
// much memory. The limit is enough for a push offer for three million tokens in chunks of 16 tokens.
constexpr std::int64_t kRequestBytesMax = 8 << 20;

/// Returns the options of the sockets between a scheduler node and its workers. ZeroMQ drops no message there, since
/// each order and each outcome counts: a lost outcome would keep slots out of use for ever. A prompt of many chunks can
/// need thousands of messages at once. 0 means no limit.
net::ZmqOptions own_options() {
  net::ZmqOptions options;
  options.receive_queue_max = options.send_queue_max = 0;
  return options;
}

Result<std::unique_ptr<net::ZmqSocket>> make_socket(net::ZmqKind kind, const ZmqContextRef& context,
                                                    net::ZmqOptions options) {
  static const auto shared = std::make_shared<net::ZmqContext>();
  return net::ZmqSocket::make(context ? context : shared, kind, options);
}

}  // namespace

Result<std::unique_ptr<ServerSocket>> ServerSocket::bind(const std::string& endpoint, const ZmqContextRef& context) {
  const bool is_for_peers = endpoint.starts_with("tcp://");
  net::ZmqOptions options = is_for_peers ? net::ZmqOptions() : own_options();
  if (is_for_peers) options.message_bytes_max = kRequestBytesMax;
  auto socket = KVFERRY_TRY(make_socket(net::ZmqKind::kRouter, context, options));
  KVFERRY_TRY(socket->bind(endpoint));
  return std::unique_ptr<ServerSocket>(new ServerSocket(std::move(socket)));
}

std::optional<ServerSocket::Message> ServerSocket::receive() {
  std::array<net::ZmqPart, 2> parts;  // the sender's routing id and the message's bytes
  while (const std::size_t num_parts = socket_->receive(parts)) {
    if (num_parts != parts.size()) continue;
    net::Identity sender = socket_->sender_of(parts);
    if (sender.role < net::Role::kWorker) continue;
    return Message{std::string(parts[0].bytes()), std::string(parts[1].bytes()), std::move(sender.name),
                   socket_->curve_key_of(parts)};
  }
  return std::nullopt;
}

bool ServerSocket::send(const std::string& to, std::string_view bytes) {
  return socket_->send(std::array<std::string_view, 2>{to, bytes});
}

Result<std::unique_ptr<ClientSocket>> ClientSocket::connect(const std::string& endpoint, const ZmqContextRef& context,
                                                            bool is_own) {
  auto socket = KVFERRY_TRY(make_socket(net::ZmqKind::kDealer, context, is_own ? own_options() : net::ZmqOptions()));
  KVFERRY_TRY(socket->connect(endpoint));
  return std::unique_ptr<ClientSocket>(new ClientSocket(std::move(socket)));
}

std::optional<std::string> ClientSocket::receive() {
  std::array<net::ZmqPart, 1> parts;
  while (const std::size_t num_parts = socket_->receive(parts)) {
    if (num_parts == 1) return std::string(parts[0].bytes());
  }
  return std::nullopt;
}

}  // namespace kvferry
