#include "transport/tcp/acceptor.h"

#include <utility>

#include "transport/base/log.h"

namespace kvferry::tcp {
namespace {

/// Takes as long for a wrong secret as for a right one.
bool is_same_secret(const std::string& said, const std::string& own) {
  if (said.size() != own.size()) return false;
  unsigned difference = 0;
  for (std::size_t at = 0; at < own.size(); ++at)
    difference |= static_cast<unsigned char>(said[at]) ^ static_cast<unsigned>(static_cast<unsigned char>(own[at]));
  return difference == 0;
}

}  // namespace

Acceptor::Acceptor(LinkHost& host, std::uint64_t incarnation, std::string secret, Welcome welcome)
    : host_(host), incarnation_(incarnation), secret_(std::move(secret)), welcome_(std::move(welcome)) {}

void Acceptor::greet(OwnedFd socket) {
  if (newcomers_.size() >= kNewcomersMax) on_broken(*newcomers_.front().connection, "too many others came after it");
  newcomers_.push_back({&host_.adopt(std::move(socket), *this, false), host_.now()});
  host_.arm();
}

bool Acceptor::check(TimeNs now) {
  while (!newcomers_.empty() && now - newcomers_.front().since >= host_.options().silence_ns)
    on_broken(*newcomers_.front().connection, "it did not introduce itself in time");
  return !newcomers_.empty();
}

std::string Acceptor::refusal(const FrameHead& head, Hello& hello) const {
  if (head.header.kind != FrameKind::kHello || head.header.id != kMagic || head.header.payload_bytes != 0)
    return "this is a kvferry transport, and what you sent is not its hello";
  Result<Hello> said = decode<Hello>(head.text(), "hello");
  if (!said) return said.error().what;
  hello = std::move(*said);
  if (hello.protocol_version != kProtocolVersion)
    return fmt::format("you speak transport protocol {}, and this side speaks {}", hello.protocol_version,
                       kProtocolVersion);
  if (hello.to_incarnation != incarnation_) return "another process has this address now, not the one you want";
  if (!is_same_secret(hello.secret, secret_)) return "your hello does not hold the secret of this side's address";
  return "";
}

Result<void> Acceptor::on_head(Connection& connection, const FrameHead& head) {
  Hello hello;
  if (std::string why = refusal(head, hello); !why.empty()) return Error{ErrorCode::kRefused, std::move(why)};
  forget(connection);
  connection.trust();
  welcome_(connection, hello);
  return {};
}

void Acceptor::on_broken(Connection& connection, const std::string& why) {
  // Not a newcomer any more: this is the farewell itself that could not be sent.
  if (!forget(connection)) return host_.close(connection);
  log().warn("tcp: a stranger's connection was closed: {}", why);
  connection.send({.kind = FrameKind::kWelcome}, why);
  connection.flush(1);
  host_.close(connection);
}

bool Acceptor::forget(const Connection& connection) {
  return std::erase_if(newcomers_, [&](const PendingPeer& one) { return one.connection == &connection; }) > 0;
}

}  // namespace kvferry::tcp
