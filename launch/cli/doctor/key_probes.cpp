#include "launch/cli/doctor/key_probes.h"

#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "transport/base/net/cluster_key.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/net/tls.h"
#include "transport/base/net/tls/owned_openssl.h"

namespace kvferry::cli {
namespace {

constexpr std::size_t kAnswerBytes = 64;
constexpr char kIllegalParameter = 47, kDecryptError = 51;  // numbers of two TLS alerts

/// Connects to the listener, within a second for each address of its host; each read of the socket ends after a second
/// at the latest. Returns an empty OwnedFd if the listener accepts no connection.
OwnedFd connected(net::HostPort address) {
  if (address.host == "0.0.0.0") address.host = "127.0.0.1";
  if (address.host == "::") address.host = "::1";
  Result<OwnedFd> socket = net::connect_tcp(address, 1000);
  if (!socket) return {};
  constexpr timeval kPatience{1, 0};
  ::setsockopt(socket->get(), SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience));
  return std::move(*socket);
}

/// Sends `said` to the listener and returns the first 64 bytes of its answer. Returns fewer bytes if the listener ends
/// the connection or a second passes before they have all arrived, and none if no connection is made.
std::string answer_of(const net::HostPort& address, std::string_view said) {
  const OwnedFd socket = connected(address);
  if (!socket || ::send(socket.get(), said.data(), said.size(), MSG_NOSIGNAL) < 0) return {};
  std::string answer(kAnswerBytes, '\0');
  const ssize_t count = ::recv(socket.get(), answer.data(), answer.size(), MSG_WAITALL);
  answer.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  return answer;
}

/// Sends `said` to the listener over TLS, and returns the first bytes of its answer, at most 64; no bytes if there is
/// no answer. Accepts any certificate, because `said` has no secrets.
std::string answer_over_tls(const net::HostPort& address, std::string_view said) {
  const OwnedFd socket = connected(address);
  const net::OwnedOpenSsl<SSL_CTX> context(::SSL_CTX_new(::TLS_client_method()));
  const net::OwnedOpenSsl<SSL> session(context ? ::SSL_new(context.get()) : nullptr);
  std::string answer(kAnswerBytes, '\0');
  std::size_t count = 0;
  if (!socket || !session || ::SSL_set_fd(session.get(), socket.get()) != 1 || ::SSL_connect(session.get()) != 1 ||
      ::SSL_write(session.get(), said.data(), static_cast<int>(said.size())) <= 0 ||
      ::SSL_read_ex(session.get(), answer.data(), answer.size(), &count) != 1)
    return {};
  answer.resize(count);
  return answer;
}

/// Returns the greeting of ZMTP 3.0, ZeroMQ's protocol: signature, version, mechanism (CURVE) and padding.
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

/// Returns whether the whole answer to tls_hello() is the alert for a wrong PSK binder, with which a client proves that
/// it has the key. The alert is decrypt_error in TLS 1.3's specification, and illegal_parameter from OpenSSL. A
/// listener checks the binder only if it has a key with the identity in the hello. Other TLS servers answer with
/// another message or another alert.
bool is_refused_key(const std::string& answer) {
  constexpr std::size_t kVersion = 1, kVersionBytes = 2;
  std::string alert = answer;
  if (alert.size() > kVersion + kVersionBytes) alert.erase(kVersion, kVersionBytes);
  // The head of a TLS record that contains an alert of two bytes, with the version left out; then the alert's first
  // byte, which says that the alert is fatal.
  const std::string fatal("\x15\0\2\2", 4);
  return alert == fatal + kDecryptError || alert == fatal + kIllegalParameter;
}

}  // namespace

bool asks_for_key(const net::HostPort& address) {
  const std::string greeting = answer_of(address, curve_greeting());
  if (greeting.size() == kAnswerBytes && greeting.substr(12, 6) == std::string("CURVE\0", 6)) return true;
  if (is_refused_key(answer_of(address, tls_hello()))) return true;
  constexpr std::string_view kQuestion = "GET /nodes HTTP/1.1\r\nHost: doctor\r\n\r\n", kRefusal = "HTTP/1.1 401 ";
  return answer_of(address, kQuestion).starts_with(kRefusal) ||
         answer_over_tls(address, kQuestion).starts_with(kRefusal);
}

}  // namespace kvferry::cli
