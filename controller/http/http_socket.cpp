#include "controller/http/http_socket.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/log.h"
#include "transport/base/net/tls/openssl_error.h"

namespace kvferry::controller {
namespace {

constexpr TimeNs kFilesCheckedEvery = kSecond;
constexpr std::size_t kSendBytes = 64 << 10;  // send() encrypts at most this many bytes at a time
// A connection ends if more encrypted bytes than this wait for its client, and the client sends TLS messages that have
// no data, such as key updates.
constexpr std::size_t kUnsentMax = 256 << 10;
constexpr char kHandshakeRecord = 0x16;  // first byte of every TLS connection
constexpr std::string_view kNotTls = "HTTP/1.0 400 -\r\n\r\nuse https://\n";

std::string reason() { return net::openssl_error("OpenSSL gave no reason"); }

int no_password(char*, int, int, void*) { return 0; }  // by default OpenSSL asks for a password at the terminal

}  // namespace

HttpCertificate::HttpCertificate(std::string certificate_file, std::string key_file, Context context)
    : certificate_file_(std::move(certificate_file)), key_file_(std::move(key_file)), context_(std::move(context)) {}

Result<HttpCertificate> HttpCertificate::read(std::string certificate_file, std::string key_file) {
  HttpCertificate made(std::move(certificate_file), std::move(key_file), nullptr);
  made.times_ = made.times();
  made.context_ = KVFERRY_TRY(made.load());
  return made;
}

Result<HttpCertificate::Context> HttpCertificate::load() const {
  ::ERR_clear_error();
  Context made(::SSL_CTX_new(::TLS_server_method()));
  if (!made || ::SSL_CTX_set_min_proto_version(made.get(), TLS1_3_VERSION) != 1 ||
      ::SSL_CTX_set_num_tickets(made.get(), 0) != 1)
    return Error{ErrorCode::kUnavailable, "OpenSSL cannot set up TLS 1.3 for HTTPS: " + reason()};
  ::SSL_CTX_set_mode(made.get(), SSL_MODE_RELEASE_BUFFERS);
  ::SSL_CTX_set_options(made.get(), SSL_OP_NO_RENEGOTIATION);
  ::SSL_CTX_set_default_passwd_cb(made.get(), no_password);
  if (::SSL_CTX_use_certificate_chain_file(made.get(), certificate_file_.c_str()) != 1)
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("http-cert-file '{}' can't be read as a certificate in PEM: {}", certificate_file_, reason())};
  if (::SSL_CTX_use_PrivateKey_file(made.get(), key_file_.c_str(), SSL_FILETYPE_PEM) != 1)
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("http-key-file '{}' can't be used with the certificate in '{}': {}; allowed: a PEM file with the "
                    "certificate's private key, without a password",
                    key_file_, certificate_file_, reason())};
  return made;
}

