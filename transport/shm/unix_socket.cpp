#include "transport/shm/unix_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>

namespace kvferry::shm {
namespace {

constexpr std::size_t kPacketBytesMax = 16384;
constexpr std::size_t kFdsMax = 4;

struct Name {
  sockaddr_un address{};
  socklen_t bytes = 0;
};

Result<Name> abstract_name(const std::string& name) {
  Name made;
  if (name.empty() || name.size() + 1 > sizeof(made.address.sun_path))
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("the name of a peer's Unix socket has {} bytes; 1 to 107 are allowed", name.size())};
  made.address.sun_family = AF_UNIX;
  std::memcpy(made.address.sun_path + 1, name.data(), name.size());
  made.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return made;
}

OwnedFd new_socket() { return OwnedFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

std::optional<ucred> credentials(int socket) {
  ucred found{};
  socklen_t bytes = sizeof(found);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &found, &bytes) != 0) return std::nullopt;
  return found;
}

}  // namespace

Result<OwnedFd> listen_on(const std::string& name) {
  const Name address = KVFERRY_TRY(abstract_name(name));
  OwnedFd socket = new_socket();
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.address), address.bytes) != 0 ||
      ::listen(socket.get(), 1024) != 0)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("cannot listen on the Unix socket '{}': {}", name, std::strerror(errno))};
  return socket;
}

Result<OwnedFd> connect_to(const std::string& name) {
  const Name address = KVFERRY_TRY(abstract_name(name));
  OwnedFd socket = new_socket();
  if (!socket)
    return Error{ErrorCode::kUnavailable, fmt::format("cannot create a Unix socket: {}", std::strerror(errno))};
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.address), address.bytes) != 0)
    return Error{ErrorCode::kPeerLost,
                 fmt::format("the peer's Unix socket '{}' does not answer: {}", name, std::strerror(errno))};
  return socket;
}

OwnedFd accept_from(int listener) {
  OwnedFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) return socket;
  const std::optional<ucred> peer = credentials(socket.get());
  if (!peer || (peer->uid != ::geteuid() && peer->uid != 0)) return {};
  return socket;
}

bool send_packet(int socket, Type type, std::string_view body, std::span<const int> fds) {
  char type_byte = static_cast<char>(type);
  std::array<iovec, 2> parts = {iovec{&type_byte, 1}, iovec{const_cast<char*>(body.data()), body.size()}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kFdsMax * sizeof(int))> control{};
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

Received receive_packet(int socket) {
  std::array<char, kPacketBytesMax> bytes;
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kFdsMax * sizeof(int))> control;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) return {std::nullopt, errno != EAGAIN && errno != EINTR};
  if (got == 0) return {std::nullopt, true};  // packets are never empty, so this is the end of the connection
  Packet packet{static_cast<Type>(bytes[0]), std::string(bytes.data() + 1, static_cast<std::size_t>(got) - 1), {}};
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t num_fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t index = 0; index < num_fds; ++index) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + index * sizeof(int), sizeof(int));
      packet.fds.emplace_back(fd);
    }
  }
  return {std::move(packet), false};
}

bool is_hung_up(int socket) {
  pollfd polled{socket, 0, 0};
  return ::poll(&polled, 1, 0) == 1 && (polled.revents & (POLLHUP | POLLERR)) != 0;
}

int peer_process(int socket) {
  const std::optional<ucred> peer = credentials(socket);
  return peer ? peer->pid : 0;
}

std::uint64_t host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network {};
  if (::stat("/proc/self/ns/net", &network) == 0) boot += fmt::format(":{}", network.st_ino);
  return std::hash<std::string>{}(boot);
}

}  // namespace kvferry::shm
