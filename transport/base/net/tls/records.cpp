// Sends and receives the data of a TLS session after its handshake.
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "transport/base/net/tls.h"

namespace kvferry::net {
namespace {

constexpr std::size_t kRecordBytes = SSL3_RT_MAX_PLAIN_LENGTH;
constexpr std::size_t kBatchBytes = 256 << 10;  // send() encrypts up to about this many bytes per call

}  // namespace

ssize_t TlsSession::receive(std::span<const iovec> parts) {
  ssize_t total = 0;
  for (const iovec& part : parts) {
    for (std::size_t at = 0; at < part.iov_len;) {
      std::size_t got = 0;
      ::ERR_clear_error();
      if (::SSL_read_ex(ssl_, static_cast<std::byte*>(part.iov_base) + at, part.iov_len - at, &got) == 1) {
        at += got;
        total += static_cast<ssize_t>(got);
        continue;
      }
      const int why = ::SSL_get_error(ssl_, 0);
      if (total > 0 && (why == SSL_ERROR_WANT_READ || why == SSL_ERROR_ZERO_RETURN)) return total;
      if (why == SSL_ERROR_ZERO_RETURN) return 0;
      if (why != SSL_ERROR_SYSCALL || errno == 0) errno = why == SSL_ERROR_WANT_READ ? EAGAIN : EPROTO;
      return -1;
    }
  }
  return total;
}

bool TlsSession::encrypt(const iovec& part) {
  std::size_t taken = 0;
  ::ERR_clear_error();
  return part.iov_len == 0 || ::SSL_write_ex(ssl_, part.iov_base, part.iov_len, &taken) == 1;
}

ssize_t TlsSession::send(std::span<const iovec> parts) {
  if (!flush()) return -1;
  std::size_t total = 0;
  bool is_sound = true;
  small_.clear();
  for (const iovec& part : parts) {
    for (std::size_t at = 0; at < part.iov_len && total < kBatchBytes && is_sound;) {
      auto* const first = static_cast<std::byte*>(part.iov_base) + at;
      const std::size_t bytes = std::min(part.iov_len - at, kRecordBytes - small_.size());
      at += bytes;
      total += bytes;
      if (bytes == kRecordBytes) {
        is_sound = encrypt({first, bytes});
        continue;
      }
      small_.insert(small_.end(), first, first + bytes);
      if (small_.size() < kRecordBytes) continue;
      is_sound = encrypt({small_.data(), small_.size()});
      small_.clear();
    }
  }
  if (!is_sound || !encrypt({small_.data(), small_.size()})) {
    errno = EPROTO;
    return -1;
  }
  return flush() || errno == EAGAIN ? static_cast<ssize_t>(total) : -1;
}

bool TlsSession::flush() {
  while (has_unsent()) {
    const ssize_t count = ::send(fd_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    sent_ += static_cast<std::size_t>(count);
  }
  out_.clear();
  sent_ = 0;
  return true;
}

}  // namespace kvferry::net