std::string HttpCertificate::times() const {
  std::string found;
  for (const std::string& file : {certificate_file_, key_file_}) {
    struct stat status {};
    ::stat(file.c_str(), &status);
    found += fmt::format("{} {}.{} ", status.st_ino, status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
  }
  return found;
}

ssl_ctx_st* HttpCertificate::current(TimeNs now) {
  if (now - checked_at_ < kFilesCheckedEvery) return context_.get();
  checked_at_ = now;
  if (std::string changed = times(); changed != times_) {
    times_ = std::move(changed);
    if (Result<Context> loaded = load()) {
      context_ = std::move(*loaded);
      log().info("HTTP: read the certificate in '{}' again, because its file or its key's file changed",
                 certificate_file_);
    } else {
      log().warn("HTTP: the former certificate stays in use: {}", loaded.error().what);
    }
  }
  return context_.get();
}

HttpSocket::HttpSocket(OwnedFd socket, ssl_ctx_st* tls) : socket_(std::move(socket)) {
  if (tls == nullptr) return;
  tls_.reset(::SSL_new(tls));
  BIO* const in = ::BIO_new(::BIO_s_mem());
  BIO* const out = ::BIO_new(::BIO_s_mem());
  KVFERRY_CHECK(tls_ != nullptr && in != nullptr && out != nullptr,
                "no memory is left for the TLS session of an HTTPS client");
  BIO_set_mem_eof_return(in, -1);  // an empty BIO means that more bytes will come
  ::SSL_set_bio(tls_.get(), in, out);
  ::SSL_set_accept_state(tls_.get());
}

ssize_t HttpSocket::receive(std::string& to) {
  if (tls_ != nullptr && !flush() && errno != EAGAIN) return -1;
  std::array<char, 64 << 10> bytes;
  const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
  if (got <= 0) return got;
  if (tls_ == nullptr) {
    to.append(bytes.data(), static_cast<std::size_t>(got));
    return got;
  }
  if (!std::exchange(is_begun_, true) && bytes.front() != kHandshakeRecord) {
    ::send(socket_.get(), kNotTls.data(), kNotTls.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    errno = EPROTO;
    return -1;
  }
  const std::size_t before = to.size();
  const bool is_valid =
      ::BIO_write(::SSL_get_rbio(tls_.get()), bytes.data(), static_cast<int>(got)) == got && decrypt(to);
  const bool is_answered = (flush() || errno == EAGAIN) && unsent_.size() <= kUnsentMax;
  if (to.size() > before) return static_cast<ssize_t>(to.size() - before);
  if ((::SSL_get_shutdown(tls_.get()) & SSL_RECEIVED_SHUTDOWN) != 0) return 0;
  errno = is_valid && is_answered ? EAGAIN : EPROTO;
  return -1;
}

/// Decrypts all that has arrived, and continues the handshake. Returns false if the client's bytes are not valid TLS,
/// the handshake has failed, or the client has ended the TLS session.
bool HttpSocket::decrypt(std::string& to) {
  std::array<char, 16 << 10> bytes;
  for (;;) {
    std::size_t count = 0;
    ::ERR_clear_error();
    if (::SSL_read_ex(tls_.get(), bytes.data(), bytes.size(), &count) != 1) break;
    to.append(bytes.data(), count);
  }
  return ::SSL_get_error(tls_.get(), 0) == SSL_ERROR_WANT_READ;
}

ssize_t HttpSocket::send(std::string_view bytes) {
  if (tls_ == nullptr) return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (!flush()) return -1;
  if (bytes.empty()) return 0;
  std::size_t taken = 0;
  ::ERR_clear_error();
  if (::SSL_write_ex(tls_.get(), bytes.data(), std::min(bytes.size(), kSendBytes), &taken) != 1) {
    errno = EPROTO;
    return -1;
  }
  return flush() || errno == EAGAIN ? static_cast<ssize_t>(taken) : -1;
}

void HttpSocket::end_sending() {
  if (tls_ != nullptr) {
    ::ERR_clear_error();
    ::SSL_shutdown(tls_.get());
    flush();
    unsent_.clear();
  }
  ::shutdown(socket_.get(), SHUT_WR);
}

/// Passes the encrypted bytes to the socket. Returns false with errno if the socket did not take all of them.
bool HttpSocket::flush() {
  BIO* const out = ::SSL_get_wbio(tls_.get());
  if (const std::size_t pending = ::BIO_ctrl_pending(out); pending > 0) {
    const std::size_t before = unsent_.size();
    unsent_.resize(before + pending);
    ::BIO_read(out, unsent_.data() + before, static_cast<int>(pending));
  }
  std::size_t num_sent = 0;
  ssize_t count = 0;
  while (num_sent < unsent_.size()) {
    count = ::send(socket_.get(), unsent_.data() + num_sent, unsent_.size() - num_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) break;
    num_sent += static_cast<std::size_t>(count);
  }
  unsent_.erase(0, num_sent);
  return count >= 0;
}

}  // namespace kvferry::controller
