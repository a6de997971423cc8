#include "controller/protocol/stream_socket.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/base/net/tcp_socket.h"

namespace kvferry::controller {
namespace {

constexpr int kBacklog = 4096;  // limit on the connections to a Unix socket that wait to be accepted
constexpr std::size_t kBufferKeptMax = std::size_t{64} << 10;  // bound on the buffer that an idle connection keeps

bool is_for_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

sockaddr_un unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof(address.sun_path) - 1));
  return address;
}

OwnedFd make_unix_socket() { return OwnedFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

Error cannot_listen(std::string_view where, std::string_view why) {
  return {ErrorCode::kUnavailable, fmt::format("cannot listen on {}: {}", where, why)};
}

Result<BoundSocket> listen_on_path(const std::string& path) {
  const std::string endpoint = "unix://" + path;
  // The lock prevents two controllers that start at the same time from both replacing a dead controller's socket file.
  // The kernel releases the lock when the process that holds it ends.
  const std::string lock_path = path + ".lock";
  OwnedFd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock)
    return cannot_listen(endpoint,
                         fmt::format("its lock file {} can't be opened: {}", lock_path, std::strerror(errno)));
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0)
    return cannot_listen(endpoint, fmt::format("the path is in use by another process, probably a controller, which "
                                               "has locked {}; stop it or choose another path",
                                               lock_path));
  const sockaddr_un address = unix_address(path);
  const auto* plain = reinterpret_cast<const sockaddr*>(&address);
  struct stat file {};
  if (::lstat(path.c_str(), &file) == 0) {
    if (!S_ISSOCK(file.st_mode))
      return cannot_listen(endpoint, "the file exists and is not a socket; remove it or choose another path");
    const OwnedFd probe = make_unix_socket();
    if (::connect(probe.get(), plain, sizeof(address)) == 0 || errno != ECONNREFUSED)
      return cannot_listen(endpoint, "the path may be in use by another process; stop it or choose another path");
    ::unlink(path.c_str());
  }
  OwnedFd socket = make_unix_socket();
  if (!socket || ::bind(socket.get(), plain, sizeof(address)) != 0 || ::listen(socket.get(), kBacklog) != 0)
    return cannot_listen(endpoint, std::strerror(errno));
  return BoundSocket{std::move(socket), std::move(lock), endpoint};
}

}  // namespace

Result<BoundSocket> listen_on(const StreamAddress& address) {
  if (address.is_unix()) return listen_on_path(address.path);
  Result<net::TcpListener> listener = net::listen_tcp(address.tcp.host, address.tcp.port);
  if (!listener)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("stream://{}: {}", net::to_text(address.tcp), listener.error().what)};
  return BoundSocket{std::move(listener->socket), OwnedFd(), "stream://" + net::to_text(listener->address)};
}

Result<OwnedFd> begin_connect(const StreamAddress& address) {
  if (!address.is_unix()) return net::begin_connect_tcp(address.tcp);
  const sockaddr_un to = unix_address(address.path);
  OwnedFd socket = make_unix_socket();
  if (!socket || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0)
    return Error{ErrorCode::kPeerLost, std::strerror(errno)};
  return socket;
}

void append_frame(std::string& out, std::string_view message) {
  const auto length = static_cast<std::uint32_t>(message.size());
  for (unsigned shift = 0; shift < 8 * kLengthBytes; shift += 8) out.push_back(static_cast<char>(length >> shift));
  out.append(message);
}

std::uint32_t frame_length(std::string_view bytes) {
  std::uint32_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length |= std::uint32_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return length;
}

long read_some(int socket, std::string& to) {
  const ssize_t num_read = ::recv(socket, to.data(), to.size(), 0);
  return num_read < 0 && !is_for_later(errno) ? 0 : num_read;
}

bool UnsentMessages::add(std::string_view message) {
  if (!empty() && bytes_.size() - num_sent_ + message.size() > bytes_max_) return false;
  append_frame(bytes_, message);
  return true;
}

void UnsentMessages::clear() {
  std::string().swap(bytes_);
  num_sent_ = 0;
}

bool UnsentMessages::write_to(int socket) {
  if (bytes_.empty()) return true;
  const ssize_t sent = ::send(socket, bytes_.data() + num_sent_, bytes_.size() - num_sent_, MSG_NOSIGNAL);
  if (sent < 0) return is_for_later(errno);
  num_sent_ += static_cast<std::size_t>(sent);
  if (num_sent_ == bytes_.size()) {
    num_sent_ = 0;
    bytes_.clear();
    if (bytes_.capacity() > kBufferKeptMax) bytes_.shrink_to_fit();
  } else if (num_sent_ > bytes_max_ / 2) {
    bytes_.erase(0, num_sent_);
    num_sent_ = 0;
  }
  return true;
}

}  // namespace kvferry::controller
