#include "controller/server/stream_connection.h"

#include <sys/socket.h>

#include <cerrno>

namespace kvferry::controller {
namespace {

constexpr std::size_t kUnsentBytesMax = std::size_t{8} << 20;  // two of the longest messages
constexpr std::size_t kBufferKeptMax = std::size_t{64} << 10;  // memory of an idle connection

bool is_for_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

/// Returns 0 if the connection is over, a negative number if no input waits.
long StreamConnection::read_some(std::string& scratch) const {
  const ssize_t num_read = ::recv(socket_.get(), scratch.data(), scratch.size(), 0);
  return num_read < 0 && !is_for_later(errno) ? 0 : num_read;
}

bool StreamConnection::send(std::string_view message) {
  if (is_ending() || out_.size() - num_sent_ + message.size() > kUnsentBytesMax) return false;
  append_frame(out_, message);
  return true;
}

bool StreamConnection::flush() {
  if (out_.empty()) return true;
  const ssize_t sent = ::send(socket_.get(), out_.data() + num_sent_, out_.size() - num_sent_, MSG_NOSIGNAL);
  if (sent < 0) return is_for_later(errno);
  num_sent_ += static_cast<std::size_t>(sent);
  if (num_sent_ == out_.size()) {
    num_sent_ = 0;
    out_.clear();
    if (out_.capacity() > kBufferKeptMax) out_.shrink_to_fit();
  } else if (num_sent_ > kUnsentBytesMax / 2) {
    out_.erase(0, num_sent_);
    num_sent_ = 0;
  }
  return true;
}

void StreamConnection::end(TimeNs ends_at) {
  ends_at_ = ends_at;
  flush();
  ::shutdown(socket_.get(), SHUT_WR);
}

}  // namespace kvferry::controller
