// The socket of one HTTP client, encrypted by TLS 1.3 if the listener has a certificate (HTTPS).
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>

#include "transport/base/clock.h"
#include "transport/base/net/tls/owned_openssl.h"
#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// The certificate of an HTTPS listener. Files that change are read again, so that a renewed certificate needs no
/// restart. Threads: the one that accepts connections.
class HttpCertificate {
 public:
  /// Reads two files in PEM. `certificate_file`: the certificate, followed by the certificates that lead to its
  /// authority; `key_file`: its private key. kInvalidArgument: a file does not exist, or does not have a readable
  /// certificate or key, or the key does not belong to the certificate; kUnavailable: OpenSSL cannot set up TLS 1.3.
  static Result<HttpCertificate> read(std::string certificate_file, std::string key_file);

  /// Returns the TLS context for new connections. Reads the files again if they have changed, which is checked at most
  /// once a second. If the changed files can't be used, logs the reason and returns the previous context.
  ssl_ctx_st* current(TimeNs now);

 private:
  using Context = net::OwnedOpenSsl<ssl_ctx_st>;
  HttpCertificate(std::string certificate_file, std::string key_file, Context context);
  Result<Context> load() const;
  std::string times() const;

  std::string certificate_file_, key_file_;
  Context context_;
  std::string times_;  // inodes and modification times of the files when they were last read
  TimeNs checked_at_ = 0;
};

class HttpSocket {
 public:
  HttpSocket() = default;
  /// `tls`: what HttpCertificate::current() returns; nullptr for a connection that is not encrypted.
  HttpSocket(OwnedFd socket, ssl_ctx_st* tls);

  int fd() const { return socket_.get(); }
  /// Appends to `to` the bytes that have arrived. Returns their number, 0 if the client sends no more, or -1 with
  /// errno: EAGAIN if nothing has arrived yet, otherwise an error.
  ssize_t receive(std::string& to);
  /// Returns how many of the bytes were accepted, or -1 with errno. With TLS, accepted bytes may still wait in unsent_.
  ssize_t send(std::string_view bytes);
  /// Returns true if accepted bytes still wait for room in the socket.
  bool has_unsent() const { return !unsent_.empty(); }
  /// Tells the client that no more bytes follow.
  void end_sending();

 private:
  bool decrypt(std::string& to);
  bool flush();

  OwnedFd socket_;
  net::OwnedOpenSsl<ssl_st> tls_;
  bool is_begun_ = false;  // with TLS: true once bytes of the client have arrived
  std::string unsent_;     // bytes of TLS that the socket has not taken
};

}  // namespace kvferry::controller
