#include "transport/tcp/acceptor.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "transport/base/log.h"
#include "transport/tcp/tcp_backend.h"

namespace kvferry::tcp {
namespace {

/// Limit on the reason that is sent to an unauthenticated client. Header and reason together have at most 64 bytes.
constexpr std::size_t kRefusalBytesMax = 64 - sizeof(MessageHeader);
// Reason that is sent to a client whose first message is no Hello, or in place of a reason that is too long to be sent.
constexpr std::string_view kNoHello = "no valid handshake";

}  // namespace

Acceptor::Acceptor(TcpBackend& host, std::uint64_t incarnation, std::string secret, Welcome welcome)
    : host_(host), incarnation_(incarnation), secret_(std::move(secret)), welcome_(std::move(welcome)) {}

void Acceptor::accept(OwnedFd socket) {
  if (pending_.size() >= kPendingMax)
    on_broken(*pending_.front().connection,
              fmt::format("no handshake arrived before {} newer connections came, and at most {} connections may be "
                          "without a handshake",
                          kPendingMax, kPendingMax));
  pending_.push_back({&host_.adopt(std::move(socket), *this, false), host_.now()});
  host_.arm_silence_check();
}

TimeNs Acceptor::check(TimeNs now) {
  const TimeNs patience = std::min(kHelloNs, host_.options().silence_ns);
  while (!pending_.empty() && now - pending_.front().since >= patience)
    on_broken(*pending_.front().connection, "no handshake in time");
  return pending_.empty() ? ProgressLoop::kNever : pending_.front().since + patience;
}

std::string Acceptor::refusal(const MessageHead& head, Hello& hello) const {
  if (head.header.kind != MessageKind::kHello || head.header.id != kMagic || head.header.payload_bytes != 0)
    return std::string(kNoHello);
  Result<Hello> said = decode<Hello>(head.text(), "handshake");
  if (!said) return said.error().what;
  hello = std::move(*said);
  if (hello.protocol_version != kProtocolVersion) return "wrong protocol version";
  if (hello.to_incarnation != incarnation_) return "address is outdated";
  if (!is_same_secret(hello.secret, secret_)) return "wrong secret in address";
  return "";
}

Result<void> Acceptor::on_head(Connection& connection, const MessageHead& head) {
  Hello hello;
  if (std::string why = refusal(head, hello); !why.empty()) return Error{ErrorCode::kRefused, std::move(why)};
  remove(connection);
  connection.trust();
  welcome_(connection, hello);
  return {};
}

void Acceptor::on_broken(Connection& connection, const std::string& why) {
  // If the flush() below fails, it calls this function again; then the connection is not pending any more.
  if (!remove(connection)) return host_.close(connection);
  // Only the 1st, 2nd, 4th, 8th ... refusal is logged, because unknown peers can connect as often as they like.
  if (const std::uint64_t count = ++num_refused_; std::has_single_bit(count)) {
    const net::HostPort from = net::peer_address(connection.fd());
    log().warn("tcp: closed a connection from {} without accepting its handshake ({} such connections so far): {}",
               from.host.empty() ? "an unknown address" : net::to_text(from), count, why);
  }
  if (!connection.is_shaking_hands()) {  // a peer gets no answer before it has proved that it has the key
    connection.send({.kind = MessageKind::kWelcome}, why.size() <= kRefusalBytesMax ? std::string_view(why) : kNoHello);
    connection.flush(1);
  }
  host_.close(connection);
}

bool Acceptor::remove(const Connection& connection) {
  return std::erase_if(pending_, [&](const PendingPeer& one) { return one.connection == &connection; }) > 0;
}

}  // namespace kvferry::tcp
