// The connections of the initiator's end of a link: how they are opened, and what their failure means.
#include <algorithm>

#include "transport/base/log.h"
#include "transport/tcp/outbound_link.h"
#include "transport/tcp/tcp_backend.h"

namespace kvferry::tcp {

void OutboundLink::try_endpoint() {
  for (; endpoint_ < address_.endpoints.size(); ++endpoint_) {
    Result<OwnedFd> socket = net::begin_connect_tcp(address_.endpoints[endpoint_]);
    if (socket) return begin_lane(0, std::move(*socket));
    failures_ += fmt::format("; {}: {}", net::to_text(address_.endpoints[endpoint_]), socket.error().what);
  }
  lose(fmt::format("no connection to the peer at any of its {} addresses{}", address_.endpoints.size(), failures_));
}

void OutboundLink::begin_lane(std::size_t index, OwnedFd socket) {
  Lane& lane = lanes_[index];
  lane.is_tried = true;
  lane.connection = &host_.adopt(std::move(socket), *this, true);
  lane.connection->set_lane(index);
  host_.arm_silence_check();
}

void OutboundLink::open_more_lanes() {
  if (!lanes_[0].is_open) return;
  const TcpOptions& options = host_.options();
  lanes_.resize(is_same_host(lanes_[0].connection->fd()) ? options.local_connections : options.connections);
  for (std::size_t index = 1; index < lanes_.size(); ++index) {
    if (lanes_[index].is_tried) continue;
    Result<OwnedFd> socket = net::begin_connect_tcp(address_.endpoints[endpoint_]);
    if (socket) begin_lane(index, std::move(*socket));
    lanes_[index].is_tried = true;
  }
}

bool OutboundLink::renew_key(const std::string& key_name) {
  const auto is_old = [&](const Lane& lane) {
    return lane.connection != nullptr && !lane.connection->key_name().empty() &&
           lane.connection->key_name() != key_name;
  };
  if (is_over_ || key_name.empty() || std::none_of(lanes_.begin(), lanes_.end(), is_old)) return true;
  if (!transfers_.empty()) return false;
  for (const Lane& lane : lanes_) {
    if (lane.connection != nullptr) host_.close(*lane.connection);
  }
  lanes_ = std::vector<Lane>(1);
  token_ = TcpBackend::random_number();  // the peer may still have the former connections under the former token
  try_endpoint();
  return true;
}

void OutboundLink::on_connected(Connection& connection) {
  skip_congestion_control_within_host(connection.fd());
  const Hello hello{kProtocolVersion, address_.incarnation, address_.secret, host_.source_address(), token_};
  connection.send({.kind = MessageKind::kHello, .id = kMagic}, encode(hello));
}

void OutboundLink::on_broken(Connection& connection, const std::string& why) {
  Lane& lane = lanes_[connection.lane()];
  if (lane.is_open) return lose(why);
  lane.connection = nullptr;
  host_.close(connection);
  if (connection.lane() != 0) {
    log().info("tcp: one connection to the peer at {} failed; the other connections to it remain in use: {}",
               net::to_text(address_.endpoints[endpoint_]), why);
    return;
  }
  failures_ += fmt::format("; {}: {}", net::to_text(address_.endpoints[endpoint_]), why);
  ++endpoint_;
  try_endpoint();
}

}  // namespace kvferry::tcp
