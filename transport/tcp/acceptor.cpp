#include "transport/tcp/acceptor.h"

#include <utility>

#include "transport/base/log.h"
#include "transport/tcp/tcp_backend.h"

namespace kvferry::tcp {
namespace {

/// Compares in constant time, so that the time does not reveal how much of a wrong secret is right.
bool is_same_secret(const std::string& said, const std::string& own) {
  if (said.size() != own.size()) return false;
  unsigned difference = 0;
  for (std::size_t at = 0; at < own.size(); ++at)
    difference |= static_cast<unsigned char>(said[at]) ^ static_cast<unsigned>(static_cast<unsigned char>(own[at]));
  return difference == 0;
}

}  // namespace

Acceptor::Acceptor(TcpBackend& host, std::uint64_t incarnation, std::string secret, Welcome welcome)
    : host_(host), incarnation_(incarnation), secret_(std::move(secret)), welcome_(std::move(welcome)) {}

void Acceptor::accept(OwnedFd socket) {
  if (pending_.size() >= kPendingMax) on_broken(*pending_.front().connection, "too many newer connections");
  pending_.push_back({&host_.adopt(std::move(socket), *this, false), host_.now()});
  host_.arm_silence_check();
}

bool Acceptor::check(TimeNs now) {
  while (!pending_.empty() && now - pending_.front().since >= host_.options().silence_ns)
    on_broken(*pending_.front().connection, "no hello arrived in time");
  return !pending_.empty();
}

std::string Acceptor::refusal(const MessageHead& head, Hello& hello) const {
  if (head.header.kind != MessageKind::kHello || head.header.id != kMagic || head.header.payload_bytes != 0)
    return "this port is a kvferry transport's, which expects a hello first";
  Result<Hello> said = decode<Hello>(head.text(), "hello");
  if (!said) return said.error().what;
  hello = std::move(*said);
  if (hello.protocol_version != kProtocolVersion)
    return fmt::format("the hello's protocol is {}, the receiver's is {}", hello.protocol_version, kProtocolVersion);
  if (hello.to_incarnation != incarnation_) return "another process has this address now";
  if (!is_same_secret(hello.secret, secret_)) return "the hello does not hold the secret of this address";
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
  // The flush() below calls this function again if it fails; then the connection is not pending any more.
  if (!remove(connection)) return host_.close(connection);
  log().warn("tcp: closed a connection before its hello was accepted: {}", why);
  connection.send({.kind = MessageKind::kWelcome}, why);
  connection.flush(1);
  host_.close(connection);
}

bool Acceptor::remove(const Connection& connection) {
  return std::erase_if(pending_, [&](const PendingPeer& one) { return one.connection == &connection; }) > 0;
}

}  // namespace kvferry::tcp
