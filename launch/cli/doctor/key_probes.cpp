#include "launch/cli/doctor/key_probes.h"

#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "transport/base/net/cluster_key.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/net/tls.h"

namespace kvferry::cli {
namespace {

constexpr std::size_t kAnswerBytes = 64;
constexpr char kIllegalParameter = 47, kDecryptError = 51;  // numbers of two TLS alerts

/// Sends `said` to the listener and returns the first 64 bytes of its answer, or what has arrived when the listener
/// ends the connection or a second has passed.
std::string answer_of(net::HostPort address, std::string_view said) {
  if (address.host == "0.0.0.0") address.host = "127.0.0.1";
  if (address.host == "::") address.host = "::1";
  const Result<OwnedFd> socket = net::connect_tcp(address);
  if (!socket) return {};
  constexpr timeval kPatience{1, 0};
  ::setsockopt(socket->get(), SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience));
  if (::send(socket->get(), said.data(), said.size(), MSG_NOSIGNAL) < 0) return {};
  std::string answer(kAnswerBytes, '\0');
  const ssize_t count = ::recv(socket->get(), answer.data(), answer.size(), MSG_WAITALL);
  answer.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  return answer;
}

/// The greeting of ZMTP 3.0: signature, version, mechanism and padding.
std::string curve_greeting() {
  std::string greeting("\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE", 17);
  greeting.resize(kAnswerBytes);
  return greeting;
}

/// Returns the first message of a TLS client that has another cluster key.
std::string tls_hello() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) return {};
  const OwnedFd client(ends[0]), listener(ends[1]);
  const net::TlsContext context(net::ClusterKey("this key is public, so that no deployment has it"),
                                net::Encrypt::kAlways);
  net::TlsSession session(context, client.get(), false);
  if (!session.handshake()) return {};
  std::string hello(net::TlsSession::kHandshakeBytesMax, '\0');
  const ssize_t count = ::recv(listener.get(), hello.data(), hello.size(), 0);
  hello.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  return hello;
}

/// Returns whether the whole answer to tls_hello() is the alert for a wrong PSK binder, the hello's proof of its key:
/// decrypt_error in TLS 1.3's specification, illegal_parameter from OpenSSL. A listener checks the binder only if it
/// has a key with the identity in the hello. Other TLS servers answer with a message of their own, or with other
/// alerts.
bool is_refused_key(const std::string& answer) {
  constexpr std::size_t kVersion = 1, kVersionBytes = 2;
  std::string alert = answer;
  if (alert.size() > kVersion + kVersionBytes) alert.erase(kVersion, kVersionBytes);
  // Head of a TLS record with an alert of two bytes, and the alert's first byte.
  const std::string fatal("\x15\0\2\2", 4);
  return alert == fatal + kDecryptError || alert == fatal + kIllegalParameter;
}

}  // namespace

bool asks_for_key(const net::HostPort& address) {
  const std::string greeting = answer_of(address, curve_greeting());
  if (greeting.size() == kAnswerBytes && greeting.substr(12, 6) == std::string("CURVE\0", 6)) return true;
  if (is_refused_key(answer_of(address, tls_hello()))) return true;
  return answer_of(address, "GET /nodes HTTP/1.1\r\nHost: doctor\r\n\r\n").starts_with("HTTP/1.1 401 ");
}

}  // namespace kvferry::cli
